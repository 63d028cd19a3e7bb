#include "kernels/cuda/computation/computation.h"

#include <algorithm>
#include <optional>

#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/computation/matrix_rows.h"
#include "kernels/cuda/products/e_product.h"
#include "kernels/cuda/profile_range.h"
#include "kernels/cuda/rows/conversions.h"

namespace headwater::cuda {
namespace {

// Host bytes that one row of a term takes on its way up and back.
constexpr int64_t kHostBytesPerRow = 13 * 4 + sizeof(RowReport) + 2;

// Rows from which on a pass over half of them takes longer than the ranks need to meet.
constexpr int64_t kLeastRowsInParts = 1024;

// Host memory for so many rows of a term or a chunk.
int64_t HostBytes(int64_t rows) { return rows * kHostBytesPerRow + 18 * Workspace::kAlignment; }

}  // namespace

bool CanJoin(const Member& a, const Member& b) {
  const auto fits = [](const Member& member) {
    return member.terms->size() == 1 && member.plan->chunks.size() == 1 && member.plan->slots.empty() &&
           member.terms->front().large_form == Form::kExponentials && member.terms->front().head->shard_count() == 1;
  };
  if (!fits(a) || !fits(b)) return false;
  const TermRun& first = a.terms->front();
  const TermRun& second = b.terms->front();
  // One product has one transform.
  const bool same_temperature = first.plan->cross_entropy.inverse_temperature == second.plan->cross_entropy.inverse_temperature;
  return first.head == second.head && same_temperature && first.plan->grad_weight == second.plan->grad_weight &&
         a.plan->chunks.front().backward == b.plan->chunks.front().backward &&
         (a.micro_batch->grad_hidden.data == nullptr) == (b.micro_batch->grad_hidden.data == nullptr);
}

int64_t JoinedBytes(const std::vector<Member>& members) {
  Workspace workspace;
  int64_t rows = 0;
  for (const Member& member : members) {
    const int64_t own_rows = static_cast<int64_t>(member.plan->chunks.front().batch_rows.size());
    const CrossEntropyTerm& spec = member.terms->front().plan->cross_entropy;
    if (spec.class_weights != nullptr) workspace.Take<float>(spec.valid_vocab_size);
    LayOutChunk(*member.terms, *member.micro_batch, own_rows, &workspace);
    rows += own_rows;
  }
  TermRun term = members.front().terms->front();
  term.hidden_in_place = false;
  LayOutTerm(term, rows, &workspace);
  return workspace.used();
}

int64_t MostHostRows(int64_t term_count) {
  // The digest's sum has its place before all others.
  const int64_t bytes = (EngineCore::kBounceBytes - Workspace::kAlignment) / (1 + term_count) - HostBytes(0);
  const int64_t rows = bytes / kHostBytesPerRow;
  return std::max<int64_t>(rows >= kRowGrain ? rows / kRowGrain * kRowGrain : rows, 0);
}

Computation::Computation(EngineCore& core, std::vector<Member> members, bool whole_workspace)
    : core_(core),
      members_(std::move(members)),
      group_(members_.front().terms->front().head->group()),
      whole_workspace_(whole_workspace),
      stream_(core.stream()),
      workspace_(core.workspace().As<void>(),
                 core.workspace().bytes() - (whole_workspace ? 0 : DeferredGradWeight::ShareOf(core.workspace().bytes()))),
      host_(core.bounce()),
      flow_(members_.size() == 1 ? members_.front().micro_batch->flow : nullptr) {}

Computation::~Computation() {
  // Enqueued work reads and writes callers' memory, and calls the flow.
  if (!drained_) static_cast<void>(core_.Synchronize("a micro-batch"));
}

absl::Status Computation::Run() {
  const ProfileRange range("micro_batch");
  // If several small micro-batches are computed together, the first one's name stands for all.
  std::optional<ProfileRange> named;
  if (const char* const label = members_.front().micro_batch->label; label != nullptr) named.emplace(label);
  drained_ = false;
  HEADWATER_RETURN_IF_ERROR(BeginDigest());
  for (const Member& member : members_) {
    HEADWATER_RETURN_IF_ERROR(ClearGradHidden(member));
    HEADWATER_RETURN_IF_ERROR(UploadClassWeights(member));
  }
  HEADWATER_RETURN_IF_ERROR(members_.size() == 1 ? RunChunks(members_.front()) : RunTogether());
  HEADWATER_RETURN_IF_ERROR(Decide());
  HEADWATER_RETURN_IF_ERROR(Drain());
  drained_ = true;
  HEADWATER_RETURN_IF_ERROR(TellNonFinite());
  const Member& first = members_.front();
  const MutableRowsView& out = first.micro_batch->grad_hidden;
  if (flow_ != nullptr && has_results() && out.data != nullptr && out.row_count > 0 && IsOnHost(first.grad_hidden_place) &&
      !HasGradient(*first.plan)) {
    flow_->GradHiddenReady(out.row_count);  // every row is 0
  }
  return absl::OkStatus();
}

absl::Status Computation::UploadClassWeights(const Member& member) {
  for (TermRun& term : *member.terms) {
    const CrossEntropyTerm& spec = term.plan->cross_entropy;
    if (spec.class_weights == nullptr) continue;
    float* device = workspace_.Take<float>(spec.valid_vocab_size);
    HEADWATER_RETURN_IF_ERROR(Check(cudaMemcpyAsync(device, spec.class_weights, static_cast<size_t>(spec.valid_vocab_size) * 4,
                                                    cudaMemcpyHostToDevice, stream_),
                                    "the upload of class weights"));
    term.cross_entropy.term.class_weights = device;
    term.finish.cross_entropy.term.class_weights = device;
  }
  return absl::OkStatus();
}

absl::Status Computation::Drain() {
  if (products_go_on_) {
    HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.results_event(), "a micro-batch"));
    HEADWATER_RETURN_IF_ERROR(core_.SynchronizeTransfers("a micro-batch"));
    core_.LetWorkGoOn(left_idle_);
  } else {
    HEADWATER_RETURN_IF_ERROR(core_.Synchronize("a micro-batch"));
  }
  for (const Pending& pending : pending_) {
    const std::vector<ChunkRow>& rows = pending.part->rows;
    for (size_t i = 0; i < rows.size(); ++i) {
      RecordRow(rows[i], pending.reports[i], pending.non_finite[i] == 0, pending.term->plan);
      if (pending.teacher_errors != nullptr && rows[i].has_gradient()) {
        pending.term->plan->sums.teacher_mean_square_error += static_cast<double>(pending.teacher_errors[i]);
        pending.term->plan->teacher_error_rows += 1;
      }
      if (pending.non_finite_out != nullptr && pending.non_finite_out[rows[i].chunk_row] != 0) {
        pending.term->plan->non_finite[static_cast<size_t>(rows[i].term_row)] = 1;
      }
    }
    if (pending.dither != nullptr) {
      GradientDither& dither = pending.term->plan->sums.dither;
      dither.entry_count += static_cast<int64_t>(pending.dither->entry_count);
      dither.squared_error += pending.dither->squared_error;
      dither.squared_norm += pending.dither->squared_norm;
    }
  }
  pending_.clear();
  host_.Reset();
  return absl::OkStatus();
}

