// The wide form: fp64 logits of a chunk, for JSD and for logits that fp32 products do not resolve.
//
// JSD. The teacher's and the student's probabilities over the common columns are p and q; d = log p - log q, m = beta p +
// (1 - beta) q. With r = log(q / m) and D = sum q r, d(JSD)/d(student logit / temperature) = (1 - beta) q (r - D). For beta = 0
// it is q - p = -q expm1(d), for beta = 1 q (-d - KL). All is computed in log space and fp64, so that a nearly distilled student
// and rows where both probabilities underflow fp32 keep their digits. A hard loss shares the student's logits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/rows/convert.h"
#include "kernels/cpu/shard_run.h"

namespace headwater::cpu {

int64_t ShardRun::WideRows(const TermPlan& term) {
  const int64_t rows = HeadOf(term).cpu_plan().wide_rows;
  return term.teacher == nullptr ? rows : std::min(rows, TeacherOf(term).cpu_plan().wide_rows);
}

absl::Status ShardRun::RunWide(const TermChunk& chunk, bool backward) {
  const int64_t max_rows = WideRows(plan_.terms[chunk.term]);
  const int64_t rows = static_cast<int64_t>(chunk.rows.size());
  const int64_t pieces = (rows + max_rows - 1) / max_rows;
  const int64_t rows_per_piece = (rows + pieces - 1) / pieces;
  for (int64_t start = 0; start < rows; start += rows_per_piece) {
    Work work = MakeWork(chunk, start, std::min(rows_per_piece, rows - start), backward);
    absl::Status status = RunWideRows(&work);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ShardRun::RunWideRows(Work* work) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  PlaceBuffers(work, shard.layout.wide_gradient);
  GatherHidden(work);
  double* hidden = shard.Workspace<double>(shard.layout.wide_hidden);
  ToDouble(work->hidden, work->is_bfloat16 ? DataType::kBFloat16 : DataType::kFloat32, work->row_count * shard.hidden_size, hidden);
  double* student = shard.Workspace<double>(shard.layout.student_logits);
  ComputeWideLogits(shard, work->parts, work->head_plan, term.head->spec().transform, hidden, work->row_count, student);
  if (term.top_k != nullptr) return RunTopKRows(work, student);
  const double* teacher = nullptr;
  int64_t teacher_stride = 0;
  int64_t common = 0;  // columns of this shard that both vocabularies have
  absl::Status status;
  if (term.jsd != nullptr) {
    const int64_t teacher_valid = term.teacher->spec().transform.valid_vocab_size;
    common = std::clamp<int64_t>(teacher_valid - shard.rows.start, 0, shard.valid_rows);
    status = ComputeTeacherLogits(work, &teacher, &teacher_stride);
    if (!status.ok()) return status;
  }
  ComputeWideStats(work, student, teacher, teacher_stride, common);
  if (term.wants_cross_entropy) status = MergeRowStats(*work);
  if (!status.ok()) return status;
  FinishRows(work);
  if (term.jsd != nullptr) status = ComputeDivergence(work, student, teacher, teacher_stride, common);
  if (!status.ok()) return status;
  RecordRows(work);
  if (!work->backward) return absl::OkStatus();
  status = ComputeWideGradient(work, student, teacher, teacher_stride, common);
  if (!status.ok()) return status;
  AddGradHidden(work);
  return absl::OkStatus();
}

void ShardRun::ComputeWideLogits(const HeadShard& shard, const ShardParts& parts, const HeadPlan& plan,
                                 const LogitTransform& transform, const double* hidden, int64_t row_count, double* logits) {
  context_.pool.Run(parts.count(), [&](int32_t part) {
    double* panel = shard.Workspace<double>(shard.layout.converted + part * plan.converted_bytes);
    float bias_panel[kMaxPanelRows];
    parts.ForEachPanel(part, plan.wide_panel_rows, [&](int64_t start, int64_t count) {
      const int64_t stride = shard.rows.size();
      ToDouble(ElementAt(shard.weight.As<char>(), shard.data_type, start * shard.hidden_size), shard.data_type,
               count * shard.hidden_size, panel);
      MultiplyTransposed(row_count, count, shard.hidden_size, {hidden, shard.hidden_size}, {panel, shard.hidden_size},
                         {logits + start, stride});
      if (shard.has_bias) ToFloat(ElementAt(shard.bias.As<char>(), shard.data_type, start), shard.data_type, count, bias_panel);
      for (int64_t i = 0; i < row_count; ++i) {
        GetRowKernels().affine_double(logits + i * stride + start, shard.has_bias ? bias_panel : nullptr, transform.logit_scale,
                                      count);
      }
    });
  });
}

absl::Status ShardRun::ComputeTeacherLogits(Work* work, const double** logits, int64_t* stride) {
  const TermPlan& term = work->term;
  const HeadShard& shard = TeacherOf(term).shard(rank());
  const RowsView& rows = term.term->teacher_hidden;
  double* hidden = shard.Workspace<double>(shard.layout.teacher_hidden);
  for (int64_t i = 0; i < work->row_count; ++i) {
    ToDouble(ElementAt(rows.data, rows.data_type, work->rows[i].term_row * rows.column_count), rows.data_type, rows.column_count,
             hidden + i * rows.column_count);
  }
  const HeadPlan& plan = TeacherOf(term).cpu_plan();
  const ShardParts parts(shard, context_.pool);
  double* own = shard.Workspace<double>(shard.layout.teacher_logits);
  ComputeWideLogits(shard, parts, plan, term.teacher->spec().transform, hidden, work->row_count, own);
  *logits = own;
  *stride = shard.rows.size();

  const int64_t common = std::min(term.teacher->spec().transform.valid_vocab_size, term.head->spec().transform.valid_vocab_size);
  const std::vector<SurplusColumns> surplus = SurplusOf(plan.shards, HeadOf(term).cpu_plan().shards, common);
  const bool aligned = std::all_of(surplus.begin(), surplus.end(), [](const SurplusColumns& of) { return of.size() == 0; });
  if (aligned) return absl::OkStatus();

  // The two heads are cut at different columns: row by row, every shard brings its columns and takes those of the student's.
  double* exchange = work->shard.Workspace<double>(work->shard.layout.exchange);
  double* received = work->shard.Workspace<double>(work->shard.layout.teacher_logits);
  const RowRange mine = {std::min(shard.rows.start, common), std::min(shard.rows.end, common)};
  const RowRange wanted = {std::min(work->shard.rows.start, common), std::min(work->shard.rows.end, common)};
  for (int64_t i = 0; i < work->row_count; ++i) {
    std::fill_n(exchange, common, 0.0);
    std::copy_n(own + i * shard.rows.size(), mine.size(), exchange + mine.start);
    absl::Status status = context_.communicator.AllReduceSum(exchange, common);
    if (!status.ok()) return status;
    std::copy_n(exchange + wanted.start, wanted.size(), received + i * work->stride);
  }
  *logits = received;
  *stride = work->stride;
  return absl::OkStatus();
}

void ShardRun::ComputeWideStats(Work* work, const double* student, const double* teacher, int64_t teacher_stride, int64_t common) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  const double student_cap = term.head->spec().transform.softcap.value_or(0);
  const int64_t rows = work->row_count;
  const size_t entries = static_cast<size_t>(rows * work->parts.count());
  const PieceStats nothing = RowStats().others;
  part_stats_.assign(entries, RowStats());
  student_parts_.assign(entries, nothing);
  teacher_parts_.assign(entries, nothing);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const RowKernels& kernels = GetRowKernels();
    const RowRange range = work->parts.part(part);
    const int64_t global_start = shard.rows.start + range.start;
    for (int64_t i = 0; i < rows; ++i) {
      const size_t entry = static_cast<size_t>(part * rows + i);
      const double* a = student + i * work->stride + range.start;
      if (term.wants_cross_entropy) {
        const int64_t target = work->rows[i].target;
        RowStats& stats = part_stats_[entry];
        stats = StatsOfColumns(term, a, range.size(), global_start, target, stats.best);
        if (target >= global_start && target < global_start + range.size()) {
          RowState& state = states_[static_cast<size_t>(i)];
          state.owns_target = true;
          state.target_argument = a[target - global_start];
          stats.target_logit = TemperedLogit(term, state.target_argument);
        }
      }
      if (term.jsd == nullptr) continue;
      const int64_t count = std::min(range.end, common) - range.start;
      if (count <= 0) continue;
      StatsOptions soft;
      soft.cap = student_cap;
      soft.inverse_temperature = 1 / term.jsd->student_temperature;
      student_parts_[entry] = kernels.stats_double(a, count, soft);
      soft.cap = term.teacher->spec().transform.softcap.value_or(0);
      soft.inverse_temperature = 1 / term.jsd->teacher_temperature;
      teacher_parts_[entry] = kernels.stats_double(teacher + i * teacher_stride + range.start, count, soft);
    }
  });
}

