// One shard's part of a micro-batch: the program that every executor runs, in step with the others.
//
// A chunk of n rows on one thread's columns of one shard, narrow form (cross_entropy_chunk.cc):
//
//     logits [n, panel] = x . W_panel^T, and row statistics while the panel is in the cache
//     statistics merged over threads and shards
//     gradient over the logits, panel by panel, and grad_weight_panel += gradient^T . x while the panel is in the cache
//     grad_hidden = gradient . W, split over threads by columns of hidden, and summed over shards
//
// The wide form (wide_chunk.cc) does the same with fp64 logits, for JSD, for top-k teachers (top_k_chunk.cc) and where fp32 logits
// are not exact enough.
//
// Traffic, narrow, fp32: each chunk reads W twice and reads and writes grad_weight once: 4 * V * H * 4 bytes. The logits stay in
// the shared cache or pass through it four times.
#ifndef HEADWATER_KERNELS_CPU_SHARD_RUN_H_
#define HEADWATER_KERNELS_CPU_SHARD_RUN_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/core/loss/top_k.h"
#include "kernels/cpu/micro_batch_plan.h"
#include "kernels/cpu/products/bfloat16_products.h"
#include "kernels/cpu/products/blas.h"
#include "kernels/cpu/rows/row_kernels.h"
#include "kernels/cpu/shard_executor.h"

namespace headwater::cpu {

// Where a shard's grad_weight products go.
struct GradientTarget {
  float* grad_weight;  // [rows, hidden_size]
  float* grad_bias;    // [rows], or null
  float alpha;         // factor of the added product
  bool overwrite;      // the target holds nothing yet
};

// Columns from `column` on of a bf16 gradient in the memory of an fp32 one. The bf16 columns of a part that begins at column
// `part_start` are contiguous, from the place of the part's first fp32 column.
inline Matrix<const uint16_t> AsBfloat16(const float* gradient, int64_t stride, int64_t part_start, int64_t column) {
  return {reinterpret_cast<const uint16_t*>(gradient + part_start) + (column - part_start), 2 * stride};
}

// Columns [0, valid_rows) of a shard in parts, one for each thread.
class ShardParts {
 public:
  ShardParts(const HeadShard& shard, const ThreadPool& pool);
  int32_t count() const { return count_; }
  RowRange part(int32_t index) const;
  // Panels of the longest part.
  int64_t MaxPanels(int64_t panel_rows) const { return (part(0).size() + panel_rows - 1) / panel_rows; }
  // Calls visit(first column, column count) for the panels of a part, in order.
  template <typename Visit>
  void ForEachPanel(int32_t index, int64_t panel_rows, const Visit& visit) const {
    const RowRange range = part(index);
    for (int64_t start = range.start; start < range.end; start += panel_rows) {
      visit(start, range.end - start < panel_rows ? range.end - start : panel_rows);
    }
  }

 private:
  RowRange columns_;
  int32_t count_;
};

// Adds gradient^T . hidden to columns [start, start + count) of a target, of the part that begins at column `part_start`. It is the
// only place that does, so a contribution that is committed later has the bits of a direct one.
void AddGradWeightPanel(const HeadShard& shard, const KeptRows& rows, int64_t part_start, int64_t start, int64_t count,
                        const GradientTarget& target);

class ShardRun {
 public:
  ShardRun(const ShardContext& context, CpuMicroBatchPlan* plan) : context_(context), plan_(*plan) {}
  absl::Status Run();

 private:
  // A term's rows and their buffers.
  struct Work {
    TermPlan& term;
    StagedHead* staged;  // the term's contribution, or null
    const ChunkRow* rows;
    int64_t row_count;
    bool backward;
    const HeadShard& shard;
    const HeadPlan& head_plan;
    ShardParts parts;
    float* hidden;    // [row_count, hidden_size] fp32, or bf16 if is_bfloat16
    float* gradient;  // [row_count, shard rows] fp32; narrow: first the logits. If is_bfloat16, RoundGradient() leaves bf16 there
    int64_t stride;   // shard rows
    // Whether the products take bf16 operands: hidden states and weights are bf16, and oneDNN multiplies them.
    bool is_bfloat16;
  };
  // How a row's gradient is dithered (dithered_gradient.cc).
  struct RowDither {
    bool active = false;      // the term has a resolution, and the row has something below it
    RowGradient ratio;        // cross entropy: of its entries over the resolution
    DitherOptions options;    // from the gradient pass's result for the row to the row's gradient
    double unit = 0;          // the resolution in units of G
    double target_entry = 0;  // cross entropy: |G| at the target, without the softcap's derivative
  };
  // Coefficients of a row after its statistics are known.
  struct RowState {
    RowLoss loss;
    RowGradient gradient;        // with all of the row's factors
    double target_argument = 0;  // the target's argument of the softcap, on the shard that owns it
    bool owns_target = false;
    double student_lse = 0;  // JSD, with temperature, over the common columns; top-k, with temperature
    double teacher_lse = 0;
    int64_t top_column = -1;  // the student's most probable common column
    double top_log_p = 0;     // of that column
    double top_log_q = 0;
    double divergence = 0;
    double divergence_mean = 0;  // see RowKernels::divergence_sums
    RowDither dither;
  };

