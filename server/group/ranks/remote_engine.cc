// The ranks of a group: engines of this process, and those of workers, behind the links by which they have joined.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/core/head_base.h"
#include "kernels/core/micro_batch_check.h"
#include "server/group/ranks/rank.h"
#include "server/group/ranks/rank_codec.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::group {
namespace {

int64_t ReplyBytes(const v1::RankReply& reply) { return static_cast<int64_t>(reply.ByteSizeLong()); }

// For how long an engine has calls, and for how long they are in their callers' flows.
class RankClock final : public EngineObserver {
 public:
  uint64_t BeginCall(const char*) override {
    calls_.Begin();
    return 0;
  }
  void EndCall(uint64_t) override { calls_.End(); }
  void EnterFlow() override { flows_.Begin(); }
  void LeaveFlow() override { flows_.End(); }

  RankTimes times(const Communicator* communicator) const {
    RankTimes times;
    times.waiting = flows_.total();
    if (communicator != nullptr) {
      const CommunicatorTimes collectives = communicator->times();
      times.waiting += absl::FromChrono(collectives.waiting);
      times.communicating = absl::FromChrono(collectives.communicating);
    }
    // Read last, so that it is never less than its parts.
    times.computing = calls_.total() - times.waiting - times.communicating;
    return times;
  }

 private:
  observability::BusyClock calls_;
  observability::BusyClock flows_;
};

constexpr absl::Duration kLongestLook = absl::Seconds(1);

// The leader's end of one rank's commands: one at a time.
class RankCommands {
 public:
  RankCommands(int32_t rank, std::shared_ptr<RankLink> link) : rank_(rank), link_(std::move(link)) {}

  int32_t rank() const { return rank_; }
  RankLink& link() const { return *link_; }
  uint64_t NewId() { return ++last_id_; }

  absl::Status Send(v1::JoinResponse message) { return link_->Send(std::move(message)); }
  // Elements, or rows, of a stream that follow a command.
  absl::Status SendData(int32_t stream, const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    for (int64_t done = 0; done < bytes; done += kDataBytes) {
      v1::JoinResponse message;
      v1::RankData* const part = message.mutable_data();
      part->set_stream(stream);
      part->set_data(from + done, static_cast<size_t>(std::min(kDataBytes, bytes - done)));
      HEADWATER_RETURN_IF_ERROR(link_->Send(std::move(message)));
    }
    return absl::OkStatus();
  }
  // The next answer, or the error that the worker reports.
  absl::StatusOr<v1::RankReply> AwaitReply() {
    absl::StatusOr<v1::RankReply> reply = link_->AwaitReply();
    if (!reply.ok()) return reply;
    if (absl::Status status = DecodeStatus(reply->status()); !status.ok()) return status;
    return reply;
  }
  absl::StatusOr<v1::RankReply> Ask(v1::JoinResponse command) {
    HEADWATER_RETURN_IF_ERROR(link_->Send(std::move(command)));
    return AwaitReply();
  }
  absl::Status WrongAnswer(const char* what) const {
    return MakeError(ErrorReason::kEngineFailed,
                     absl::StrCat("rank ", rank_, " sends another number of ", what, " than was asked for"));
  }

 private:
  const int32_t rank_;
  const std::shared_ptr<RankLink> link_;
  uint64_t last_id_ = 0;  // of heads and contributions
};

class RemoteContribution final : public StagedContribution {
 public:
  RemoteContribution(RankCommands& commands, uint64_t id) : commands_(commands), id_(id) {}
  ~RemoteContribution() override {
    if (is_gone_) return;
    v1::JoinResponse command;
    command.mutable_release()->add_contributions(id_);
    commands_.Send(std::move(command)).IgnoreError();
  }

 private:
  absl::Status DoCommit(double factor) override {
    v1::JoinResponse command;
    command.mutable_commit()->set_contribution(id_);
    command.mutable_commit()->set_factor(factor);
    absl::Status status = commands_.Ask(std::move(command)).status();
    is_gone_ = !HasReason(status, ErrorReason::kShardNotReady);
    return status;
  }

