#include "server/service/compute_loss_call.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/error.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"
#include "server/scheduler/stall_clock.h"
#include "server/scheduler/work_queue.h"
#include "server/service/canonical_header.h"
#include "server/service/field_check.h"
#include "server/service/loss_terms.h"
#include "server/service/micro_batch_account.h"
#include "server/service/proto_encoding.h"
#include "server/service/retry_after.h"
#include "server/transport/grad_gate.h"
#include "server/transport/pinned_pool.h"
#include "server/transport/region_registry.h"
#include "server/transport/row_exchange.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {
namespace {

using observability::MicroBatchOutcome;
using observability::MonotonicNow;
using transport::RegionAccess;
using transport::RegionUse;
using transport::RowExchange;

// Rows that are worth beginning with: the first slice of the CUDA engine.
constexpr int64_t kFirstRows = 1024;
// A micro-batch begins before it is complete if the rest will be there within this, at the pace of what has come.
constexpr absl::Duration kNearlyComplete = absl::Milliseconds(250);
// How often a computation that waits for rows looks whether others wait.
constexpr absl::Duration kLookAtOthers = absl::Milliseconds(1);
// How often a wait looks at what does not wake it: a lost engine, say.
constexpr absl::Duration kLook = absl::Milliseconds(50);
constexpr absl::Duration kLookAtJoined = absl::Milliseconds(2);
// Turns at the engine, the last of which a micro-batch keeps even if it has to wait for files with it: who saves again and again
// must not keep it out for ever.
constexpr int kMostTurns = 4;
// How long after the end of a stream it is known whether it was cut.
constexpr absl::Duration kEndKnown = absl::Milliseconds(50);

// Whether memory of the client is read or written where it lies.
observability::Transport PathOf(const std::optional<RegionUse>& region) {
  if (!region.has_value()) return observability::Transport::kGrpc;
  return region->memory() == MemorySpace::kDevice ? observability::Transport::kCudaIpc : observability::Transport::kSharedMemory;
}

std::string RowsName(const char* rows, size_t term, size_t term_count) {
  return term_count == 1 ? rows : absl::StrCat(rows, " of terms[", term, "]");
}

}  // namespace

// Rows that come in.
struct ComputeLossCall::Source {
  int32_t digest_stream = 0;  // 0: hidden states; 1 + term: its teacher's
  int64_t row_start = 0;      // in the micro-batch
  int64_t row_count = 0;
  int64_t row_bytes = 0;
  // Where they are, or who brings them; else they come as chunks.
  std::optional<RegionUse> region;
  std::shared_ptr<transport::JoinedRows> joined;
  int64_t joined_rows = 0;                        // of `joined` that are in `block`
  std::shared_ptr<transport::PinnedBlock> block;  // of what is not in a region; null if there are no rows
  int64_t bytes() const { return row_count * row_bytes; }
};

// Copies of what lies in the client's memory, which is the client's again when the call ends.
struct ComputeLossCall::Kept {
  std::vector<std::shared_ptr<transport::PinnedBlock>> blocks;  // by source; null: it needs none
  absl::Mutex mutex;
  int64_t running ABSL_GUARDED_BY(mutex) = 0;  // parts that are being copied
  absl::Status status ABSL_GUARDED_BY(mutex);

  void Begin() {
    absl::MutexLock lock(&mutex);
    ++running;
  }
  void End(const absl::Status& result) {
    absl::MutexLock lock(&mutex);
    --running;
    status.Update(result);
  }
  absl::Status Await() {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(
        +[](int64_t* count) { return *count == 0; }, &running));
    return status;
  }
};

// All that a submission's terms and rows point to.
struct ComputeLossCall::Payload {
  MicroBatchRequest request;
  std::vector<Source> sources;
  transport::ByteBudget::Reservation held;  // of max_held_bytes, once it is held

  // Of rows, per-row data and class weights.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Source& source : sources) bytes += source.bytes();
    for (const LossTermRequest& term : request.terms) {
      if (term.targets.has_value()) bytes += term.row_count * int64_t{sizeof(int32_t)};
      for (const auto* values : {&term.token_weights, &term.entropy_factors, &term.lse_factors}) {
        if (values->has_value()) bytes += term.row_count * int64_t{sizeof(float)};
      }
      const auto* const divergence = std::get_if<JensenShannonRequest>(&term.loss);
      const auto* const hard = divergence != nullptr ? &divergence->hard_loss : std::get_if<CrossEntropyRequest>(&term.loss);
      if (hard != nullptr && hard->class_weights) bytes += static_cast<int64_t>(hard->class_weights->size() * sizeof(float));
      if (const auto* const top_k = std::get_if<TopKRequest>(&term.loss)) bytes += top_k->bytes();
      if (term.teacher.has_value() && term.teacher->joined.has_value()) {
        bytes += static_cast<int64_t>(term.teacher->joined->row_indices.size() * sizeof(int32_t));
      }
    }
    return bytes;
  }
};

// [rows of the term] each; empty if not asked for.
struct ComputeLossCall::TokenOutputs {
  std::vector<float> token_loss, lse, target_log_probability, entropy, mean_logits, log_sum_sq_probs;
  std::vector<int32_t> argmax;
};

// What the head is given of rows that may still be on their way.
class ComputeLossCall::Incoming final : public heads::IncomingRows {
 public:
  explicit Incoming(ComputeLossCall& call) : call_(call) {}

