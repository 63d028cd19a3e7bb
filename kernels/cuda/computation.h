// One micro-batch on the device, or several small ones together: places their rows, runs the forms' products and passes chunk by
// chunk, and brings the results back.
//
// Order within a chunk and term: logits (or exponentials), row work, grad_hidden, grad_weight; all on the core's one stream. The
// host waits in between only for the exponential form's overflow flag, and that while the grad_hidden product runs.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/host_stage.h"
#include "kernels/cuda/staged_contribution.h"
#include "kernels/cuda/term_form.h"

namespace headwater::cuda {

// A micro-batch of a computation.
struct Member {
  const MicroBatch* micro_batch = nullptr;
  MicroBatchPlan* plan = nullptr;
  std::vector<TermRun>* terms = nullptr;  // of `plan`
  // An entry for each head that is staged.
  const std::vector<std::unique_ptr<StagedHead>>* staged = nullptr;
};

// Whether micro-batches can be computed together: each has one chunk with one term, all in the exponential form with one head on
// one shard, and the same gradients are asked for; nothing is staged.
bool CanJoin(const Member& a, const Member& b);
// Workspace that members take together.
int64_t JoinedBytes(const std::vector<Member>& members);

// Made and run by the holder of the work lock.
class Computation {
 public:
  // Several members: any two of them CanJoin(). All that they point to must outlive this. `whole_workspace`: nothing is owed, and
  // nothing is put off.
  Computation(EngineCore& core, std::vector<Member> members, bool whole_workspace);
  ~Computation();

  // Enqueues everything and waits for it; sums and per-token outputs are then in the plan's terms and the caller's memory.
  absl::Status Run();

 private:
  // Rows [first, first + count) of a term's part of a chunk.
  struct Slice {
    int64_t first;
    int64_t count;
  };
  // A term's rows in a chunk of a member.
  struct Part {
    const Member* member;
    const Chunk* chunk;
    const TermChunk* rows;
    TermRun* term;
    ChunkBuffers shared;
    int64_t first;  // among the rows of the work
    int64_t count;
  };
  // Rows whose products are computed at once: a part, or those of several members.
  struct Work {
    std::vector<Part> parts;
    TermRun* term;       // the parts' own, as far as products are concerned
    StagedHead* staged;  // null: nothing is staged
    bool backward;
    bool wants_grad_hidden;
    TermBuffers own;
    ConstMatrix hidden;   // [rows, padded]
    ConstMatrix teacher;  // JSD
    int64_t rows;
    TargetGroups groups;  // order null until they are made
    void* kept_matrix;    // M's place in the slot, if rows are kept; else null
    bool overflowed;      // the exponential form is done again as rows
    // Host copies (page-locked).
    int32_t* targets;
    RowReport* reports;
    uint8_t* non_finite;
  };
  // Results that are on their way to the host.
  struct Pending {
    const TermChunk* part;
    TermRun* term;
    const RowReport* reports;
    const uint8_t* non_finite;      // of hidden, by term row; null: none
    const uint8_t* non_finite_out;  // of grad_hidden, by chunk row; null: none
  };

  absl::Status UploadClassWeights(const Member& member);
  absl::Status RunChunks(const Member& member);
  absl::Status RunTogether();
  // What the terms of a chunk share: before their work, and after it (`first_pending`: of the chunk).
  absl::Status OpenChunk(const Member& member, const Chunk& chunk, ChunkBuffers* buffers);
  absl::Status CloseChunk(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, size_t first_pending,
                          size_t count);
  absl::Status RunWork(Work* work);
  absl::Status UploadRows(Work* work);
  absl::Status PlaceTermRows(Work* work);
  absl::Status PlaceTeacherRows(Work* work);
  // Brings rows of a tensor on the device to where the products read them; in place where it already is that.
  absl::Status PlaceRows(ConstMatrix source, int64_t first, bool contiguous, const int32_t* index, int64_t count, Element element,
                         bool in_place_allowed, void* out, uint8_t* non_finite, ConstMatrix* placed);
  // Calls visit(part, rows of the part that are in the slice) in order.
  absl::Status ForEachPart(const Work& work, const Slice& slice, absl::FunctionRef<absl::Status(const Part&, const Slice&)> visit);
  absl::Status MakeGroups(Work* work);
  // Whether the term's grad_weight product is put off (gradient_debt.h).
  bool PutsOff(const Work& work) const;

  // The forms: from hidden states to M, factors and reports.
  absl::Status RunExponentials(Work* work);
  absl::Status RunRows(Work* work, const Slice& slice);
  // out [hidden.rows, out_stride] = hidden . weight^T of a shard: fp32, or, with `wide_hidden`, fp64 through `panel`.
  absl::Status ComputeLogits(const ShardWeights& shard, const ConstMatrix& hidden, const double* wide_hidden, void* panel,
                             void* out, int64_t out_stride);
  absl::Status ComputeProducts(Work* work, const Slice& slice);
  absl::Status ComputeTeacherProducts(Work* work, const Slice& slice);
  absl::Status RunDivergence(Work* work, const Slice& slice);

  absl::Status AddGradHidden(Work* work, const Slice& slice, bool product_is_there);
  absl::Status MultiplyByWeight(Work* work, const Slice& slice, int32_t rank);
  absl::Status FinishGradHidden(Work* work, const Slice& slice, int32_t rank);
  absl::Status FinishPart(Work* work, const Part& part, const Slice& slice, int64_t product_row, int32_t rank);
  absl::Status AddGradWeight(Work* work, const Slice& slice);
  absl::Status WriteGradHidden(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers);
  absl::Status ClearGradHidden(const Member& member);

  ChunkRows RowsOf(const Work& work, const Slice& slice) const;
  LogitsView StudentView(const Work& work, int32_t rank) const;
  LogitsView TeacherView(const Work& work, int32_t rank) const;
  ConstMatrix MatrixOf(const Work& work, const Slice& slice, int32_t rank) const;
  // Calls visit(index of the first, its row, count) for runs of rows that follow each other.
  absl::Status ForEachRun(const std::vector<int64_t>& rows, absl::FunctionRef<absl::Status(int64_t, int64_t, int64_t)> visit);
  // Where rows of a member's grad_hidden are written: the caller's device memory, or on the way to the host.
  static GradHiddenTarget OutputOf(const Member& member, const ChunkBuffers& buffers, const int32_t* map, uint8_t* non_finite);
  // Copies rows `rows[i]` of a host tensor to row i of `to`; neighbours together.
  absl::Status CopyRowsIn(const RowsView& view, const std::vector<int64_t>& rows, void* to);
  template <typename T>
  absl::Status Upload(T* device, const T* host, int64_t count) {
    return Check(cudaMemcpyAsync(device, host, static_cast<size_t>(count) * sizeof(T), cudaMemcpyHostToDevice, stream_),
                 "an upload of row data");
  }
  // Waits for the device and takes what has come back.
  absl::Status Drain();
  absl::Status Check(cudaError_t error, const char* what) { return core_.Check(error, what); }

  EngineCore& core_;
  const std::vector<Member> members_;
  const bool whole_workspace_;
  const cudaStream_t stream_;
  Workspace workspace_;
  HostStage host_;
  cudaEvent_t row_sums_done_ = nullptr;
  std::vector<Pending> pending_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_H_
