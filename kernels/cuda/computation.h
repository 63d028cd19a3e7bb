// One micro-batch on the device: places its rows, runs the forms' products and passes chunk by chunk, and brings the results back.
//
// Order within a chunk and term: logits (or exponentials), row work, grad_hidden, grad_weight; all on the core's one stream. The
// host waits in between only for the exponential form's overflow flag, and that while the grad_hidden product runs.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/host_stage.h"
#include "kernels/cuda/staged_contribution.h"
#include "kernels/cuda/term_form.h"

namespace headwater::cuda {

// Made and run by the holder of the work lock.
class Computation {
 public:
  // `terms` belong to `plan`; `staged` has an entry for each head that is staged. All must outlive this.
  // `whole_workspace`: nothing is owed, and nothing is put off.
  Computation(EngineCore& core, const MicroBatch& micro_batch, MicroBatchPlan* plan, std::vector<TermRun>* terms,
              const std::vector<std::unique_ptr<StagedHead>>& staged, bool whole_workspace);
  ~Computation();

  // Enqueues everything and waits for it; sums and per-token outputs are then in the plan's terms and the caller's memory.
  absl::Status Run();

 private:
  // Rows [first, first + count) of a term's part of a chunk.
  struct Slice {
    int64_t first;
    int64_t count;
  };
  // What the work on one term's part of a chunk needs.
  struct Work {
    const Chunk* chunk;
    const TermChunk* part;
    TermRun* term;
    StagedHead* staged;  // null: nothing is staged
    ChunkBuffers shared;
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
    const Chunk* chunk;
    const TermChunk* part;
    TermRun* term;
    const RowReport* reports;
    const uint8_t* non_finite;      // of hidden, by term row; null: none
    const uint8_t* non_finite_out;  // of grad_hidden, by chunk row; null: none
  };

  absl::Status UploadClassWeights();
  absl::Status RunChunk(const Chunk& chunk);
  absl::Status PlaceHidden(const Chunk& chunk, const ChunkBuffers& buffers);
  absl::Status RunTerm(Work* work);
  absl::Status UploadRows(Work* work);
  absl::Status PlaceTermRows(Work* work);
  absl::Status MakeGroups(Work* work);
  // Whether the term's grad_weight product is put off (gradient_debt.h).
  bool PutsOff(const Work& work) const;

  // The forms: from hidden states to M, factors and reports.
  absl::Status RunExponentials(Work* work);
  absl::Status RunRows(Work* work, const Slice& slice);
  absl::Status ComputeProducts(Work* work, const Slice& slice);
  absl::Status ComputeTeacherProducts(Work* work, const Slice& slice);
  absl::Status RunDivergence(Work* work, const Slice& slice);

  absl::Status AddGradHidden(Work* work, const Slice& slice, bool product_is_there);
  absl::Status MultiplyByWeight(Work* work, const Slice& slice, int32_t rank);
  absl::Status FinishGradHidden(Work* work, const Slice& slice, int32_t rank);
  absl::Status AddGradWeight(Work* work, const Slice& slice);
  absl::Status WriteGradHidden(const Chunk& chunk, const ChunkBuffers& buffers);
  absl::Status ClearGradHidden();

  ChunkRows RowsOf(const Work& work, const Slice& slice) const;
  LogitsView StudentView(const Work& work, int32_t rank) const;
  LogitsView TeacherView(const Work& work, int32_t rank) const;
  ConstMatrix MatrixOf(const Work& work, const Slice& slice, int32_t rank) const;
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
  const MicroBatch& micro_batch_;
  MicroBatchPlan& plan_;
  std::vector<TermRun>& terms_;
  const std::vector<std::unique_ptr<StagedHead>>& staged_;
  const bool whole_workspace_;
  const cudaStream_t stream_;
  Workspace workspace_;
  HostStage host_;
  cudaEvent_t row_sums_done_ = nullptr;
  std::vector<Pending> pending_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_H_
