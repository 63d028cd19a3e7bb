// One micro-batch on the device, or several small ones together. It places their rows, runs the forms' products and passes chunk by
// chunk, and brings the results back.
//
// Order within a chunk and term: logits (or exponentials), row work, grad_hidden, grad_weight; all on the core's stream. The host
// waits in between only for the exponential form's overflow flag, and that while the grad_hidden product runs.
//
// With a coarse enough resolution exponentials become lists of entries, and the gradients are taken from these (gradient_list.h).
//
// Large parts of other rows whose logits would not fit also go slice by slice. They go as far as M, or as grad_hidden if that
// leaves for the host.
//
// In a group of GPUs each rank does this with its own shard, all in the same order. The ranks agree before on how rows are cut. The
// ranks meet for the targets' logits, for a teacher's logits that are cut at other columns than the student's, and for the rows'
// statistics. They also meet where grad_hidden is added up on rank 0, which alone has the results that leave. In the exponential
// form statistics and targets travel beside the grad_hidden product. In a divergence statistics of half of the rows travel beside
// the other half's pass. In any form grad_hidden travels beside the first half of the product of grad_weight. Their errors are the
// same on all ranks, or break the group. With heads that the rank has in full, ranks do not meet.
//
// Large parts in the exponential form go slice by slice as far as grad_hidden. While one slice is computed, the next one's rows
// come in, and the previous gradient leaves, on streams of their own. Their grad_weight is one product over all slices. So with a
// flow the host waits for later rows while the device has earlier ones, and nothing is added before all are there.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_COMPUTATION_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_COMPUTATION_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/micro_batch_plan.h"
#include "kernels/cuda/caller_memory.h"
#include "kernels/cuda/computation/row_slices.h"
#include "kernels/cuda/computation/staged_contribution.h"
#include "kernels/cuda/computation/term_form.h"
#include "kernels/cuda/device_group.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/host_stage.h"
#include "kernels/cuda/products/gradient_list.h"

namespace headwater::cuda {

// A micro-batch of a computation. Memory on another device counts as host memory here: it is copied in and out.
struct Member {
  const MicroBatch* micro_batch = nullptr;
  Place hidden_place = Place::kPageable;
  Place grad_hidden_place = Place::kPageable;
  const std::vector<Place>* teacher_places = nullptr;  // by term
  MicroBatchPlan* plan = nullptr;
  std::vector<TermRun>* terms = nullptr;  // of `plan`
  // An entry for each head that is staged.
  const std::vector<std::unique_ptr<StagedHead>>* staged = nullptr;
  // Properties that decide how rows are cut. In a group they are true on all ranks if they are on any.
  bool rows_come = false;        // hidden states from the host
  bool gradient_leaves = false;  // grad_hidden for the host
  bool awaits_all_rows = false;  // before anything else
};

// Whether micro-batches can be computed together. Each must have one chunk with one term, all in the exponential form with one head
// on one shard. The same gradients are asked for, and nothing is staged.
bool CanJoin(const Member& a, const Member& b);
// Workspace that members take together.
int64_t JoinedBytes(const std::vector<Member>& members);
// The most rows of a chunk of so many terms that the page-locked memory beside the rows allows; 0 if not even one fits.
int64_t MostHostRows(int64_t term_count);

// Made and run by the holder of the work lock.
class Computation {
 public:
  // Several members: any two of them CanJoin(). All that they point to must outlive this. `whole_workspace`: no rows wait for their
  // product, and none are to.
  Computation(EngineCore& core, std::vector<Member> members, bool whole_workspace);
  ~Computation();

  // Enqueues everything and waits for the caller's results. Sums and per-token outputs are then in the plan's terms and the
  // caller's memory, none of which is read or written any more. The last chunk's grad_weight products may still run
  // (EngineCore::LetWorkGoOn()), so that the device has work until the next call comes. After an error, running work ends before
  // this returns.
  absl::Status Run();
  // Whether so many rows may have the entries of their gradient listed (computation_lists.cc), which takes all memory that is left.
  static bool MayList(const TermRun& term, int64_t rows);
  // Whether Run() failed with the flow's error: nothing was added then.
  bool interrupted() const { return interrupted_; }

