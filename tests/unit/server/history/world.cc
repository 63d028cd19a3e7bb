#include "world.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/heads/steps/submit.h"
#include "server/model_files/xxh3.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::history {

using heads::Head;
using heads::HeadInfo;

// What calls point to; kept while their contribution is held.
struct World::CallMemory {
  Payload payload;
  std::vector<float> grad_hidden;
  std::vector<std::vector<float>> lse;
};

// Remembers the heads, so that their numbers can be seen.
class World::Engine : public testing::FakeEngine {
 public:
  using FakeEngine::FakeEngine;

  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    absl::StatusOr<std::unique_ptr<EngineHead>> head = FakeEngine::DoCreateHead(spec);
    if (head.ok()) heads[static_cast<int>(spec.transform.logit_scale) - 1] = static_cast<const testing::FakeHead*>(head->get());
    return head;
  }

  std::map<int, const testing::FakeHead*> heads;  // the newest of each name
};

namespace {

constexpr char kRoot[] = "checkpoints";

Reply ToReply(const absl::Status& status, std::vector<double> numbers = {}) {
  if (!status.ok()) return {ErrorReasonName(GetErrorReason(status))};
  return {"OK", std::move(numbers)};
}
// `say` tells the numbers of what went well.
template <typename T, typename Say>
Reply ToReply(const absl::StatusOr<T>& result, const Say& say) {
  return result.ok() ? Reply{"OK", say(*result)} : ToReply(result.status());
}

Digest ToDigest(uint64_t content) {
  Digest digest{};
  std::memcpy(digest.data(), &content, sizeof(content));
  return digest;
}

std::string ChecksumOf(const std::vector<float>& values) {
  model_files::Xxh3Hasher hasher;
  hasher.Update(values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
  return hasher.Digest();
}

char StateOf(const HeadInfo& info) {
  switch (info.state) {
    case heads::HeadState::kLoading:
      return 'L';
    case heads::HeadState::kReady:
      return 'R';
    case heads::HeadState::kLost:
      return 'X';
    case heads::HeadState::kRestored:
      return 'B';
  }
  return '?';
}

std::vector<double> TotalsOf(const heads::StepTotals& totals) {
  return Numbers(totals.micro_batch_count, totals.valid_token_count, totals.loss_sum, totals.token_weight_sum,
                 totals.non_finite_row_count);
}

uint64_t ContentOf(const Digest& digest) {
  uint64_t content = 0;
  std::memcpy(&content, digest.data(), sizeof(content));
  return content;
}

}  // namespace

// ---- the process -----------------------------------------------------------------------------------------------------

World::World(const std::vector<Payload>& payloads, int shard_count, const WorldBugs& bugs)
    : payloads_(payloads), shard_count_(shard_count), bugs_(bugs) {
  // The process can end before and after each change.
  files_.OnEachChange([this] { await_points_.Pass(); });
  if (bugs.never_syncs) files_.LeaveOut("syncdir");
  if (bugs.keeps_older_checkpoint) files_.LeaveOut("exchange");
  Start();
}

World::~World() { Stop(); }

void World::Start() {
  engine_ = std::make_unique<Engine>(shard_count_);
  testing::FakeControl& control = engine_->control();
  control.bug = bugs_.engine;
  control.on_call = control.on_done = [this] { await_points_.Pass(); };
  control.during_compute = [this] {
    if (const std::function<void()> work = std::exchange(during_compute_, nullptr); work != nullptr) work();
  };
  const heads::RegistryLimits limits = {
      .max_heads = kMaxHeads, .max_heads_per_tenant = kMaxHeadsPerTenant, .max_tenant_memory_bytes = kMaxTenantMemoryBytes};
  const heads::HeadLimits head_limits = {.max_step_micro_batches = kMaxStepRecords};
  registry_ = std::make_unique<heads::HeadRegistry>(*engine_, limits, head_limits, [this] { return Now(); });
  const heads::SessionLimits session_limits = {.max_sessions = kMaxSessions, .max_lease = absl::Seconds(kMaxLeaseSeconds)};
  sessions_ = std::make_unique<heads::SessionRegistry>(
      session_limits, [this](const heads::SessionId& session, auto&&...) { return OnSessionEnd(session); },
      [this] { return bugs_.session_clock_stands ? absl::UnixEpoch() : Now(); });
  store_ = *checkpoint::CheckpointStore::Open(kRoot, files_);
}

void World::Stop() {
  deleted_.clear();
  sessions_.reset();
  registry_.reset();
  engine_.reset();
  store_.reset();
}

int64_t World::OnSessionEnd(const heads::SessionId& session) {
  if (!computing_) return registry_->DropSession(session);
  ended_meanwhile_.push_back(session);  // the heads' locks are held
  return 0;
}

// ---- names for what is random ----------------------------------------------------------------------------------------

heads::Epoch World::EpochOf(int number) const {
  heads::Epoch foreign;
  foreign.fill(0xee);
  return number >= 0 && number < static_cast<int>(epochs_.size()) ? epochs_[static_cast<size_t>(number)] : foreign;
}

heads::Epoch World::EpochOf(const Target& target) const {
  if (bugs_.ignores_epochs) {
    if (const absl::StatusOr<HeadPointer> head = registry_->Find(NameOf(target.head)); head.ok()) return (*head)->Describe().epoch;
  }
  return EpochOf(target.epoch);
}

int World::NumberOf(const heads::Epoch& epoch) {
  const auto found = std::find(epochs_.rbegin(), epochs_.rend(), epoch);
  if (found != epochs_.rend()) return static_cast<int>(epochs_.rend() - found) - 1;
  epochs_.push_back(epoch);
  return static_cast<int>(epochs_.size()) - 1;
}

std::optional<heads::SessionId> World::SessionOf(int number) const {
  if (number == kNoSession) return std::nullopt;
  heads::SessionId foreign;
  foreign.fill(0xee);
  return number >= 0 && number < static_cast<int>(session_ids_.size()) ? session_ids_[static_cast<size_t>(number)] : foreign;
}

int World::IndexOf(const heads::HeadName& name) {
  for (int head = 0; head < kHeadCount; ++head) {
    if (NameOf(head).tenant == name.tenant && NameOf(head).head == name.head) return head;
  }
  return -1;
}

// ---- events ----------------------------------------------------------------------------------------------------------

Reply World::Run(const Event& event) {
  FailCallOf(event);
  if (event.disk_full) disk_.set_capacity_bytes(disk_.stored_bytes() + event.disk_left);
  if (event.crash_at > 0) return CrashIn(event);
  Reply reply = Dispatch(event);
  disk_.set_capacity_bytes(INT64_MAX);
  engine_->control().ClearFailures();
  during_compute_ = nullptr;
  reply.beside = std::exchange(beside_, {});
  return reply;
}

void World::FailCallOf(const Event& event) {
  engine_->control().ClearFailures();
  if (event.failing_call == nullptr) return;
  engine_->control().FailNext(event.failing_call, MakeError(event.failure, "by order of the history"));
}

Reply World::Dispatch(const Event& event) {
  await_points_.Pass();
  switch (event.op) {
    case Op::kCall:
    case Op::kAnnounce:
    case Op::kRows:
      return Call(event);
    case Op::kCommit:
    case Op::kDiscard:
      return Decide(event);
    case Op::kDamage:
      Damage(event);
      return {};
    case Op::kCreate:
      return Create(event);
    case Op::kDelete:
      return Delete(event);
    case Op::kExpireIdle:
      return ExpireIdle(event);
    case Op::kOpenSession:
      return ToReply(sessions_->Open("history", absl::Seconds(event.seconds + 0.5)), [this](const auto& grant) {
        session_ids_.push_back(grant.id);
        return Numbers(absl::ToDoubleSeconds(grant.lease), session_ids_.size() - 1);
      });
    case Op::kRenewSession:
      return ToReply(sessions_->Renew(*SessionOf(event.session)),
                     [](absl::Duration it) { return Numbers(absl::ToDoubleSeconds(it)); });
    case Op::kCloseSession:
      return {"OK", Numbers(sessions_->Close(*SessionOf(event.session)))};
    case Op::kAdvance:
      now_ += event.seconds;
      return {};
    case Op::kExpireSessions:
      now_ += event.seconds;
      return {"OK", Numbers(sessions_->Expire().size())};
    case Op::kRestart:
      return Restart();
    default: {
      absl::StatusOr<HeadPointer> head = Find(event, event.targets[0].head);
      if (!head.ok()) return ToReply(head.status());
      if (*head == nullptr) return {};
      return OnHead(event, *head);
    }
  }
}

// Null for a deleted head that is not remembered.
absl::StatusOr<World::HeadPointer> World::Find(const Event& event, int head) const {
  if (!event.deleted_handle) return registry_->Find(NameOf(head));
  const auto found = deleted_.find(head);
  return found == deleted_.end() ? nullptr : found->second;
}

absl::Status World::AwaitStep(const Event& event, const HeadPointer& head, const Target& target) const {
  scheduler::ThreadWaiter gone([] { return true; });
  heads::WaitLimits limits = {absl::InfiniteFuture(), nullptr, absl::InfinitePast()};
  if (event.cancel_waiting) limits = {absl::InfiniteFuture(), &gone};
  return head->AwaitStep(KeyOf(target), limits);
}

absl::StatusOr<heads::SessionRegistry::Use> World::UseSession(int session) {
  if (session == kNoSession) return heads::SessionRegistry::Use();
  absl::StatusOr<heads::SessionRegistry::Use> use = sessions_->Begin(*SessionOf(session));
  if (use.ok() && bugs_.forgets_call_of_session) return heads::SessionRegistry::Use();
  return use;
}

// ---- micro-batches ---------------------------------------------------------------------------------------------------

Reply World::Call(const Event& event) {
  absl::StatusOr<heads::SessionRegistry::Use> use = UseSession(event.session);
  if (!use.ok()) return ToReply(use.status());
  const auto memory = std::make_shared<CallMemory>();
  memory->payload = payloads_[static_cast<size_t>(event.payload)];
  const Payload& payload = memory->payload;
  memory->grad_hidden.resize(payload.hidden.size());

  heads::Submission submission;
  for (const Target& target : event.targets) {
    heads::SubmittedTerm& term = submission.terms.emplace_back();
    absl::StatusOr<HeadPointer> head = Find(event, target.head);
    if (!head.ok()) return ToReply(head.status());
    if (*head == nullptr) return {};
    term.head = *head;
    if (target.epoch != kNoEpoch) term.head_epoch = EpochOf(target);
    term.step = target.step;
    term.expected_weight_version = target.version;
    const size_t start = static_cast<size_t>(target.row_start), count = static_cast<size_t>(target.row_count);
    term.term.row_start = target.row_start;
    term.term.row_count = target.row_count;
    term.term.targets = absl::MakeConstSpan(payload.targets).subspan(start, count);
    term.term.loss_scale = target.scale;
    if (target.weighted) term.term.token_weights = absl::MakeConstSpan(payload.token_weights).subspan(start, count);
    term.term.lse = memory->lse.emplace_back(count).data();
    if (target.teacher < 0) continue;
    absl::StatusOr<HeadPointer> teacher = Find(event, target.teacher);
    if (!teacher.ok()) return ToReply(teacher.status());
    term.teacher_head = *teacher;
    term.term.loss = JsdSpec();
    if (target.teacher_epoch != kNoEpoch) term.teacher_head_epoch = EpochOf(target.teacher_epoch);
    term.expected_teacher_weight_version = target.teacher_version;
    term.term.teacher_hidden = {payload.teacher_hidden.data() + start * kWidth, target.row_count, kWidth, DataType::kFloat32};
  }
  if (event.names_micro_batch) submission.micro_batch = event.micro_batch;
  submission.attempt = event.attempt;
  submission.backward = event.backward;
  submission.explicit_commit = event.is_explicit;
  submission.first_wins = event.first_wins;
  submission.refuse_non_finite = event.refuse;
  submission.late_token_factors = event.late_factors;
  submission.session = SessionOf(event.session);
  if (event.allow_held || event.late_factors) {
    submission.hold = [this, memory]() -> absl::StatusOr<std::shared_ptr<const void>> {
      await_points_.Pass();
      if (held_count_ >= kMaxHeldCount) return MakeError(ErrorReason::kStagingFull, "as many are held as may be");
      ++held_count_;
      return std::shared_ptr<const void>(memory.get(), [this, memory](const void*) { --held_count_; });
    };
  }
  submission.hidden = {payload.hidden.data(), payload.row_count, kWidth, DataType::kFloat32};
  if (event.backward) submission.grad_hidden = {memory->grad_hidden.data(), payload.row_count, kWidth, DataType::kFloat32};
  submission.digest = ToDigest(ContentOf(event));

  for (size_t i = 0; i < event.targets.size(); ++i) {
    const heads::SubmittedTerm& term = submission.terms[i];
    if (!event.backward || !term.step.has_value() || !term.head->spec().trainable) continue;
    if (absl::Status status = AwaitStep(event, term.head, event.targets[i]); !status.ok()) return ToReply(status);
  }
  if (event.op != Op::kRows) {
    absl::Status announced = heads::Announce(submission);
    if (!announced.ok() || event.op == Op::kAnnounce) return ToReply(announced);
  }

  bool cancelled = event.cancel == Cancel::kBefore;
  bool in_progress = false;
  const bool is_beside = std::exchange(computing_, true);
  during_compute_ = [&] {
    if (event.cancel == Cancel::kWhileComputing) cancelled = true;
    DoMeanwhile(event, submission, &in_progress);
  };
  const auto is_cancelled = [this, &cancelled] {
    await_points_.Pass();
    return cancelled;
  };
  // The rows that come while they are computed, and what becomes of the call when it waits for all of them.
  heads::TestRows rows(submission.digest);
  absl::Status broken;
  if (event.flow == Flow::kBreaks) broken = MakeError(ErrorReason::kStripeLost, "by order of the history");
  if (event.flow == Flow::kRefused) broken = MakeError(ErrorReason::kProtocolViolation, "by order of the history");
  rows.on_await = [&](int64_t row_end) {
    await_points_.Pass();
    if (row_end < payload.row_count) return absl::OkStatus();
    rows.is_stalled = event.flow == Flow::kStalls;
    if (rows.is_stalled) return MakeError(ErrorReason::kCancelled, "the rows stay away");
    return event.flow == Flow::kBreaks ? broken : absl::OkStatus();
  };
  rows.on_finish = [&] {
    await_points_.Pass();
    if (event.flow == Flow::kRefused) return broken;
    if (event.cancel == Cancel::kAtDecision) cancelled = true;
    return absl::OkStatus();
  };
  if (event.flow != Flow::kComplete) submission.incoming = &rows;
  absl::StatusOr<heads::SubmissionOutcome> outcome = heads::Submit(submission, *engine_, is_cancelled);
  if (outcome.ok() && outcome->needs_all_rows) {
    submission.incoming = nullptr;
    outcome = broken.ok() ? heads::Submit(submission, *engine_, is_cancelled) : broken;
  }
  computing_ = is_beside;
  if (!is_beside) {
    for (const heads::SessionId& session : std::exchange(ended_meanwhile_, {})) registry_->DropSession(session);
  }
  if (!outcome.ok()) return ToReply(outcome.status());

  Reply reply;
  for (size_t i = 0; i < outcome->terms.size(); ++i) {
    const LossSums& sums = outcome->terms[i];
    AddNumbers(reply.numbers, sums.valid_token_count, sums.loss_sum, sums.token_weight_sum, sums.non_finite_row_count,
               outcome->weight_versions[i], outcome->teacher_weight_versions[i]);
  }
  for (const std::vector<float>& lse : memory->lse) AddNumbers(reply.numbers, lse);
  AddNumbers(reply.numbers, memory->grad_hidden, static_cast<int>(outcome->state), static_cast<int>(outcome->form),
             outcome->replayed, outcome->payload_differs, event.backward ? ContentOf(outcome->digest) >> 16 : 0);
  if (event.meanwhile == Meanwhile::kSameCall || event.meanwhile == Meanwhile::kDiscard || event.meanwhile == Meanwhile::kCommit) {
    AddNumbers(reply.numbers, in_progress);
  }
  return reply;
}

// What would wait for the call's end must not be tried here: it would wait for ever.
void World::DoMeanwhile(const Event& event, const heads::Submission& submission, bool* in_progress) {
  switch (event.meanwhile) {
    case Meanwhile::kNothing:
      return;
    case Meanwhile::kSameCall:
    case Meanwhile::kDiscard:
    case Meanwhile::kCommit: {
      std::vector<heads::DecisionTarget> targets;
      for (size_t i = 0; i < event.targets.size(); ++i) {
        const HeadPointer& head = submission.terms[i].head;
        if (!head->spec().trainable) continue;
        const auto steps = head->GetSteps(EpochOf(event.targets[i].epoch));
        if (!steps.ok()) return;
        const auto found = steps->first.micro_batches.find(event.micro_batch);
        if (found == steps->first.micro_batches.end() || found->second.state != heads::ContributionState::kInProgress) return;
        targets.push_back({head, KeyOf(event.targets[i])});
      }
      const absl::Status status =
          event.meanwhile == Meanwhile::kSameCall ? heads::Submit(submission, *engine_, nullptr).status()
          : event.meanwhile == Meanwhile::kDiscard
              ? heads::Discard(targets, event.micro_batch, event.attempt, submission.session).status()
              : heads::Commit(targets, event.micro_batch, event.attempt, {1, {}}, submission.session).status();
      *in_progress = HasReason(status, ErrorReason::kMicroBatchInProgress);
      return;
    }
    case Meanwhile::kCloseSession:
      sessions_->Close(*SessionOf(event.session));
      return;
    case Meanwhile::kLeasePasses:
      now_ += kMaxLeaseSeconds + 1;
      sessions_->Expire();
      return;
    case Meanwhile::kOtherCall:
      CallBeside(event.beside.at(0));
      return;
  }
}

void World::CallBeside(const Event& event) {
  FailCallOf(event);
  Reply reply;
  std::thread thread([&] { reply = Call(event); });
  thread.join();
  engine_->control().ClearFailures();
  during_compute_ = nullptr;
  beside_.push_back(std::move(reply));
}

Reply World::Decide(const Event& event) {
  absl::StatusOr<heads::SessionRegistry::Use> use = UseSession(event.session);
  if (!use.ok()) return ToReply(use.status());
  std::vector<heads::DecisionTarget> targets;
  for (const Target& target : event.targets) {
    absl::StatusOr<HeadPointer> head = Find(event, target.head);
    if (!head.ok()) return ToReply(head.status());
    if (*head == nullptr) return {};
    targets.push_back({*head, KeyOf(target)});
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (absl::Status status = AwaitStep(event, targets[i].head, event.targets[i]); !status.ok()) return ToReply(status);
  }
  absl::StatusOr<bool> done;
  if (event.op == Op::kDiscard) {
    done = heads::Discard(targets, event.micro_batch, event.attempt, SessionOf(event.session));
  } else {
    const heads::CommitArguments arguments = {
        .factor = event.factor,
        .token_factors = MakeTokenFactors(event.token_factors, payloads_[static_cast<size_t>(event.payload)].row_count)};
    done = heads::Commit(targets, event.micro_batch, event.attempt, arguments, SessionOf(event.session));
  }
  return ToReply(done, [](bool it) { return Numbers(it); });
}

// ---- one head --------------------------------------------------------------------------------------------------------

Reply World::AddGradient(const Event& event, const HeadPointer& head) {
  const heads::StepKey key = KeyOf(event.targets[0]);
  absl::Status check = head->CheckAddGradient(key, event.micro_batch, event.attempt, event.row_start, event.row_count);
  if (!check.ok()) return ToReply(check);
  const std::vector<float> rows = MakeNumbers(event.numbers, event.row_count * kWidth);
  const heads::GradientPart part = {
      .row_start = event.row_start, .row_count = event.row_count, .data = rows.data(), .factor = event.factor};
  return ToReply(head->AddGradient(key, event.micro_batch, event.attempt, ToDigest(ContentOf(event)), part,
                                   [&event] { return event.cancel == Cancel::kBefore; }),
                 [](bool it) { return Numbers(it); });
}

std::vector<double> World::HeadNumbers(const Head& head) {
  const HeadInfo info = head.Describe();
  return Numbers(NumberOf(info.epoch), StateOf(info), info.open_step.value_or(-1), info.weight_version);
}

Reply World::AndHead(const absl::Status& status, const Head& head) {
  return ToReply(status, status.ok() ? HeadNumbers(head) : std::vector<double>());
}

Reply World::OnHead(const Event& event, const HeadPointer& head) {
  const Target& target = event.targets[0];
  const heads::StepKey key = KeyOf(target);
  const std::optional<heads::Epoch> epoch = target.epoch == kNoEpoch ? std::nullopt : std::optional(key.epoch);
  if (target.step.has_value()) {
    if (absl::Status status = AwaitStep(event, head, target); !status.ok()) return ToReply(status);
  }
  switch (event.op) {
    case Op::kAddGradient:
      return AddGradient(event, head);
    case Op::kSeal:  // with a deadline that has passed
      return ToReply(head->Seal(key, *event.expected, heads::WaitLimits()), [](const auto& it) {
        return Numbers(it.replayed, it.stats.norm_squared, it.stats.non_finite_count, TotalsOf(it.totals));
      });
    case Op::kApply:
      return ToReply(head->Apply(key, event.expected, event.apply), [&](const auto& it) {
        return Numbers(it.replayed, it.open_step, it.weight_version, it.global_grad_norm, it.gradient_norm_squared, it.clip_factor,
                       TotalsOf(it.totals), EngineHeadOf(target.head).update_count());
      });
    case Op::kDiscardGradient:
      return ToReply(head->DiscardGradient(key), [](const auto& it) { return Numbers(it.first, it.second); });
    case Op::kReplace:
      return Replace(event, head);
    case Op::kReadGradient: {
      std::vector<float> values(static_cast<size_t>(head->spec().vocab_size * kWidth));
      const absl::Status read =
          head->ReadGradient(key, HeadTensor::kGradWeight, 0, static_cast<int64_t>(values.size()), values.data());
      return ToReply(read, Numbers(values));
    }
    case Op::kGradientNorm:
      return ToReply(head->GradientNorm(key), [](const auto& it) { return Numbers(it.norm_squared, it.non_finite_count); });
    case Op::kGetSteps:
      return ToReply(head->GetSteps(key.epoch).status());
    case Op::kGetHead:
      return AndHead(absl::OkStatus(), *head);
    case Op::kCheckEpoch:
      return ToReply(head->CheckEpoch(key.epoch));
    case Op::kSetTensors:
      return SetTensors(event, head);
    case Op::kReadWeights: {
      std::vector<float> values(static_cast<size_t>(head->spec().vocab_size * kWidth));
      const absl::Status read =
          head->ReadWeights(HeadTensor::kWeight, 0, static_cast<int64_t>(values.size()), values.data(), event.version, epoch);
      return ToReply(read, Numbers(values));
    }
    case Op::kSave:
      return ToReply(head->Save(epoch, *store_, event.checkpoint, event.overwrite),
                     [](const auto& it) { return Numbers(it.step); });
    case Op::kRestore:
      return AndHead(head->Restore(key.epoch, *store_, event.checkpoint).status(), *head);
    case Op::kTake: {
      std::vector<heads::Epoch> recovers;
      for (const int number : event.recovers) recovers.push_back(EpochOf(number));
      return AndHead(head->Take(epoch, recovers).status(), *head);
    }
    default:
      return {"not an event on a head", {}};
  }
}

Reply World::Replace(const Event& event, const HeadPointer& head) {
  const int64_t width = event.tensors[0] == HeadTensor::kBias ? 1 : kWidth;
  const auto values = std::make_shared<std::vector<float>>(MakeNumbers(event.numbers, head->spec().vocab_size * width));
  const heads::ShadowTensor tensor = {
      .tensor = event.tensors[0],
      .data = std::shared_ptr<const void>(values, values->data()),
      .byte_count = static_cast<int64_t>(values->size() * sizeof(float)) - (event.wrong_size ? 4 : 0)};
  return ToReply(head->Replace(KeyOf(event.targets[0]), tensor), [](const auto& it) { return Numbers(it.closed); });
}

Reply World::SetTensors(const Event& event, const HeadPointer& head) {
  const heads::Epoch epoch = EpochOf(event.targets[0].epoch);
  std::vector<heads::TensorUpdate> updates;
  std::vector<std::vector<float>> values;
  values.reserve(event.tensors.size());
  for (const HeadTensor tensor : event.tensors) {
    values.push_back(MakeNumbers(event.numbers, head->spec().vocab_size * (tensor == HeadTensor::kBias ? 1 : kWidth)));
    if (event.tensors.size() == 1) {
      const int64_t bytes = static_cast<int64_t>(values[0].size() * sizeof(float)) - (event.wrong_size ? 4 : 0);
      return AndHead(head->SetTensor(epoch, tensor, DataType::kFloat32, values[0].data(), bytes).status(), *head);
    }
    updates.push_back({tensor, DataType::kFloat32, [data = values.back().data()](int64_t start, int64_t count, void* out) {
                         std::memcpy(out, data + start, static_cast<size_t>(count) * sizeof(float));
                         return absl::OkStatus();
                       }});
  }
  return AndHead(head->SetTensors(epoch, updates).status(), *head);
}

// ---- the server ------------------------------------------------------------------------------------------------------

Reply World::Create(const Event& event) {
  const int head = event.targets[0].head;
  return ToReply(registry_->Create(NameOf(head), SpecOf(head, event.other_spec), event.if_exists, store_.get()),
                 [this](const auto& it) { return Numbers(HeadNumbers(*it.head), it.created); });
}

Reply World::Delete(const Event& event) {
  const Target& target = event.targets[0];
  HeadPointer pointer;
  for (const HeadPointer& head : registry_->ListAll()) {
    if (IndexOf(head->name()) == target.head) pointer = head;
  }
  const std::optional<heads::Epoch> epoch = target.epoch == kNoEpoch ? std::nullopt : std::optional(EpochOf(target.epoch));
  const absl::Status status = registry_->Delete(NameOf(target.head), epoch, event.force, store_.get());
  if (status.ok()) deleted_[target.head] = pointer;
  return ToReply(status);
}

Reply World::ExpireIdle(const Event& event) {
  now_ += event.seconds;
  std::map<int, HeadPointer> before;
  for (const HeadPointer& head : registry_->ListAll()) before[IndexOf(head->name())] = head;
  Reply reply;
  for (const heads::HeadName& name : registry_->ExpireIdle(absl::Seconds(kIdleSeconds), store_.get(), event.save_first)) {
    reply.numbers.push_back(IndexOf(name));
    deleted_[IndexOf(name)] = before[IndexOf(name)];
  }
  std::sort(reply.numbers.begin(), reply.numbers.end());
  return reply;
}

Reply World::Restart() {
  Stop();
  Start();
  Reply reply;
  for (const heads::HeadRegistry::Comeback& comeback : registry_->RestoreAll(*store_)) {
    if (!comeback.checkpoint.empty()) reply.numbers.push_back(IndexOf(comeback.name));
  }
  std::sort(reply.numbers.begin(), reply.numbers.end());
  if (bugs_.comes_back_in_silence) {
    for (const HeadPointer& head : registry_->ListAll()) head->Take(std::nullopt).IgnoreError();
  }
  return reply;
}

int64_t World::StoredBy(const Event& event) const {
  if (event.op != Op::kSave && event.op != Op::kDelete && event.op != Op::kCreate && event.op != Op::kRestore) return 0;
  const heads::HeadName name = NameOf(event.targets[0].head);
  if (event.op == Op::kSave) {
    const auto info = store_->Read(name.tenant, name.head, event.checkpoint);
    return info.ok() ? info->sequence : 0;
  }
  const auto live = store_->LiveHeads();
  return live.ok() && std::find(live->begin(), live->end(), std::pair(name.tenant, name.head)) != live->end();
}

Reply World::CrashIn(const Event& event) {
  const int64_t before = StoredBy(event);
  const size_t epoch_count = epochs_.size(), session_count = session_ids_.size();
  disk_.WatchSyncs(event.power_loss.has_value());
  await_points_.EndAt(event.crash_at);
  std::optional<Reply> unanswered;
  try {
    unanswered = Dispatch(event);
  } catch (const ProcessEnd&) {
  }
  const bool begun = await_points_.passed() > 1;
  await_points_.EndAt(0);
  disk_.set_capacity_bytes(INT64_MAX);
  if (event.power_loss.has_value()) disk_.LosePower(*event.power_loss);
  computing_ = false;
  ended_meanwhile_.clear();
  // Nobody has heard of these.
  epochs_.resize(epoch_count);
  session_ids_.resize(session_count);
  Reply reply = Restart();
  const bool changed = StoredBy(event) != before;
  const bool is_done = unanswered.has_value() && unanswered->reason == "OK";
  // A head that was made is a new one, whatever a former one of its name has saved; one that was restored can come back.
  const bool is_made = event.op == Op::kCreate && is_done && unanswered->numbers.back() != 0;
  const bool is_restored = event.op == Op::kRestore && is_done && before == 0;
  const bool stores = event.op == Op::kSave || is_restored || ((event.op == Op::kDelete || is_made) && before != 0);
  if (unanswered.has_value() && stores && changed != (unanswered->reason == "OK")) {
    return {changed ? "what was refused has been done" : "what was done is gone", {}};
  }
  reply.numbers.insert(reply.numbers.begin(), changed);
  reply.crash = unanswered.has_value() ? Crash::kUnanswered : begun ? Crash::kWithin : Crash::kBefore;
  return reply;
}

void World::Damage(const Event& event) {
  const heads::HeadName name = NameOf(event.targets[0].head);
  const std::string directory = absl::StrCat(kRoot, "/", name.tenant, "/", name.head, "/", event.checkpoint);
  const absl::StatusOr<std::vector<std::string>> files = disk_.ListDirectory(directory);
  if (!files.ok()) return;
  // The manifest comes first: odd events cut it short, even ones change a shard's last number.
  const std::string path = absl::StrCat(directory, "/", event.numbers % 2 == 1 ? files->front() : files->back());
  std::string bytes = disk_.Contents(path);
  if (event.numbers % 2 == 1) {
    bytes.resize(bytes.size() / 2);
  } else {
    bytes.replace(bytes.size() - 4, 4, 4, '\x7f');  // no number that a history has
  }
  disk_.SetContents(path, bytes);
}

// ---- the observable state --------------------------------------------------------------------------------------------

const testing::FakeHead& World::EngineHeadOf(int head) const { return *engine_->heads.at(head); }

void World::ObserveStep(View& view, const heads::StepRecord& step) {
  static const std::map<heads::StepState, char> kStates = {{heads::StepState::kOpen, 'O'},
                                                           {heads::StepState::kSealed, 'S'},
                                                           {heads::StepState::kApplied, 'A'},
                                                           {heads::StepState::kDiscarded, 'D'},
                                                           {heads::StepState::kReplaced, 'R'}};
  static constexpr char kContributions[] = {'N', 'P', 'S', 'C', 'D'};
  view.Section("step, state", step.step, kStates.at(step.state));
  view.Section("totals", TotalsOf(step.Totals()));
  view.Section("records: id, state, tombstone, fence, attempt, form, digest, counts, factor, token factors");
  for (const auto& [id, record] : step.micro_batches) {
    view.Add(id, kContributions[static_cast<int>(record.state)], record.tombstone_attempt, record.fence_attempt);
    if (record.state != heads::ContributionState::kStaged && record.state != heads::ContributionState::kCommitted) continue;
    view.Add(record.attempt, static_cast<int>(record.form), record.digest.has_value() ? ContentOf(*record.digest) >> 16 : 0);
    const auto& counts = record.counts;
    view.Add(counts.valid_token_count, counts.loss_sum, counts.token_weight_sum, counts.non_finite_row_count);
    view.Add(record.factor.factor, record.factor.token_factors.has_value());
  }
}

View World::Observe() {
  std::map<int, HeadPointer> all;
  for (const HeadPointer& head : registry_->ListAll()) all[IndexOf(head->name())] = head;
  // First, so that contributions which another head has dropped are seen as such by all.
  std::map<int, bool> in_use;
  for (const auto& [index, head] : all) in_use[index] = head->InUse();

  View view;
  view.Section("server/: heads, sessions, contributions held as rows", registry_->size(), sessions_->size(), held_count_);
  for (const auto& [index, head] : all) {
    const HeadInfo info = head->Describe();
    const testing::FakeHead& numbers = EngineHeadOf(index);
    const char state = StateOf(info);
    view.Section(kHeadSections[index]);
    view.Section("epoch", NumberOf(info.epoch));
    view.Section("recovers");
    for (const heads::Epoch& epoch : info.recovers_epochs) {
      view.Add(epoch == EpochOf(kForeignEpoch) ? kForeignEpoch : NumberOf(epoch));
    }
    view.Section("state", state);
    view.Section("weight version, open step", info.weight_version, info.open_step.value_or(-1));
    view.Section("in use", in_use[index]);
    view.Section("restored from", info.restored_checkpoint);
    view.Section("free slots", numbers.FreeStagingSlots());
    const std::vector<float>& weight = numbers.Tensor(HeadTensor::kWeight);
    // 0 none, 1 that of the weight, 2 another
    view.Section("checksum", info.weight_checksum.empty() ? 0 : info.weight_checksum == ChecksumOf(weight) ? 1 : 2);
    if (state == 'X') continue;  // what is in it is unknown
    if (head->spec().trainable && state != 'B') {
      const auto steps = head->GetSteps(info.epoch);
      if (steps.ok()) {
        ObserveStep(view, steps->first);
        view.Section("last closed", steps->second.has_value());
        if (steps->second.has_value()) ObserveStep(view, *steps->second);
      }
    }
    view.Section("gradient", numbers.Tensor(HeadTensor::kGradWeight));
    view.Section("gradient of bias", numbers.Tensor(HeadTensor::kGradBias));
    if (state == 'L') continue;
    view.Section("weight", weight);
    view.Section("bias", numbers.Tensor(HeadTensor::kBias));
    view.Section("moments", numbers.Tensor(HeadTensor::kMoment1Weight), numbers.Tensor(HeadTensor::kMoment1Bias),
                 numbers.Tensor(HeadTensor::kMoment2Weight), numbers.Tensor(HeadTensor::kMoment2Bias));
  }
  return view;
}

}  // namespace headwater::history
