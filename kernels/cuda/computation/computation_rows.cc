// The rows of a computation: how they come in, where the products find them, and their sum for the digest.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/computation/computation.h"
#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/computation/row_digester.h"
#include "kernels/cuda/profile_range.h"
#include "kernels/cuda/rows/conversions.h"
#include "kernels/cuda/rows/row_digest.h"

namespace headwater::cuda {
namespace {

constexpr size_t kSumBytes = 2 * sizeof(uint64_t);

bool Aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

int64_t RowBytes(const RowsView& view) { return view.column_count * ElementBytes(view.data_type); }

}  // namespace

absl::Status Computation::AwaitRows(int64_t row_end) {
  if (flow_ == nullptr || row_end <= awaited_) return absl::OkStatus();
  awaited_ = row_end;
  return Answered(flow_->AwaitRows(row_end));
}

absl::Status Computation::Answered(absl::Status answer) {
  if (group_ != nullptr) answer = group_->Agree(answer);
  // A broken group's is no answer.
  interrupted_ = !answer.ok() && (group_ == nullptr || group_->status().ok());
  return answer;
}

absl::Status Computation::Decide() {
  if (flow_ == nullptr || decided_) return absl::OkStatus();
  const MicroBatch& micro_batch = *members_.front().micro_batch;
  HEADWATER_RETURN_IF_ERROR(AwaitRows(micro_batch.hidden.row_count));
  HEADWATER_RETURN_IF_ERROR(FinishDigest());
  decided_ = true;
  return Answered(flow_->Decide(micro_batch.digest_rows ? &digest_ : nullptr));
}

absl::Status Computation::BeginDigest() {
  const Member& member = members_.front();
  const MicroBatch& micro_batch = *member.micro_batch;
  if (member.awaits_all_rows) HEADWATER_RETURN_IF_ERROR(AwaitRows(micro_batch.hidden.row_count));
  if (flow_ == nullptr || !micro_batch.digest_rows) return absl::OkStatus();
  device_sum_ = workspace_.Take<uint64_t>(2);
  host_sum_ = host_.Take<uint64_t>(2);
  host_.Keep();
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemsetAsync(device_sum_, 0, kSumBytes, stream_), "clearing a sum"));
  const std::vector<RowsView> streams = StreamsOf(micro_batch);
  for (size_t i = 0; i < streams.size(); ++i) {
    const RowsView& rows = streams[i];
    if (rows.data == nullptr || rows.memory != MemorySpace::kDevice) continue;
    HEADWATER_RETURN_IF_ERROR(AwaitRows(micro_batch.hidden.row_count));
    HEADWATER_RETURN_IF_ERROR(DigestOnDevice(rows.data, rows.row_count, RowBytes(rows), static_cast<int32_t>(i), nullptr));
  }
  return absl::OkStatus();
}

bool Computation::SumsCopy(const Part& part) const {
  if (device_sum_ == nullptr || decided_ || part.member->micro_batch->hidden.memory != MemorySpace::kHost) return false;
  if (part.chunk->terms.size() > 1) return false;
  // In order of rows: those of weight 0 have chunks of their own behind the others.
  return summed_chunks_.empty() || summed_chunks_.back() == part.chunk ||
         summed_chunks_.back()->batch_rows.back() < part.chunk->batch_rows.front();
}

absl::Status Computation::DigestOnDevice(const void* rows, int64_t count, int64_t row_bytes, int32_t stream_index,
                                         const int32_t* numbers) {
  HEADWATER_RETURN_IF_ERROR(
      Check(LaunchDigestRows(rows, count, row_bytes, stream_index, numbers, 0, device_sum_, stream_), "summing rows up"));
  // Each time, so that the last one's is there long before the work behind it is done.
  HEADWATER_RETURN_IF_ERROR(
      Check(cudaMemcpyAsync(host_sum_, device_sum_, kSumBytes, cudaMemcpyDeviceToHost, stream_), "the way back of a sum"));
  return Check(cudaEventRecord(core_.sum_event(), stream_), "recording an event");
}