absl::Status Computation::TellNonFinite() {
  const Member& member = members_.front();
  if (group_ == nullptr || member.micro_batch->grad_hidden.data == nullptr || !HasGradient(*member.plan)) return absl::OkStatus();
  std::vector<double> rows;  // places in all terms' flags
  if (has_results()) {
    double place = 0;
    for (const TermPlan& term : member.plan->terms) {
      for (const uint8_t flag : term.non_finite) {
        if (flag != 0) rows.push_back(place);
        ++place;
      }
    }
  }
  const absl::StatusOr<Exchanged> counts = group_->Exchange(true, {static_cast<double>(rows.size())});
  if (!counts.ok()) return counts.status();
  rows.resize(static_cast<size_t>(counts->values.front().front()));
  if (rows.empty()) return absl::OkStatus();
  const absl::StatusOr<Exchanged> told = group_->Exchange(true, rows);
  if (!told.ok()) return told.status();
  const std::vector<double>& places = told->values.front();
  auto next = places.begin();
  double place = 0;
  for (TermPlan& term : member.plan->terms) {
    for (uint8_t& flag : term.non_finite) {
      if (next != places.end() && *next == place) {
        flag = 1;
        ++next;
      }
      ++place;
    }
  }
  return absl::OkStatus();
}

absl::Status Computation::RunChunks(const Member& member) {
  const int64_t mark = workspace_.used();
  for (const Chunk& chunk : member.plan->chunks) {
    workspace_.Rewind(mark);
    products_go_on_ = false;
    // The chunk before may still be on its way out.
    if (&chunk != &member.plan->chunks.front()) {
      HEADWATER_RETURN_IF_ERROR(core_.Order(core_.download_stream(), stream_));
      if (group_ != nullptr) HEADWATER_RETURN_IF_ERROR(core_.Order(gradient_stream(), stream_));
    }
    const int64_t rows = static_cast<int64_t>(chunk.batch_rows.size());
    if (!host_.HasRoom(HostBytes(rows) * static_cast<int64_t>(1 + chunk.terms.size()))) HEADWATER_RETURN_IF_ERROR(Drain());
    ChunkBuffers shared;
    HEADWATER_RETURN_IF_ERROR(OpenChunk(member, chunk, &shared));
    const int64_t chunk_mark = workspace_.used();
    const size_t first_pending = pending_.size();
    Work work{};
    for (const TermChunk& part : chunk.terms) {
      workspace_.Rewind(chunk_mark);
      TermRun* term = &(*member.terms)[part.term];
      work = Work{};
      work.parts = {{&member, &chunk, &part, term, shared, 0, static_cast<int64_t>(part.rows.size())}};
      work.term = term;
      if (chunk.backward && term->plan->slot >= 0) work.staged = (*member.staged)[static_cast<size_t>(term->plan->slot)].get();
      HEADWATER_RETURN_IF_ERROR(RunWork(&work));
    }
    HEADWATER_RETURN_IF_ERROR(CloseChunk(member, chunk, shared, first_pending, chunk.terms.size()));
    HEADWATER_RETURN_IF_ERROR(AddOwedGradWeight(&work));
    HEADWATER_RETURN_IF_ERROR(SendPostponed());
  }
  return absl::OkStatus();
}

absl::Status Computation::RunTogether() {
  TermRun merged = members_.front().terms->front();
  merged.hidden_in_place = false;
  Work work{};
  work.term = &merged;
  int64_t rows = 0;
  for (const Member& member : members_) {
    const Chunk& chunk = member.plan->chunks.front();
    const TermChunk& part = chunk.terms.front();
    ChunkBuffers shared;
    HEADWATER_RETURN_IF_ERROR(OpenChunk(member, chunk, &shared));
    const int64_t count = static_cast<int64_t>(part.rows.size());
    work.parts.push_back({&member, &chunk, &part, &member.terms->front(), shared, rows, count});
    rows += count;
  }
  HEADWATER_RETURN_IF_ERROR(RunWork(&work));
  for (size_t i = 0; i < work.parts.size(); ++i) {
    HEADWATER_RETURN_IF_ERROR(CloseChunk(*work.parts[i].member, *work.parts[i].chunk, work.parts[i].shared, i, 1));
  }
  HEADWATER_RETURN_IF_ERROR(AddOwedGradWeight(&work));
  return SendPostponed();
}

