// A checked micro-batch, prepared for an engine: which rows of which term are computed together, and where results go.
//
// Order of a Compute(): PlanTerms, PlanChunks, TakeSlots; then, as nothing can be refused any more, BeginOutputs; RecordRow for
// each row that was computed; FinishTerms. All of it is linear in the rows: no sorting, no searching.
#ifndef HEADWATER_KERNELS_CORE_MICRO_BATCH_PLAN_H_
#define HEADWATER_KERNELS_CORE_MICRO_BATCH_PLAN_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/head_base.h"
#include "kernels/core/loss/cross_entropy_term.h"
#include "kernels/core/loss/row_report.h"

namespace headwater {

// A row of a term.
struct ChunkRow {
  int64_t term_row = 0;   // in the term
  int64_t batch_row = 0;  // in the micro-batch
  int64_t chunk_row = 0;  // in its chunk
  int64_t target = -1;    // -1: none
  double token_weight = 1;
  double entropy_factor = 0;
  double lse_factor = 0;

  // Whether the row has a gradient; the others are computed for their outputs alone.
  bool has_gradient() const { return token_weight != 0 || entropy_factor != 0 || lse_factor != 0; }
};

// A term with the constants that do not depend on the row.
struct TermPlan {
  const LossTerm* term = nullptr;
  HeadBase* head = nullptr;
  HeadBase* teacher = nullptr;   // JSD
  const JsdSpec* jsd = nullptr;  // null: cross entropy, or a top-k teacher
  const TopKSpec* top_k = nullptr;
  double hard_weight = 1;  // a; 1 for cross entropy, 0 for a top-k teacher
  double soft_weight = 0;  // 1 - a
  CrossEntropyTerm cross_entropy;
  bool wants_weighted = false;  // entropy, as an output or in the objective
  bool wants_squares = false;   // log_sum_sq_probs
  bool wants_total = false;     // mean_logits
  bool wants_argmax = false;
  bool has_entropy_factors = false;  // of which at least one is not 0
  bool has_lse_factors = false;
  bool dithers = false;              // LossTerm::gradient_resolution
  bool wants_cross_entropy = false;  // statistics of the student's row at all
  bool has_token_outputs = false;
  GradWeightMode grad_weight = GradWeightMode::kNone;
  int32_t slot = -1;  // kStage: index into MicroBatchPlan::slots, once they are taken

  // Whether sums weighted by the probabilities are wanted, beside that of the exponentials. A new output of that kind belongs here.
  bool wants_spread() const { return wants_weighted || wants_squares; }

  // Results.
  LossSums sums;
  int64_t teacher_error_rows = 0;   // that have added to sums.teacher_mean_square_error, which FinishTerms() divides by them
  std::vector<uint8_t> non_finite;  // [row_count]
};

// The rows of a term that are in a chunk, in increasing order; at least one.
struct TermChunk {
  size_t term = 0;
  std::vector<ChunkRow> rows;

  // True if the rows follow each other without a gap: in the chunk, in the micro-batch. They follow each other in the term if they
  // do in the micro-batch.
  bool ContiguousInChunk() const { return rows.back().chunk_row - rows.front().chunk_row + 1 == static_cast<int64_t>(rows.size()); }
  bool ContiguousInBatch() const { return rows.back().batch_row - rows.front().batch_row + 1 == static_cast<int64_t>(rows.size()); }
};

// Rows that are computed together.
struct Chunk {
  bool backward = false;
  std::vector<int64_t> batch_rows;  // increasing; at least one
  std::vector<TermChunk> terms;     // at least one