  RankCommands& commands_;
  const uint64_t id_;
  bool is_gone_ = false;
};

class RemoteHead final : public HeadBase {
 public:
  RemoteHead(RankCommands& commands, uint64_t id, const HeadSpec& spec, MemoryPlan plan, std::vector<RowRange> shard_rows,
             const std::string& device)
      : HeadBase(spec, std::move(plan), std::move(shard_rows), device), commands_(commands), id_(id) {}
  ~RemoteHead() override {
    v1::JoinResponse command;
    command.mutable_release()->add_heads(id_);
    commands_.Send(std::move(command)).IgnoreError();
  }
  uint64_t id() const { return id_; }

 private:
  absl::Status DoReadTensor(HeadTensor tensor, int64_t start, int64_t count, void* out) const override {
    v1::JoinResponse command;
    v1::RankReadTensor* const read = command.mutable_read_tensor();
    read->set_head(id_);
    read->set_tensor(static_cast<int32_t>(tensor));
    read->set_start(start);
    read->set_count(count);
    int64_t missing = count * ElementBytes(TensorDataType(tensor));
    absl::StatusOr<v1::RankReply> reply = commands_.Ask(std::move(command));
    for (char* to = static_cast<char*>(out); reply.ok(); reply = commands_.AwaitReply()) {
      const int64_t bytes = static_cast<int64_t>(reply->data().size());
      if (bytes > missing || (bytes < missing && !reply->more())) return commands_.WrongAnswer("bytes");
      std::memcpy(to, reply->data().data(), reply->data().size());
      to += bytes;
      missing -= bytes;
      if (!reply->more()) return absl::OkStatus();
    }
    return reply.status();
  }

  absl::Status DoWriteTensor(HeadTensor tensor, int64_t start, int64_t count, const void* in) override {
    return Write(WriteCommand(tensor, start, count), in, count * ElementBytes(TensorDataType(tensor)));
  }

  absl::Status DoAddToGradient(HeadTensor tensor, int64_t start, int64_t count, double factor, const float* in) override {
    v1::JoinResponse command = WriteCommand(tensor, start, count);
    command.mutable_write_tensor()->set_factor(factor);
    return Write(std::move(command), in, count * static_cast<int64_t>(sizeof(float)));
  }

  absl::Status DoZeroGradient() override { return Do(v1::RankHeadCommand::ZERO_GRADIENT).status(); }
  absl::Status DoReduceGradient() override { return Do(v1::RankHeadCommand::REDUCE_GRADIENT).status(); }
  absl::Status DoResetOptimizerState() override { return Do(v1::RankHeadCommand::RESET_OPTIMIZER_STATE).status(); }

  absl::StatusOr<GradientStats> DoComputeGradientStats() const override {
    HEADWATER_ASSIGN_OR_RETURN(const v1::RankReply reply, Do(v1::RankHeadCommand::STATS));
    return GradientStats{reply.norm_squared(), reply.non_finite_count()};
  }

  absl::Status DoApplyOptimizer(const OptimizerStep& step) override {
    v1::JoinResponse command;
    v1::RankApplyOptimizer* const apply = command.mutable_apply_optimizer();
    apply->set_head(id_);
    apply->set_learning_rate(step.learning_rate);
    apply->set_gradient_multiplier(step.gradient_multiplier);
    apply->set_update_count(step.update_count);
    EncodeOptimizer(step.settings, apply->mutable_settings());
    return commands_.Ask(std::move(command)).status();
  }

  absl::StatusOr<v1::RankReply> Do(v1::RankHeadCommand::Kind kind) const {
    v1::JoinResponse command;
    command.mutable_head_command()->set_head(id_);
    command.mutable_head_command()->set_kind(kind);
    return commands_.Ask(std::move(command));
  }
  v1::JoinResponse WriteCommand(HeadTensor tensor, int64_t start, int64_t count) const {
    v1::JoinResponse command;
    v1::RankWriteTensor* const write = command.mutable_write_tensor();
    write->set_head(id_);
    write->set_tensor(static_cast<int32_t>(tensor));
    write->set_start(start);
    write->set_count(count);
    return command;
  }
  absl::Status Write(v1::JoinResponse command, const void* in, int64_t bytes) {
    HEADWATER_RETURN_IF_ERROR(commands_.Send(std::move(command)));
    HEADWATER_RETURN_IF_ERROR(commands_.SendData(0, in, bytes));
    return commands_.AwaitReply().status();
  }