absl::Status Computation::OpenChunk(const Member& member, const Chunk& chunk, ChunkBuffers* buffers) {
  const MicroBatch& micro_batch = *member.micro_batch;
  const int64_t rows = static_cast<int64_t>(chunk.batch_rows.size());
  *buffers = LayOutChunk(*member.terms, micro_batch, rows, &workspace_);
  // A chunk's only term takes its rows itself, slice by slice.
  if (chunk.terms.size() > 1) HEADWATER_RETURN_IF_ERROR(UploadHidden(member, chunk, *buffers, {0, rows}, stream_));
  if (buffers->batch_rows != nullptr) {
    int32_t* batch_rows = host_.Take<int32_t>(rows);
    std::transform(chunk.batch_rows.begin(), chunk.batch_rows.end(), batch_rows,
                   [](int64_t row) { return static_cast<int32_t>(row); });
    HEADWATER_RETURN_IF_ERROR(Upload(buffers->batch_rows, batch_rows, rows));
  }
  if (!chunk.backward || micro_batch.grad_hidden.data == nullptr) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemsetAsync(buffers->non_finite, 0, static_cast<size_t>(rows), stream_), "clearing flags"));
  int32_t* output_rows = host_.Take<int32_t>(rows);
  const bool on_device = micro_batch.grad_hidden.memory == MemorySpace::kDevice;
  for (int64_t i = 0; i < rows; ++i) {
    output_rows[i] = static_cast<int32_t>(on_device ? chunk.batch_rows[static_cast<size_t>(i)] : i);
  }
  HEADWATER_RETURN_IF_ERROR(Upload(buffers->output_rows, output_rows, rows));
  // The only term of a rank's chunk writes it.
  if (buffers->sum == nullptr || (group_ != nullptr && chunk.terms.size() == 1)) return absl::OkStatus();
  const size_t bytes = static_cast<size_t>(rows * PaddedWidth(micro_batch.hidden.column_count)) * sizeof(float);
  return Check(cudaMemsetAsync(buffers->sum, 0, bytes, stream_), "clearing the sum of grad_hidden");
}

absl::Status Computation::CloseChunk(const Member& member, const Chunk& chunk, const ChunkBuffers& buffers, size_t first_pending,
                                     size_t count) {
  if (!chunk.backward || member.micro_batch->grad_hidden.data == nullptr) return absl::OkStatus();
  const int64_t rows = static_cast<int64_t>(chunk.batch_rows.size());
  if (chunk.terms.size() > 1) {
    const Slice all = {0, rows};
    HEADWATER_RETURN_IF_ERROR(SumOverRanks(chunk, buffers, member.micro_batch->hidden.column_count, all));
    HEADWATER_RETURN_IF_ERROR(WriteGradHidden(member, chunk, buffers, all, {}));
    HEADWATER_RETURN_IF_ERROR(core_.Order(gradient_stream(), core_.download_stream()));
    HEADWATER_RETURN_IF_ERROR(SendGradHidden({&member, &chunk, buffers.out, all}));
  }
  if (!has_results()) return absl::OkStatus();
  uint8_t* non_finite = host_.Take<uint8_t>(rows);
  for (size_t i = first_pending; i < first_pending + count; ++i) pending_[i].non_finite_out = non_finite;
  // In a group the products do not wait for them.
  return Check(
      cudaMemcpyAsync(non_finite, buffers.non_finite, static_cast<size_t>(rows), cudaMemcpyDeviceToHost, gradient_stream()),
      "the way back of flags");
}

absl::Status Computation::ForEachPart(const Work& work, const Slice& slice,
                                      absl::FunctionRef<absl::Status(const Part&, const Slice&)> visit) {
  for (const Part& part : work.parts) {
    const int64_t first = std::max(slice.first, part.first);
    const int64_t end = std::min(slice.first + slice.count, part.first + part.count);
    if (first < end) HEADWATER_RETURN_IF_ERROR(visit(part, {first, end - first}));
  }
  return absl::OkStatus();
}

absl::Status Computation::RunWork(Work* work) {
  TermRun& term = *work->term;
  const Part& last = work->parts.back();
  work->rows = last.first + last.count;
  work->backward = last.chunk->backward;
  work->wants_grad_hidden = work->backward && last.member->micro_batch->grad_hidden.data != nullptr;
  work->own = LayOutTerm(term, work->rows, &workspace_);
  TermBuffers& own = work->own;
  if (work->staged != nullptr && work->staged->keeps_rows) {
    // The operands of the grad_weight products go to the slot straight away.
    Workspace& slot = work->staged->space;
    const Form form = term.FormOf(work->rows);
    const int64_t padded = PaddedWidth(term.head->spec().hidden_size);
    const int64_t element_bytes = BytesOf(term.MatrixElement());
    work->kept_matrix = slot.TakeBytes(work->rows * ProductStride(term.head->shard_weights(0).columns) * term.MatrixPitch(form));
    // Exponentials that overflow are done again in the workspace, and only then kept.
    if (form != Form::kExponentials) (own.matrices.empty() ? own.products : own.matrices)[0] = work->kept_matrix;
    own.hidden = slot.TakeBytes(work->rows * padded * element_bytes);
    own.scaled = slot.TakeBytes(work->rows * padded * element_bytes);
    own.targets = slot.Take<int32_t>(work->rows);
    own.order = slot.Take<int32_t>(work->rows);
    own.starts = slot.Take<int32_t>(work->rows + 1);
    own.row_factor = slot.Take<float>(work->rows);
    own.target_factor = slot.Take<float>(work->rows);
    own.alpha = slot.Take<float>(2);
  } else if (Defers(*work)) {
    HEADWATER_RETURN_IF_ERROR(ReserveOperands(work));
  }
  work->reports = host_.Take<RowReport>(work->rows);
  work->non_finite = host_.Take<uint8_t>(work->rows);
  HEADWATER_RETURN_IF_ERROR(UploadRows(work));
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemsetAsync(own.non_finite, 0, static_cast<size_t>(work->rows), stream_), "clearing flags"));
  if (term.plan->wants_cross_entropy) {
    HEADWATER_RETURN_IF_ERROR(Check(
        cudaMemsetAsync(own.target_arguments, 0, static_cast<size_t>(work->rows) * sizeof(double), stream_), "clearing logits"));
  }
  if (term.FormOf(work->rows) == Form::kExponentials) {
    HEADWATER_RETURN_IF_ERROR(RunExponentials(work));
  } else {
    HEADWATER_RETURN_IF_ERROR(RunLogits(work));
  }
  // The results of a chunk's only term leave first; the next term would need the workspace.
  work->results_leave = last.chunk->terms.size() == 1;
  if (!work->results_leave) HEADWATER_RETURN_IF_ERROR(AddOwedGradWeight(work));
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemcpyAsync(work->reports, own.reports, static_cast<size_t>(work->rows) * sizeof(RowReport),
                                                  cudaMemcpyDeviceToHost, stream_),
                                  "the way back of the losses"));
  HEADWATER_RETURN_IF_ERROR(
      Check(cudaMemcpyAsync(work->non_finite, own.non_finite, static_cast<size_t>(work->rows), cudaMemcpyDeviceToHost, stream_),
            "the way back of flags"));
  if (term.plan->dithers && work->backward) {
    work->dither = host_.Take<DitherSums>(1);
    HEADWATER_RETURN_IF_ERROR(Check(LaunchSumDither(own.dither_sums, own.dither_rows, work->rows, own.dither_total, stream_),
                                    "summing up what was dithered"));
    HEADWATER_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(work->dither, own.dither_total, sizeof(DitherSums), cudaMemcpyDeviceToHost, stream_),
              "the way back of what was dithered"));
  }
  if (term.int8_teacher) {
    work->teacher_errors = host_.Take<float>(work->rows);
    HEADWATER_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(work->teacher_errors, own.teacher_errors, static_cast<size_t>(work->rows) * sizeof(float),
                              cudaMemcpyDeviceToHost, stream_),
              "the way back of the teacher's errors"));
  }
  for (const Part& part : work->parts) {
    pending_.push_back({part.rows, part.term, work->reports + part.first, work->non_finite + part.first, nullptr, work->dither,
                        work->teacher_errors});
  }
  return absl::OkStatus();
}