absl::Status Computation::FinishDigest() {
  const Member& member = members_.front();
  const MicroBatch& micro_batch = *member.micro_batch;
  if (!micro_batch.digest_rows) return absl::OkStatus();
  bool any_on_device = !summed_chunks_.empty();
  const std::vector<RowsView> streams = StreamsOf(micro_batch);
  for (size_t i = 0; i < streams.size(); ++i) {
    const RowsView& rows = streams[i];
    if (rows.data == nullptr) continue;
    if (rows.memory == MemorySpace::kDevice) {
      any_on_device = true;
      continue;
    }
    const Place place = i == 0 ? member.hidden_place : (*member.teacher_places)[i - 1];
    const auto add = [&](int64_t first, int64_t count) {
      return core_.digester().Add(rows, place, first, count, static_cast<int32_t>(i), &digest_);
    };
    int64_t next = 0;
    for (const Chunk* chunk : summed_chunks_) {
      if (i > 0) break;
      // Only the rows that no product has needed so far.
      for (const int64_t row : chunk->batch_rows) {
        HEADWATER_RETURN_IF_ERROR(add(next, row - next));
        next = row + 1;
      }
    }
    HEADWATER_RETURN_IF_ERROR(add(next, rows.row_count - next));
  }
  if (!any_on_device) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.sum_event(), "summing rows up"));
  digest_.AddSum(host_sum_[0], host_sum_[1]);
  return absl::OkStatus();
}

std::vector<RowSlice> Computation::SlicesOf(const Work& work) const {
  SliceNeeds needs;
  if (core_.options().deterministic) return SliceRows(work.rows, needs);
  const Part& part = work.parts.front();
  if (work.parts.size() == 1 && part.chunk->terms.size() == 1) {
    needs.comes_in = part.member->rows_come;
    // A rank's slices are narrow, and each has its sum over the ranks: it has no more of them than it must.
    const bool leaves = work.wants_grad_hidden && part.member->gradient_leaves;
    needs.leaves = leaves && group_ == nullptr;
    // Results leave while grad_weight is computed, if it is computed now. Each rank decides for itself whether rows are kept.
    const bool keeps_rows = work.waits || (work.staged != nullptr && work.staged->keeps_rows);
    const bool weight_follows = work.term->plan->grad_weight != GradWeightMode::kNone && (group_ != nullptr || !keeps_rows);
    needs.ends_by_way = leaves && !weight_follows;
  }
  return SliceRows(work.rows, needs);
}

absl::Status Computation::ForEachRun(absl::Span<const int64_t> rows,
                                     absl::FunctionRef<absl::Status(int64_t, int64_t, int64_t)> visit) {
  for (size_t start = 0; start < rows.size();) {
    size_t end = start + 1;
    while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
    HEADWATER_RETURN_IF_ERROR(visit(static_cast<int64_t>(start), rows[start], static_cast<int64_t>(end - start)));
    start = end;
  }
  return absl::OkStatus();
}

absl::Status Computation::CopyRowsIn(const RowsView& view, absl::Span<const int64_t> rows, void* to, cudaStream_t stream) {
  const int64_t row_bytes = RowBytes(view);
  // From pageable memory: until the stream has come so far, on which the ranks may meet before.
  const DeviceGroup::Wait wait(group_);
  return ForEachRun(rows, [&](int64_t index, int64_t row, int64_t count) {
    return Check(cudaMemcpyAsync(static_cast<char*>(to) + index * row_bytes, static_cast<const char*>(view.data) + row * row_bytes,
                                 static_cast<size_t>(count * row_bytes), cudaMemcpyDefault, stream),
                 "the upload of hidden states");
  });
}

absl::Status Computation::ClearGradHidden(const Member& member) {
  const MutableRowsView& out = member.micro_batch->grad_hidden;
  if (out.data == nullptr || out.row_count == 0 || !has_results()) return absl::OkStatus();
  const int64_t row_bytes = out.column_count * ElementBytes(out.data_type);
  bool any = false;
  absl::Status status;
  ForEachRowWithoutGradient(*member.plan, [&](int64_t first, int64_t count) {
    any = true;
    if (out.memory == MemorySpace::kDevice || !status.ok()) return;
    char* rows = static_cast<char*>(out.data) + first * row_bytes;
    if (IsOnHost(member.grad_hidden_place)) {
      std::memset(rows, 0, static_cast<size_t>(count * row_bytes));
      return;
    }
    const DeviceMemory& zeros = core_.zeros();
    for (int64_t done = 0; done < count * row_bytes && status.ok(); done += zeros.bytes()) {
      const size_t bytes = static_cast<size_t>(std::min(zeros.bytes(), count * row_bytes - done));
      status = Check(cudaMemcpyAsync(rows + done, zeros.As<void>(), bytes, cudaMemcpyDefault, core_.download_stream()),
                     "clearing grad_hidden");
    }
  });
  if (!any || out.memory == MemorySpace::kHost) return status;
  // All of it: one launch takes microseconds, one for each run of ignored rows milliseconds.
  return Check(cudaMemsetAsync(out.data, 0, static_cast<size_t>(out.row_count * row_bytes), stream_), "clearing grad_hidden");
}