DivergenceOptions ShardRun::MakeDivergenceOptions(const TermPlan& term, const RowState& state) const {
  DivergenceOptions options;
  options.beta = term.jsd->beta;
  options.student_cap = term.head->spec().transform.softcap.value_or(0);
  options.teacher_cap = term.teacher->spec().transform.softcap.value_or(0);
  options.student_inverse_temperature = 1 / term.jsd->student_temperature;
  options.teacher_inverse_temperature = 1 / term.jsd->teacher_temperature;
  options.student_lse = state.student_lse;
  options.teacher_lse = state.teacher_lse;
  const double d = state.top_log_p - state.top_log_q;
  const double beta = options.beta;
  if (beta == 1) {
    options.reference = -d;
  } else if (beta > 0) {
    options.reference = d > 0 ? -std::log1p((1 - beta) * std::expm1(-d)) - d : -std::log1p(beta * std::expm1(d));
  }
  return options;
}

absl::Status ShardRun::MergePieceStats(const Work& work, std::vector<PieceStats>* by_part, std::vector<PieceStats>* merged) {
  const size_t rows = static_cast<size_t>(work.row_count);
  const PieceStats nothing = RowStats().others;
  merged->assign(rows, nothing);
  for (size_t entry = 0; entry < by_part->size(); ++entry) MergeStats((*by_part)[entry], &(*merged)[entry % rows]);
  const int32_t world_size = context_.communicator.world_size();
  if (world_size == 1) return absl::OkStatus();
  by_part->assign(rows * static_cast<size_t>(world_size), nothing);
  absl::Status status =
      context_.communicator.AllGather(reinterpret_cast<const double*>(merged->data()), kPieceStatsDoubles * work.row_count,
                                      reinterpret_cast<double*>(by_part->data()));
  merged->assign(rows, nothing);
  for (size_t entry = 0; entry < by_part->size(); ++entry) MergeStats((*by_part)[entry], &(*merged)[entry % rows]);
  return status;
}