 private:
  using Slice = RowSlice;  // of a term's part of a chunk
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
  // A slice's entries as a list.
  struct ListedRows {
    Slice rows;
    EntryList list;
  };
  // Rows whose products are computed at once: a part, or those of several members.
  struct Work {
    std::vector<Part> parts;
    TermRun* term;       // the parts' own, as far as products are concerned
    StagedHead* staged;  // null: nothing is staged
    bool backward;
    bool wants_grad_hidden;
    bool has_entropy_factors;  // whether any row has one
    bool has_lse_factors;      // whether any row has one
    TermBuffers own;
    ConstMatrix hidden;   // [rows, padded]
    ConstMatrix teacher;  // JSD
    int64_t rows;
    TargetGroups groups;  // order null until they are made
    int64_t uploaded;     // rows that have been enqueued to come from the host
    int64_t placed;       // rows that are where the products read them
    void* kept_matrix;    // M's place in the slot, if rows are kept; else null
    bool overflowed;      // the exponential form is done again as rows
    EntryList list;       // of all rows: the gradients are taken from it, not from M, if `lists` has its slices
    std::vector<ListedRows> lists;
    bool waits;             // its grad_weight product is deferred: `own` has the operands where they wait
    bool owes_grad_weight;  // that of all rows is still to be added
    bool results_leave;     // all results of the caller have been enqueued, except rows on their way to pageable memory
    // Host copies (page-locked).
    int32_t* targets;
    RowReport* reports;
    uint8_t* non_finite;
    DitherSums* dither;     // of the only part; null: exact
    float* teacher_errors;  // of the only part; null: exact
  };
  // Results that are on their way to the host.
  struct Pending {
    const TermChunk* part;
    TermRun* term;
    const RowReport* reports;
    const uint8_t* non_finite;      // of hidden, by term row; null: none
    const uint8_t* non_finite_out;  // of grad_hidden, by chunk row; null: none
    const DitherSums* dither;       // of the part; null: exact
    const float* teacher_errors;    // by term row; null: exact
  };

  // Rows of a chunk's grad_hidden on their way to the host.
  struct Delivery {
    const Member* member;
    const Chunk* chunk;
    const void* out;  // of the chunk
    Slice slice;
  };
  // The note for a flow when its rows are ready.
  struct ReadyNote {
    RowFlow* flow;
    int64_t row_end;
    const DeviceGroup* group;  // null: none
  };

  absl::Status UploadClassWeights(const Member& member);
  absl::Status RunChunks(const Member& member);
  absl::Status RunTogether();
  // The work that the terms of a chunk share, before their own work, and after it (`first_pending`: of the chunk). CloseChunk()
  // leaves postponed work.
  absl::Status OpenChunk(const Member& member, const Chunk& chunk, ChunkBuffers* buffers);
  absl::Status CloseChunk(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, size_t first_pending,
                          size_t count);
  absl::Status RunWork(Work* work);