  absl::Status AwaitRows(int64_t row_end) override {
    RowExchange& exchange = call_.transfer_->exchange();
    const absl::Time start = MonotonicNow();
    clock_.BeginWait(start);
    while (true) {
      if (absl::Status status = call_.PullJoined(); !status.ok()) return status;
      const absl::Time now = MonotonicNow();
      const absl::Time give_up = clock_.GiveUpAt(now, call_.core_.queue.others_wait());
      const auto there = exchange.AwaitRows(row_end, std::min(give_up, now + kLookAtOthers));
      if (!there.ok()) return there.status();
      if (*there) {
        clock_.EndWait(MonotonicNow());
        if (trace() != nullptr) trace()->AddSpan("engine waits", absl::StrCat("for rows to ", row_end), start, MonotonicNow());
        if (exchange.complete()) Send(gate_.Open());
        return absl::OkStatus();
      }
      // Rows that were sent of the gradient because all have come just now cannot be computed again.
      if (MonotonicNow() < give_up || !gate_.Shut()) continue;
      return MakeError(ErrorReason::kCancelled, "the rows stay away for too long to hold the engine for them");
    }
  }

  bool stalled() const override { return gate_.is_shut(); }

  absl::StatusOr<Digest> Finish(const DigestBuilder* rows) override {
    if (absl::Status status = call_.transfer_->exchange().CheckInput(); !status.ok()) return status;
    if (const absl::Time now = MonotonicNow(); trace() != nullptr) {
      trace()->AddSpan("commit", "decision: all rows are there", now, now);
    }
    Send(gate_.Open());
    const std::string header = CanonicalHeader(call_.payload_->request);
    return rows != nullptr ? rows->Finish(header) : call_.transfer_->Digested().Finish(header);
  }

  // Looks itself whether all rows have come: where nothing is added the engine does not ask before its end.
  void GradHiddenReady(int64_t row_end) override {
    if (trace() != nullptr) trace()->AddRows("engine: grad_hidden", row_end, call_.times_.engine_start);
    const int64_t may_leave = gate_.Ready(row_end);
    Send(may_leave == 0 && call_.transfer_->exchange().complete() ? gate_.Open() : may_leave);
  }

 private:
  void Send(int64_t row_end) {
    if (row_end > 0 && call_.sends_grad_) call_.transfer_->GradReady(row_end, /*here=*/false);
  }

  observability::CallTrace* trace() const { return call_.identity_.trace.get(); }

  ComputeLossCall& call_;
  scheduler::StallClock clock_;
  transport::GradGate gate_;
};

ComputeLossCall::ComputeLossCall(ServerCore& core, Caller caller, std::string client, scheduler::WaitLimits limits, Identity who)
    : core_(core),
      caller_(std::move(caller)),
      client_(std::move(client)),
      limits_(std::move(limits)),
      identity_(std::move(who)),
      payload_(std::make_shared<Payload>()) {}

ComputeLossCall::~ComputeLossCall() {
  if (!counted_) core_.metrics.CountMicroBatch(MicroBatchOutcome::kCancelled);  // its stream ended before Run()
}

absl::Status ComputeLossCall::Done(absl::Status status) {
  if (!counted_ && !status.ok()) {
    core_.metrics.CountMicroBatch(OutcomeOf(status));
    counted_ = true;
  }
  return status;
}

// ---- the header ------------------------------------------------------------------------------------------------------

absl::Status ComputeLossCall::Accept(const v1::MicroBatchHeader& header) { return Done(OnHeader(header)); }

absl::Status ComputeLossCall::OnHeader(const v1::MicroBatchHeader& header) {
  times_.header = MonotonicNow();
  auto request = DecodeMicroBatchHeader(header, core_.options.limits);
  if (!request.ok()) return request.status();
  payload_->request = *std::move(request);
  head_name_ = payload_->request.terms.front().head.head.ToString();
  if (payload_->request.transfer.has_value()) {
    auto entry = core_.transfers.Announce(*payload_->request.transfer);
    if (!entry.ok()) return entry.status();
    entry_.emplace(*std::move(entry));
  }
  if (payload_->request.session.has_value()) {
    const heads::SessionId& session = *payload_->request.session;
    client_ = "session " + absl::BytesToHexString({reinterpret_cast<const char*>(session.data()), session.size()});
  }
  auto use = core_.UseSession(payload_->request.session);
  if (!use.ok()) return use.status();
  session_use_ = *std::move(use);
  HEADWATER_RETURN_IF_ERROR(BuildTerms(caller_, core_.registry, &payload_->request, &submission_));
  head_uses_ = UseHeads(submission_);
  HEADWATER_RETURN_IF_ERROR(CheckTargets(payload_->request, submission_));
  HEADWATER_RETURN_IF_ERROR(FindRows());
  FillSubmission();
  HEADWATER_RETURN_IF_ERROR(AwaitSteps());
  HEADWATER_RETURN_IF_ERROR(heads::CheckSubmission(submission_));
  HEADWATER_RETURN_IF_ERROR(ReserveBytes());
  HEADWATER_RETURN_IF_ERROR(ClaimJoined());
  // The header is accepted: from here on a higher attempt takes effect.
  if (submission_.attempt > 0 && submission_.micro_batch.has_value()) {
    HEADWATER_RETURN_IF_ERROR(heads::Announce(submission_, limits_));
  }
  return PlaceRows();
}