absl::Status ShardRun::FindTopColumns(Work* work, const double* student, const double* teacher, int64_t teacher_stride,
                                      int64_t common) {
  const TermPlan& term = work->term;
  const size_t rows = static_cast<size_t>(work->row_count);
  const double student_cap = term.head->spec().transform.softcap.value_or(0);
  const double teacher_cap = term.teacher->spec().transform.softcap.value_or(0);
  const auto logit = [](double a, double cap) { return cap > 0 ? cap * std::tanh(a / cap) : a; };
  // The smallest of the shards' columns: the largest of their negatives.
  std::vector<double>& columns = top_columns_;
  columns.assign(rows, -std::numeric_limits<double>::infinity());
  for (size_t i = 0; i < rows && common > 0; ++i) {
    const int64_t column =
        GetRowKernels().first_at_least_double(student + static_cast<int64_t>(i) * work->stride, common, student_cap,
                                              1 / term.jsd->student_temperature, student_stats_[i].max);
    if (column < common) columns[i] = -static_cast<double>(work->shard.rows.start + column);
  }
  absl::Status status = context_.communicator.AllReduceMax(columns.data(), work->row_count);
  if (!status.ok()) return status;
  std::vector<double>& logs = sums_;
  logs.assign(2 * rows, 0.0);
  for (size_t i = 0; i < rows; ++i) {
    RowState& state = states_[i];
    // No column where nothing is comparable: a row of NaN.
    if (std::isfinite(columns[i])) state.top_column = static_cast<int64_t>(-columns[i]);
    const int64_t local = state.top_column - work->shard.rows.start;
    if (local < 0 || local >= common) continue;
    const int64_t row = static_cast<int64_t>(i);
    logs[2 * i] = logit(teacher[row * teacher_stride + local], teacher_cap) / term.jsd->teacher_temperature - state.teacher_lse;
    logs[2 * i + 1] = logit(student[row * work->stride + local], student_cap) / term.jsd->student_temperature - state.student_lse;
  }
  status = context_.communicator.AllReduceSum(logs.data(), static_cast<int64_t>(logs.size()));
  for (size_t i = 0; i < rows; ++i) {
    states_[i].top_log_p = logs[2 * i];
    states_[i].top_log_q = logs[2 * i + 1];
  }
  return status;
}

