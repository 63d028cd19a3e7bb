#include "kernels/cpu/shard_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/rows/convert.h"

namespace headwater::cpu {
namespace {

PieceStats Stats(const float* a, int64_t count, const StatsOptions& options) {
  return GetRowKernels().stats_float(a, count, options);
}
PieceStats Stats(const double* a, int64_t count, const StatsOptions& options) {
  return GetRowKernels().stats_double(a, count, options);
}
int64_t FirstAtLeast(const float* a, int64_t count, double cap, double inverse_temperature, double value) {
  return GetRowKernels().first_at_least_float(a, count, cap, inverse_temperature, value);
}
int64_t FirstAtLeast(const double* a, int64_t count, double cap, double inverse_temperature, double value) {
  return GetRowKernels().first_at_least_double(a, count, cap, inverse_temperature, value);
}

// Fewer columns than this are not worth a thread.
constexpr int64_t kMinColumnsPerThread = 64;
constexpr int64_t kColumnGrain = 16;

}  // namespace

ShardParts::ShardParts(const HeadShard& shard, const ThreadPool& pool)
    : columns_{0, shard.valid_rows},
      count_(static_cast<int32_t>(std::clamp<int64_t>(shard.valid_rows / kMinColumnsPerThread, 1, pool.thread_count()))) {}

RowRange ShardParts::part(int32_t index) const { return SplitEvenly(columns_, index, count_, kColumnGrain); }

void AddGradWeightPanel(const HeadShard& shard, const KeptRows& rows, int64_t part_start, int64_t start, int64_t count,
                        const GradientTarget& target) {
  const float beta = target.overwrite ? 0.0f : 1.0f;
  const Matrix<float> grad_weight = {target.grad_weight + start * shard.hidden_size, shard.hidden_size};
  const Matrix<const uint16_t> rounded = AsBfloat16(rows.gradient, shard.rows.size(), part_start, start);
  if (rows.is_bfloat16) {
    MultiplyFirstTransposed(count, shard.hidden_size, rows.row_count, target.alpha, rounded,
                            {reinterpret_cast<const uint16_t*>(rows.hidden), shard.hidden_size}, beta, grad_weight);
  } else {
    MultiplyFirstTransposed(count, shard.hidden_size, rows.row_count, target.alpha, {rows.gradient + start, shard.rows.size()},
                            {rows.hidden, shard.hidden_size}, beta, grad_weight);
  }
  if (target.grad_bias == nullptr) return;
  if (target.overwrite) std::memset(target.grad_bias + start, 0, static_cast<size_t>(count) * sizeof(float));
  if (rows.is_bfloat16) {
    float row[kMaxPanelRows];
    for (int64_t i = 0; i < rows.row_count; ++i) {
      ToFloat(rounded.data + i * rounded.stride, DataType::kBFloat16, count, row);
      GetRowKernels().add_scaled(row, count, target.alpha, target.grad_bias + start);
    }
    return;
  }
  GetRowKernels().add_column_sums(rows.gradient + start, rows.row_count, shard.rows.size(), count, target.alpha,
                                  target.grad_bias + start);
}

absl::Status ShardRun::Run() {
  const MicroBatch& micro_batch = *plan_.micro_batch;
  for (size_t i = 0; i < plan_.chunks.size(); ++i) {
    const Chunk& chunk = plan_.chunks[i];
    absl::Status status = RunChunk(chunk);
    if (!status.ok()) return status;
    if (rank() != 0 || micro_batch.flow == nullptr || !chunk.backward || micro_batch.grad_hidden.data == nullptr) continue;
    micro_batch.flow->GradHiddenReady(FinalRowsAfter(plan_, i));
  }
  return absl::OkStatus();
}

absl::Status ShardRun::RunChunk(const Chunk& chunk) {
  const HeadShard& first = HeadOf(plan_.terms[chunk.terms.front().term]).shard(rank());
  grad_hidden_ = nullptr;
  if (chunk.backward && plan_.micro_batch->grad_hidden.data != nullptr) {
    grad_hidden_ = first.Workspace<float>(first.layout.grad_hidden);
    std::memset(grad_hidden_, 0, chunk.batch_rows.size() * static_cast<size_t>(first.hidden_size) * sizeof(float));
  }
  for (const TermChunk& part : chunk.terms) {
    bool wide = plan_.terms[part.term].jsd != nullptr || plan_.terms[part.term].top_k != nullptr;
    if (!wide) {
      Work work = MakeWork(part, 0, static_cast<int64_t>(part.rows.size()), chunk.backward);
      absl::Status status = RunNarrow(&work, &wide);
      if (!status.ok()) return status;
    }
    if (wide) {
      absl::Status status = RunWide(part, chunk.backward);
      if (!status.ok()) return status;
    }
  }
  return grad_hidden_ != nullptr ? WriteGradHidden(chunk) : absl::OkStatus();
}

ShardRun::Work ShardRun::MakeWork(const TermChunk& chunk, int64_t start, int64_t count, bool backward) {
  TermPlan& term = plan_.terms[chunk.term];
  const HeadShard& shard = HeadOf(term).shard(rank());
  const HeadPlan& head_plan = HeadOf(term).cpu_plan();
  states_.assign(static_cast<size_t>(count), RowState());
  return Work{term,
              plan_.StagedOf(term),
              chunk.rows.data() + start,
              count,
              backward,
              shard,
              head_plan,
              ShardParts(shard, context_.pool),
              nullptr,
              nullptr,
              shard.rows.size(),
              HeadOf(term).core().options.bfloat16_products == Bfloat16Products::kOneDnn &&
                  shard.data_type == DataType::kBFloat16 && plan_.micro_batch->hidden.data_type == DataType::kBFloat16};
}

void ShardRun::PlaceBuffers(Work* work, int64_t gradient_offset) {
  const HeadShard& shard = work->shard;
  work->hidden = shard.Workspace<float>(shard.layout.hidden);
  work->gradient = shard.Workspace<float>(gradient_offset);
  if (!work->backward || work->staged == nullptr || !work->staged->keeps_rows) return;
  // Taken for good only in BeginGradWeight(): the narrow form may give up before.
  float* free_elements = work->staged->SlotOf(shard) + work->staged->used_elements[static_cast<size_t>(rank())];
  work->hidden = free_elements;
  work->gradient = free_elements + work->row_count * shard.hidden_size;
}

void ShardRun::GatherHidden(Work* work) {
  const RowsView& hidden = plan_.micro_batch->hidden;
  non_finite_hidden_.assign(static_cast<size_t>(work->row_count), 0);
  const int64_t columns = hidden.column_count;
  context_.pool.Run(context_.pool.thread_count(), [&](int32_t part) {
    const RowRange range = SplitEvenly({0, work->row_count}, part, context_.pool.thread_count(), 1);
    float* converted = work->shard.Workspace<float>(work->shard.layout.converted + part * work->head_plan.converted_bytes);
    for (int64_t i = range.start; i < range.end; ++i) {
      const void* in = ElementAt(hidden.data, hidden.data_type, work->rows[i].batch_row * columns);
      float* row = work->is_bfloat16 ? converted : work->hidden + i * columns;
      ToFloat(in, hidden.data_type, columns, row);
      if (work->is_bfloat16)
        std::memcpy(ElementAt(work->hidden, DataType::kBFloat16, i * columns), in, static_cast<size_t>(columns) * 2);
      non_finite_hidden_[static_cast<size_t>(i)] = GetRowKernels().count_non_finite(row, columns) > 0;
    }
  });
}

void ShardRun::RoundGradient(const Work& work, int64_t row, int64_t part_start, int64_t start, int64_t count) {
  if (!work.is_bfloat16) return;
  float* part = work.gradient + row * work.stride + part_start;
  float copy[kMaxPanelRows];
  std::memcpy(copy, part + (start - part_start), static_cast<size_t>(count) * sizeof(float));
  FromFloat(copy, count, DataType::kBFloat16, ElementAt(part, DataType::kBFloat16, start - part_start));
}

absl::Status ShardRun::MergeRowStats(const Work& work) {
  const size_t rows = static_cast<size_t>(work.row_count);
  merged_stats_.assign(rows, RowStats());
  for (int32_t part = 0; part < work.parts.count(); ++part) {
    for (size_t i = 0; i < rows; ++i) MergeStats(part_stats_[static_cast<size_t>(part) * rows + i], &merged_stats_[i]);
  }
  const int32_t world_size = context_.communicator.world_size();
  if (world_size == 1) return absl::OkStatus();
  gathered_stats_.resize(rows * static_cast<size_t>(world_size));
  absl::Status status =
      context_.communicator.AllGather(reinterpret_cast<const double*>(merged_stats_.data()), work.row_count * kRowStatsDoubles,
                                      reinterpret_cast<double*>(gathered_stats_.data()));
  if (!status.ok()) return status;
  merged_stats_.assign(rows, RowStats());
  for (int32_t shard = 0; shard < world_size; ++shard) {
    for (size_t i = 0; i < rows; ++i) MergeStats(gathered_stats_[static_cast<size_t>(shard) * rows + i], &merged_stats_[i]);
  }
  return absl::OkStatus();
}

void ShardRun::FinishRows(Work* work) {
  const TermPlan& term = work->term;
  for (int64_t i = 0; i < work->row_count; ++i) {
    RowState& state = states_[static_cast<size_t>(i)];
    const ChunkRow& row = work->rows[i];
    if (!term.wants_cross_entropy) continue;
    state.loss = FinishRow(merged_stats_[static_cast<size_t>(i)], row.target, term.cross_entropy);
    if (row.target < 0 || term.hard_weight == 0) continue;
    state.gradient = GradientOf(state.loss, {row.token_weight * term.hard_weight, row.entropy_factor, row.lse_factor});
    if (term.dithers && work->backward) SetResolution(*work, row, merged_stats_[static_cast<size_t>(i)], &state);
  }
}

void ShardRun::RecordRows(Work* work) {
  if (rank() != 0) return;
  TermPlan& term = work->term;
  for (int64_t i = 0; i < work->row_count; ++i) {
    const size_t index = static_cast<size_t>(i);
    const RowState& state = states_[index];
    RowReport report;
    report.soft = state.divergence;
    report.hard = state.loss.hard;
    report.z_loss = state.loss.z_loss;
    report.lse = state.loss.lse;
    report.target_log_probability = state.loss.target_log_probability;
    report.entropy = state.loss.entropy;
    report.mean_logits = state.loss.mean_logits;
    report.log_sum_sq_probs = state.loss.log_sum_sq_probs;
    if (term.wants_argmax) report.argmax = static_cast<int32_t>(merged_stats_[index].best_column);
    const ChunkRow& row = work->rows[i];
    const RowGradient& gradient = state.gradient;
    const double largest =
        std::max(std::abs(gradient.probability_factor) + std::abs(gradient.distance_factor), std::abs(gradient.target));
    report.gradient_bound = std::abs(GradientScale(term)) * (largest + std::abs(row.token_weight) * term.soft_weight);
    if (state.dither.active) report.gradient_bound = std::max(report.gradient_bound, std::abs(state.dither.options.factor));
    RecordRow(row, report, non_finite_hidden_[index] == 0, &term);
  }
}

template <typename T>
RowStats ShardRun::StatsOfColumns(const TermPlan& term, const T* a, int64_t count, int64_t global_start, int64_t target,
                                  double best_before) {
  const CrossEntropyTerm& cross_entropy = term.cross_entropy;
  StatsOptions options;
  options.cap = term.head->spec().transform.softcap.value_or(0);
  options.inverse_temperature = cross_entropy.inverse_temperature;
  options.want_spread = term.wants_spread();
  options.want_linear = cross_entropy.label_smoothing > 0;
  options.want_total = term.wants_total;
  // The pieces before and behind the target, which takes no part.
  const int64_t column = std::clamp<int64_t>(target - global_start, -1, count);
  const bool inside = target >= 0 && column >= 0 && column < count;
  const RowRange pieces[2] = {{0, inside ? column : count}, {inside ? column + 1 : count, count}};
  RowStats stats;
  for (const RowRange& piece : pieces) {
    if (piece.size() == 0) continue;
    if (cross_entropy.class_weights != nullptr) options.class_weights = cross_entropy.class_weights + global_start + piece.start;
    MergeStats(Stats(a + piece.start, piece.size(), options), &stats.others);
  }
  if (!term.wants_argmax) return stats;
  // Over all columns: the target's too, by the row kernel, since another tanh may differ in the last bit.
  stats.best = stats.others.max;
  StatsOptions plain;
  plain.cap = options.cap;
  plain.inverse_temperature = options.inverse_temperature;
  if (inside) stats.best = std::max(stats.best, Stats(a + column, 1, plain).max);
  if (stats.best > best_before) {
    stats.best_column =
        static_cast<double>(global_start + FirstAtLeast(a, count, options.cap, options.inverse_temperature, stats.best));
  }
  return stats;
}

template RowStats ShardRun::StatsOfColumns(const TermPlan&, const float*, int64_t, int64_t, int64_t, double);
template RowStats ShardRun::StatsOfColumns(const TermPlan&, const double*, int64_t, int64_t, int64_t, double);

double ShardRun::TemperedLogit(const TermPlan& term, double argument) {
  const double cap = term.head->spec().transform.softcap.value_or(0);
  return (cap > 0 ? cap * std::tanh(argument / cap) : argument) * term.cross_entropy.inverse_temperature;
}

double ShardRun::GradientScale(const TermPlan& term) {
  return term.term->loss_scale * term.head->spec().transform.logit_scale * term.cross_entropy.inverse_temperature;
}

template <typename T>
GradientCoefficients ShardRun::CoefficientsOf(const TermPlan& term, const RowState& state) {
  const RowGradient& gradient = WrittenOf(state);
  const double inverse_temperature = term.cross_entropy.inverse_temperature;
  // The kernel subtracts the rounded maximum; the rounding error is in the factors.
  const double max = static_cast<double>(static_cast<T>(gradient.max / inverse_temperature));
  const double shift = max == gradient.max ? 0.0 : max * inverse_temperature - gradient.max;
  const double scale = WrittenScale(term, state) * std::exp(shift);
  return {max, inverse_temperature, scale * (gradient.probability_factor - gradient.distance_factor * shift),
          scale * gradient.distance_factor, WrittenScale(term, state) * gradient.class_factor};
}

template GradientCoefficients ShardRun::CoefficientsOf<float>(const TermPlan&, const RowState&);
template GradientCoefficients ShardRun::CoefficientsOf<double>(const TermPlan&, const RowState&);

GradientTarget ShardRun::TargetOf(const Work& work) const {
  const HeadShard& shard = work.shard;
  const size_t index = static_cast<size_t>(rank());
  if (work.term.grad_weight == GradWeightMode::kAccumulate) {
    return {shard.grad_weight.As<float>(), shard.grad_bias.As<float>(), 1, false};
  }
  if (work.staged != nullptr && !work.staged->keeps_rows) {
    float* slot = work.staged->SlotOf(shard);
    float* bias = shard.has_bias ? slot + shard.rows.size() * shard.hidden_size : nullptr;
    return {slot, bias, 1, work.staged->has_product[index] == 0};
  }
  return {nullptr, nullptr, 0, false};
}

void ShardRun::BeginGradWeight(Work* work) {
  if (work->staged == nullptr) return;
  StagedHead& staged = *work->staged;
  const size_t index = static_cast<size_t>(rank());
  if (staged.keeps_rows) {
    staged.kept[index].push_back({work->gradient, work->hidden, work->row_count, work->is_bfloat16});
    staged.used_elements[index] += work->row_count * (work->shard.hidden_size + work->stride);
  } else {
    staged.has_product[index] = 1;
  }
}

// Threads split grad_hidden by columns, and by rows where columns are few: each element has one writer and one order of adding.
void ShardRun::AddGradHidden(Work* work) {
  if (grad_hidden_ == nullptr) return;
  const HeadShard& shard = work->shard;
  const int64_t columns = shard.hidden_size;
  const int64_t rows = work->row_count;
  const int64_t threads = context_.pool.thread_count();
  const int64_t column_parts = std::clamp<int64_t>(columns / 128, 1, threads);
  const int64_t row_parts = std::clamp<int64_t>(rows / 16, 1, threads / column_parts);
  const bool contiguous = work->rows[rows - 1].chunk_row - work->rows[0].chunk_row == rows - 1;
  float* target =
      contiguous ? grad_hidden_ + work->rows[0].chunk_row * columns : shard.Workspace<float>(shard.layout.grad_hidden_term);
  context_.pool.Run(static_cast<int32_t>(column_parts * row_parts), [&](int32_t part) {
    const RowRange column_range = SplitEvenly({0, columns}, part % column_parts, column_parts, kColumnGrain);
    const RowRange row_range = SplitEvenly({0, rows}, part / column_parts, row_parts, 1);
    if (!contiguous) {
      for (int64_t i = row_range.start; i < row_range.end; ++i) {
        std::memset(target + i * columns + column_range.start, 0, static_cast<size_t>(column_range.size()) * sizeof(float));
      }
    }
    float* out = target + row_range.start * columns + column_range.start;
    const float* gradient = work->gradient + row_range.start * work->stride;
    if (work->is_bfloat16) {
      const uint16_t* weight = shard.weight.As<uint16_t>() + column_range.start;
      for (int32_t weight_part = 0; weight_part < work->parts.count(); ++weight_part) {
        const RowRange range = work->parts.part(weight_part);
        if (range.size() == 0) continue;  // a shard of padding
        Multiply(row_range.size(), column_range.size(), range.size(), AsBfloat16(gradient, work->stride, range.start, range.start),
                 {weight + range.start * columns, columns}, 1, {out, columns});
      }
    } else if (shard.data_type == DataType::kFloat32) {
      Multiply(row_range.size(), column_range.size(), shard.valid_rows, {gradient, work->stride},
               {shard.weight.As<float>() + column_range.start, columns}, 1, {out, columns});
    } else {
      float* converted = shard.Workspace<float>(shard.layout.converted + part * work->head_plan.converted_bytes);
      for (int64_t start = 0; start < shard.valid_rows; start += work->head_plan.converted_rows) {
        const int64_t count = std::min(work->head_plan.converted_rows, shard.valid_rows - start);
        for (int64_t v = 0; v < count; ++v) {
          ToFloat(shard.weight.As<uint16_t>() + (start + v) * columns + column_range.start, shard.data_type, column_range.size(),
                  converted + v * column_range.size());
        }
        Multiply(row_range.size(), column_range.size(), count, {gradient + start, work->stride}, {converted, column_range.size()},
                 1, {out, columns});
      }
    }
    if (!contiguous) {
      for (int64_t i = row_range.start; i < row_range.end; ++i) {
        GetRowKernels().add_scaled(target + i * columns + column_range.start, column_range.size(), 1,
                                   grad_hidden_ + work->rows[i].chunk_row * columns + column_range.start);
      }
    }
  });
}

absl::Status ShardRun::WriteGradHidden(const Chunk& chunk) {
  const MutableRowsView& out = plan_.micro_batch->grad_hidden;
  const int64_t rows = static_cast<int64_t>(chunk.batch_rows.size());
  const int64_t columns = out.column_count;
  absl::Status status = context_.communicator.AllReduceSum(grad_hidden_, rows * columns);
  if (!status.ok() || rank() != 0) return status;
  non_finite_grad_hidden_.assign(static_cast<size_t>(rows), 0);
  const float scale = static_cast<float>(plan_.micro_batch->grad_hidden_scale);
  // Values from here on round to infinity in the output's type.
  const float limit = out.data_type == DataType::kFloat16 ? 65520.0f : std::numeric_limits<float>::infinity();
  context_.pool.Run(context_.pool.thread_count(), [&](int32_t part) {
    const RowRange range = SplitEvenly({0, rows}, part, context_.pool.thread_count(), 1);
    for (int64_t i = range.start; i < range.end; ++i) {
      float* row = grad_hidden_ + i * columns;
      GetRowKernels().scale(row, columns, scale, row);
      bool finite = GetRowKernels().count_non_finite(row, columns) == 0;
      if (out.data_type == DataType::kFloat16) {
        for (int64_t h = 0; h < columns; ++h) finite = finite && std::abs(row[h]) < limit;
      }
      non_finite_grad_hidden_[static_cast<size_t>(i)] = finite ? 0 : 1;
      void* to = ElementAt(out.data, out.data_type, chunk.batch_rows[static_cast<size_t>(i)] * columns);
      FromFloat(row, columns, out.data_type, to);
    }
  });
  for (const TermChunk& part : chunk.terms) {
    for (const ChunkRow& row : part.rows) {
      if (non_finite_grad_hidden_[static_cast<size_t>(row.chunk_row)]) {
        plan_.terms[part.term].non_finite[static_cast<size_t>(row.term_row)] = 1;
      }
    }
  }
  return status;
}

}  // namespace headwater::cpu