absl::Status ComputeLossCall::FindRows() {
  const MicroBatchRequest& request = payload_->request;
  const auto find = [&](const SharedRowsRequest& rows, int64_t bytes, RegionAccess access, DataType type, const std::string& field,
                        std::optional<RegionUse>* region) {
    auto use = core_.regions.Find(*request.session, rows.region_id, rows.offset_bytes, bytes, access, ElementBytes(type), field);
    if (!use.ok()) return use.status();
    region->emplace(*std::move(use));
    return absl::OkStatus();
  };
  Source& hidden = payload_->sources.emplace_back();
  hidden.row_count = request.row_count;
  hidden.row_bytes = request.hidden_size * ElementBytes(request.data_type);
  if (request.hidden_rows.has_value()) {
    HEADWATER_RETURN_IF_ERROR(
        find(*request.hidden_rows, hidden.bytes(), RegionAccess::kRead, request.data_type, "header.hidden_rows", &hidden.region));
  }
  path_ = PathOf(hidden.region);
  for (size_t i = 0; i < request.terms.size(); ++i) {
    const LossTermRequest& term = request.terms[i];
    if (!term.teacher.has_value()) continue;
    Source& teacher = payload_->sources.emplace_back();
    const RowsView& view = submission_.terms[i].term.teacher_hidden;
    teacher.digest_stream = 1 + static_cast<int32_t>(i);
    teacher.row_start = term.row_start;
    teacher.row_count = view.row_count;
    teacher.row_bytes = view.column_count * ElementBytes(view.data_type);
    if (!term.teacher->rows.has_value()) continue;
    HEADWATER_RETURN_IF_ERROR(find(*term.teacher->rows, teacher.bytes(), RegionAccess::kRead, view.data_type,
                                   TermField(i) + ".teacher_hidden.rows", &teacher.region));
  }
  if (request.grad_hidden_rows.has_value()) {
    const int64_t bytes = request.row_count * request.hidden_size * ElementBytes(request.grad_hidden_data_type);
    HEADWATER_RETURN_IF_ERROR(find(*request.grad_hidden_rows, bytes, RegionAccess::kWrite, request.grad_hidden_data_type,
                                   "header.grad_hidden_rows", &grad_region_));
  }
  for (const Source& source : payload_->sources) {
    if (!source.region.has_value()) continue;
    if (grad_region_.has_value() && RegionUse::Overlap(*source.region, *grad_region_)) {
      return FieldError(ErrorReason::kInvalidField, "header.grad_hidden_rows", "memory apart from the rows that are read",
                        "memory that overlaps it");
    }
  }
  return absl::OkStatus();
}

// Everything of the submission but terms, rows and outputs.
void ComputeLossCall::FillSubmission() {
  const MicroBatchRequest& request = payload_->request;
  submission_.label = identity_.request_id;
  submission_.micro_batch = request.micro_batch;
  submission_.attempt = request.attempt;
  submission_.session = request.session;
  submission_.backward = request.backward;
  submission_.explicit_commit = request.explicit_commit;
  submission_.first_wins = request.first_wins;
  submission_.refuse_non_finite = request.refuse_non_finite;
  submission_.late_token_factors = request.late_token_factors;
  if (request.allow_held || request.late_token_factors || core_.options.deterministic) {
    submission_.hold = [this] { return HoldPayload(/*anyway=*/false); };
    submission_.hold_first = [this] { return HoldPayload(/*anyway=*/true); };
  }
  submission_.hidden = {nullptr, request.row_count, request.hidden_size, request.data_type};
  submission_.grad_hidden_scale = request.grad_hidden_scale;
}

absl::Status ComputeLossCall::AwaitSteps() {
  if (!submission_.backward) return absl::OkStatus();
  for (const heads::SubmittedTerm& term : submission_.terms) {
    if (!term.step.has_value() || !term.head_epoch.has_value()) continue;
    HEADWATER_RETURN_IF_ERROR(term.head->AwaitStep({*term.head_epoch, *term.step}, limits_));
  }
  return absl::OkStatus();
}

// Admits the micro-batch's tensors: rows in, gradient and per-token outputs out.
absl::Status ComputeLossCall::ReserveBytes() {
  const Limits& limits = core_.options.limits;
  const MicroBatchRequest& request = payload_->request;
  int64_t row_bytes = 0;
  int64_t bytes = 0;  // that take memory of the server
  for (const Source& source : payload_->sources) {
    row_bytes += source.bytes();
    // Of a region, what PrepareRegions() and BeginToKeep() copy.
    bytes += source.region.has_value() ? source.region->staged_bytes() + (KeepsCopies() ? source.bytes() : 0) : source.bytes();
    if (source.digest_stream > 0 && request.terms[static_cast<size_t>(source.digest_stream - 1)].teacher->joined.has_value()) {
      bytes += source.row_count * transport::TeacherJoin::kRowOverheadBytes;  // of its claim
    }
  }
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", row_bytes, "max_micro_batch_bytes", limits.max_micro_batch_bytes));
  // In deterministic mode what others wait for is held whatever is free: another attempt finds its place in the end.
  if (!core_.options.deterministic && MustBeHeld(submission_)) {
    HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", payload_->bytes(), "max_held_bytes", limits.max_held_bytes));
  }

  // All per-token outputs travel in the summary, which is one message.
  constexpr int64_t kTermBytes = 512;
  int64_t output_rows = 0;
  for (const LossTermRequest& term : request.terms) output_rows += term.row_count;
  const int64_t output_bytes = output_rows * 4 * std::popcount(request.outputs);
  const int64_t summary_bytes = output_bytes + kTermBytes * static_cast<int64_t>(request.terms.size());
  HEADWATER_RETURN_IF_ERROR(
      CheckLimit("header.outputs", summary_bytes, "max_message_bytes", limits.max_message_bytes - kMessageOverheadBytes));

  bytes += output_bytes;
  if (grad_region_.has_value()) {
    bytes += grad_region_->staged_bytes();
  } else if (request.return_grad_hidden) {
    bytes += request.row_count * request.hidden_size * ElementBytes(request.grad_hidden_data_type);
  }
  HEADWATER_RETURN_IF_ERROR(CheckLimit("header.row_count", bytes, "max_in_flight_bytes", limits.max_in_flight_bytes));
  return core_.ReserveInFlight(client_, bytes, "the micro-batch", &reservation_);
}

