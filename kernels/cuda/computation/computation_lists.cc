// The gradients of a computation from lists of a dithered matrix's entries (gradient_list.h) instead of products.
//
// Exponentials, and M of a divergence, are listed slice by slice. They must be of one shard, and a sample of the first slice's rows
// must have few entries. grad_weight takes one list of all rows. M stays as it was written until all slices are there. If a list
// has no room for its slice's entries, all rows take products. M is then dithered in place, and has the same entries. Exponentials
// have their list beside the chunk's memory, where the workspace has room left. A divergence has it where its teacher's logits
// were, and none if these are computed in slices. Its scratch memory, and what a slot keeps of it, go into M's gaps, so no plan
// counts them twice.
//
// At finer resolutions the first ids, which the tokenizer gives the frequent tokens, stay a matrix of products.
#include <algorithm>
#include <utility>

#include "kernels/cuda/computation/computation.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"

namespace headwater::cuda {
namespace {

// Finer resolutions leave so many entries that products of a matrix take less time. Up to DeferredGradWeight::kMaxMicroBatchRows
// rows a list must have fewer: behind dense columns it does not pay. Fewer rows yet do not pay for the sample: at 1024 flat rows an
// H100 took a tenth longer with it.
constexpr double kLeastListedResolution = 0x1p-12;
constexpr double kLeastListedResolutionOfFewRows = 0x1p-10;
constexpr int64_t kMostUnlistedRows = 1024;
// Rows whose entries are counted before a micro-batch's form is chosen.
constexpr int64_t kSampledRows = 64;
// Vocabularies are cut at a multiple of this, where products' tiles end.
constexpr int64_t kDenseGrain = 256;

// The numbers of columns that may be dense: none, a quarter, half.
DensePrefixes PrefixesOf(int64_t columns) {
  DensePrefixes prefixes{};
  for (int32_t i = 0; i < DensePrefixes::kCount; ++i) {
    prefixes.columns[i] = static_cast<int32_t>(columns * i / 4 / kDenseGrain * kDenseGrain);
  }
  return prefixes;
}

// The time of both gradients from a list behind `dense` columns, less than which two products of all columns may take
// (ProductTime()). In either, time grows with the width. A list's grows with its entries, whose rows are gathered, and with the
// rows of grad_weight that it changes. At a width of 4096 an H100 takes 5 ns an entry of flat rows. An entry of a trained model's
// rows, which share columns, takes 3.5 ns. A changed row takes 11 ns. Two products take 2.4 us a row there, with a vocabulary of
// 128256.
double ProductTime(int64_t rows, int64_t columns) { return 0.0046 * static_cast<double>(rows) * static_cast<double>(columns); }
double ListTime(double entries, int64_t rows, int64_t columns, int64_t dense) {
  const double changed = std::min(entries, static_cast<double>(columns - dense));
  return entries + 2.75 * changed + ProductTime(rows, dense);
}

}  // namespace

bool Computation::MayList(const Work& work) const {
  const TermRun& term = *work.term;
  const double least_resolution =
      work.rows > DeferredGradWeight::kMaxMicroBatchRows ? kLeastListedResolution : kLeastListedResolutionOfFewRows;
  return term.may_list && work.rows > kMostUnlistedRows && term.finish.gradient_resolution >= least_resolution &&
         EntryKeysFit(work.rows, term.head->shard_weights(0).columns);
}

void Computation::TakeLists(Work* work, const std::vector<Slice>& slices) {
  if (!MayList(*work)) return;
  const ShardWeights shard = work->term->head->shard_weights(0);
  Workspace* const space = work->term->plan->jsd != nullptr ? &work->own.lists : &workspace_;
  const int64_t mark = space->used();
  work->list = LayOutEntryList(work->rows, shard.columns, static_cast<int64_t>(slices.size()), space);
  if (space->fits() && GapFits(0, MatrixOf(*work, slices.front(), 0).stride, shard.stride)) {
    for (const Slice& slice : slices) {
      work->lists.push_back({slice, SliceOf(work->list, slice.first, slice.count, static_cast<int64_t>(work->lists.size()))});
    }
  } else {
    space->Rewind(mark);
  }
}

const EntryList* Computation::ListOf(const Work& work, const Slice& slice) {
  for (const ListedRows& listed : work.lists) {
    if (listed.rows.first == slice.first) return &listed.list;
  }
  return nullptr;
}

absl::Status Computation::ChooseLists(Work* work, const Slice& slice) {
  const EntryList* const list = ListOf(*work, slice);
  if (list == nullptr || slice.first > 0) return absl::OkStatus();
  constexpr int32_t kCount = DensePrefixes::kCount;
  const auto samples = static_cast<int32_t>(std::min(slice.count, kSampledRows));
  const ConstMatrix matrix = MatrixOf(*work, slice, 0);
  const DensePrefixes prefixes = PrefixesOf(matrix.columns);
  // The pool has no entries yet.
  float* const counts = list->pool.values;
  HEADWATER_RETURN_IF_ERROR(
      Check(work->term->plan->jsd != nullptr
                ? LaunchEstimateDivergence(matrix, prefixes, ResolutionOf(*work, slice), samples, counts, stream_)
                : LaunchEstimateEntries(matrix, prefixes, work->own.dither_rows, samples, counts, stream_),
            "counting entries"));
  float* const entries = host_.Take<float>(samples * kCount);
  HEADWATER_RETURN_IF_ERROR(Check(
      cudaMemcpyAsync(entries, counts, static_cast<size_t>(samples * kCount) * sizeof(float), cudaMemcpyDeviceToHost, stream_),
      "the way back of counts"));
  HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(core_.flag_event(), stream_), "recording an event"));
  HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.flag_event(), "the rows' resolutions"));
  const int64_t stride = work->term->head->shard_weights(0).stride;
  double least = ProductTime(work->rows, matrix.columns);
  int32_t dense = -1;
  for (int32_t k = 0; k < kCount; ++k) {
    double mean = 0;
    for (int32_t i = 0; i < samples; ++i) mean += entries[i * kCount + k] / samples;
    const int32_t columns = prefixes.columns[k];
    const double time = ListTime(mean * static_cast<double>(work->rows), work->rows, matrix.columns, columns);
    if (mean > kEntriesPerRow || time > least || !GapFits(columns, matrix.stride, stride)) continue;
    least = time;
    dense = columns;
  }
  if (dense < 0) {
    work->lists.clear();
    return absl::OkStatus();
  }
  const MutableMatrix all = MatrixOut(*work, {0, work->rows}, 0);
  work->list.dense = dense;
  work->list.gap = Advance(all.data, all.element, dense);
  work->list.gap_pitch = all.stride * BytesOf(all.element);
  for (ListedRows& listed : work->lists) listed.list.dense = dense;
  return absl::OkStatus();
}