absl::Status Computation::UploadRows(Work* work) {
  const int64_t count = work->rows;
  work->targets = host_.Take<int32_t>(count);
  float* token_weights = host_.Take<float>(count);
  // A row has factors or a resolution: the room for one also holds the other.
  const bool dithers = work->term->plan->dithers;
  float* entropy_factors = dithers ? nullptr : host_.Take<float>(count);
  float* lse_factors = dithers ? nullptr : host_.Take<float>(count);
  DitherKey* dither_keys = dithers ? host_.Take<DitherKey>(count) : nullptr;
  int32_t* source_rows = host_.Take<int32_t>(count);
  int32_t* chunk_rows = host_.Take<int32_t>(count);
  int32_t* output_rows = host_.Take<int32_t>(count);
  int32_t* teacher_rows = host_.Take<int32_t>(count);
  int64_t i = 0;
  bool gathers = false;  // rows that do not follow each other
  for (const Part& part : work->parts) {
    const bool device_hidden = part.member->micro_batch->hidden.memory == MemorySpace::kDevice;
    const bool device_out = part.member->micro_batch->grad_hidden.memory == MemorySpace::kDevice;
    work->has_entropy_factors = work->has_entropy_factors || part.term->plan->has_entropy_factors;
    work->has_lse_factors = work->has_lse_factors || part.term->plan->has_lse_factors;
    gathers = gathers || !(device_hidden ? part.rows->ContiguousInBatch() : part.rows->ContiguousInChunk());
    for (const ChunkRow& row : part.rows->rows) {
      work->targets[i] = static_cast<int32_t>(row.target);
      token_weights[i] = static_cast<float>(row.token_weight);
      if (dithers) {
        dither_keys[i] = MakeDitherKey(part.term->plan->term->dither_seed, row.batch_row);
      } else {
        entropy_factors[i] = static_cast<float>(row.entropy_factor);
        lse_factors[i] = static_cast<float>(row.lse_factor);
      }
      source_rows[i] = static_cast<int32_t>(device_hidden ? row.batch_row : row.chunk_row);
      chunk_rows[i] = static_cast<int32_t>(row.chunk_row);
      output_rows[i] = static_cast<int32_t>(device_out ? row.batch_row : row.chunk_row);
      teacher_rows[i] = static_cast<int32_t>(row.term_row);
      ++i;
    }
  }
  HEADWATER_RETURN_IF_ERROR(Upload(work->own.targets, work->targets, count));
  HEADWATER_RETURN_IF_ERROR(Upload(work->own.token_weights, token_weights, count));
  if (work->has_entropy_factors) HEADWATER_RETURN_IF_ERROR(Upload(work->own.entropy_factors, entropy_factors, count));
  if (work->has_lse_factors) HEADWATER_RETURN_IF_ERROR(Upload(work->own.lse_factors, lse_factors, count));
  if (dithers) HEADWATER_RETURN_IF_ERROR(Upload(work->own.dither_keys, dither_keys, count));
  if (gathers) HEADWATER_RETURN_IF_ERROR(Upload(work->own.source_rows, source_rows, count));
  HEADWATER_RETURN_IF_ERROR(Upload(work->own.chunk_rows, chunk_rows, count));
  HEADWATER_RETURN_IF_ERROR(Upload(work->own.output_rows, output_rows, count));
  if (work->term->plan->jsd == nullptr || work->parts.front().rows->ContiguousInBatch()) return absl::OkStatus();
  return Upload(work->own.teacher_rows, teacher_rows, count);
}

absl::Status Computation::UploadHidden(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, const Slice& slice,
                                       cudaStream_t stream) {
  const RowsView& hidden = member.micro_batch->hidden;
  const absl::Span<const int64_t> rows = BatchRowsOf(chunk, slice);
  HEADWATER_RETURN_IF_ERROR(AwaitRows(rows.back() + 1));
  if (hidden.memory == MemorySpace::kDevice) return absl::OkStatus();
  const ProfileRange range("upload");
  return CopyRowsIn(hidden, rows, static_cast<char*>(buffers.raw_hidden) + slice.first * RowBytes(hidden), stream);
}