ChunkRows Computation::RowsOf(const Work& work, const Slice& slice) const {
  ChunkRows rows = {slice.count, work.own.targets + slice.first, work.own.token_weights + slice.first};
  if (work.has_entropy_factors) rows.entropy_factors = work.own.entropy_factors + slice.first;
  if (work.has_lse_factors) rows.lse_factors = work.own.lse_factors + slice.first;
  return rows;
}

absl::Status Computation::RunExponentials(Work* work) {
  const ProfileRange range("exponentials");
  TermBuffers& own = work->own;
  if (group_ != nullptr) HEADWATER_RETURN_IF_ERROR(work->term->head->MakeReference());
  const int64_t sum_count = work->term->head->merged_shards() * work->rows;
  HEADWATER_RETURN_IF_ERROR(Check(cudaMemsetAsync(own.overflow, 0, sizeof(int32_t), stream_), "clearing a flag"));
  HEADWATER_RETURN_IF_ERROR(
      Check(cudaMemsetAsync(own.sums, 0, static_cast<size_t>(sum_count) * sizeof(double), stream_), "clearing sums"));
  int32_t* overflow = host_.Take<int32_t>(1);
  // The other ranks' sums arrive, and the losses are computed, while the grad_hidden product runs.
  const cudaStream_t finish = group_ != nullptr && work->wants_grad_hidden ? group_->merge_stream() : stream_;
  const bool sums_early = SumsShares(*work);
  const std::vector<Slice> slices = SlicesOf(*work);
  TakeLists(work, slices);
  uint32_t* const entries = host_.Take<uint32_t>(1);
  for (size_t i = 0; i < slices.size(); ++i) {
    const Slice& slice = slices[i];
    const bool is_last = i + 1 == slices.size();
    HEADWATER_RETURN_IF_ERROR(UploadSlice(work, slice));
    HEADWATER_RETURN_IF_ERROR(PlaceSlice(work, slice));
    HEADWATER_RETURN_IF_ERROR(ComputeExponentials(work, slice, finish));
    // Without grad_hidden the flag is not needed before the last slice, and the device continues without a pause.
    const EntryList* const list = ListOf(*work, slice);
    if (!work->wants_grad_hidden && !is_last && list == nullptr) continue;
    HEADWATER_RETURN_IF_ERROR(
        Check(cudaMemcpyAsync(overflow, own.overflow, sizeof(int32_t), cudaMemcpyDeviceToHost, finish), "the way back of a flag"));
    if (list != nullptr) {
      HEADWATER_RETURN_IF_ERROR(Check(cudaMemcpyAsync(entries, list->pool.count, sizeof(uint32_t), cudaMemcpyDeviceToHost, finish),
                                      "the way back of a count"));
    }
    HEADWATER_RETURN_IF_ERROR(Check(cudaEventRecord(core_.flag_event(), finish), "recording an event"));
    if (list != nullptr) HEADWATER_RETURN_IF_ERROR(Check(LaunchSortEntries(*list, stream_), "sorting entries"));
    // The device has this to do while the host looks at the flag and brings the next slice.
    if (work->wants_grad_hidden && work->term->head->shard_weights(0).columns > 0) {
      HEADWATER_RETURN_IF_ERROR(MultiplyByWeight(work, slice, 0));
    }
    if (finish != stream_) HEADWATER_RETURN_IF_ERROR(core_.Order(finish, stream_));
    // The sum over ranks must get its multiprocessors before the product of grad_weight takes all, and enqueueing it takes the host
    // a while. It is therefore enqueued before the flag is there. If the flag is set, the rows are summed up once more.
    if (sums_early) HEADWATER_RETURN_IF_ERROR(ComputeGradHidden(work, slice, /*product_is_there=*/true));
    if (is_last) HEADWATER_RETURN_IF_ERROR(MakeGroups(work));
    if (!is_last && flow_ == nullptr) HEADWATER_RETURN_IF_ERROR(UploadSlice(work, slices[i + 1]));
    HEADWATER_RETURN_IF_ERROR(core_.AwaitEvent(core_.flag_event(), "the exponentials' product"));
    if (*overflow != 0) return RunOverflowed(work, work->wants_grad_hidden ? slice.first : 0);
    if (list != nullptr) {
      HEADWATER_RETURN_IF_ERROR(FinishList(work, slice, *entries));
      if (work->lists.empty() && work->wants_grad_hidden) HEADWATER_RETURN_IF_ERROR(MultiplyByWeight(work, slice, 0));
    }
    if (!sums_early) HEADWATER_RETURN_IF_ERROR(ComputeGradHidden(work, slice, /*product_is_there=*/true));
    HEADWATER_RETURN_IF_ERROR(DeliverGradHidden(work, slice));
  }
  HEADWATER_RETURN_IF_ERROR(CompleteList(work));
  work->owes_grad_weight = true;
  return absl::OkStatus();
}