absl::Status ComputeLossCall::ClaimJoined() {
  const MicroBatchRequest& request = payload_->request;
  auto claims = std::make_shared<std::vector<std::shared_ptr<transport::JoinedRows>>>();
  for (Source& source : payload_->sources) {
    if (source.digest_stream == 0) continue;
    const size_t index = static_cast<size_t>(source.digest_stream - 1);
    const LossTermRequest& term = request.terms[index];
    if (!term.teacher->joined.has_value()) continue;
    const JoinedTeacherRequest& joined = *term.teacher->joined;
    const RowsView& view = submission_.terms[index].term.teacher_hidden;
    const transport::JoinedSet set = {term.teacher->head.tenant, joined.join_key, joined.total_row_count, view.column_count,
                                      view.data_type};
    // A repeat of this micro-batch is the same user of the rows, whatever its attempt.
    const HeadStepRequest& head = request.terms.front().head;
    const std::string user =
        request.micro_batch.has_value()
            ? absl::StrCat(head.head.ToString(), "/", head.epoch.has_value() ? heads::EpochToHex(*head.epoch) : "", "/",
                           head.step.value_or(-1), "/", *request.micro_batch)
            : "";
    auto claim = core_.join.Claim(set, source.row_count, joined.row_indices, user);
    if (!claim.ok()) return claim.status();
    source.joined = *std::move(claim);
    claims->push_back(source.joined);
  }
  if (!claims->empty()) submission_.until_decided = std::move(claims);
  return absl::OkStatus();
}

// ---- memory ----------------------------------------------------------------------------------------------------------

absl::Status ComputeLossCall::PlaceRows() {
  const MicroBatchRequest& request = payload_->request;
  std::vector<Transfer::Tensor> tensors;
  for (Source& source : payload_->sources) {
    Transfer::Tensor& tensor = tensors.emplace_back();
    const size_t term = static_cast<size_t>(std::max(source.digest_stream - 1, 0));
    const bool is_hidden = source.digest_stream == 0;
    tensor.rows.name = is_hidden ? "hidden" : RowsName("teacher_hidden", term, request.terms.size());
    tensor.rows.row_start = source.row_start;
    tensor.rows.row_count = source.row_count;
    tensor.rows.row_bytes = source.row_bytes;
    tensor.digest_stream = source.digest_stream;
    if (source.region.has_value()) {
      tensor.by_chunks = false;
      tensor.why_not = absl::StrCat("because ", is_hidden ? "header.hidden_rows" : TermField(term) + ".teacher_hidden.rows",
                                    " says where the rows are");
    } else if (source.joined != nullptr) {
      tensor.by_chunks = false;
      tensor.why_not = absl::StrCat("because ", TermField(term), ".joined_teacher says that another process sends the rows");
      tensor.rows.by_input = false;
    }
    if (!source.region.has_value() && source.row_count > 0) {
      auto block = core_.rows.Allocate(source.bytes());
      if (!block.ok()) return block.status();
      source.block = *std::move(block);
      tensor.rows.data = source.block->data();
      tensor.owner = source.block;
    }
    PointAt(source, tensor.rows.data, MemorySpace::kHost);
  }
  transfer_ = std::make_shared<Transfer>(
      core_,
      Transfer::Options{request.row_count, static_cast<int64_t>(request.terms.size()), request.stripe_count, request.backward},
      std::move(tensors));
  return PlaceGrad();
}

void ComputeLossCall::PointAt(const Source& source, const void* data, MemorySpace memory) {
  RowsView& view = source.digest_stream == 0 ? submission_.hidden
                                             : submission_.terms[static_cast<size_t>(source.digest_stream - 1)].term.teacher_hidden;
  view.data = data;
  view.memory = memory;
}

absl::Status ComputeLossCall::PlaceGrad() {
  const MicroBatchRequest& request = payload_->request;
  if (!request.return_grad_hidden || request.row_count == 0) return absl::OkStatus();
  submission_.grad_hidden = {nullptr, request.row_count, request.hidden_size, request.grad_hidden_data_type};
  if (grad_region_.has_value()) return absl::OkStatus();
  const int64_t row_bytes = request.hidden_size * ElementBytes(request.grad_hidden_data_type);
  auto block = core_.rows.Allocate(request.row_count * row_bytes);
  if (!block.ok()) return block.status();
  submission_.grad_hidden.data = (*block)->data();
  transfer_->OpenGrad(request.row_count, row_bytes, (*block)->data(), *block);
  sends_grad_ = true;
  return absl::OkStatus();
}

