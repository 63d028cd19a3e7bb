// The form in which a term is computed, and its rows' memory in the workspace.
//
//   kExponentials  bf16 cross entropy on Hopper: own product, exponentials instead of logits; 2 bytes a logit
//   kRows          16-bit operands of one type: fp32 products and row passes; 4 bytes a logit, 8 with a teacher
//                  or, in slices: 2 bytes a logit for M, and 4 or 8 for the rows of one slice at a time
//   kWide          everything else (fp32 heads, types that differ): fp64 products; 8 bytes a logit, 16 with a teacher
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_TERM_FORM_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_TERM_FORM_H_

#include <cstdint>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/core/shard_layout.h"
#include "kernels/cuda/caller_memory.h"
#include "kernels/cuda/computation/workspace.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/head_plan.h"
#include "kernels/cuda/rows/divergence_shards.h"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {

enum class Form { kExponentials, kRows, kWide };

// Rows up to which the exponentials' own product does not pay: its tiles are 256 rows high.
inline constexpr int64_t kLargestSmallBatch = 256;

// A term as this engine sees it; fixed for the micro-batch.
struct TermRun {
  TermPlan* plan = nullptr;
  CudaHead* head = nullptr;
  CudaHead* teacher = nullptr;
  Form large_form = Form::kRows;  // of more than kLargestSmallBatch rows
  // The products read the caller's own memory: on the device, of the right type and stride, and no row is left out.
  bool hidden_in_place = false;
  bool teacher_in_place = false;
  // Deterministic mode: memory is laid out as if all tensors came from and went to the host. Rows are then cut alike wherever they
  // lie.
  bool as_on_host = false;
  // kRows: rows whose logits exist at once, while M of the whole chunk has a place of its own. 0: M is written over the logits of
  // all rows.
  int64_t slice_rows = 0;
  bool exchanges_teacher = false;     // on a rank of a group whose teacher is cut at other columns than the student
  bool shard_passes = false;          // a divergence on a rank of a group, by the passes of divergence_shards.h
  bool int8_teacher = false;          // the teacher's logits are those of its int8 copy
  bool may_list = false;              // M may become lists of entries (gradient_list.h), if there are rows enough
  CrossEntropyOptions cross_entropy;  // its class weights are device memory
  FinishOptions finish;
  DivergenceTerm divergence;

  Form FormOf(int64_t rows) const {
    return large_form == Form::kExponentials && rows <= kLargestSmallBatch ? Form::kRows : large_form;
  }
  // Whether M has a place of its own, without gaps.
  bool IsSliced(Form form) const { return form == Form::kRows && slice_rows > 0; }
  // Bytes from one entry of a row of M to the row's next, gaps between rows included.
  int64_t MatrixPitch(Form form) const { return form == Form::kExponentials || IsSliced(form) ? 2 : BytesOf(ProductElement(form)); }
  // The element of hidden states and M: the head's 16-bit type, or fp32 in the wide form.
  Element MatrixElement() const;
  // The element of the logits' products.
  Element ProductElement(Form form) const { return form == Form::kWide ? Element::kFloat64 : Element::kFloat32; }
};

// The form, with the constants of FinishOptions and DivergenceTerm; class_weights are set later. The places are those of the
// micro-batch's hidden states and of the term's teacher's.
TermRun MakeTermRun(const MicroBatch& micro_batch, TermPlan* plan, bool hopper, Place hidden_place, Place teacher_place);

// Elements from row to row of the products (and of E) with `columns` of a shard.
constexpr int64_t ProductStride(int64_t columns) { return RoundUp(columns, 8); }

// The teacher's columns that the engine has logits of: all, or in a group its shard's.
int64_t TeacherColumns(const TermRun& term);
// In a group, by rank: the columns of both heads that its shard of the teacher has, and its shard of the student has not.
std::vector<SurplusColumns> TeacherSurplus(const TermRun& term);

// The memory of one term for `rows` rows of a chunk. All device memory.
struct TermBuffers {
  // Uploaded: [rows] each.
  int32_t* targets = nullptr;
  float* token_weights = nullptr;
  float* entropy_factors = nullptr;  // this and the next only if a row has some
  float* lse_factors = nullptr;
  DitherKey* dither_keys = nullptr;  // with a resolution; a row has none of the factors then
  int32_t* source_rows = nullptr;    // where the hidden states of a row are
  int32_t* teacher_rows = nullptr;
  int32_t* chunk_rows = nullptr;   // place in the chunk
  int32_t* output_rows = nullptr;  // place in grad_hidden
  int32_t* order = nullptr;        // by target
  int32_t* starts = nullptr;       // [rows + 1]