absl::Status Computation::ComputeExponentials(Work* work, const Slice& slice, cudaStream_t finish) {
  TermRun& term = *work->term;
  TermBuffers& own = work->own;
  const int32_t merged_shards = term.head->merged_shards();
  // [merged shards, rows of the slice], slice after slice.
  double* sums = own.sums + merged_shards * slice.first;
  double* const offsets = own.offsets + slice.first;
  if (group_ != nullptr) {
    HEADWATER_RETURN_IF_ERROR(Check(LaunchTargetArguments(Rows(work->hidden, slice.first, slice.count), term.head->reference(),
                                                          /*targets=*/nullptr, term.finish.transform.logit_scale, offsets, stream_),
                                    "the rows' offsets"));
  }
  for (int32_t rank = 0; rank < term.head->shard_count(); ++rank) {
    EProductParams params;
    params.hidden = Rows(work->hidden, slice.first, slice.count);
    params.shard = term.head->shard_weights(rank);
    if (params.shard.columns == 0) continue;
    const MutableMatrix matrix = MatrixOut(*work, slice, rank);
    params.targets = own.targets + slice.first;
    params.offsets = offsets;
    params.transform = term.finish.transform;
    params.exponentials = matrix.data;
    params.e_stride = matrix.stride;
    params.partial_sums = own.partial_sums;
    HEADWATER_RETURN_IF_ERROR(Check(LaunchEProduct(params, stream_), "the exponentials' product"));
    HEADWATER_RETURN_IF_ERROR(
        Check(LaunchSumPartials(own.partial_sums, slice.count, params.shard.columns, OwnPart(sums, rank, slice.count), stream_),
              "the rows' sums"));
  }
  if (finish != stream_) HEADWATER_RETURN_IF_ERROR(core_.Order(stream_, finish));
  HEADWATER_RETURN_IF_ERROR(Collect(sums, slice.count, finish));
  HEADWATER_RETURN_IF_ERROR(MergeTargets(*work, slice, finish));
  if (term.plan->dithers) {
    HEADWATER_RETURN_IF_ERROR(Check(LaunchEResolutions(sums, merged_shards, slice.count, term.finish.gradient_resolution,
                                                       DitherRowsOf(*work, slice.first), finish),
                                    "the rows' resolutions"));
  }
  // Several parts have one shard.
  HEADWATER_RETURN_IF_ERROR(ForEachPart(*work, slice, [&](const Part& part, const Slice& rows) {
    return Check(LaunchFinishERows(sums + (rows.first - slice.first), merged_shards, own.merged_arguments + rows.first,
                                   own.offsets + rows.first, RowsOf(*work, rows), part.term->finish, own.reports + rows.first,
                                   own.row_factor + rows.first, own.target_factor + rows.first, own.overflow,
                                   DitherRowsOf(*work, rows.first), finish),
                 "the rows' losses");
  }));
  return Dither(work, slice);
}

absl::Status Computation::MergeTargets(const Work& work, const Slice& slice, cudaStream_t stream) {
  if (group_ == nullptr) return absl::OkStatus();
  return group_->merges().AllReduceSum(work.own.target_arguments + slice.first, work.own.merged_arguments + slice.first,
                                       slice.count, stream);
}

DivergenceResolution Computation::ResolutionOf(const Work& work, const Slice& slice) {
  const TermRun& term = *work.term;
  DivergenceResolution of;
  of.resolution = term.finish.gradient_resolution;
  of.factor = term.finish.loss_scale * term.finish.transform.logit_scale / term.divergence.student_temperature;
  of.token_weights = work.own.token_weights + slice.first;
  of.row_factor = work.own.row_factor + slice.first;
  return of;
}

absl::Status Computation::Dither(Work* work, const Slice& slice) {
  if (!work->term->plan->dithers || !work->backward) return absl::OkStatus();
  const TermRun& term = *work->term;
  const TermBuffers& own = work->own;
  DitherRow* const rows = own.dither_rows + slice.first;
  const bool jsd = term.plan->jsd != nullptr;
  const int32_t shard_count = term.head->shard_count();
  for (int32_t rank = 0; rank < shard_count && jsd; ++rank) {
    HEADWATER_RETURN_IF_ERROR(Check(LaunchDivergenceResolutions(MatrixOf(*work, slice, rank), ResolutionOf(*work, slice), rank == 0,
                                                                rank + 1 == shard_count, rows, stream_),
                                    "the rows' resolutions"));
  }
  HEADWATER_RETURN_IF_ERROR(ChooseLists(work, slice));
  if (const EntryList* const list = ListOf(*work, slice); list != nullptr) return ListEntries(*work, slice, *list);
  for (int32_t rank = 0; rank < shard_count; ++rank) {
    HEADWATER_RETURN_IF_ERROR(Check(LaunchDither(MatrixOut(*work, slice, rank), term.head->shard_weights(rank).vocab_start,
                                                 jsd ? nullptr : own.targets + slice.first, rows, own.dither_keys + slice.first,
                                                 /*add=*/rank > 0, own.dither_sums + slice.first, stream_),
                                    "dithering"));
  }
  return absl::OkStatus();
}