absl::Status ShardRun::ComputeDivergence(Work* work, const double* student, const double* teacher, int64_t teacher_stride,
                                         int64_t common) {
  const size_t rows = static_cast<size_t>(work->row_count);
  absl::Status status = MergePieceStats(*work, &student_parts_, &student_stats_);
  if (status.ok()) status = MergePieceStats(*work, &teacher_parts_, &teacher_stats_);
  if (!status.ok()) return status;
  for (size_t i = 0; i < rows; ++i) {
    states_[i].student_lse = LogSumExp(student_stats_[i]);
    states_[i].teacher_lse = LogSumExp(teacher_stats_[i]);
  }
  status = FindTopColumns(work, student, teacher, teacher_stride, common);
  if (!status.ok()) return status;
  // [parts][rows] pairs (divergence, mean), summed over parts in order.
  std::vector<double>& partial = sums_by_part_;
  partial.assign(2 * rows * static_cast<size_t>(work->parts.count()), 0.0);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const RowRange range = work->parts.part(part);
    const int64_t end = std::min(range.end, common);
    if (end <= range.start) return;
    for (size_t i = 0; i < rows; ++i) {
      double* sums = &partial[2 * (static_cast<size_t>(part) * rows + i)];
      const int64_t row = static_cast<int64_t>(i);
      const DivergenceOptions options = MakeDivergenceOptions(work->term, states_[i]);
      const auto add = [&](int64_t start, int64_t count, double* mean) {
        if (count <= 0) return;
        GetRowKernels().divergence_sums(student + row * work->stride + start, teacher + row * teacher_stride + start, count,
                                        options, &sums[0], mean);
      };
      const int64_t top = states_[i].top_column - work->shard.rows.start;
      if (top < range.start || top >= end) {
        add(range.start, end - range.start, &sums[1]);
        continue;
      }
      double ignored = 0;
      add(range.start, top - range.start, &sums[1]);
      add(top, 1, &ignored);
      add(top + 1, end - top - 1, &sums[1]);
    }
  });
  std::vector<double>& sums = sums_;
  sums.assign(2 * rows, 0.0);
  for (size_t entry = 0; entry < partial.size(); ++entry) sums[entry % (2 * rows)] += partial[entry];
  status = context_.communicator.AllReduceSum(sums.data(), static_cast<int64_t>(sums.size()));
  for (size_t i = 0; i < rows; ++i) {
    states_[i].divergence = sums[2 * i];
    states_[i].divergence_mean = sums[2 * i + 1];
  }
  return status;
}

void ShardRun::AddDivergenceGradient(const Work& work, int64_t row, const double* student, const double* teacher, int64_t start,
                                     int64_t count, double factor, float* gradient) const {
  const TermPlan& term = work.term;
  const RowState& state = states_[static_cast<size_t>(row)];
  const DivergenceOptions options = MakeDivergenceOptions(term, state);
  const int64_t top = state.top_column - (work.shard.rows.start + start);
  const bool inside = state.top_column >= 0 && top >= 0 && top < count;
  const RowRange pieces[2] = {{0, inside ? top : count}, {inside ? top + 1 : count, count}};
  for (const RowRange& piece : pieces) {
    if (piece.size() == 0) continue;
    GetRowKernels().divergence_gradient(student + piece.start, teacher + piece.start, piece.size(), options, state.divergence_mean,
                                        factor, gradient + piece.start);
  }
  if (!inside) return;
  // The gradients over a row sum to 0: the top column's is the remainder of the others.
  const double cap = term.head->spec().transform.softcap.value_or(0);
  const double top_factor = term.jsd->beta == 0 ? 1 : std::exp(state.top_log_q) * (term.jsd->beta == 1 ? 1 : 1 - term.jsd->beta);
  gradient[top] += static_cast<float>(-factor * top_factor * state.divergence_mean * SoftcapDerivative(student[top], cap));
}

