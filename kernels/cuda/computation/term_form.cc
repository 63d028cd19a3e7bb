#include "kernels/cuda/computation/term_form.h"

#include <algorithm>
#include <variant>

#include "kernels/cuda/products/e_product.h"
#include "kernels/cuda/rows/finish.h"

namespace headwater::cuda {
namespace {

// The transform of logits over a temperature: z / T = (softcap / T) * tanh((a / T) / (softcap / T)). No kernel sees the
// temperature.
Transform TransformOf(const HeadSpec& spec, double inverse_temperature) {
  return {spec.transform.logit_scale * inverse_temperature, spec.transform.softcap.value_or(0) * inverse_temperature};
}

bool Is16Bit(DataType type) { return type != DataType::kFloat32; }

// Whether the terms of a chunk add to a common grad_hidden before it is written.
bool SumsGradHidden(const std::vector<TermRun>& terms) {
  if (terms.empty()) return false;
  const CudaHead& head = *terms.front().head;
  return terms.size() > 1 || head.group() != nullptr || (!head.is_replica() && head.shards().size() > 1);
}

// All terms of a call are alike in this.
bool AsOnHost(const std::vector<TermRun>& terms) { return !terms.empty() && terms.front().as_on_host; }

bool TakesAllRows(const LossTerm& term) {
  for (const int32_t target : term.targets) {
    if (target == term.ignore_index) return false;
  }
  // A row of weight 0 may have factors; so rare a case is not looked at.
  for (const float weight : term.token_weights) {
    if (weight == 0) return false;
  }
  return true;
}

// Whether a product can read a tensor as it lies.
bool IsOperand(const RowsView& view, DataType type) {
  return view.memory == MemorySpace::kDevice && view.data_type == type && PaddedWidth(view.column_count) == view.column_count &&
         reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

constexpr int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Rows of a micro-batch that have a gradient, or a bound of them.
int64_t RowsWithGradient(const std::vector<TermRun>& terms, const MicroBatch& micro_batch) {
  if (terms.size() != 1) return micro_batch.hidden.row_count;
  const LossTerm& term = *terms.front().plan->term;
  int64_t count = 0;
  for (int64_t i = 0; i < term.row_count; ++i) {
    const size_t row = static_cast<size_t>(i);
    const bool ignored = !term.targets.empty() && term.targets[row] == term.ignore_index;
    const auto is_zero = [row](absl::Span<const float> factors) { return factors.empty() || factors[row] == 0; };
    const bool has_weight = term.token_weights.empty() || term.token_weights[row] != 0;
    if (!ignored && (has_weight || !is_zero(term.entropy_factors) || !is_zero(term.lse_factors))) ++count;
  }
  return count;
}

// Rows of a term at once, where memory allows it.
int64_t MostRows(const TermRun& term) {
  const bool on_rank = term.head->group() != nullptr;
  switch (term.large_form) {
    case Form::kExponentials:
      return on_rank ? kMaxRankExponentialRows : kMaxExponentialRows;
    case Form::kRows:
      return on_rank ? kMaxRankRows : kMaxRows;
    case Form::kWide:
      break;
  }
  return kMaxRows;
}

// The most rows that fit in place. They come in steps of one GPU's full load, so that no small chunk is left, and below that in
// steps of 128.
int64_t RowsThatFit(const std::vector<TermRun>& terms, const MicroBatch& micro_batch, int64_t bytes) {
  int64_t rows = kMaxRankExponentialRows;
  for (const TermRun& term : terms) rows = std::min(rows, MostRows(term));
  while (rows > 0 && ChunkBytes(terms, micro_batch, rows) > bytes) {
    rows -= rows > kMaxExponentialRows ? kMaxExponentialRows : rows > kRowGrain ? kRowGrain : 1;
  }
  return rows;
}

void SetSliceRows(int64_t rows, std::vector<TermRun>* terms) {
  for (TermRun& term : *terms) {
    if (term.large_form == Form::kRows) term.slice_rows = rows;
  }
}

// The logits of `rows` rows. Returns the bytes of the teacher's memory, which are at least `least_teacher_bytes`, or 0.
int64_t LayOutLogits(const TermRun& term, Form form, int64_t rows, int64_t least_teacher_bytes, Workspace* workspace,
                     TermBuffers* buffers) {
  const int32_t shard_count = term.head->shard_count();
  const int64_t product_bytes = form == Form::kExponentials ? 2 : BytesOf(term.ProductElement(form));
  const auto shard_bytes = [&](int32_t rank) {
    return rows * ProductStride(term.head->shard_weights(rank).columns) * product_bytes;
  };
  for (int32_t rank = 0; rank < shard_count; ++rank) buffers->products.push_back(workspace->TakeBytes(shard_bytes(rank)));
  if (term.plan->jsd == nullptr) return 0;
  const int64_t teacher_bytes = std::max(rows * ProductStride(TeacherColumns(term)) * product_bytes, least_teacher_bytes);
  buffers->teacher_products = workspace->TakeBytes(teacher_bytes);
  if (shard_count == 1 && !term.exchanges_teacher) return teacher_bytes;
  for (int32_t rank = 0; rank < shard_count; ++rank) buffers->cut_teacher.push_back(workspace->TakeBytes(shard_bytes(rank)));
  if (!term.exchanges_teacher) return teacher_bytes;
  int64_t columns = 0;
  for (const SurplusColumns& of : TeacherSurplus(term)) columns += of.size();
  buffers->teacher_exchange = workspace->TakeBytes(rows * columns * product_bytes);
  return teacher_bytes;
}

}  // namespace

Element TermRun::MatrixElement() const { return large_form == Form::kWide ? Element::kFloat32 : ElementOf(head->spec().data_type); }

TermRun MakeTermRun(const MicroBatch& micro_batch, TermPlan* plan, bool hopper, Place hidden_place, Place teacher_place) {
  TermRun run;
  run.plan = plan;
  run.head = static_cast<CudaHead*>(plan->head);
  run.teacher = static_cast<CudaHead*>(plan->teacher);
  const HeadSpec& spec = run.head->spec();
  const LossTerm& term = *plan->term;
  run.cross_entropy.term = plan->cross_entropy;
  run.cross_entropy.want_rest = plan->wants_spread() || plan->wants_total;
  run.cross_entropy.want_squares = plan->wants_squares;
  run.cross_entropy.want_argmax = plan->wants_argmax;
  run.cross_entropy.want_distance = plan->has_entropy_factors;
  run.finish.cross_entropy = run.cross_entropy;
  run.finish.hard_weight = plan->hard_weight;
  run.finish.loss_scale = term.loss_scale;
  run.finish.gradient_resolution = term.gradient_resolution;
  run.finish.transform = TransformOf(spec, plan->cross_entropy.inverse_temperature);
  run.finish.divergence_follows = plan->jsd != nullptr;

  bool narrow = Is16Bit(spec.data_type) && micro_batch.hidden.data_type == spec.data_type;
  if (plan->jsd != nullptr) {
    const HeadSpec& teacher = run.teacher->spec();
    narrow = narrow && teacher.data_type == spec.data_type && term.teacher_hidden.data_type == teacher.data_type;
    run.divergence.beta = plan->jsd->beta;
    run.divergence.student_temperature = plan->jsd->student_temperature;
    run.divergence.teacher_temperature = plan->jsd->teacher_temperature;
    run.divergence.soft_weight = plan->soft_weight;
    run.divergence.common_columns = std::min(spec.transform.valid_vocab_size, teacher.transform.valid_vocab_size);
  }
  if (plan->jsd != nullptr && run.head->group() != nullptr) {
    for (const SurplusColumns& of : TeacherSurplus(run)) run.exchanges_teacher = run.exchanges_teacher || of.size() > 0;
  }
  run.large_form = narrow ? Form::kRows : Form::kWide;
  run.int8_teacher = narrow && plan->jsd != nullptr && run.teacher->spec().int8_teacher;
  const auto is_plain = [](const HeadSpec& head) { return !head.has_bias && head.transform.softcap.value_or(0) == 0; };
  run.shard_passes = hopper && narrow && run.head->group() != nullptr && plan->jsd != nullptr && !plan->wants_cross_entropy &&
                     is_plain(spec) && is_plain(run.teacher->spec()) && HasDigitsInOnePass(run.divergence.beta) &&
                     IsOrdinaryScale(spec.transform.logit_scale, run.divergence.student_temperature) &&
                     IsOrdinaryScale(run.teacher->spec().transform.logit_scale, run.divergence.teacher_temperature);
  const bool plain = plan->jsd == nullptr && plan->top_k == nullptr && plan->cross_entropy.label_smoothing == 0 &&
                     !run.cross_entropy.want_rest && !plan->wants_argmax;
  if (hopper && narrow && plain && spec.data_type == DataType::kBFloat16) run.large_form = Form::kExponentials;
  run.finish.matrix_element = run.MatrixElement();
  const bool rows_of_bf16 = hopper && run.large_form == Form::kRows && run.MatrixElement() == Element::kBFloat16;
  const bool has_listed_form = run.large_form == Form::kExponentials || (plan->jsd != nullptr && rows_of_bf16);
  run.may_list = plan->dithers && micro_batch.backward && has_listed_form && run.head->group() == nullptr &&
                 run.head->shard_count() == 1 && !spec.has_bias;
  if (TakesAllRows(term)) {
    const DataType element = static_cast<DataType>(run.MatrixElement());
    run.hidden_in_place = hidden_place == Place::kOwnDevice && IsOperand(micro_batch.hidden, element);
    run.teacher_in_place = plan->jsd != nullptr && teacher_place == Place::kOwnDevice && IsOperand(term.teacher_hidden, element);
  }
  return run;
}

int64_t TeacherColumns(const TermRun& term) {
  return term.teacher->group() == nullptr ? term.teacher->spec().transform.valid_vocab_size
                                          : term.teacher->shard_weights(0).columns;
}

std::vector<SurplusColumns> TeacherSurplus(const TermRun& term) {
  return SurplusOf(term.teacher->shard_rows(), term.head->shard_rows(), term.divergence.common_columns);
}

TermBuffers LayOutTerm(const TermRun& term, int64_t rows, Workspace* workspace) {
  TermBuffers buffers;
  const Form form = term.FormOf(rows);
  const bool wide = form == Form::kWide;
  const bool jsd = term.plan->jsd != nullptr;
  const int64_t element_bytes = BytesOf(term.MatrixElement());
  const int64_t padded = PaddedWidth(term.head->spec().hidden_size);
  const int64_t shard_count = static_cast<int64_t>(term.head->shard_count());
  const int64_t merged_shards = static_cast<int64_t>(term.head->merged_shards());

  for (int32_t** list : {&buffers.targets, &buffers.source_rows, &buffers.chunk_rows, &buffers.output_rows, &buffers.order}) {
    *list = workspace->Take<int32_t>(rows);
  }
  buffers.starts = workspace->Take<int32_t>(rows + 1);
  for (float** list : {&buffers.token_weights, &buffers.entropy_factors, &buffers.lse_factors})
    *list = workspace->Take<float>(rows);
  if (term.as_on_host || !term.hidden_in_place) buffers.hidden = workspace->TakeBytes(rows * padded * element_bytes);
  if (wide) {
    buffers.wide_hidden = workspace->Take<double>(rows * padded);
    buffers.panel = workspace->TakeBytes(kPanelBytes);
  }
  int64_t largest_columns = 0;
  int64_t largest_partials = 0;
  for (int32_t rank = 0; rank < static_cast<int32_t>(shard_count); ++rank) {
    const int64_t columns = term.head->shard_weights(rank).columns;
    largest_columns = std::max(largest_columns, columns);
    largest_partials = std::max(largest_partials, form == Form::kExponentials ? EProductPartialCount(rows, columns) : 0);
    if (term.IsSliced(form)) buffers.matrices.push_back(workspace->TakeBytes(rows * ProductStride(columns) * element_bytes));
  }
  // The product M W and the scaled hidden states come when the teacher's logits are no longer needed. Nor are the student's, where
  // M has a place of its own.
  const int64_t finish_bytes =
      RoundUp(rows * padded * 4, Workspace::kAlignment) + RoundUp(rows * padded * element_bytes, Workspace::kAlignment);
  Workspace late;
  if (term.IsSliced(form)) {
    const int64_t slice_rows = std::min(rows, term.slice_rows);
    Workspace counted;
    TermBuffers unused;
    LayOutLogits(term, form, slice_rows, 0, &counted, &unused);
    const int64_t bytes = std::max(counted.used(), finish_bytes);
    void* space = workspace->TakeBytes(bytes);
    Workspace early(space, bytes);
    LayOutLogits(term, form, slice_rows, 0, &early, &buffers);
    late = Workspace(space, bytes);
  } else {
    const int64_t teacher_bytes = LayOutLogits(term, form, rows, finish_bytes, workspace, &buffers);
    late = jsd ? Workspace(buffers.teacher_products, teacher_bytes) : Workspace(workspace->TakeBytes(finish_bytes), finish_bytes);
  }
  if (jsd) {
    const HeadSpec& teacher = term.teacher->spec();
    const int64_t teacher_padded = PaddedWidth(teacher.hidden_size);
    const int64_t teacher_columns = teacher.transform.valid_vocab_size;
    buffers.teacher_rows = workspace->Take<int32_t>(rows);
    if (term.as_on_host || term.plan->term->teacher_hidden.memory == MemorySpace::kHost) {
      buffers.raw_teacher =
          workspace->TakeBytes(rows * teacher.hidden_size * ElementBytes(term.plan->term->teacher_hidden.data_type));
    }
    if (term.as_on_host || !term.teacher_in_place)
      buffers.teacher_hidden = workspace->TakeBytes(rows * teacher_padded * element_bytes);
    if (wide) buffers.wide_teacher_hidden = workspace->Take<double>(rows * teacher_padded);
    if (term.int8_teacher) {
      buffers.int8_teacher = LayOutInt8(workspace->TakeBytes(Int8Bytes(rows, teacher.hidden_size)), rows, teacher.hidden_size);
      buffers.teacher_errors = workspace->Take<float>(rows);
    }
    if (!buffers.cut_teacher.empty())
      buffers.teacher_bias = workspace->TakeBytes(teacher_columns * ElementBytes(teacher.data_type));
    if (term.shard_passes) {
      buffers.shard_sides = workspace->Take<ShardSides>(merged_shards * rows);
      buffers.shard_sums = workspace->Take<ShardSums>(merged_shards * rows);
      buffers.shard_rows = workspace->Take<ShardRow>(rows);
    } else {
      buffers.soft_student = workspace->Take<SoftStats>(merged_shards * rows);
      buffers.soft_teacher = workspace->Take<SoftStats>(merged_shards * rows);
      buffers.divergence_sums = workspace->Take<DivergenceSums>(merged_shards * rows);
    }
  }
  buffers.product = late.Take<float>(rows * padded);
  buffers.scaled = late.TakeBytes(rows * padded * element_bytes);
  if (jsd && term.may_list && !term.IsSliced(form)) buffers.lists = late;
  buffers.alpha = workspace->Take<float>(2);
  if (term.head->spec().has_bias) buffers.bias_scratch = workspace->TakeBytes(GradBiasScratchBytes(largest_columns));
  if (term.plan->top_k != nullptr) {
    const int64_t entries = rows * term.plan->top_k->k;
    buffers.top_k_columns = workspace->Take<int32_t>(entries);
    buffers.top_k_log_probs = workspace->Take<float>(entries);
    buffers.top_k_logits = workspace->Take<double>(entries);
    buffers.top_k_gradient = workspace->Take<float>(entries);
  }
  buffers.target_arguments = workspace->Take<double>(rows);
  const bool in_group = term.head->group() != nullptr;
  buffers.merged_arguments = in_group ? workspace->Take<double>(rows) : buffers.target_arguments;
  buffers.offsets = in_group ? workspace->Take<double>(rows) : buffers.target_arguments;
  buffers.partial_sums = workspace->Take<float>(largest_partials);
  buffers.sums = workspace->Take<double>(merged_shards * rows);
  buffers.overflow = workspace->Take<int32_t>(1);
  buffers.stats = workspace->Take<RowStats>(merged_shards * rows);
  buffers.coefficients = workspace->Take<RowCoefficients>(rows);
  buffers.reports = workspace->Take<RowReport>(rows);
  buffers.row_factor = workspace->Take<float>(rows);
  buffers.target_factor = workspace->Take<float>(rows);
  buffers.non_finite = workspace->Take<uint8_t>(rows);
  if (!term.plan->dithers) return buffers;
  buffers.dither_keys = workspace->Take<DitherKey>(rows);
  buffers.dither_rows = workspace->Take<DitherRow>(rows);
  buffers.dither_sums = workspace->Take<DitherSums>(rows);
  buffers.dither_total = workspace->Take<DitherSums>(1);
  return buffers;
}

ChunkBuffers LayOutChunk(const std::vector<TermRun>& terms, const MicroBatch& micro_batch, int64_t rows, Workspace* workspace) {
  ChunkBuffers buffers;
  const int64_t width = micro_batch.hidden.column_count;
  const bool as_on_host = AsOnHost(terms);
  if (as_on_host || micro_batch.hidden.memory == MemorySpace::kHost) {
    buffers.raw_hidden = workspace->TakeBytes(rows * width * ElementBytes(micro_batch.hidden.data_type));
    if (as_on_host || micro_batch.digest_rows) buffers.batch_rows = workspace->Take<int32_t>(rows);
  }
  if (micro_batch.grad_hidden.data != nullptr) {
    if (as_on_host || micro_batch.grad_hidden.memory == MemorySpace::kHost) {
      buffers.out = workspace->TakeBytes(rows * width * ElementBytes(micro_batch.grad_hidden.data_type));
    }
    if (SumsGradHidden(terms)) buffers.sum = workspace->Take<float>(rows * PaddedWidth(width));
    buffers.output_rows = workspace->Take<int32_t>(rows);
  }
  buffers.non_finite = workspace->Take<uint8_t>(rows);
  return buffers;
}

int64_t ChunkBytes(const std::vector<TermRun>& terms, const MicroBatch& micro_batch, int64_t rows) {
  Workspace workspace;
  if (micro_batch.digest_rows || AsOnHost(terms)) workspace.Take<uint64_t>(2);
  for (const TermRun& term : terms) {
    if (term.plan->cross_entropy.class_weights != nullptr) workspace.Take<float>(term.plan->cross_entropy.valid_vocab_size);
  }
  LayOutChunk(terms, micro_batch, rows, &workspace);
  const int64_t shared = workspace.used();
  int64_t largest = 0;
  for (const TermRun& term : terms) {
    workspace.Rewind(shared);
    LayOutTerm(term, rows, &workspace);
    largest = std::max(largest, workspace.used());
  }
  return largest;
}

int64_t FitChunksInPlace(const MicroBatch& micro_batch, int64_t bytes, std::vector<TermRun>* terms) {
  SetSliceRows(0, terms);
  return RowsThatFit(*terms, micro_batch, bytes);
}

int64_t SliceRowsOf(const std::vector<TermRun>& terms) {
  int64_t rows = 0;
  for (const TermRun& term : terms) rows = std::max(rows, term.slice_rows);
  return rows;
}

int64_t FitChunks(const MicroBatch& micro_batch, int64_t bytes, std::vector<TermRun>* terms) {
  const int64_t in_place = FitChunksInPlace(micro_batch, bytes, terms);
  const bool any_wide =
      std::any_of(terms->begin(), terms->end(), [](const TermRun& term) { return term.large_form == Form::kWide; });
  const bool adds = micro_batch.backward && std::any_of(terms->begin(), terms->end(), [](const TermRun& term) {
                      return term.large_form == Form::kRows && term.plan->grad_weight != GradWeightMode::kNone;
                    });
  const int64_t all_rows = RowsWithGradient(*terms, micro_batch);
  if (in_place == 0 || !adds || any_wide || all_rows == 0) return in_place;
  const int64_t chunks = CeilDivide(all_rows, in_place);
  // Products of fewer rows than they would have in place cost more than is gained.
  const int64_t least_slice_rows = RoundUp(CeilDivide(all_rows, chunks), kRowGrain);
  for (int64_t fewer = CeilDivide(all_rows, kMaxSlicedRows); fewer < chunks; ++fewer) {
    const int64_t rows = RoundUp(CeilDivide(all_rows, fewer), kRowGrain);
    for (int64_t slices = 2;; ++slices) {
      const int64_t slice_rows = RoundUp(CeilDivide(rows, slices), kRowGrain);
      if (slice_rows < least_slice_rows) break;
      SetSliceRows(slice_rows, terms);
      if (ChunkBytes(*terms, micro_batch, rows) <= bytes) return rows;
      if (slice_rows == kRowGrain) break;  // more slices would not be smaller
    }
  }
  SetSliceRows(0, terms);
  return in_place;
}

}  // namespace headwater::cuda