  // Rows on their way in (computation_rows.cc). AwaitRows() and Decide() ask the flow, if there is one, at most once for the same.
  absl::Status AwaitRows(int64_t row_end);
  // To be called before anything is added to an accumulator.
  absl::Status Decide();
  // The flow's answer, on all ranks of a group: if one rank's flow refused, all did.
  absl::Status Answered(absl::Status answer);
  // The rows' sum for the digest. Rows on the device are summed there. Rows that the products read from a copy are summed with that
  // copy, and the rest by this thread at last.
  absl::Status BeginDigest();
  bool SumsCopy(const Part& part) const;
  absl::Status DigestOnDevice(const void* rows, int64_t count, int64_t row_bytes, int32_t stream_index, const int32_t* numbers);
  absl::Status FinishDigest();
  // The slices of a work in the exponential form; they depend on where its tensors are and on nothing of the moment.
  std::vector<Slice> SlicesOf(const Work& work) const;
  absl::Status UploadRows(Work* work);
  // Where a part's rows come to from the host; empty if they do not.
  static absl::Span<const std::byte> RawHiddenOf(const Part& part);
  // Enqueues the copies of a slice's rows, and of those before it, if they come from the host.
  absl::Status UploadSlice(Work* work, const Slice& slice);
  absl::Status UploadHidden(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, const Slice& slice,
                            cudaStream_t stream);
  // Brings a slice's hidden states to where the products read them, and computes their targets' logits.
  absl::Status PlaceSlice(Work* work, const Slice& slice);
  absl::Status UploadTeacherRows(Work* work, const Slice& slice);
  absl::Status PlaceTeacherRows(Work* work, const Slice& slice);
  bool MayReadInPlace(const RowsView& rows, Place place) const;
  // Brings rows of a tensor on the device to where the products read them; in place where it already is that.
  absl::Status PlaceRows(ConstMatrix source, int64_t first, bool contiguous, const int32_t* index, int64_t count, Element element,
                         bool in_place_allowed, void* out, uint8_t* non_finite, ConstMatrix* placed);
  // Calls visit(part, rows of the part that are in the slice) in order.
  absl::Status ForEachPart(const Work& work, const Slice& slice, absl::FunctionRef<absl::Status(const Part&, const Slice&)> visit);
  absl::Status MakeGroups(Work* work);
  // Whether the work's grad_weight product is deferred (deferred_grad_weight.h).
  bool Defers(const Work& work) const;
  // Makes a place for the operands of such a product, and lets the work write them there.
  absl::Status ReserveOperands(Work* work);

  // The forms: from hidden states to M, factors and reports.
  absl::Status RunExponentials(Work* work);
  // `finish`: the stream that has the rows' losses then.
  absl::Status ComputeExponentials(Work* work, const Slice& slice, cudaStream_t finish);
  absl::Status RunOverflowed(Work* work, int64_t first);
  // The entries of M as lists (computation_lists.cc).
  // Memory for those of all slices, if there is room for it.
  void TakeLists(Work* work, const std::vector<Slice>& slices);
  // Where they are taken from.
  Workspace& ListSpace(Work* work);
  // Makes the slices' lists parts of the whole one.
  static void CutLists(Work* work);
  // M's memory.
  Workspace MatrixSpace(const Work& work) const;
  // A slice's list, or null.
  static const EntryList* ListOf(const Work& work, const Slice& slice);
  // Called before the first slice is dithered: chooses the columns that stay dense, or drops the lists, by the entries of its rows.
  absl::Status ChooseLists(Work* work, const Slice& slice);
  absl::Status ListEntries(const Work& work, const Slice& slice, const EntryList& list);
  // Sorts a slice's list, if it has one, and waits for its number of entries.
  absl::Status SettleList(Work* work, const Slice& slice);
  // Called when a slice's number of entries is known: drops all lists if its list has no room for them.
  absl::Status FinishList(Work* work, const Slice& slice, uint32_t entries);
  // Called behind the last slice: makes the list that grad_weight is taken from, and brings it to the slot that keeps it.
  absl::Status CompleteList(Work* work);
  // Makes M of the rows below `end`, whose lists are not used any more.
  absl::Status DropLists(Work* work, int64_t end);
  // Null if the term has no resolution.
  static DitherRow* DitherRowsOf(const Work& work, int64_t first) {
    return work.term->plan->dithers ? work.own.dither_rows + first : nullptr;
  }
  // M of a slice's rows, if the term has a resolution: as a list, or in place.
  absl::Status Dither(Work* work, const Slice& slice);
  // The resolution of a divergence's rows.
  static DivergenceResolution ResolutionOf(const Work& work, const Slice& slice);
  absl::Status RunLogits(Work* work);
  // As far as M.
  absl::Status RunRows(Work* work, const Slice& slice);
  // out [hidden.rows, out_stride] = hidden . weight^T of a shard: fp32, or, with `wide_hidden`, fp64 through `panel`.
  absl::Status ComputeLogits(const ShardWeights& shard, const ConstMatrix& hidden, const double* wide_hidden, void* panel,
                             void* out, int64_t out_stride);
  absl::Status ComputeProducts(Work* work, const Slice& slice);
  // With the student's columns in place (computation_teacher.cc).
  absl::Status ComputeTeacherProducts(Work* work, const Slice& slice);
  // A slice's teacher rows, `hidden`, in int8, and the expected errors of their logits; with TermRun::int8_teacher.
  absl::Status QuantizeTeacherRows(Work* work, const Slice& slice, const ConstMatrix& hidden, Int8Rows* out);
  // On a rank whose teacher's shard is not its student's columns: the ranks hand out their parts of each other's columns.
  absl::Status ExchangeTeacherColumns(Work* work, const Slice& slice);
  // Enqueues a copy of columns [first, first + columns) of logits. Strides in elements.
  absl::Status CopyColumns(const void* from, int64_t from_stride, int64_t first, void* to, int64_t to_stride, int64_t columns,
                           Element element, int64_t rows);
  absl::Status RunDivergence(Work* work, const Slice& slice);
  // From hidden states to M, with a top-k teacher (computation_teacher.cc).
  absl::Status RunTopK(Work* work, const Slice& slice);
  // Runs a slice as far as M, on a rank, by passes over its rows in two parts. One part has its pass while the other part's results
  // are collected from the ranks.
  absl::Status RunShardPasses(Work* work, const Slice& slice);