absl::Status ShardRun::ComputeWideGradient(Work* work, const double* student, const double* teacher, int64_t teacher_stride,
                                           int64_t common) {
  const HeadShard& shard = work->shard;
  const TermPlan& term = work->term;
  const double cap = term.head->spec().transform.softcap.value_or(0);
  const double scale = GradientScale(term);
  const GradientTarget target = TargetOf(*work);
  const bool dithers_divergence = term.dithers && term.jsd != nullptr;
  BeginDither(*work);
  // Writes a part's columns [start, start + count) of a row; a divergence that is dithered afterwards without its factors.
  const auto write = [&](int32_t part, int64_t i, int64_t start, int64_t count) {
    const RowKernels& kernels = GetRowKernels();
    const int64_t global_start = shard.rows.start + start;
    const float* class_weights = term.cross_entropy.class_weights;
    const RowState& state = states_[static_cast<size_t>(i)];
    float* row = work->gradient + i * work->stride + start;
    const double* a = student + i * work->stride + start;
    if (term.hard_weight > 0) {
      kernels.gradient_double(a, count, cap, CoefficientsOf<double>(term, state),
                              class_weights == nullptr ? nullptr : class_weights + global_start, row);
      DitherColumns(*work, i, start, count, &dither_sums_[static_cast<size_t>(part)]);
      const int64_t column = work->rows[i].target - global_start;
      if (column >= 0 && column < count) {
        row[column] = static_cast<float>(scale * state.gradient.target * SoftcapDerivative(state.target_argument, cap));
      }
    } else {
      std::memset(row, 0, static_cast<size_t>(count) * sizeof(float));
    }
    const int64_t soft_count = std::min(start + count, common) - start;
    if (term.soft_weight == 0 || soft_count <= 0) return;
    const double factor = scale * work->rows[i].token_weight * term.soft_weight / term.jsd->student_temperature;
    AddDivergenceGradient(*work, i, a, teacher + i * teacher_stride + start, start, soft_count, dithers_divergence ? 1 : factor,
                          row);
  };
  if (dithers_divergence) {
    const size_t rows = static_cast<size_t>(work->row_count);
    sums_by_part_.assign(rows * static_cast<size_t>(work->parts.count()), 0.0);
    context_.pool.Run(work->parts.count(), [&](int32_t part) {
      double* magnitudes = &sums_by_part_[static_cast<size_t>(part) * rows];
      work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
        for (int64_t i = 0; i < work->row_count; ++i) {
          write(part, i, start, count);
          magnitudes[i] += GetRowKernels().sum_of_magnitudes(work->gradient + i * work->stride + start, count);
        }
      });
    });
    absl::Status status = SetDivergenceResolutions(work);
    if (!status.ok()) return status;
  }
  BeginGradWeight(work);
  context_.pool.Run(work->parts.count(), [&](int32_t part) {
    const int64_t part_start = work->parts.part(part).start;
    work->parts.ForEachPanel(part, work->head_plan.panel_rows, [&](int64_t start, int64_t count) {
      for (int64_t i = 0; i < work->row_count; ++i) {
        if (dithers_divergence) {
          DitherColumns(*work, i, start, count, &dither_sums_[static_cast<size_t>(part)]);
        } else {
          write(part, i, start, count);
        }
        RoundGradient(*work, i, part_start, start, count);
      }
      if (target.grad_weight != nullptr) {
        AddGradWeightPanel(shard, {work->gradient, work->hidden, work->row_count, work->is_bfloat16}, part_start, start, count,
                           target);
      }
    });
  });
  return ReportDither(work);
}

}  // namespace headwater::cpu