void ComputeLossCall::AllocateTokenOutputs() {
  const MicroBatchRequest& request = payload_->request;
  token_outputs_.resize(request.terms.size());
  for (size_t i = 0; i < request.terms.size(); ++i) {
    const size_t rows = static_cast<size_t>(request.terms[i].row_count);
    const auto allocate = [&](v1::TokenOutput output, auto* values) {
      if ((request.outputs & TokenOutputBit(output)) != 0) values->resize(rows);
      return values->empty() ? nullptr : values->data();
    };
    TokenOutputs& outputs = token_outputs_[i];
    LossTerm& term = submission_.terms[i].term;
    term.token_loss = allocate(v1::TOKEN_OUTPUT_LOSS, &outputs.token_loss);
    term.lse = allocate(v1::TOKEN_OUTPUT_LSE, &outputs.lse);
    term.target_log_probability = allocate(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, &outputs.target_log_probability);
    term.entropy = allocate(v1::TOKEN_OUTPUT_ENTROPY, &outputs.entropy);
    term.argmax = allocate(v1::TOKEN_OUTPUT_ARGMAX, &outputs.argmax);
    term.mean_logits = allocate(v1::TOKEN_OUTPUT_MEAN_LOGITS, &outputs.mean_logits);
    term.log_sum_sq_probs = allocate(v1::TOKEN_OUTPUT_LOG_SUM_SQ_PROBS, &outputs.log_sum_sq_probs);
  }
}

absl::Status ComputeLossCall::PrepareRegions() {
  for (Source& source : payload_->sources) {
    if (!source.region.has_value()) continue;
    HEADWATER_RETURN_IF_ERROR(source.region->Prepare());
    PointAt(source, source.region->data(), source.region->memory());
    HEADWATER_RETURN_IF_ERROR(AddEvent(*source.region, source.row_bytes));
    core_.metrics.CountBytes(observability::Direction::kIn, source.bytes(), PathOf(source.region));
  }
  if (!grad_region_.has_value() || submission_.grad_hidden.row_count == 0) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(grad_region_->Prepare());
  submission_.grad_hidden.data = grad_region_->data();
  submission_.grad_hidden.memory = grad_region_->memory();
  return AddEvent(*grad_region_, submission_.grad_hidden.column_count * ElementBytes(submission_.grad_hidden.data_type));
}

absl::Status ComputeLossCall::AddEvent(const RegionUse& region, int64_t row_bytes) {
  const DeviceEvent* const event = region.after();
  if (event == nullptr || event == submission_.after || region.bytes() == 0) return absl::OkStatus();
  if (submission_.after == nullptr) {
    submission_.after = event;
    return absl::OkStatus();
  }
  // The engine waits for one event only; another one is over once a row behind it has been read.
  DigestBuilder unused;
  const RowsView row = {region.data(), 1, row_bytes / int64_t{sizeof(float)}, DataType::kFloat32, MemorySpace::kDevice};
  return core_.engine->DigestRows({&row, 1}, event, &unused);
}

absl::StatusOr<std::shared_ptr<const void>> ComputeLossCall::HoldPayload(bool anyway) {
  const int64_t bytes = payload_->bytes();
  if (anyway) {
    core_.held.ReserveAnyway(bytes, &payload_->held);
  } else if (!core_.held.TryReserve(bytes, &payload_->held)) {
    const int64_t available = core_.held.available_bytes();
    const bool a_slot_would_do = !payload_->request.late_token_factors && !core_.options.deterministic;
    return MakeError(ErrorReason::kStagingFull,
                     absl::StrCat("the contribution would be held as ", bytes, " bytes of rows, and ", available, " of ",
                                  core_.held.capacity_bytes(), " (max_held_bytes) are free; commit or discard others first, ",
                                  a_slot_would_do ? "create the head with more staging_slots, or raise " : "or raise ",
                                  "--max_held_bytes of the server"),
                     {{"limit", "max_held_bytes"},
                      {"requestedBytes", absl::StrCat(bytes)},
                      {"availableBytes", absl::StrCat(available)},
                      {kRetryAfterMsKey, "500"}});
  }
  if (kept_ == nullptr) HEADWATER_RETURN_IF_ERROR(BeginToKeep());
  HEADWATER_RETURN_IF_ERROR(kept_->Await());
  for (size_t i = 0; i < payload_->sources.size(); ++i) {
    Source& source = payload_->sources[i];
    if (kept_->blocks[i] == nullptr) continue;
    source.block = std::move(kept_->blocks[i]);
    source.region.reset();
    PointAt(source, source.block->data(), MemorySpace::kHost);
  }
  return std::shared_ptr<const void>(payload_);
}

bool ComputeLossCall::KeepsCopies() const {
  return submission_.late_token_factors || (core_.options.deterministic && submission_.micro_batch.has_value());
}

absl::Status ComputeLossCall::BeginToKeep() {
  constexpr int64_t kPartBytes = 4 << 20;
  auto kept = std::make_shared<Kept>();
  kept->blocks.resize(payload_->sources.size());
  for (size_t i = 0; i < payload_->sources.size(); ++i) {
    const Source& source = payload_->sources[i];
    if (!source.region.has_value() || source.bytes() == 0) continue;
    auto block = core_.rows.Allocate(source.bytes());
    if (!block.ok()) return block.status();
    kept->blocks[i] = *std::move(block);
  }
  for (size_t i = 0; i < payload_->sources.size(); ++i) {
    const Source& source = payload_->sources[i];
    if (kept->blocks[i] == nullptr) continue;
    // A device's copy is one; those of host memory are made by several threads. The payload keeps the region mapped meanwhile.
    const int64_t rows_a_part =
        source.region->memory() == MemorySpace::kDevice ? source.row_count : std::max<int64_t>(1, kPartBytes / source.row_bytes);
    for (int64_t row = 0; row < source.row_count; row += rows_a_part) {
      const int64_t count = std::min(rows_a_part, source.row_count - row);
      const int64_t offset = row * source.row_bytes;
      const RowsView part = {static_cast<const uint8_t*>(source.region->data()) + offset, count,
                             source.row_bytes / int64_t{sizeof(uint16_t)}, DataType::kBFloat16, source.region->memory()};
      uint8_t* const out = static_cast<uint8_t*>(kept->blocks[i]->data()) + offset;
      kept->Begin();
      core_.senders.Post([engine = core_.engine.get(), payload = payload_, kept, block = kept->blocks[i], part,
                          after = submission_.after, out] { kept->End(engine->CopyRows(part, after, out)); });
    }
  }
  kept_ = std::move(kept);
  return absl::OkStatus();
}