  // The two that follow it. Before DeliverGradHidden() a rank's results are nowhere but in its own memory.
  absl::Status AddGradHidden(Work* work, const Slice& slice, bool product_is_there);
  absl::Status ComputeGradHidden(Work* work, const Slice& slice, bool product_is_there);
  absl::Status DeliverGradHidden(Work* work, const Slice& slice);
  absl::Status MultiplyByWeight(Work* work, const Slice& slice, int32_t rank);
  absl::Status FinishGradHidden(Work* work, const Slice& slice, int32_t rank);
  absl::Status FinishPart(Work* work, const Part& part, const Slice& slice, int64_t product_row, int32_t rank);
  absl::Status AddGradWeight(Work* work, const Slice& slice);
  absl::Status AddOwedGradWeight(Work* work);
  // Writes rows of a chunk whose gradient was summed up; none else.
  // `factors`: of these rows, if they are shares that the ranks have added up.
  absl::Status WriteGradHidden(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, const Slice& slice,
                               const ShareFactors& factors);
  // In a group only rank 0 sees which rows of grad_hidden are not finite, and sends them to the others, through the host. Once, at
  // the end.
  absl::Status TellNonFinite();
  // Adds up rows of a chunk's sum on rank 0 of a group.
  absl::Status SumOverRanks(const Chunk& chunk, const ChunkBuffers& buffers, int64_t width, const Slice& slice);
  // A rank's share, where its shard has no columns.
  absl::Status ClearShare(Work* work, const Slice& slice);
  // Makes statistics [ranks, count] of those that each rank has written in its place; without a group they are all there.
  template <typename T>
  absl::Status Collect(T* statistics, int64_t count, cudaStream_t stream) {
    if (group_ == nullptr) return absl::OkStatus();
    return group_->merges().AllGather(statistics, count * static_cast<int64_t>(sizeof(T)), stream);
  }
  // The targets' logits of all ranks: one has a row's target, and the others 0.
  absl::Status MergeTargets(const Work& work, const Slice& slice, cudaStream_t stream);
  // Where a shard that is here has its own in them.
  template <typename T>
  T* OwnPart(T* statistics, int32_t index, int64_t count) const {
    return statistics + (group_ == nullptr ? index : group_->rank()) * count;
  }
  // Enqueues a delivery behind the download stream's present work, or keeps it for SendPostponed().
  absl::Status SendGradHidden(const Delivery& delivery);
  absl::Status SendPostponed();
  absl::Status Send(const Delivery& delivery);
  static void TellFlow(void* note);  // a ReadyNote
  absl::Status ClearGradHidden(const Member& member);

