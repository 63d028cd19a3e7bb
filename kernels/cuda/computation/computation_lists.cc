// The gradients of a computation from lists of a dithered matrix's entries (gradient_list.h) instead of products.
//
// Exponentials, and M of a divergence, are listed slice by slice. They must be of one shard. A sample of the first slice's rows
// shows which columns stay dense, and whether the rest has few entries. grad_weight takes one list of all rows. M stays as it was
// written until all slices are there. If a list has no room for its slice's entries, all rows take products. M is then dithered in
// place, and has the same entries. Exponentials have their list beside the chunk's memory, where the workspace has room left. A
// divergence has it where its teacher's logits were, and none if these are computed in slices. Sums of chunks, and what a slot
// keeps, go into M's memory at last, so no plan counts them twice.
#include <algorithm>
#include <utility>

#include "kernels/cuda/computation/computation.h"
#include "kernels/cuda/computation/staged_contribution.h"

namespace headwater::cuda {
namespace {

// Finer resolutions leave so many entries that products of a matrix take less time. Few rows do not pay for the sample: at 1024
// flat rows an H100 took a tenth longer with it.
constexpr double kLeastListedResolution = 0x1p-14;
constexpr int64_t kMostUnlistedRows = 1024;
// Rows whose entries are counted before a micro-batch's form is chosen.
constexpr int64_t kSampledRows = 256;

// Times of both gradients at a width of 4096, in ns; all grow with the width. An entry has its rows of W and of x gathered, and
// each column with entries changes its row of grad_weight. Where columns share the entries evenly, none becomes dense, and fewer
// rows of W come from the L2 cache. A dense column takes its part of two products, and the time to copy its rows of W and of
// grad_weight.
constexpr double kEntryTime = 3;
constexpr double kEvenEntryTime = 5;
constexpr double kChangedRowTime = 14;
constexpr double kDenseRowTime = 27;
double ProductTime(int64_t rows, int64_t columns) { return 0.023 * static_cast<double>(rows) * static_cast<double>(columns); }
double ListTime(double entries, int64_t rows, int64_t columns, int64_t dense) {
  const double changed = std::min(entries, static_cast<double>(columns - dense));
  return (dense > 0 ? kEntryTime : kEvenEntryTime) * entries + kChangedRowTime * changed +
         kDenseRowTime * static_cast<double>(dense) + ProductTime(rows, dense);
}
// From so many entries on a column takes less time if it is dense.
double LeastDenseEntries(int64_t rows) { return (ProductTime(rows, 1) + kDenseRowTime - kChangedRowTime) / kEntryTime; }

}  // namespace

bool Computation::MayList(const TermRun& term, int64_t rows) {
  // In deterministic mode other heads, which size the workspace, must not decide.
  return term.may_list && !term.as_on_host && rows > kMostUnlistedRows &&
         term.finish.gradient_resolution >= kLeastListedResolution && EntryKeysFit(rows, term.head->shard_weights(0).columns);
}

void Computation::TakeLists(Work* work, const std::vector<Slice>& slices) {
  if (!work->backward || !MayList(*work->term, work->rows)) return;
  Workspace& space = ListSpace(work);
  const int64_t mark = space.used();
  work->list = LayOutEntryList(work->rows, work->term->head->shard_weights(0).columns, static_cast<int64_t>(slices.size()), &space);
  if (space.fits()) {
    for (const Slice& slice : slices) work->lists.push_back({slice, {}});
    CutLists(work);
  } else {
    space.Rewind(mark);
  }
}

Workspace& Computation::ListSpace(Work* work) { return work->term->plan->jsd != nullptr ? work->own.lists : workspace_; }

void Computation::CutLists(Work* work) {
  int64_t number = 0;
  for (auto& [rows, list] : work->lists) list = SliceOf(work->list, rows.first, rows.count, number++);
}

const EntryList* Computation::ListOf(const Work& work, const Slice& slice) {
  for (const ListedRows& listed : work.lists) {
    if (listed.rows.first == slice.first) return &listed.list;
  }
  return nullptr;
}

absl::Status Computation::ChooseLists(Work* work, const Slice& slice) {
  if (ListOf(*work, slice) == nullptr || slice.first > 0) return absl::OkStatus();
  const auto samples = static_cast<int32_t>(std::min(slice.count, kSampledRows));
  const ConstMatrix matrix = MatrixOf(*work, slice, 0);
  const ShardWeights shard = work->term->head->shard_weights(0);
  EntryList& list = work->list;
  HEADWATER_RETURN_IF_ERROR(
      Check(LaunchCountEntries(matrix, work->own.dither_rows, samples, list.dense, stream_), "counting entries"));
  const double of_sample = static_cast<double>(samples) / static_cast<double>(work->rows);
  HEADWATER_RETURN_IF_ERROR(
      Check(LaunchChooseDense(matrix.columns, of_sample * LeastDenseEntries(work->rows), list.dense, stream_), "choosing columns"));
  DenseChoice* const choice = host_.Take<DenseChoice>(1);
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemcpyAsync(choice, list.dense.choice, sizeof(DenseChoice), cudaMemcpyDeviceToHost, stream_),
                                  "the way back of counts"));
  HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(core_.flag_event(), stream_), "recording an event"));
  HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.flag_event(), "the rows' entries"));
  const double entries = static_cast<double>(choice->listed) / kEntryUnits / of_sample;
  const double most_entries = static_cast<double>(work->rows * kEntriesPerRow);
  if (choice->dense == matrix.columns || entries > most_entries ||
      ListTime(entries, work->rows, matrix.columns, choice->dense) > ProductTime(work->rows, matrix.columns)) {
    work->lists.clear();
    return absl::OkStatus();
  }
  Workspace& space = ListSpace(work);
  const int64_t mark = space.used();
  LayOutDense(choice->dense, shard.stride, &space, &list);
  Workspace in_matrix = MatrixSpace(*work);
  list.partials = LayOutKept(list, shard.stride, &in_matrix).partials;
  // Whether or not it is kept.
  const bool commits = PlanBytes(list, shard.stride) <= CudaStagedContribution::CommitSpaceOf(core_.workspace().bytes());
  if (!space.fits() || !in_matrix.fits() || !commits) {
    space.Rewind(mark);
    work->lists.clear();
    return absl::OkStatus();
  }
  CutLists(work);
  if (list.dense.count == 0 || !work->wants_grad_hidden) return absl::OkStatus();
  return Check(LaunchGatherDenseRows(shard, list.dense, stream_), "gathering rows");
}

