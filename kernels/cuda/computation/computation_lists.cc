// The gradients of a computation from lists of a dithered matrix's entries (gradient_list.h) instead of products.
//
// Exponentials, and M of a divergence, are listed if they are of one shard: slice by slice, if a sample of the first slice's rows
// has few entries. M stays as it was written until all slices are there. If a list has no room for its slice's entries, all rows
// take products. M is then dithered in place, and has the same entries. Lists lie beside the chunk's memory, where the workspace
// has room left. Their order by column and their scratch memory go where M was, so that no plan counts them twice.
#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/cuda/computation/computation.h"

namespace headwater::cuda {
namespace {

// Finer resolutions leave so many entries that products of a matrix take less time.
constexpr double kLeastListedResolution = 0x1p-10;
// Rows whose entries are counted before a micro-batch's form is chosen.
constexpr int64_t kSampledRows = 64;

// Whether sums over a list take less time than two products of a matrix. In both time grows with the width. A list's grows with its
// entries, whose rows are gathered, and with the rows of grad_weight that it changes. At a width of 4096 an H100 takes 5 ns an
// entry of flat rows. An entry of a trained model's rows, which share columns, takes 3.5 ns. A changed row takes 11 ns. Two
// products take 2.4 us a row there, with a vocabulary of 128256.
bool ListIsFaster(double entries, int64_t rows, int64_t columns) {
  const double changed = std::min(entries, static_cast<double>(columns));
  return entries + 2.75 * changed <= 0.0046 * static_cast<double>(rows) * static_cast<double>(columns);
}

}  // namespace

bool Computation::MayList(const Work& work) const {
  const TermRun& term = *work.term;
  const ShardWeights shard = term.head->shard_weights(0);
  const bool is_divergence = term.plan->jsd != nullptr && term.large_form == Form::kRows && core_.hopper() &&
                             term.MatrixElement() == Element::kBFloat16 && work.rows > kLargestSmallBatch;
  return term.plan->dithers && work.backward && group_ == nullptr && term.head->shard_count() == 1 && shard.bias == nullptr &&
         (term.FormOf(work.rows) == Form::kExponentials || is_divergence) &&
         term.finish.gradient_resolution >= kLeastListedResolution && EntryKeysFit(work.rows, shard.columns);
}

void Computation::TakeLists(Work* work, const std::vector<Slice>& slices) {
  if (!MayList(*work)) return;
  const ShardWeights shard = work->term->head->shard_weights(0);
  const int64_t mark = workspace_.used();
  int64_t kept_bytes = 0, partial_bytes = 0;
  for (const Slice& slice : slices) {
    const EntryList list = LayOutEntryList(slice.count, shard.columns, &workspace_);
    kept_bytes += MovedEntryBytes(list);
    partial_bytes = std::max(partial_bytes, PartialBytes(list, shard.stride));
    work->lists.push_back({slice, list});
  }
  const MutableMatrix matrix = MatrixOut(*work, {0, work->rows}, 0);
  if (workspace_.fits() && kept_bytes + partial_bytes <= matrix.rows * matrix.stride * BytesOf(matrix.element)) return;
  work->lists.clear();
  workspace_.Rewind(mark);
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
  const auto samples = static_cast<int32_t>(std::min(slice.count, kSampledRows));
  const ConstMatrix matrix = MatrixOf(*work, slice, 0);
  // The pool has no entries yet.
  float* const counts = list->pool.values;
  HEADWATER_RETURN_IF_ERROR(Check(work->term->plan->jsd != nullptr
                                      ? LaunchEstimateDivergence(matrix, ResolutionOf(*work, slice), samples, counts, stream_)
                                      : LaunchEstimateEntries(matrix, work->own.dither_rows, samples, counts, stream_),
                                  "counting entries"));
  float* const entries = host_.Take<float>(samples);
  HEADWATER_RETURN_IF_ERROR(
      Check(cudaMemcpyAsync(entries, counts, static_cast<size_t>(samples) * sizeof(float), cudaMemcpyDeviceToHost, stream_),
            "the way back of counts"));
  HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(core_.flag_event(), stream_), "recording an event"));
  HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.flag_event(), "the rows' resolutions"));
  const double mean = std::accumulate(entries, entries + samples, 0.0) / samples;
  if (mean > kEntriesPerRow || !ListIsFaster(mean * static_cast<double>(work->rows), work->rows, list->columns)) {
    work->lists.clear();
  }
  return absl::OkStatus();
}

absl::Status Computation::ListEntries(const Work& work, const Slice& slice, const EntryList& list) {
  const TermBuffers& own = work.own;
  const ConstMatrix matrix = MatrixOf(work, slice, 0);
  const int64_t vocab_start = work.term->head->shard_weights(0).vocab_start;
  DitherRow* const rows = own.dither_rows + slice.first;
  const DitherKey* const keys = own.dither_keys + slice.first;
  DitherSums* const sums = own.dither_sums + slice.first;
  HEADWATER_RETURN_IF_ERROR(Check(LaunchClearEntries(list, stream_), "clearing a list"));
  return Check(work.term->plan->jsd != nullptr
                   ? LaunchListDivergence(matrix, vocab_start, ResolutionOf(work, slice), keys, list.pool, rows, sums, stream_)
                   : LaunchListDithered(matrix, vocab_start, own.targets + slice.first, rows, keys, list.pool, sums, stream_),
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
  if (slice.first + slice.count < work->rows) return absl::OkStatus();
  const MutableMatrix matrix = MatrixOut(*work, {0, work->rows}, 0);
  Workspace space(matrix.data, matrix.rows * matrix.stride * BytesOf(matrix.element));
  int64_t partial_bytes = 0;
  for (ListedRows& listed : work->lists) {
    // In a slot only the memory that lies there stays.
    if (work->kept_matrix != nullptr) {
      HEADWATER_RETURN_IF_ERROR(Check(LaunchMoveEntries(&space, &listed.list, stream_), "keeping a list"));
    }
    partial_bytes = std::max(partial_bytes, PartialBytes(listed.list, work->term->head->shard_weights(0).stride));
  }
  // One after the other they use it.
  float* const partials = static_cast<float*>(space.TakeBytes(partial_bytes));
  for (ListedRows& listed : work->lists) listed.list.partials = partials;
  return absl::OkStatus();
}

absl::Status Computation::DropLists(Work* work, int64_t end) {
  const std::vector<ListedRows> dropped = std::move(work->lists);
  work->lists.clear();
  for (const ListedRows& listed : dropped) {
    if (listed.rows.first < end) HEADWATER_RETURN_IF_ERROR(Dither(work, listed.rows));
  }
  return absl::OkStatus();
}

}  // namespace headwater::cuda