  int32_t rank() const { return context_.rank; }
  Work MakeWork(const TermChunk& chunk, int64_t start, int64_t count, bool backward);
  // Memory for a gradient of the logits and for hidden rows: the slot of a contribution that keeps them, else the workspace.
  void PlaceBuffers(Work* work, int64_t gradient_offset);
  void GatherHidden(Work* work);
  // If is_bfloat16: a row's columns [start, start + count), a panel, as bf16 where AsBfloat16() looks for them. The part's panels
  // follow each other: the columns that they overwrite have been rounded before.
  static void RoundGradient(const Work& work, int64_t row, int64_t part_start, int64_t start, int64_t count);

  absl::Status RunChunk(const Chunk& chunk);
  // Narrow form. *needs_wide is set, and nothing written, if its logits are not exact enough.
  absl::Status RunNarrow(Work* work, bool* needs_wide);
  absl::Status RunWide(const TermChunk& chunk, bool backward);
  // Rows that the wide form takes at once.
  static int64_t WideRows(const TermPlan& term);
  absl::Status RunWideRows(Work* work);

  // Statistics of a row's columns [global_start, global_start + count), whose arguments of the softcap are in `a`. The best column
  // is looked for where it is better than `best_before`.
  template <typename T>
  static RowStats StatsOfColumns(const TermPlan& term, const T* a, int64_t count, int64_t global_start, int64_t target,
                                 double best_before);
  // The logit of the loss, in fp64, out of the argument of the softcap.
  static double TemperedLogit(const TermPlan& term, double argument);
  // Common factor of a term's gradient of the logits: loss_scale, and the derivatives of temperature and scale.
  static double GradientScale(const TermPlan& term);
  // For the row kernels, which take fp32 or fp64 logits.
  template <typename T>
  static GradientCoefficients CoefficientsOf(const TermPlan& term, const RowState& state);
  // Coefficients and factor of a row in the gradient pass: of its gradient, or of ratios that are dithered afterwards.
  static const RowGradient& WrittenOf(const RowState& state) { return state.dither.active ? state.dither.ratio : state.gradient; }
  static double WrittenScale(const TermPlan& term, const RowState& state) {
    return state.dither.active ? 1.0 : GradientScale(term);
  }

  // narrow
  // Whether the statistics are taken in fp64, from the products' fp32 logits. With a temperature, rounding a multiple of a logit
  // would be an error of the loss. The smallest exponentials of an entropy must be as exact as the largest, behind a softcap too.
  static bool TakesExactStats(const TermPlan& term);
  // Replaces the logits that matter most by fp64 dots (logit_refinement.cc). *overflow is set if there are too many.
  absl::Status RefineLogits(Work* work, bool* overflow);
  double RefinementCutoff(const Work& work, const RowStats& stats) const;
  double LogitArgument(const Work& work, int64_t row, int64_t column, float* converted) const;
  void RefinePart(const Work& work, int32_t part);
  // Applies the row's refined logits before column `end`: those of the part from `*next` on, which moves.
  void ApplyRefinedGradient(const Work& work, int32_t part, int64_t row, int64_t end, size_t* next) const;
  // The fp32 products of rows and columns [start, start + count), converted where the head is not fp32.
  static void MultiplyConverted(const Work& work, int64_t start, int64_t count, float* converted, Matrix<float> logits);
  void ComputeNarrowLogits(Work* work);
  // A part's share of the rows: the argument of the target's softcap, on the shard that owns the target.
  void ComputeTargetLogits(const Work& work, int32_t part, float* converted);
  void ComputeNarrowGradient(Work* work);
  // wide
  void ComputeWideLogits(const HeadShard& shard, const ShardParts& parts, const HeadPlan& plan, const LogitTransform& transform,
                         const double* hidden, int64_t row_count, double* logits);
  absl::Status ComputeTeacherLogits(Work* work, const double** logits, int64_t* stride);
  void ComputeWideStats(Work* work, const double* student, const double* teacher, int64_t teacher_stride, int64_t common);
  absl::Status FindTopColumns(Work* work, const double* student, const double* teacher, int64_t teacher_stride, int64_t common);
  absl::Status ComputeDivergence(Work* work, const double* student, const double* teacher, int64_t teacher_stride, int64_t common);
  // Adds a row's divergence gradient times `factor` to columns [start, start + count).
  void AddDivergenceGradient(const Work& work, int64_t row, const double* student, const double* teacher, int64_t start,
                             int64_t count, double factor, float* gradient) const;
  absl::Status ComputeWideGradient(Work* work, const double* student, const double* teacher, int64_t teacher_stride,
                                   int64_t common);
  DivergenceOptions MakeDivergenceOptions(const TermPlan& term, const RowState& state) const;
  // with a top-k teacher; all that follows the logits
  absl::Status RunTopKRows(Work* work, const double* student);
  void ComputeTopKGradient(Work* work, const double* student);