absl::Status ComputeLossCall::PullJoined() {
  RowExchange& exchange = transfer_->exchange();
  for (size_t i = 0; i < payload_->sources.size(); ++i) {
    Source& source = payload_->sources[i];
    const int64_t ready = source.joined != nullptr ? source.joined->ready_rows() : 0;
    if (ready <= source.joined_rows) continue;
    const int64_t count = ready - source.joined_rows;
    const auto place = exchange.Claim(i, source.joined_rows, count, count * source.row_bytes, "joined_teacher");
    if (!place.ok()) return place.status();
    HEADWATER_RETURN_IF_ERROR(source.joined->Gather(source.joined_rows, count, *place));
    transfer_->AddToDigest(i, source.joined_rows, count);
    exchange.Deliver(i, source.joined_rows, count);
    source.joined_rows = ready;
  }
  return absl::OkStatus();
}

bool ComputeLossCall::Joins() const { return submission_.until_decided != nullptr; }

// Waits for joined rows alone, when nothing else is missing.
absl::Status ComputeLossCall::AwaitJoined() {
  RowExchange& exchange = transfer_->exchange();
  const auto cancelled = [&] { return !exchange.status().ok() || limits_.waiter->cancelled(); };
  for (const Source& source : payload_->sources) {
    if (source.joined == nullptr || source.joined_rows == source.row_count) continue;
    HEADWATER_RETURN_IF_ERROR(source.joined->Await(source.row_count, limits_.deadline, cancelled));
  }
  return PullJoined();
}

bool ComputeLossCall::OnlyJoinedMissing() const {
  int64_t missing = 0;
  for (const Source& source : payload_->sources) {
    if (source.joined != nullptr) missing += (source.row_count - source.joined_rows) * source.row_bytes;
  }
  const RowExchange& exchange = transfer_->exchange();
  return missing > 0 && exchange.total_bytes() - exchange.received_bytes() == missing;
}

// ---- the computation -------------------------------------------------------------------------------------------------

absl::Status ComputeLossCall::Run() {
  accept_time_ = MonotonicNow();
  place_ = core_.start_order.Join(accept_time_);
  if (entry_.has_value()) entry_->Open(transfer_);
  AllocateTokenOutputs();
  HEADWATER_RETURN_IF_ERROR(Done(PrepareRegions()));
  // The copies are made while the engine computes, and wait for an event that may be of the gradient's region, which is let go.
  const absl::Cleanup copied = [this] {
    if (kept_ != nullptr) kept_->Await().IgnoreError();
  };
  if (KeepsCopies()) HEADWATER_RETURN_IF_ERROR(Done(BeginToKeep()));
  HEADWATER_RETURN_IF_ERROR(Done(Compute()));
  CountOutcome();
  for (const Source& source : payload_->sources) {
    if (source.joined != nullptr) source.joined->MarkUsed();
  }
  if (grad_region_.has_value() && submission_.grad_hidden.row_count > 0) {
    core_.metrics.CountBytes(observability::Direction::kOut, grad_region_->bytes(), PathOf(grad_region_));
    HEADWATER_RETURN_IF_ERROR(grad_region_->Finish());
  }
  return AwaitGradSent();
}

absl::Status ComputeLossCall::Compute() {
  const int64_t row_count = payload_->request.row_count;
  const bool large = scheduler::JobSizeOf(row_count) == scheduler::JobSize::kLarge;
  submission_.engine_digests = std::any_of(payload_->sources.begin(), payload_->sources.end(),
                                           [](const Source& source) { return source.region.has_value(); });
  // In deterministic mode all of them are: how rows came must not show in the last bits.
  may_begin_early_ = large && !core_.options.deterministic;
  Incoming incoming(*this);
  // Small ones are complete when they begin, so that the engine can compute many of them together.
  submission_.incoming = may_begin_early_ ? &incoming : nullptr;
  while (true) {
    HEADWATER_RETURN_IF_ERROR(AwaitStart());
    if (submission_.incoming == nullptr && submission_.backward) {
      auto digest = DigestOfAll();
      if (!digest.ok()) return digest.status();
      submission_.digest = *digest;
    }
    if (!transfer_->exchange().complete()) core_.metrics.CountEarlyStart();
    const absl::Status status = Submit();
    if (!status.ok()) return HasReason(status, ErrorReason::kProtocolViolation) ? ExplainEnd(status) : status;
    if (!outcome_->needs_all_rows) return absl::OkStatus();
    if (incoming.stalled()) core_.metrics.CountStall();
    submission_.incoming = nullptr;
    submission_.engine_digests = false;
    may_begin_early_ = false;
  }
}

bool ComputeLossCall::EnoughToBegin() const {
  const RowExchange& exchange = transfer_->exchange();
  if (!may_begin_early_ || exchange.ready_rows() < std::min(kFirstRows, payload_->request.row_count)) return false;
  // Behind others it would gain nothing, and take their patience with rows that they wait for themselves.
  if (!core_.queue.idle() || !core_.start_order.IsFirst(place_, MonotonicNow())) return false;
  const int64_t received = exchange.received_bytes();
  const int64_t missing = exchange.total_bytes() - received;
  return received > 0 &&
         (MonotonicNow() - accept_time_) * (static_cast<double>(missing) / static_cast<double>(received)) <= kNearlyComplete;
}