  RankCommands& commands_;
  const uint64_t id_;
};

uint64_t IdOf(const EngineHead* head) { return head == nullptr ? 0 : static_cast<const RemoteHead*>(head)->id(); }

class RemoteEngine final : public LossEngine {
 public:
  RemoteEngine(EngineOptions options, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
               bool shares_rows)
      : options_(std::move(options)),
        device_(std::move(device)),
        commands_(options_.group.rank, std::move(link)),
        silence_timeout_(silence_timeout),
        shares_rows_(shares_rows),
        last_look_(observability::MonotonicNow()),
        silence_(absl::ZeroDuration()) {}

  std::string name() const override { return "remote"; }
  std::vector<EngineDevice> devices() const override { return {device_}; }
  const EngineOptions& options() const override { return options_; }
  // The worker's engine counts them.
  int64_t planned_bytes() const override { return 0; }
  int64_t progress() const override { return commands_.link().alive().progress(); }

  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override {
    v1::JoinResponse command;
    EncodeHeadSpec(spec, command.mutable_plan_head()->mutable_spec());
    HEADWATER_ASSIGN_OR_RETURN(const v1::RankReply reply, commands_.Ask(std::move(command)));
    return DecodePlan(reply);
  }

 private:
  static MemoryPlan DecodePlan(const v1::RankReply& reply) {
    MemoryPlan plan;
    for (int i = 0; i < std::min(reply.plan_purposes_size(), reply.plan_bytes_size()); ++i) {
      plan.items.push_back({reply.plan_purposes(i), reply.plan_bytes(i)});
    }
    plan.total_bytes = reply.plan_total_bytes();
    plan.token_chunk_rows = reply.token_chunk_rows();
    return plan;
  }

  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override {
    const uint64_t id = commands_.NewId();
    v1::JoinResponse command;
    command.mutable_create_head()->set_head(id);
    EncodeHeadSpec(spec, command.mutable_create_head()->mutable_spec());
    HEADWATER_ASSIGN_OR_RETURN(const v1::RankReply reply, commands_.Ask(std::move(command)));
    return std::make_unique<RemoteHead>(commands_, id, spec, DecodePlan(reply),
                                        SplitVocab(spec.vocab_size, options_.shard_count, options_.shard_weights), device_.name);
  }

  absl::Status DoHealth() const override {
    const int32_t rank = commands_.rank();
    if (absl::Status status = commands_.link().status(); !status.ok()) {
      return MakeError(ErrorReason::kEngineFailed, absl::StrCat("rank ", rank, " is gone: ", std::string(status.message())));
    }
    const int64_t messages = commands_.link().messages();
    const absl::Time now = observability::MonotonicNow();
    absl::MutexLock lock(&mutex_);
    const absl::Duration look = std::min(now - last_look_, kLongestLook);
    last_look_ = now;
    if (messages != heard_) {
      heard_ = messages;
      silence_ = absl::ZeroDuration();
      return absl::OkStatus();
    }
    silence_ += look;
    if (silence_ < silence_timeout_) return absl::OkStatus();
    return MakeError(ErrorReason::kEngineFailed, absl::StrCat("rank ", rank, " has been silent for ",
                                                              absl::FormatDuration(silence_timeout_), " (rank_timeout)"));
  }

  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    HEADWATER_ASSIGN_OR_RETURN(const Parallelism parallelism, ParallelismOf(micro_batch));
    const bool is_whole = parallelism == Parallelism::kRows;
    const uint64_t contribution = commands_.NewId();
    v1::JoinResponse command;
    EncodeCompute(micro_batch, IdOf, command.mutable_compute());
    command.mutable_compute()->set_contribution(contribution);
    command.mutable_compute()->set_whole(is_whole);
    command.mutable_compute()->set_shared_rows(shares_rows_ && !is_whole);
    HEADWATER_RETURN_IF_ERROR(commands_.Send(std::move(command)));
    absl::Status decision;
    HEADWATER_RETURN_IF_ERROR(SendRows(micro_batch, is_whole, &decision));
    const absl::StatusOr<v1::RankReply> reply =
        is_whole ? AwaitOutputs(OutputsOf(micro_batch), micro_batch) : AwaitOutputs({}, micro_batch);
    if (!decision.ok() && !HasReason(reply.status(), ErrorReason::kEngineFailed)) return decision;
    if (!reply.ok()) return reply.status();
    MicroBatchResult result;
    for (const auto& sums : reply->terms()) result.terms.push_back(DecodeLossSums(sums));
    if (is_whole && result.terms.size() != micro_batch.terms.size()) return commands_.WrongAnswer("terms");
    if (reply->staged()) result.staged = std::make_unique<RemoteContribution>(commands_, contribution);
    return result;
  }