  void* hidden = nullptr;          // [rows, padded] of MatrixElement()
  void* raw_teacher = nullptr;     // [rows, teacher width] as it came from the host
  void* teacher_hidden = nullptr;  // [rows, padded teacher width]
  double* wide_hidden = nullptr;   // [rows, padded] fp64
  double* wide_teacher_hidden = nullptr;
  void* panel = nullptr;             // kPanelBytes: converted weights
  std::vector<void*> products;       // by shard: [rows, ProductStride] of ProductElement(), or E; in slices a slice's rows
  std::vector<void*> matrices;       // by shard, only in slices: M [rows, ProductStride] of MatrixElement()
  void* teacher_products = nullptr;  // [rows, stride of TeacherColumns()]; in slices a slice's rows, as in cut_teacher
  // By shard, only with several, or with exchanges_teacher: the teacher's logits of the student's columns.
  std::vector<void*> cut_teacher;
  Int8Rows int8_teacher;  // with int8_teacher: the rows of teacher_hidden, and by row the logits' expected squared error
  float* teacher_errors = nullptr;
  void* teacher_exchange = nullptr;  // with exchanges_teacher: by rank [rows, its SurplusColumns]
  void* teacher_bias = nullptr;      // [teacher's valid vocabulary], with cut_teacher
  float* product = nullptr;          // [rows, padded] fp32: M W
  void* scaled = nullptr;            // [rows, padded] of MatrixElement()
  float* alpha = nullptr;            // [2]: factor of the grad_weight product, and that with the caller's factor
  void* bias_scratch = nullptr;

  // Only with a top-k teacher: [rows, k] each.
  int32_t* top_k_columns = nullptr;
  float* top_k_log_probs = nullptr;
  double* top_k_logits = nullptr;
  float* top_k_gradient = nullptr;

  double* target_arguments = nullptr;  // of the shards that are here: 0 where the target is in another
  double* merged_arguments = nullptr;  // of all shards; without a group those
  double* offsets = nullptr;           // of exponentials; without a group the targets'
  float* partial_sums = nullptr;
  double* sums = nullptr;  // [merged shards, rows]
  int32_t* overflow = nullptr;
  RowStats* stats = nullptr;  // [merged shards, rows], like the next for a divergence
  SoftStats* soft_student = nullptr;
  SoftStats* soft_teacher = nullptr;
  DivergenceSums* divergence_sums = nullptr;
  // With shard_passes, instead of those three.
  ShardSides* shard_sides = nullptr;  // [merged shards, rows], as the next
  ShardSums* shard_sums = nullptr;
  ShardRow* shard_rows = nullptr;  // [rows]
  RowCoefficients* coefficients = nullptr;
  RowReport* reports = nullptr;
  float* row_factor = nullptr;
  float* target_factor = nullptr;
  uint8_t* non_finite = nullptr;     // of the hidden states
  DitherRow* dither_rows = nullptr;  // this and the next two with a resolution
  DitherSums* dither_sums = nullptr;
  DitherSums* dither_total = nullptr;  // one
  Workspace lists;                     // for the list of a divergence that has may_list; empty in slices
};

// Takes it from `workspace`, in an order that is the same every time.
TermBuffers LayOutTerm(const TermRun& term, int64_t rows, Workspace* workspace);

// The memory that the terms of a chunk share.
struct ChunkBuffers {
  void* raw_hidden = nullptr;  // [rows, width] as it came from the host
  void* out = nullptr;         // [rows, width] of grad_hidden's type, on its way to the host
  float* sum = nullptr;        // [rows, padded] where several terms or shards add up
  int32_t* output_rows = nullptr;
  int32_t* batch_rows = nullptr;  // of raw_hidden's rows, where their sum is asked for
  uint8_t* non_finite = nullptr;  // [rows] of grad_hidden
};
ChunkBuffers LayOutChunk(const std::vector<TermRun>& terms, const MicroBatch& micro_batch, int64_t rows, Workspace* workspace);

// Bytes of a chunk of `rows` rows, class weights included.
int64_t ChunkBytes(const std::vector<TermRun>& terms, const MicroBatch& micro_batch, int64_t rows);
// The most rows a chunk may have so that it fits `bytes`, in steps of 128 above 128; 0 if not even one does. Sets the terms'
// slice_rows. Where one chunk cannot take all rows in place, slices are chosen if they make fewer chunks. Every chunk reads and
// writes the whole accumulator.
int64_t FitChunks(const MicroBatch& micro_batch, int64_t bytes, std::vector<TermRun>* terms);
// The same without slices.
int64_t FitChunksInPlace(const MicroBatch& micro_batch, int64_t bytes, std::vector<TermRun>* terms);
// FitChunks()'s choice; 0: no slices.
int64_t SliceRowsOf(const std::vector<TermRun>& terms);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_TERM_FORM_H_