absl::Status ComputeLossCall::AwaitStart() {
  RowExchange& exchange = transfer_->exchange();
  const absl::Duration idle = core_.options.stream_idle_timeout;
  const absl::Duration stripe_wait = core_.options.limits.max_stripe_wait;
  while (true) {
    HEADWATER_RETURN_IF_ERROR(PullJoined());
    const int64_t seen = exchange.version();
    if (absl::Status status = exchange.CheckInput(); !status.ok()) return ExplainEnd(status);
    if (exchange.complete() || EnoughToBegin()) return absl::OkStatus();
    if (OnlyJoinedMissing()) {
      if (absl::Status status = AwaitJoined(); !status.ok()) return exchange.status().ok() ? status : exchange.status();
      continue;
    }
    const absl::Time now = MonotonicNow();
    if (limits_.waiter->cancelled()) {
      return MakeError(ErrorReason::kCancelled, "the call was cancelled while its rows came; nothing was added");
    }
    if (now >= limits_.deadline) {
      return MakeError(ErrorReason::kDeadlineExceeded, "the deadline passed while the rows came; nothing was added");
    }
    for (const heads::HeadUse& use : head_uses_) {
      HEADWATER_RETURN_IF_ERROR(
          use->CheckEpoch(std::nullopt));  // one that has been deleted keeps its memory as long as this call is there
    }
    const absl::Time idle_end = exchange.last_row_time() + idle;
    if (now >= idle_end) {
      return MakeError(ErrorReason::kCancelled, absl::StrCat("the client has sent no rows for ", absl::FormatDuration(idle),
                                                             " (stream_idle_timeout); nothing was added"));
    }
    const absl::Time stripes_end = accept_time_ + stripe_wait;
    const int32_t joined = transfer_->joined();
    if (joined < transfer_->stripe_count() && now >= stripes_end) {
      return MakeError(ErrorReason::kStripeLost,
                       absl::StrCat(joined, " of ", transfer_->stripe_count(), " streams have come within ",
                                    absl::FormatDuration(stripe_wait), " (max_stripe_wait), and rows are missing"));
    }
    exchange.AwaitChange(seen, std::min({limits_.deadline, idle_end, now + (Joins() ? kLookAtJoined : kLook)}));
  }
}

absl::Status ComputeLossCall::ExplainEnd(const absl::Status& status) {
  RowExchange& exchange = transfer_->exchange();
  const absl::Time known = MonotonicNow() + kEndKnown;
  while (exchange.status().ok() && MonotonicNow() < known) exchange.AwaitChange(exchange.version(), known);
  const absl::Status broken = exchange.status();
  return broken.ok() ? status : broken;
}

absl::StatusOr<Digest> ComputeLossCall::DigestOfAll() {
  DigestBuilder digest = transfer_->Digested();
  // Rows in regions have not been looked at yet.
  std::vector<RowsView> streams(submission_.terms.size() + 1);
  bool any = false;
  for (const Source& source : payload_->sources) {
    if (!source.region.has_value()) continue;
    const size_t stream = static_cast<size_t>(source.digest_stream);
    streams[stream] = stream == 0 ? submission_.hidden : submission_.terms[stream - 1].term.teacher_hidden;
    any = true;
  }
  if (any) HEADWATER_RETURN_IF_ERROR(core_.engine->DigestRows(streams, submission_.after, &digest));
  return digest.Finish(CanonicalHeader(payload_->request));
}

absl::Status ComputeLossCall::AwaitFiles() {
  if (!heads::IsBehindFiles(submission_)) return absl::OkStatus();
  place_.Release();  // nobody lets it begin first
  const RowExchange& exchange = transfer_->exchange();
  scheduler::ThreadWaiter waiter([&] { return !exchange.status().ok() || limits_.waiter->cancelled(); }, limits_.waiter->calls());
  const absl::Status status = heads::AwaitFiles(submission_, {limits_.deadline, &waiter});
  return !status.ok() && !exchange.status().ok() ? exchange.status() : status;
}

absl::Status ComputeLossCall::Submit() {
  absl::StatusOr<heads::SubmissionOutcome> outcome = MakeError(ErrorReason::kInternal, "the queue did not run the job");
  bool has_run = false;
  for (int turns_left = kMostTurns; !has_run; --turns_left) {
    HEADWATER_RETURN_IF_ERROR(AwaitFiles());
    const absl::Status queued = core_.queue.Run(
        client_, scheduler::JobSizeOf(payload_->request.row_count),
        [&] {
          // While it waited for its turn files may have come between: others take the turn.
          if (turns_left > 1 && heads::IsBehindFiles(submission_)) return;
          const observability::BusyClock::Work work(core_.busy);
          times_.engine_start = MonotonicNow();
          place_.Release();
          has_run = true;
          outcome = heads::Submit(submission_, *core_.engine, cancelled_);
          times_.engine_end = MonotonicNow();
        },
        cancelled_, limits_.deadline);
    if (!queued.ok()) return queued;
  }
  // Whatever came of it, and whether its client is still there: an engine would look stuck otherwise while it only refuses.
  core_.metrics.ObservePhase(observability::Phase::kCompute, times_.engine_end - times_.engine_start);
  if (!outcome.ok()) return outcome.status();
  outcome_ = *std::move(outcome);
  return absl::OkStatus();
}