  bool ContiguousInBatch() const { return batch_rows.back() - batch_rows.front() + 1 == static_cast<int64_t>(batch_rows.size()); }
};

// A staging slot that a micro-batch's terms with one head share.
struct PlannedSlot {
  StagingSlot slot;
  int64_t row_count = 0;  // rows of these terms that have a gradient
};

struct MicroBatchPlan {
  const MicroBatch* micro_batch = nullptr;
  std::vector<TermPlan> terms;     // one for each term
  std::vector<Chunk> chunks;       // those with a gradient first, each kind in order of rows
  std::vector<PlannedSlot> slots;  // one for each head with a contribution
};

// How rows are cut into chunks.
struct ChunkLimits {
  int64_t max_rows = 1;
  int64_t grain = 1;   // chunks of less than max_rows have a multiple of it, the last one aside
  bool exact = false;  // all chunks but the last have max_rows; else they are as even as the grain allows, since a small last chunk
                       // would starve the products
};

// The rows that a micro-batch's digest covers, in the order of its streams: hidden, then each term's teacher_hidden. A term without
// a teacher has a view without data.
std::vector<RowsView> StreamsOf(const MicroBatch& micro_batch);

// A plan with its terms only. `micro_batch` passed CheckMicroBatch() and outlives the plan; its heads are HeadBases.
MicroBatchPlan PlanTerms(const MicroBatch& micro_batch);

// Adds the chunks: rows that are not ignored and have a gradient. Other rows whose outputs are asked for come then, in chunks of
// their own.
void PlanChunks(const ChunkLimits& limits, MicroBatchPlan* plan);

// Takes the staging slots; kStagingFull, with no slot taken, if one is missing.
absl::Status TakeSlots(MicroBatchPlan* plan);

// Counts the valid rows of every term, and sets the per-token outputs to the values that ignored rows and rows of weight 0 keep.
void BeginOutputs(MicroBatchPlan* plan);

// Calls visit(first row, row count) for the rows that no chunk gives a gradient, in order.
void ForEachRowWithoutGradient(const MicroBatchPlan& plan, absl::FunctionRef<void(int64_t, int64_t)> visit);

// Rows [0, result) of grad_hidden are final once chunk `chunk`, which has a gradient, and those before it are computed.
int64_t FinalRowsAfter(const MicroBatchPlan& plan, size_t chunk);
// Whether any chunk has a gradient.
bool HasGradient(const MicroBatchPlan& plan);

// Writes the per-token outputs of a term's row that were asked for.
inline void WriteOutputs(const LossTerm& out, int64_t row, double loss, const RowReport& report) {
  if (out.token_loss != nullptr) out.token_loss[row] = static_cast<float>(loss);
#define HEADWATER_WRITE_OUTPUT(name) \
  if (out.name != nullptr) out.name[row] = static_cast<std::decay_t<decltype(*out.name)>>(report.name);
  HEADWATER_EACH(HEADWATER_WRITE_OUTPUT, HEADWATER_LOGIT_OUTPUTS)
#undef HEADWATER_WRITE_OUTPUT
}

// Adds up a row and writes its outputs; rows of a term in increasing order. `finite_hidden`: the row of hidden states has neither a
// NaN nor an infinity.
inline void RecordRow(const ChunkRow& row, const RowReport& report, bool finite_hidden, TermPlan* plan) {
  // A weight of 0 wins over values that are not finite.
  const double soft = plan->soft_weight > 0 ? plan->soft_weight * report.soft : 0.0;
  const double hard = plan->hard_weight > 0 ? plan->hard_weight * report.hard : 0.0;
  const double z_loss = plan->hard_weight > 0 ? plan->hard_weight * report.z_loss : 0.0;
  const double loss = soft + hard + z_loss;
  if (plan->has_token_outputs) WriteOutputs(*plan->term, row.term_row, loss, report);
  if (!row.has_gradient()) return;  // only its outputs were asked for
  if (row.token_weight != 0) {
    plan->sums.soft_loss_sum += row.token_weight * soft;
    plan->sums.hard_loss_sum += row.token_weight * hard;
    plan->sums.z_loss_sum += row.token_weight * z_loss;
    plan->sums.loss_sum += row.token_weight * loss;
  }
  const bool finite = (row.token_weight == 0 || std::isfinite(loss)) &&
                      report.gradient_bound <= static_cast<double>(std::numeric_limits<float>::max()) && finite_hidden;
  if (!finite) plan->non_finite[static_cast<size_t>(row.term_row)] = 1;
}

// Appends every term's sums to `sums`, which has room for them: nothing may fail once accumulators have changed. Returns
// kNonFiniteValues if the micro-batch refuses non-finite values and has some.
absl::Status FinishTerms(MicroBatchPlan* plan, std::vector<LossSums>* sums);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_MICRO_BATCH_PLAN_H_