  // dithered (dithered_gradient.cc)
  // A cross entropy's, out of the statistics of its other columns and the target's logit.
  static void SetResolution(const Work& work, const ChunkRow& row, const RowStats& stats, RowState* state);
  // A divergence's, out of the magnitudes of its gradient, which `gradient` holds with factor 1.
  absl::Status SetDivergenceResolutions(Work* work);
  // Columns [start, start + count) of a row, as they were written, become its gradient.
  void DitherColumns(const Work& work, int64_t row, int64_t start, int64_t count, DitherSums* sums) const;
  void BeginDither(const Work& work) { dither_sums_.assign(static_cast<size_t>(work.parts.count()), DitherSums()); }
  absl::Status ReportDither(Work* work);

  // both
  absl::Status MergeRowStats(const Work& work);
  absl::Status MergePieceStats(const Work& work, std::vector<PieceStats>* by_part, std::vector<PieceStats>* merged);
  void FinishRows(Work* work);
  void RecordRows(Work* work);
  GradientTarget TargetOf(const Work& work) const;
  void BeginGradWeight(Work* work);
  void AddGradHidden(Work* work);
  absl::Status WriteGradHidden(const Chunk& chunk);

  // Changes of a row's statistics by the columns that were taken again.
  struct RowRefinement {
    double sum = 0;  // this and the next two: differences of the statistics' sums
    double weighted = 0;
    double squares = 0;
    // The largest excess over the maximum among the columns that were at it.
    double top = -kRowInfinity;
    // The largest logit, and its column.
    double best = -kRowInfinity;
    double best_column = 0;
  };
  static void AddRefinement(const RowRefinement& refinement, bool spread, PieceStats* others);

  const ShardContext context_;
  CpuMicroBatchPlan& plan_;
  float* grad_hidden_ = nullptr;  // [chunk rows, hidden_size], in the first term's workspace

  // A logit taken again in fp64.
  struct RefinedLogit {
    int32_t row;
    int32_t column;   // of the shard
    double argument;  // of the softcap
  };
  struct RefinedPart {
    std::vector<RefinedLogit> logits;  // by panel, then row, then column
    std::vector<int32_t> found;        // columns of a panel; scratch
    std::vector<RowRefinement> rows;   // one a row, and one whose `sum` is not 0 if there were too many logits
  };
  std::vector<RefinedPart> refined_;       // by part
  std::atomic<size_t> refined_count_ = 0;  // over all parts: more than the capacity in any order of the threads, or in none
  std::vector<RowRefinement> refinements_, gathered_refinements_;

  // By row of the work in progress.
  std::vector<RowState> states_;
  std::vector<RowStats> part_stats_;    // [parts][rows]
  std::vector<RowStats> merged_stats_;  // [rows]
  std::vector<RowStats> gathered_stats_;
  std::vector<float> panel_max_;  // [parts][panels][rows]: largest logit of a panel's columns but the target's
  int64_t panels_per_part_ = 0;
  std::vector<PieceStats> student_parts_, teacher_parts_, student_stats_, teacher_stats_;
  std::vector<float> cutoffs_;  // see RefinementCutoff()
  std::vector<double> top_columns_;
  std::vector<double> sums_by_part_, sums_;  // sums over parts and shards
  std::vector<DitherSums> dither_sums_;      // by part
  // A top-k teacher's rows, the first place of each row's entries in top_k_logits_, and the student's logits of all entries.
  std::vector<TopKRow> top_k_rows_;
  std::vector<size_t> top_k_starts_;
  std::vector<double> top_k_logits_;
  std::vector<uint8_t> non_finite_hidden_;
  std::vector<uint8_t> non_finite_grad_hidden_;
};

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_SHARD_RUN_H_