absl::Status Computation::RunOverflowed(Work* work, int64_t first) {
  // Some row's exponentials do not fit their offset: from `first` on fp32 logits, as many rows at once as the exponentials' memory
  // holds. It is all of it: earlier rows' products there are added first. On a rank their sum may still be under way.
  if (group_ != nullptr) HEADWATER_RETURN_IF_ERROR(core_.Order(gradient_stream(), stream_));
  const Slice rest = {work->placed, work->rows - work->placed};
  if (rest.count > 0) {
    HEADWATER_RETURN_IF_ERROR(UploadSlice(work, rest));
    HEADWATER_RETURN_IF_ERROR(PlaceSlice(work, rest));
  }
  HEADWATER_RETURN_IF_ERROR(DropLists(work, first));
  if (first > 0) HEADWATER_RETURN_IF_ERROR(AddGradWeight(work, {0, first}));
  work->overflowed = true;
  const int64_t slice_rows = std::max<int64_t>(work->rows / 2, 1);
  for (; first < work->rows; first += slice_rows) {
    const Slice slice = {first, std::min(slice_rows, work->rows - first)};
    HEADWATER_RETURN_IF_ERROR(RunRows(work, slice));
    if (!work->backward) continue;
    if (work->groups.order == nullptr) HEADWATER_RETURN_IF_ERROR(MakeGroups(work));
    HEADWATER_RETURN_IF_ERROR(AddGradHidden(work, slice, /*product_is_there=*/false));
    HEADWATER_RETURN_IF_ERROR(AddGradWeight(work, slice));
  }
  return absl::OkStatus();
}

absl::Status Computation::RunLogits(Work* work) {
  const TermRun& term = *work->term;
  const int64_t slice_rows = term.IsSliced(term.FormOf(work->rows)) ? term.slice_rows : work->rows;
  const bool is_sliced = slice_rows < work->rows;
  // Rows that stay on the device do so all at once: one product is better than several.
  const bool leaves_early =
      is_sliced && work->wants_grad_hidden && !core_.options().deterministic && work->parts.front().member->gradient_leaves;
  std::vector<Slice> slices;
  for (int64_t first = 0; first < work->rows; first += slice_rows) {
    slices.push_back({first, std::min(slice_rows, work->rows - first)});
  }
  TakeLists(work, slices);
  for (const Slice& slice : slices) {
    HEADWATER_RETURN_IF_ERROR(UploadSlice(work, slice));
    // Beside the student's products. A slice's hidden states come by the same stream, and are placed first.
    if (is_sliced) HEADWATER_RETURN_IF_ERROR(PlaceSlice(work, slice));
    if (term.plan->jsd != nullptr) HEADWATER_RETURN_IF_ERROR(UploadTeacherRows(work, slice));
    if (!is_sliced) HEADWATER_RETURN_IF_ERROR(PlaceSlice(work, slice));
    HEADWATER_RETURN_IF_ERROR(RunRows(work, slice));
    HEADWATER_RETURN_IF_ERROR(SettleList(work, slice));
    if (leaves_early) HEADWATER_RETURN_IF_ERROR(AddGradHidden(work, slice, /*product_is_there=*/false));
  }
  if (!work->backward) return absl::OkStatus();
  const Slice all = {0, work->rows};
  HEADWATER_RETURN_IF_ERROR(MakeGroups(work));
  if (!leaves_early) HEADWATER_RETURN_IF_ERROR(AddGradHidden(work, all, /*product_is_there=*/false));
  HEADWATER_RETURN_IF_ERROR(CompleteList(work));
  work->owes_grad_weight = true;
  return absl::OkStatus();
}

absl::Status Computation::ComputeLogits(const ShardWeights& shard, const ConstMatrix& hidden, const double* wide_hidden,
                                        void* panel, void* out, int64_t out_stride) {
  ProductShape shape;
  shape.kind = ProductKind::kLogits;
  shape.rows = hidden.rows;
  shape.width = shard.width;
  shape.a_stride = shape.b_stride = shard.stride;
  shape.out_stride = out_stride;
  if (wide_hidden == nullptr) {
    shape.element = shard.element;
    shape.vocab = shard.columns;
    return core_.products().Run(shape, hidden.data, shard.weight, out, 1, nullptr, stream_);
  }
  shape.element = shape.out_element = Element::kFloat64;
  const int64_t panel_rows = std::max<int64_t>(kPanelBytes / (shard.stride * 8), 1);
  for (int64_t start = 0; start < shard.columns; start += panel_rows) {
    shape.vocab = std::min(panel_rows, shard.columns - start);
    HEADWATER_RETURN_IF_ERROR(Check(LaunchConvert(Advance(shard.weight, shard.element, start * shard.stride), shard.element,
                                                  shape.vocab * shard.stride, panel, Element::kFloat64, stream_),
                                    "widening weights"));
    HEADWATER_RETURN_IF_ERROR(
        core_.products().Run(shape, wide_hidden, panel, Advance(out, Element::kFloat64, start), 1, nullptr, stream_));
  }
  return absl::OkStatus();
}

absl::Status Computation::ComputeProducts(Work* work, const Slice& slice) {
  const TermRun& term = *work->term;
  const TermBuffers& own = work->own;
  for (int32_t rank = 0; rank < term.head->shard_count(); ++rank) {
    const ShardWeights shard = term.head->shard_weights(rank);
    if (shard.columns == 0) continue;
    const double* wide_hidden = own.wide_hidden == nullptr ? nullptr : own.wide_hidden + slice.first * shard.stride;
    HEADWATER_RETURN_IF_ERROR(ComputeLogits(shard, Rows(work->hidden, slice.first, slice.count), wide_hidden, own.panel,
                                            own.products[static_cast<size_t>(rank)], ProductStride(shard.columns)));
  }
  return absl::OkStatus();
}