absl::Status ComputeLossCall::AwaitGradSent() {
  if (!sends_grad_) return absl::OkStatus();
  RowExchange& exchange = transfer_->exchange();
  transfer_->GradReady(payload_->request.row_count, /*here=*/true);
  while (true) {
    const int64_t seen = exchange.version();
    if (absl::Status status = exchange.status(); !status.ok()) return status;
    if (transfer_->grad_sent()) return absl::OkStatus();
    exchange.AwaitChange(seen, absl::InfiniteFuture());  // each stream's client is watched while it should take something
  }
}

void ComputeLossCall::CountOutcome() {
  counted_ = true;
  times_.last_row = transfer_->exchange().last_row_time();
  CountMicroBatch(core_.metrics, submission_, *outcome_, path_, times_);
}

void ComputeLossCall::Trace(absl::Time end) const {
  observability::CallTrace* const trace = identity_.trace.get();
  if (trace == nullptr) return;
  const auto add = [&](const char* phase, absl::Time from, absl::Time to) {
    if (to > from) trace->AddSpan(phase, phase, from, to);  // of a phase that another one overlapped nothing may be left
  };
  add("upload", times_.header, times_.last_row);
  add("queue", times_.last_row, times_.engine_start);
  add("compute", times_.engine_start, times_.engine_end);
  add("download", times_.engine_end, end);
  trace->SetAttribute("transport", observability::TransportName(path_));
  trace->SetAttribute("rows", absl::StrCat(payload_->request.row_count));
  trace->SetAttribute("product_flops", absl::StrCat(ProductFlopsOf(submission_, *outcome_)));
  trace->SetAttribute("engine_detail", submission_.incoming != nullptr
                                           ? "rows as the engine waited for them, and as their gradient was ready"
                                           : "none: computed as a whole, perhaps together with others");
}

void ComputeLossCall::FillSummary(v1::MicroBatchSummary* summary) {
  const heads::SubmissionOutcome& outcome = *outcome_;
  for (size_t i = 0; i < outcome.terms.size(); ++i) {
    v1::LossTermResult* const term = summary->add_terms();
    EncodeLossSums(outcome.terms[i], term->mutable_sums());
    term->set_non_finite_row_count(outcome.terms[i].non_finite_row_count);
    if (payload_->request.terms[i].gradient_resolution != 0) EncodeGradientDither(outcome.terms[i].dither, term->mutable_dither());
    term->set_weight_version(outcome.weight_versions[i]);
    term->set_teacher_weight_version(outcome.teacher_weight_versions[i]);
    const auto encode = [&](v1::TokenOutput output, const auto& values, v1::DataType type,
                            v1::Tensor* (v1::LossTermResult::*field)()) {
      if ((payload_->request.outputs & TokenOutputBit(output)) == 0) return;
      v1::Tensor* const tensor = (term->*field)();
      tensor->set_data_type(type);
      tensor->add_shape(static_cast<int64_t>(values.size()));
      tensor->set_data(values.data(), values.size() * 4);
    };
    using Result = v1::LossTermResult;
    const TokenOutputs& outputs = token_outputs_[i];
    encode(v1::TOKEN_OUTPUT_LOSS, outputs.token_loss, v1::DATA_TYPE_FLOAT32, &Result::mutable_token_loss);
    encode(v1::TOKEN_OUTPUT_LSE, outputs.lse, v1::DATA_TYPE_FLOAT32, &Result::mutable_lse);
    encode(v1::TOKEN_OUTPUT_TARGET_LOG_PROBABILITY, outputs.target_log_probability, v1::DATA_TYPE_FLOAT32,
           &Result::mutable_target_log_probability);
    encode(v1::TOKEN_OUTPUT_ENTROPY, outputs.entropy, v1::DATA_TYPE_FLOAT32, &Result::mutable_entropy);
    encode(v1::TOKEN_OUTPUT_ARGMAX, outputs.argmax, v1::DATA_TYPE_INT32, &Result::mutable_argmax);
    encode(v1::TOKEN_OUTPUT_MEAN_LOGITS, outputs.mean_logits, v1::DATA_TYPE_FLOAT32, &Result::mutable_mean_logits);
    encode(v1::TOKEN_OUTPUT_LOG_SUM_SQ_PROBS, outputs.log_sum_sq_probs, v1::DATA_TYPE_FLOAT32, &Result::mutable_log_sum_sq_probs);
  }

  summary->set_state(static_cast<v1::ContributionState>(outcome.state));
  summary->set_form(static_cast<v1::ContributionForm>(outcome.form));
  summary->set_replayed(outcome.replayed);
  summary->set_payload_differs(outcome.payload_differs);
  if (submission_.backward) summary->set_digest(outcome.digest.data(), outcome.digest.size());
  if (outcome.step.has_value()) summary->set_step(*outcome.step);
  const absl::Time now = MonotonicNow();
  core_.metrics.ObservePhase(observability::Phase::kDownload, now - times_.engine_end);
  v1::Timing* const timing = summary->mutable_timing();
  EncodeDuration(times_.last_row - times_.header, timing->mutable_upload());
  EncodeDuration(times_.engine_start - times_.last_row, timing->mutable_queue());
  EncodeDuration(times_.engine_end - times_.engine_start, timing->mutable_engine());
  EncodeDuration(now - times_.engine_end, timing->mutable_download());
  summary->set_transport(observability::TransportName(path_));
  Trace(now);
}

}  // namespace headwater::service