  // Sends the rows, or none that another rank of the process gets, then the flow's decision.
  absl::Status SendRows(const MicroBatch& micro_batch, bool is_whole, absl::Status* decision) {
    const int64_t row_count = shares_rows_ && !is_whole ? 0 : micro_batch.hidden.row_count;
    // A rank that computes alone has all rows at once. Otherwise the flow follows the first rank's. All that has come is sent on:
    // the ranks agree on each slice of rows, and the first rank may wait for this one.
    auto* const follower = is_whole ? nullptr : static_cast<GroupFlow::Follower*>(micro_batch.flow);
    v1::JoinResponse message;
    for (int64_t start = 0, end = row_count; start < row_count; start = end) {
      if (follower != nullptr) {
        const absl::StatusOr<int64_t> here = follower->AwaitMore(start);
        if (!here.ok()) {
          *decision = here.status();
          EncodeStatus(*decision, message.mutable_data()->mutable_ended());
          return commands_.Send(std::move(message));
        }
        end = std::min(*here, row_count);
      }
      HEADWATER_RETURN_IF_ERROR(SendRows(micro_batch, start, end));
    }
    if (micro_batch.flow == nullptr) return absl::OkStatus();
    *decision = micro_batch.flow->Decide(nullptr);
    EncodeStatus(*decision, message.mutable_decision()->mutable_status());
    return commands_.Send(std::move(message));
  }

  // Rows [row_start, row_end) of all streams.
  absl::Status SendRows(const MicroBatch& micro_batch, int64_t row_start, int64_t row_end) {
    const auto send = [this](int32_t stream, const RowsView& rows, int64_t start, int64_t end) {
      const int64_t row_bytes = rows.column_count * ElementBytes(rows.data_type);
      if (end <= start || row_bytes == 0) return absl::OkStatus();
      return commands_.SendData(stream, static_cast<const char*>(rows.data) + start * row_bytes, (end - start) * row_bytes);
    };
    HEADWATER_RETURN_IF_ERROR(send(0, micro_batch.hidden, row_start, row_end));
    for (size_t i = 0; i < micro_batch.terms.size(); ++i) {
      const LossTerm& term = micro_batch.terms[i];
      if (!std::holds_alternative<JsdSpec>(term.loss)) continue;
      HEADWATER_RETURN_IF_ERROR(send(static_cast<int32_t>(i) + 1, term.teacher_hidden,
                                     std::clamp<int64_t>(row_start - term.row_start, 0, term.row_count),
                                     std::clamp<int64_t>(row_end - term.row_start, 0, term.row_count)));
    }
    return absl::OkStatus();
  }