absl::Status Computation::ListEntries(const Work& work, const Slice& slice, const EntryList& list) {
  const TermBuffers& own = work.own;
  const MutableMatrix matrix = MatrixOut(work, slice, 0);
  const int64_t vocab_start = work.term->head->shard_weights(0).vocab_start;
  DitherRow* const rows = own.dither_rows + slice.first;
  const DitherKey* const keys = own.dither_keys + slice.first;
  DitherSums* const sums = own.dither_sums + slice.first;
  HEADWATER_RETURN_IF_ERROR(Check(LaunchClearEntries(list, stream_), "clearing a list"));
  return Check(
      work.term->plan->jsd != nullptr
          ? LaunchListDivergence(matrix, list.dense, vocab_start, ResolutionOf(work, slice), keys, list.pool, rows, sums, stream_)
          : LaunchListDithered(matrix, list.dense, vocab_start, own.targets + slice.first, rows, keys, list.pool, sums, stream_),
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
  return Check(LaunchKeepEntries(work->list, stream_), "keeping a list");
}

absl::Status Computation::DropLists(Work* work, int64_t end) {
  const std::vector<ListedRows> dropped = std::move(work->lists);
  work->lists.clear();
  const int64_t vocab_start = work->term->head->shard_weights(0).vocab_start;
  for (const auto& [rows, list] : dropped) {
    if (rows.first >= end) continue;
    // The dense columns are dithered, and the sums of all are there.
    MutableMatrix matrix = MatrixOut(*work, rows, 0);
    matrix.data = Advance(matrix.data, matrix.element, list.dense);
    matrix.columns -= list.dense;
    HEADWATER_RETURN_IF_ERROR(
        Check(LaunchDither(matrix, vocab_start + list.dense, /*targets=*/nullptr, work->own.dither_rows + rows.first,
                           work->own.dither_keys + rows.first, /*add=*/false, /*sums=*/nullptr, stream_),
              "dithering"));
  }
  return absl::OkStatus();
}

}  // namespace headwater::cuda