absl::Span<const std::byte> Computation::RawHiddenOf(const Part& part) {
  if (part.shared.raw_hidden == nullptr) return {};
  const size_t bytes = part.chunk->batch_rows.size() * static_cast<size_t>(RowBytes(part.member->micro_batch->hidden));
  return {static_cast<const std::byte*>(part.shared.raw_hidden), bytes};
}

absl::Status Computation::UploadSlice(Work* work, const Slice& slice) {
  const int64_t end = slice.first + slice.count;
  const Slice missing = {work->uploaded, end - work->uploaded};
  if (missing.count <= 0 || work->parts.front().chunk->terms.size() > 1) return absl::OkStatus();
  // A work's whole rows need no stream of their own: nothing runs beside them.
  const bool is_sliced = slice.count < work->rows;
  const cudaStream_t stream = is_sliced ? core_.upload_stream() : stream_;
  // The rows go into memory that the chunk before may still use. The previous call has said which memory it does not use.
  if (is_sliced && work->uploaded == 0) {
    const Part& part = work->parts.front();
    const bool is_first = part.chunk == &part.member->plan->chunks.front();
    HEADWATER_RETURN_IF_ERROR(is_first ? core_.OrderForWriting(RawHiddenOf(part), stream) : core_.Order(stream_, stream));
  }
  work->uploaded = end;
  return ForEachPart(*work, missing, [&](const Part& part, const Slice& rows) {
    return UploadHidden(*part.member, *part.chunk, part.shared, {rows.first - part.first, rows.count}, stream);
  });
}

bool Computation::MayReadInPlace(const RowsView& rows, Place place) const {
  // A product's algorithm depends on its operands' alignment, which in deterministic mode must not depend on the caller.
  const bool is_callers = rows.memory == MemorySpace::kDevice;
  return place != Place::kForeignDevice && !(is_callers && core_.options().deterministic);
}

absl::Status Computation::PlaceRows(ConstMatrix source, int64_t first, bool contiguous, const int32_t* index, int64_t count,
                                    Element element, bool in_place_allowed, void* out, uint8_t* non_finite, ConstMatrix* placed) {
  const int64_t padded = PaddedWidth(source.columns);
  if (contiguous) source = Rows(source, first, count);
  if (contiguous && in_place_allowed && source.element == element && source.columns == padded && Aligned16(source.data)) {
    *placed = source;
    if (non_finite == nullptr) return absl::OkStatus();
    return Check(LaunchCheckRows(source, non_finite, stream_), "checking hidden states");
  }
  *placed = {out, count, source.columns, padded, element};
  return Check(
      LaunchGatherRows(source, contiguous ? nullptr : index, {out, count, source.columns, padded, element}, non_finite, stream_),
      "gathering hidden states");
}

absl::Status Computation::PlaceSlice(Work* work, const Slice& slice) {
  TermBuffers& own = work->own;
  const Element element = work->term->MatrixElement();
  // The rows are read once more when the caller's memory may be gone.
  const bool keeps_rows =
      (work->staged != nullptr && work->staged->keeps_rows) || (work->waits && work->term->plan->hard_weight > 0);
  const bool is_alone = work->parts.size() == 1;
  if (slice.count < work->rows) HEADWATER_RETURN_IF_ERROR(core_.Order(core_.upload_stream(), stream_));
  HEADWATER_RETURN_IF_ERROR(ForEachPart(*work, slice, [&](const Part& part, const Slice& rows) {
    const RowsView& hidden = part.member->micro_batch->hidden;
    const bool on_device = hidden.memory == MemorySpace::kDevice;
    const int64_t offset = rows.first - part.first;
    if (SumsCopy(part)) {
      if (summed_chunks_.empty() || summed_chunks_.back() != part.chunk) summed_chunks_.push_back(part.chunk);
      const int64_t row_bytes = RowBytes(hidden);
      HEADWATER_RETURN_IF_ERROR(DigestOnDevice(static_cast<const char*>(part.shared.raw_hidden) + offset * row_bytes, rows.count,
                                               row_bytes, 0, part.shared.batch_rows + offset));
    }
    const ConstMatrix source = {on_device ? hidden.data : part.shared.raw_hidden, hidden.row_count, hidden.column_count,
                                hidden.column_count, ElementOf(hidden.data_type)};
    const ChunkRow& first = part.rows->rows.front();
    const int64_t padded = PaddedWidth(hidden.column_count);
    void* out = own.hidden == nullptr ? nullptr : Advance(own.hidden, element, rows.first * padded);
    ConstMatrix placed;
    HEADWATER_RETURN_IF_ERROR(PlaceRows(source, (on_device ? first.batch_row : first.chunk_row) + offset,
                                        on_device ? part.rows->ContiguousInBatch() : part.rows->ContiguousInChunk(),
                                        own.source_rows + rows.first, rows.count, element,
                                        is_alone && !keeps_rows && MayReadInPlace(hidden, part.member->hidden_place), out,
                                        own.non_finite + rows.first, &placed));
    // Slices of a part follow each other, in place or not.
    work->hidden = {is_alone ? Advance(placed.data, element, -offset * placed.stride) : own.hidden, work->rows, placed.columns,
                    placed.stride, element};
    return absl::OkStatus();
  }));
  work->placed = slice.first + slice.count;
  if (own.wide_hidden != nullptr) {
    HEADWATER_RETURN_IF_ERROR(Check(
        LaunchConvert(work->hidden.data, element, work->rows * work->hidden.stride, own.wide_hidden, Element::kFloat64, stream_),
        "widening hidden states"));
  }
  const TermRun& term = *work->term;
  if (!term.plan->wants_cross_entropy) return absl::OkStatus();
  for (int32_t rank = 0; rank < term.head->shard_count(); ++rank) {
    const ShardWeights shard = term.head->shard_weights(rank);
    if (shard.columns == 0) continue;
    HEADWATER_RETURN_IF_ERROR(
        Check(LaunchTargetArguments(Rows(work->hidden, slice.first, slice.count), shard, own.targets + slice.first,
                                    term.finish.transform.logit_scale, own.target_arguments + slice.first, stream_),
              "the targets' logits"));
  }
  return absl::OkStatus();
}

