// The teacher of a divergence: its logits, or the entries of a top-k teacher; and where a student's shard finds those of its own
// columns.
#include <algorithm>
#include <vector>

#include "kernels/core/shard_layout.h"
#include "kernels/cuda/computation/computation.h"
#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/rows/top_k_rows.h"

namespace headwater::cuda {
namespace {

RowRange Overlap(RowRange a, RowRange b) {
  const int64_t start = std::max(a.start, b.start);
  return {start, std::max(start, std::min(a.end, b.end))};
}

// Logits [rows, columns] of any element type, which stand for columns [start, ...) of the vocabulary.
struct Columns {
  void* data = nullptr;
  int64_t stride = 0;  // elements
  int64_t start = 0;
};

}  // namespace

absl::Status Computation::ComputeTeacherProducts(Work* work, const Slice& slice) {
  const TermRun& term = *work->term;
  const Element element = term.ProductElement(term.large_form);
  const int64_t stride = ProductStride(TeacherColumns(term));
  TermBuffers& own = work->own;
  const ConstMatrix hidden = Rows(work->teacher, slice.first, slice.count);
  Int8Rows int8_hidden;
  if (term.int8_teacher) HEADWATER_RETURN_IF_ERROR(QuantizeTeacherRows(work, slice, hidden, &int8_hidden));
  for (int32_t rank = 0; rank < term.teacher->shard_count(); ++rank) {
    const ShardWeights shard = term.teacher->shard_weights(rank);
    if (shard.columns == 0) continue;
    void* const out = Advance(own.teacher_products, element, group_ == nullptr ? shard.vocab_start : 0);
    if (term.int8_teacher) {
      HEADWATER_RETURN_IF_ERROR(
          Check(LaunchInt8Product(int8_hidden, term.teacher->int8_weights(rank), static_cast<float*>(out), stride, stream_),
                "the teacher's int8 product"));
    } else {
      const double* wide = own.wide_teacher_hidden == nullptr ? nullptr : own.wide_teacher_hidden + slice.first * shard.stride;
      HEADWATER_RETURN_IF_ERROR(ComputeLogits(shard, hidden, wide, own.panel, out, stride));
    }
    if (own.teacher_bias != nullptr && shard.bias != nullptr) {
      HEADWATER_RETURN_IF_ERROR(
          Check(cudaMemcpyAsync(Advance(own.teacher_bias, shard.element, shard.vocab_start), shard.bias,
                                static_cast<size_t>(shard.columns * BytesOf(shard.element)), cudaMemcpyDeviceToDevice, stream_),
                "collecting the teacher's bias"));
    }
  }
  if (term.exchanges_teacher) return ExchangeTeacherColumns(work, slice);
  // The student's shards may be cut elsewhere: each gets the teacher's logits of its own columns.
  for (size_t rank = 0; rank < own.cut_teacher.size(); ++rank) {
    const LogitsView view = TeacherView(*work, static_cast<int32_t>(rank));
    HEADWATER_RETURN_IF_ERROR(CopyColumns(own.teacher_products, stride, view.vocab_start, own.cut_teacher[rank], view.stride,
                                          view.columns, element, slice.count));
  }
  return absl::OkStatus();
}

absl::Status Computation::QuantizeTeacherRows(Work* work, const Slice& slice, const ConstMatrix& hidden, Int8Rows* out) {
  CudaHead& teacher = *work->term->teacher;
  HEADWATER_RETURN_IF_ERROR(teacher.MakeInt8Weights());
  const Int8Rows& all = work->own.int8_teacher;
  *out = {all.data + slice.first * Int8Width(all.width), all.scales + slice.first, all.norms + slice.first, slice.count, all.width};
  HEADWATER_RETURN_IF_ERROR(Check(LaunchQuantizeRows(hidden, *out, stream_), "a teacher's hidden states in int8"));
  const double scale = teacher.spec().transform.logit_scale;
  return Check(LaunchInt8Errors(*out, teacher.int8_means(0), scale * scale, work->own.teacher_errors + slice.first, stream_),
               "the error of a teacher's logits");
}

absl::Status Computation::CopyColumns(const void* from, int64_t from_stride, int64_t first, void* to, int64_t to_stride,
                                      int64_t columns, Element element, int64_t rows) {
  if (columns == 0) return absl::OkStatus();
  const auto bytes = [element](int64_t elements) { return static_cast<size_t>(elements * BytesOf(element)); };
  return Check(cudaMemcpy2DAsync(to, bytes(to_stride), Advance(from, element, first), bytes(from_stride), bytes(columns),
                                 static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream_),
               "cutting the teacher's logits");
}

absl::Status Computation::ExchangeTeacherColumns(Work* work, const Slice& slice) {
  const TermRun& term = *work->term;
  TermBuffers& own = work->own;
  const Element element = term.ProductElement(term.large_form);
  const int64_t common = term.divergence.common_columns;
  const std::vector<RowRange>& student = term.head->shard_rows();
  const std::vector<RowRange>& teacher = term.teacher->shard_rows();
  const std::vector<SurplusColumns> surplus = TeacherSurplus(term);
  const size_t me = static_cast<size_t>(group_->rank());

  // Each rank hands out the columns that it has and its student's shard lacks: [rows, columns before its shard], [rows, columns
  // behind it].
  std::vector<int64_t> bounds = {0};
  for (const SurplusColumns& of : surplus) bounds.push_back(bounds.back() + slice.count * of.size() * BytesOf(element));
  const auto handed_out = [&](size_t rank, bool behind) {
    const SurplusColumns& of = surplus[rank];
    void* const data = static_cast<char*>(own.teacher_exchange) + bounds[rank];
    return Columns{Advance(data, element, behind ? slice.count * of.before.size() : 0), (behind ? of.behind : of.before).size(),
                   (behind ? of.behind : of.before).start};
  };
  const Columns mine = {own.teacher_products, ProductStride(TeacherColumns(term)), teacher[me].start};
  const auto copy = [&](const Columns& from, const Columns& to, RowRange columns) {
    return CopyColumns(from.data, from.stride, columns.start - from.start, Advance(to.data, element, columns.start - to.start),
                       to.stride, columns.size(), element, slice.count);
  };
  HEADWATER_RETURN_IF_ERROR(copy(mine, handed_out(me, false), surplus[me].before));
  HEADWATER_RETURN_IF_ERROR(copy(mine, handed_out(me, true), surplus[me].behind));
  HEADWATER_RETURN_IF_ERROR(group_->bulk().AllGatherParts(own.teacher_exchange, bounds, stream_));

  const RowRange wanted = Overlap(student[me], {0, common});
  const Columns cut = {own.cut_teacher.front(), ProductStride(StudentView(*work, 0).columns), wanted.start};
  HEADWATER_RETURN_IF_ERROR(copy(mine, cut, Overlap(wanted, teacher[me])));
  for (size_t rank = 0; rank < surplus.size(); ++rank) {
    if (rank == me) continue;
    HEADWATER_RETURN_IF_ERROR(copy(handed_out(rank, false), cut, Overlap(wanted, surplus[rank].before)));
    HEADWATER_RETURN_IF_ERROR(copy(handed_out(rank, true), cut, Overlap(wanted, surplus[rank].behind)));
  }
  if (!term.teacher->spec().has_bias) return absl::OkStatus();
  const int64_t bias_bytes = ElementBytes(term.teacher->spec().data_type);
  std::vector<int64_t> bias_bounds = {0};
  for (const RowRange& shard : teacher) {
    bias_bounds.push_back(std::min(shard.end, term.teacher->spec().transform.valid_vocab_size) * bias_bytes);
  }
  return group_->bulk().AllGatherParts(own.teacher_bias, bias_bounds, stream_);
}

LogitsView Computation::TeacherView(const Work& work, int32_t rank) const {
  const TermRun& term = *work.term;
  const HeadSpec& teacher = term.teacher->spec();
  LogitsView view;
  view.element = term.large_form == Form::kWide ? Element::kFloat64 : Element::kFloat32;
  view.bias_element = static_cast<Element>(teacher.data_type);
  view.transform = {teacher.transform.logit_scale, teacher.transform.softcap.value_or(0)};
  if (work.own.cut_teacher.empty()) {
    const ShardWeights shard = term.teacher->shard_weights(0);
    view.products = work.own.teacher_products;
    view.columns = TeacherColumns(term);
    view.stride = ProductStride(view.columns);
    view.vocab_start = shard.vocab_start;
    view.bias = shard.bias;
    return view;
  }
  const ShardWeights shard = term.head->shard_weights(rank);
  view.products = work.own.cut_teacher[static_cast<size_t>(rank)];
  view.stride = ProductStride(shard.columns);
  view.columns = std::clamp<int64_t>(teacher.transform.valid_vocab_size - shard.vocab_start, 0, shard.columns);
  view.vocab_start = shard.vocab_start;
  if (teacher.has_bias) view.bias = Advance(work.own.teacher_bias, view.bias_element, shard.vocab_start);
  return view;
}

absl::Status Computation::RunTopK(Work* work, const Slice& slice) {
  TermRun& term = *work->term;
  TermBuffers& own = work->own;
  const TopKSpec& teacher = *term.plan->top_k;
  const int32_t shard_count = term.head->shard_count();
  const int64_t first = slice.first * teacher.k;
  const TopKRows top_k = {slice.count,
                          teacher.k,
                          kLeastRestMass,
                          own.top_k_columns + first,
                          own.top_k_log_probs + first,
                          own.top_k_logits + first,
                          own.top_k_gradient + first};
  ChunkRows rows = RowsOf(*work, slice);
  rows.targets = nullptr;

  // The entries come beside the products, into memory that earlier work may still use.
  HEADWATER_RETURN_IF_ERROR(core_.Order(stream_, core_.upload_stream()));
  HEADWATER_RETURN_IF_ERROR(ComputeProducts(work, slice));
  std::vector<int64_t> term_rows(static_cast<size_t>(slice.count));
  const auto first_row = work->parts.front().rows->rows.begin() + slice.first;  // terms with a teacher are not computed together
  std::transform(first_row, first_row + slice.count, term_rows.begin(), [](const ChunkRow& row) { return row.term_row; });
  const auto upload = [&](auto* to, const auto& from) {
    return ForEachRun(term_rows, [&](int64_t index, int64_t row, int64_t count) {
      return Check(
          cudaMemcpyAsync(to + first + index * teacher.k, from.data() + row * teacher.k,
                          static_cast<size_t>(count * teacher.k) * sizeof(*to), cudaMemcpyHostToDevice, core_.upload_stream()),
          "the upload of a top-k teacher");
    });
  };
  HEADWATER_RETURN_IF_ERROR(upload(own.top_k_columns, teacher.ids));
  HEADWATER_RETURN_IF_ERROR(upload(own.top_k_log_probs, teacher.log_probs));
  HEADWATER_RETURN_IF_ERROR(core_.Order(core_.upload_stream(), stream_));

  for (int32_t rank = 0; rank < shard_count; ++rank) {
    const LogitsView student = StudentView(*work, rank);
    HEADWATER_RETURN_IF_ERROR(Check(LaunchTakeTopK(student, top_k, stream_), "a top-k teacher's logits"));
    HEADWATER_RETURN_IF_ERROR(Check(
        LaunchRowStats(student, rows, term.cross_entropy, OwnPart(own.stats, rank, slice.count), stream_), "the rows' statistics"));
  }
  RowCoefficients* const coefficients = own.coefficients + slice.first;
  HEADWATER_RETURN_IF_ERROR(
      Check(LaunchFinishTopK(own.stats, shard_count, top_k, rows, term.finish, own.reports + slice.first, coefficients,
                             own.row_factor + slice.first, own.target_factor + slice.first, stream_),
            "the rows' divergences"));
  if (!work->backward) return absl::OkStatus();
  for (int32_t rank = 0; rank < shard_count; ++rank) {
    const LogitsView student = StudentView(*work, rank);
    if (student.columns == 0) continue;
    const MutableMatrix matrix = MatrixOut(*work, slice, rank);
    HEADWATER_RETURN_IF_ERROR(Check(LaunchCrossEntropyGradient(student, rows, term.cross_entropy, coefficients, matrix, stream_),
                                    "the gradient of the logits"));
    HEADWATER_RETURN_IF_ERROR(Check(LaunchPutTopK(top_k, student.vocab_start, matrix, stream_), "a top-k teacher's gradient"));
  }
  return absl::OkStatus();
}

}  // namespace headwater::cuda