  ChunkRows RowsOf(const Work& work, const Slice& slice) const;
  LogitsView StudentView(const Work& work, int32_t rank) const;
  LogitsView TeacherView(const Work& work, int32_t rank) const;
  ConstMatrix MatrixOf(const Work& work, const Slice& slice, int32_t rank) const;
  MutableMatrix MatrixOut(const Work& work, const Slice& slice, int32_t rank) const;
  static absl::Span<const int64_t> BatchRowsOf(const Chunk& chunk, const Slice& slice) {
    return absl::MakeConstSpan(chunk.batch_rows).subspan(static_cast<size_t>(slice.first), static_cast<size_t>(slice.count));
  }
  // Calls visit(index of the first, its row, count) for runs of rows that follow each other.
  static absl::Status ForEachRun(absl::Span<const int64_t> rows, absl::FunctionRef<absl::Status(int64_t, int64_t, int64_t)> visit);
  // Whether results are this engine's to write.
  bool has_results() const { return group_ == nullptr || group_->is_first(); }
  // The stream on which writes of grad_hidden are enqueued.
  cudaStream_t gradient_stream() const { return group_ == nullptr ? stream_ : group_->sum_stream(); }
  static bool IsOnlyTerm(const Work& work) { return work.parts.front().chunk->terms.size() == 1; }
  // Whether the product of grad_hidden is added up over ranks where it was written.
  bool SumsShares(const Work& work) const { return group_ != nullptr && IsOnlyTerm(work); }
  // Where that product of a slice's rows is written.
  float* ProductOut(const Work& work, const Slice& slice) const;
  static bool IsOnHost(Place place) { return place == Place::kPageable || place == Place::kPageLocked; }
  // Where rows of a member's grad_hidden are written: the caller's device memory, or on the way to the host.
  static GradHiddenTarget OutputOf(const Member& member, const ChunkBuffers& buffers, const int32_t* map, uint8_t* non_finite);
  // Copies rows `rows[i]` of a tensor that is not the device's own to row i of `to`; neighbours together.
  absl::Status CopyRowsIn(const RowsView& view, absl::Span<const int64_t> rows, void* to, cudaStream_t stream);
  template <typename T>
  absl::Status Upload(T* device, const T* host, int64_t count) {
    return Check(cudaMemcpyAsync(device, host, static_cast<size_t>(count) * sizeof(T), cudaMemcpyHostToDevice, stream_),
                 "an upload of row data");
  }
  // Waits for the device and takes the results.
  absl::Status Drain();
  absl::Status Check(cudaError_t error, const char* what) { return core_.Check(error, what); }

  EngineCore& core_;
  const std::vector<Member> members_;
  DeviceGroup* const group_;  // CudaHead::group() of all heads; null: this engine computes alone
  const bool whole_workspace_;
  const cudaStream_t stream_;
  Workspace workspace_;
  HostStage host_;
  std::vector<Pending> pending_;
  std::vector<Delivery> postponed_;
  std::deque<ReadyNote> notes_;  // where they are until the driver has called back
  bool drained_ = true;
  // Behind the core's results_event() the last chunk has only products that add to an accumulator or a slot.
  bool products_go_on_ = false;
  absl::Span<const std::byte> left_idle_;  // the memory that they do not use

  RowFlow* const flow_;   // of the only member, or null
  int64_t awaited_ = -1;  // rows that the flow has been asked for; -1: never
  bool decided_ = false;
  bool interrupted_ = false;
  // The digest of the only member's rows, if it is asked for.
  DigestBuilder digest_;
  uint64_t* device_sum_ = nullptr;           // [2]
  uint64_t* host_sum_ = nullptr;             // [2], page-locked
  std::vector<const Chunk*> summed_chunks_;  // copies of their hidden states are in the sum
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_COMPUTATION_H_