LogitsView Computation::StudentView(const Work& work, int32_t rank) const {
  const TermRun& term = *work.term;
  const ShardWeights shard = term.head->shard_weights(rank);
  LogitsView view;
  view.products = work.own.products[static_cast<size_t>(rank)];
  view.element = term.large_form == Form::kWide ? Element::kFloat64 : Element::kFloat32;
  view.stride = ProductStride(shard.columns);
  view.columns = shard.columns;
  view.vocab_start = shard.vocab_start;
  view.bias = shard.bias;
  view.bias_element = shard.element;
  view.transform = term.finish.transform;
  return view;
}

absl::Status Computation::RunRows(Work* work, const Slice& slice) {
  const ProfileRange range("rows");
  TermRun& term = *work->term;
  TermBuffers& own = work->own;
  const TermPlan& plan = *term.plan;
  if (plan.top_k != nullptr) return RunTopK(work, slice);
  const ChunkRows rows = RowsOf(*work, slice);
  const int32_t shard_count = term.head->shard_count();
  const int32_t merged_shards = term.head->merged_shards();
  HEADWATER_RETURN_IF_ERROR(ComputeProducts(work, slice));
  const bool jsd = plan.jsd != nullptr;
  if (jsd) {
    // They may still be coming while the student's products run.
    HEADWATER_RETURN_IF_ERROR(PlaceTeacherRows(work, slice));
    HEADWATER_RETURN_IF_ERROR(ComputeTeacherProducts(work, slice));
  }
  bool matrix_is_there = false;
  if (term.shard_passes) {
    HEADWATER_RETURN_IF_ERROR(RunShardPasses(work, slice));
    matrix_is_there = true;
  } else if (jsd && !plan.wants_cross_entropy && merged_shards == 1 && core_.hopper()) {
    const LogitsView student = StudentView(*work, 0);
    const LogitsView teacher = TeacherView(*work, 0);
    if (DivergenceRowsFit(student, teacher, term.divergence, term.MatrixElement())) {
      HEADWATER_RETURN_IF_ERROR(Check(LaunchDivergenceRows(student, teacher, rows, term.divergence, plan.term->loss_scale,
                                                           MatrixOut(*work, slice, 0), work->backward, own.reports + slice.first,
                                                           own.row_factor + slice.first, own.target_factor + slice.first, stream_),
                                      "the divergence's row pass"));
      matrix_is_there = true;
    }
  }
  if (!matrix_is_there) {
    if (plan.wants_cross_entropy) {
      for (int32_t rank = 0; rank < shard_count; ++rank) {
        HEADWATER_RETURN_IF_ERROR(Check(
            LaunchRowStats(StudentView(*work, rank), rows, term.cross_entropy, OwnPart(own.stats, rank, slice.count), stream_),
            "the rows' statistics"));
      }
      HEADWATER_RETURN_IF_ERROR(Collect(own.stats, slice.count, stream_));
      HEADWATER_RETURN_IF_ERROR(MergeTargets(*work, slice, stream_));
      HEADWATER_RETURN_IF_ERROR(ForEachPart(*work, slice, [&](const Part& part, const Slice& of_part) {
        return Check(LaunchFinishRows(own.stats + (of_part.first - slice.first), merged_shards,
                                      own.merged_arguments + of_part.first, RowsOf(*work, of_part), part.term->finish,
                                      own.reports + of_part.first, own.coefficients + of_part.first, own.row_factor + of_part.first,
                                      own.target_factor + of_part.first, DitherRowsOf(*work, of_part.first), stream_),
                     "the rows' losses");
      }));
    }
    if (jsd) HEADWATER_RETURN_IF_ERROR(RunDivergence(work, slice));
    if (work->backward) {
      for (int32_t rank = 0; rank < shard_count; ++rank) {
        const LogitsView student = StudentView(*work, rank);
        if (student.columns == 0) continue;
        const MutableMatrix matrix = MatrixOut(*work, slice, rank);
        HEADWATER_RETURN_IF_ERROR(Check(
            jsd ? LaunchDivergenceGradient(student, TeacherView(*work, rank), rows, term.divergence, term.cross_entropy,
                                           own.coefficients + slice.first, matrix, stream_)
                : LaunchCrossEntropyGradient(student, rows, term.cross_entropy, own.coefficients + slice.first, matrix, stream_),
            "the gradient of the logits"));
      }
    }
  }
  return Dither(work, slice);
}

absl::Status Computation::RunDivergence(Work* work, const Slice& slice) {
  TermRun& term = *work->term;
  TermBuffers& own = work->own;
  const int32_t shard_count = term.head->shard_count();
  const int32_t merged_shards = term.head->merged_shards();
  const ChunkRows rows = RowsOf(*work, slice);
  RowCoefficients* coefficients = own.coefficients + slice.first;
  for (int32_t rank = 0; rank < shard_count; ++rank) {
    HEADWATER_RETURN_IF_ERROR(
        Check(LaunchSoftStats(StudentView(*work, rank), TeacherView(*work, rank), slice.count, term.divergence,
                              OwnPart(own.soft_student, rank, slice.count), OwnPart(own.soft_teacher, rank, slice.count), stream_),
              "the divergence's statistics"));
  }
  HEADWATER_RETURN_IF_ERROR(Collect(own.soft_student, slice.count, stream_));
  HEADWATER_RETURN_IF_ERROR(Collect(own.soft_teacher, slice.count, stream_));
  HEADWATER_RETURN_IF_ERROR(
      Check(LaunchFinishSoftStats(own.soft_student, own.soft_teacher, merged_shards, slice.count, coefficients, stream_),
            "the divergence's statistics"));
  for (int32_t rank = 0; rank < shard_count; ++rank) {
    HEADWATER_RETURN_IF_ERROR(
        Check(LaunchDivergenceSums(StudentView(*work, rank), TeacherView(*work, rank), slice.count, term.divergence, coefficients,
                                   OwnPart(own.divergence_sums, rank, slice.count), stream_),
              "the divergence's sums"));
  }
  HEADWATER_RETURN_IF_ERROR(Collect(own.divergence_sums, slice.count, stream_));
  return Check(LaunchFinishDivergence(own.divergence_sums, merged_shards, rows, term.divergence, term.finish,
                                      term.plan->wants_cross_entropy, own.reports + slice.first, coefficients,
                                      own.row_factor + slice.first, own.target_factor + slice.first, stream_),
               "the rows' divergences");
}