absl::Status Computation::UploadTeacherRows(Work* work, const Slice& slice) {
  const Part& part = work->parts.front();  // terms with a teacher are not computed together
  const RowsView& teacher = part.term->plan->term->teacher_hidden;
  if (teacher.memory == MemorySpace::kDevice) return absl::OkStatus();
  std::vector<int64_t> term_rows(static_cast<size_t>(slice.count));
  const auto first = part.rows->rows.begin() + slice.first;
  std::transform(first, first + slice.count, term_rows.begin(), [](const ChunkRow& row) { return row.term_row; });
  // Beside the student's product, into memory that earlier work may still use.
  if (slice.first == 0) HEADWATER_RETURN_IF_ERROR(core_.Order(stream_, core_.upload_stream()));
  return CopyRowsIn(teacher, term_rows, static_cast<char*>(work->own.raw_teacher) + slice.first * RowBytes(teacher),
                    core_.upload_stream());
}

absl::Status Computation::PlaceTeacherRows(Work* work, const Slice& slice) {
  TermBuffers& own = work->own;
  const Part& part = work->parts.front();
  const Element element = work->term->MatrixElement();
  const RowsView& teacher = part.term->plan->term->teacher_hidden;
  ConstMatrix source = {teacher.data, teacher.row_count, teacher.column_count, teacher.column_count, ElementOf(teacher.data_type)};
  bool contiguous = part.rows->ContiguousInBatch();
  int64_t first = part.rows->rows.front().term_row;
  if (teacher.memory == MemorySpace::kHost) {
    HEADWATER_RETURN_IF_ERROR(core_.Order(core_.upload_stream(), stream_));
    source.data = own.raw_teacher;
    contiguous = true;
    first = 0;
  }
  const bool in_place = MayReadInPlace(teacher, (*part.member->teacher_places)[part.rows->term]);
  // Values of the teacher's rows that are not finite show in the loss: the products ignore none of these rows.
  const int64_t padded = PaddedWidth(teacher.column_count);
  void* out = own.teacher_hidden == nullptr ? nullptr : Advance(own.teacher_hidden, element, slice.first * padded);
  ConstMatrix placed;
  HEADWATER_RETURN_IF_ERROR(PlaceRows(source, first + slice.first, contiguous, own.teacher_rows + slice.first, slice.count, element,
                                      in_place, out, nullptr, &placed));
  // Slices follow each other, in place or not.
  work->teacher = {Advance(placed.data, element, -slice.first * placed.stride), work->rows, placed.columns, placed.stride, element};
  if (own.wide_teacher_hidden == nullptr) return absl::OkStatus();
  return Check(LaunchConvert(work->teacher.data, element, work->rows * work->teacher.stride, own.wide_teacher_hidden,
                             Element::kFloat64, stream_),
               "widening the teacher's hidden states");
}

}  // namespace headwater::cuda