  // Receives the answer and `outputs`; reports rows of grad_hidden to the flow as they come.
  absl::StatusOr<v1::RankReply> AwaitOutputs(const std::vector<Output>& outputs, const MicroBatch& micro_batch) {
    const int64_t row_bytes = micro_batch.grad_hidden.column_count * ElementBytes(micro_batch.grad_hidden.data_type);
    const bool tells_rows = micro_batch.flow != nullptr && micro_batch.grad_hidden.data != nullptr && row_bytes > 0;
    size_t index = 0;
    int64_t done = 0;  // bytes of outputs[index]
    absl::StatusOr<v1::RankReply> reply = commands_.AwaitReply();
    for (; reply.ok(); reply = commands_.AwaitReply()) {
      const std::string& data = reply->data();
      for (size_t taken = 0; taken < data.size();) {
        if (index == outputs.size()) return commands_.WrongAnswer("bytes of outputs");
        const int64_t bytes = std::min(static_cast<int64_t>(data.size() - taken), outputs[index].bytes - done);
        std::memcpy(outputs[index].data + done, data.data() + taken, static_cast<size_t>(bytes));
        taken += static_cast<size_t>(bytes);
        done += bytes;
        if (index == 0 && tells_rows && done >= row_bytes) micro_batch.flow->GradHiddenReady(done / row_bytes);
        if (done < outputs[index].bytes) continue;
        ++index;
        done = 0;
      }
      if (reply->more()) continue;
      const auto is_empty = [](const Output& output) { return output.bytes == 0; };
      if (!std::all_of(outputs.begin() + static_cast<std::ptrdiff_t>(index), outputs.end(), is_empty)) {
        return commands_.WrongAnswer("bytes of outputs");
      }
      return reply;
    }
    return reply;
  }

  const EngineOptions options_;
  const EngineDevice device_;
  mutable RankCommands commands_;
  const absl::Duration silence_timeout_;
  const bool shares_rows_;
  mutable absl::Mutex mutex_;
  mutable int64_t heard_ ABSL_GUARDED_BY(mutex_) = -1;  // messages at the last look
  mutable absl::Time last_look_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Duration silence_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::Status RankLink::Send(v1::JoinResponse message) {
  const auto is_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !unsent_.has_value() || !status_.ok(); };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&is_free));
  if (status_.ok()) unsent_ = std::move(message);
  return status_;
}

void RankLink::SendAll() {
  const auto is_due = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return unsent_.has_value() || !status_.ok(); };
  v1::JoinResponse message;
  do {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_due));
    if (!status_.ok()) return;
    message = *std::exchange(unsent_, std::nullopt);
  } while (send_(message));
  Break(MakeError(ErrorReason::kEngineFailed, "the worker's call has ended"));
}

absl::StatusOr<v1::RankReply> RankLink::AwaitReply() {
  const auto come = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !replies_.empty() || !status_.ok(); };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&come));
  if (!status_.ok()) return status_;
  v1::RankReply reply = std::move(replies_.front());
  replies_.pop_front();
  reply_bytes_ -= ReplyBytes(reply);
  return reply;
}

void RankLink::Break(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (!status_.ok()) return;
  status_ = reason;
  cancel_();
}

void RankLink::Deliver(v1::JoinRequest message) {
  const auto has_room = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return (replies_.size() < kMaxReplies && reply_bytes_ < kMaxReplyBytes) || !status_.ok();
  };
  absl::MutexLock lock(&mutex_);
  if (!status_.ok()) return;
  ++messages_;
  if (message.has_alive()) alive_ = message.alive();
  if (!message.has_reply()) return;
  mutex_.Await(absl::Condition(&has_room));
  if (!status_.ok()) return;
  reply_bytes_ += ReplyBytes(message.reply());
  replies_.push_back(std::move(*message.mutable_reply()));
}

Rank MakeLocalRank(std::unique_ptr<LossEngine> engine) {
  const auto clock = std::make_shared<RankClock>();
  engine->Observe(clock);
  const std::shared_ptr<Communicator> communicator = engine->options().group.communicator;
  Rank rank;
  rank.engine = std::move(engine);
  rank.abort = [communicator](const absl::Status& reason) {
    if (communicator != nullptr) communicator->Abort(reason);
  };
  rank.times = [communicator, clock] { return clock->times(communicator.get()); };
  return rank;
}

Rank MakeRemoteRank(EngineOptions options, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
                    bool shares_rows) {
  Rank rank;
  rank.engine = std::make_unique<RemoteEngine>(std::move(options), std::move(device), link, silence_timeout, shares_rows);
  rank.is_remote = true;
  rank.abort = [link](const absl::Status& reason) { link->Break(reason); };
  rank.times = [link] {
    const v1::RankAlive alive = link->alive();
    return RankTimes{absl::Microseconds(alive.computing_us()), absl::Microseconds(alive.waiting_us()),
                     absl::Microseconds(alive.communicating_us())};
  };
  return rank;
}

}  // namespace headwater::group