absl::Status Computation::RunShardPasses(Work* work, const Slice& slice) {
  const TermRun& term = *work->term;
  const DivergenceTerm& divergence = term.divergence;
  TermBuffers& own = work->own;
  const int32_t ranks = term.head->merged_shards();
  const int64_t half = RoundUp(slice.count / 2, kRowGrain);
  std::vector<Slice> parts = {slice};
  if (slice.count >= kLeastRowsInParts) parts = {{slice.first, half}, {slice.first + half, slice.count - half}};
  const size_t count = parts.size();
  const cudaStream_t merges = count > 1 ? group_->merge_stream() : stream_;

  const auto view_of = [&](LogitsView view, const Slice& part) {
    view.products = Advance(view.products, view.element, (part.first - slice.first) * view.stride);
    return view;
  };
  // Pass number `pass` over a part: sides, sums, gradient.
  const auto run_pass = [&](size_t pass, const Slice& part) {
    const LogitsView student = view_of(StudentView(*work, 0), part), teacher = view_of(TeacherView(*work, 0), part);
    ShardRow* const rows = own.shard_rows + part.first;
    if (pass == 0) {
      ShardSides* const sides = OwnPart(own.shard_sides + ranks * part.first, 0, part.count);
      return Check(LaunchShardSides(student, teacher, part.count, divergence, sides, stream_), "the sides' sums");
    }
    if (pass == 1) {
      ShardSums* const sums = OwnPart(own.shard_sums + ranks * part.first, 0, part.count);
      return Check(LaunchShardSums(student, teacher, part.count, divergence, term.MatrixElement(), rows, sums, stream_),
                   "the divergence's sums");
    }
    MutableMatrix matrix = MatrixOut(*work, slice, 0);
    matrix.data = Advance(matrix.data, matrix.element, (part.first - slice.first) * matrix.stride);
    matrix.rows = part.count;
    return Check(LaunchShardGradient(student, teacher, part.count, divergence, rows, matrix, stream_),
                 "the gradient of the logits");
  };
  // All ranks' results of such a pass, to the same conclusions on each.
  const auto merge = [&](size_t pass, const Slice& part) -> absl::Status {
    const LogitsView student = StudentView(*work, 0), teacher = TeacherView(*work, 0);
    ShardRow* const rows = own.shard_rows + part.first;
    HEADWATER_RETURN_IF_ERROR(core_.Order(stream_, merges));
    if (pass == 0) {
      ShardSides* const sides = own.shard_sides + ranks * part.first;
      HEADWATER_RETURN_IF_ERROR(Collect(sides, part.count, merges));
      return Check(LaunchFinishShardSides(sides, ranks, student, teacher, part.count, divergence, rows, merges), "the rows' sides");
    }
    ShardSums* const sums = own.shard_sums + ranks * part.first;
    HEADWATER_RETURN_IF_ERROR(Collect(sums, part.count, merges));
    return Check(LaunchFinishShardSums(sums, ranks, student, teacher, RowsOf(*work, part), divergence, term.plan->term->loss_scale,
                                       term.MatrixElement(), work->backward, rows, own.reports + part.first,
                                       own.row_factor + part.first, own.target_factor + part.first, merges),
                 "the rows' divergences");
  };
  // A step is a pass over a part; the passes follow each other, and each goes part by part. Before a step, stream_ waits for the
  // merge that the step needs. Only then is the previous step's merge enqueued, so that it runs beside this step.
  const size_t merged_steps = 2 * count, steps = (work->backward ? 3 : 2) * count;
  for (size_t step = 0; step <= steps; ++step) {
    if (step >= count) HEADWATER_RETURN_IF_ERROR(core_.Order(merges, stream_));
    if (step > 0 && step <= merged_steps) HEADWATER_RETURN_IF_ERROR(merge((step - 1) / count, parts[(step - 1) % count]));
    if (step < steps) HEADWATER_RETURN_IF_ERROR(run_pass(step / count, parts[step % count]));
  }
  return core_.Order(merges, stream_);
}

ConstMatrix Computation::MatrixOf(const Work& work, const Slice& slice, int32_t rank) const {
  const MutableMatrix matrix = MatrixOut(work, slice, rank);
  return {matrix.data, matrix.rows, matrix.columns, matrix.stride, matrix.element};
}

MutableMatrix Computation::MatrixOut(const Work& work, const Slice& slice, int32_t rank) const {
  const TermRun& term = *work.term;
  const ShardWeights shard = term.head->shard_weights(rank);
  MutableMatrix matrix;
  matrix.data = work.own.products[static_cast<size_t>(rank)];
  matrix.rows = slice.count;
  matrix.columns = shard.columns;
  matrix.element = term.MatrixElement();
  matrix.stride = ProductStride(shard.columns);
  if (!work.own.matrices.empty()) {
    matrix.data = Advance(work.own.matrices[static_cast<size_t>(rank)], matrix.element, slice.first * matrix.stride);
  } else if (term.FormOf(work.rows) == Form::kExponentials && !work.overflowed) {
    // The operands of all rows are kept.
    if (work.kept_matrix != nullptr) matrix.data = work.kept_matrix;
    matrix.data = Advance(matrix.data, matrix.element, slice.first * matrix.stride);
  } else {
    matrix.stride *= BytesOf(term.ProductElement(term.large_form)) / BytesOf(matrix.element);
  }
  return matrix;
}

}  // namespace headwater::cuda