Workspace Computation::MatrixSpace(const Work& work) const {
  const MutableMatrix matrix = MatrixOut(work, {0, work.rows}, 0);
  return Workspace(matrix.data, matrix.rows * matrix.stride * BytesOf(matrix.element));
}

absl::Status Computation::ListEntries(const Work& work, const Slice& slice, const EntryList& list) {
  const TermBuffers& own = work.own;
  HEADWATER_RETURN_IF_ERROR(Check(LaunchClearEntries(list, stream_), "clearing a list"));
  return Check(LaunchListDithered(MatrixOf(work, slice, 0), work.term->plan->jsd != nullptr ? nullptr : own.targets + slice.first,
                                  own.dither_rows + slice.first, own.dither_keys + slice.first, list, own.dither_sums + slice.first,
                                  stream_),
               "listing entries");
}

absl::Status Computation::SettleList(Work* work, const Slice& slice) {
  const EntryList* const list = ListOf(*work, slice);
  if (list == nullptr) return absl::OkStatus();
  uint32_t* const entries = host_.Take<uint32_t>(1);
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemcpyAsync(entries, list->pool.count, sizeof(uint32_t), cudaMemcpyDeviceToHost, stream_),
                                  "the way back of a count"));
  HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(core_.flag_event(), stream_), "recording an event"));
  // The device has this to do while the host looks at the count.
  HEADWATER_RETURN_IF_ERROR(Check(LaunchSortEntries(*list, stream_), "sorting entries"));
  HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.flag_event(), "a list's count"));
  return FinishList(work, slice, *entries);
}

absl::Status Computation::FinishList(Work* work, const Slice& slice, uint32_t entries) {
  if (entries > ListOf(*work, slice)->pool.capacity) return DropLists(work, slice.first + slice.count);
  return absl::OkStatus();
}

absl::Status Computation::CompleteList(Work* work) {
  if (work->lists.size() > 1) HEADWATER_RETURN_IF_ERROR(Check(LaunchSortSlices(work->list, stream_), "sorting entries"));
  if (work->lists.empty() || work->kept_matrix == nullptr) return absl::OkStatus();
  Workspace in_matrix = MatrixSpace(*work);
  const EntryList kept = LayOutKept(work->list, work->term->head->shard_weights(0).stride, &in_matrix);
  HEADWATER_RETURN_IF_ERROR(Check(LaunchKeepEntries(work->list, kept, stream_), "keeping a list"));
  work->list = kept;
  return absl::OkStatus();
}

absl::Status Computation::DropLists(Work* work, int64_t end) {
  const std::vector<ListedRows> dropped = std::move(work->lists);
  work->lists.clear();
  for (const auto& [rows, list] : dropped) {
    if (rows.first >= end) continue;
    // Their sums are there.
    HEADWATER_RETURN_IF_ERROR(
        Check(LaunchDither(MatrixOut(*work, rows, 0), work->term->head->shard_weights(0).vocab_start, /*targets=*/nullptr,
                           work->own.dither_rows + rows.first, work->own.dither_keys + rows.first, /*add=*/false,
                           /*sums=*/nullptr, stream_),
              "dithering"));
  }
  return absl::OkStatus();
}

}  // namespace headwater::cuda
