#include "server/group/remote_rank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "proto/headwater/v1/spec_codec.h"
#include "server/group/rank_codec.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::group {
namespace {

constexpr absl::Duration kLongestLook = absl::Seconds(1);

v1::JoinResponse HeadCommand(uint64_t head, v1::RankHeadCommand::Kind kind) {
  v1::JoinResponse command;
  command.mutable_head_command()->set_head(head);
  command.mutable_head_command()->set_kind(kind);
  return command;
}

}  // namespace

RemoteRank::RemoteRank(int32_t rank, EngineDevice device, std::shared_ptr<RankLink> link, absl::Duration silence_timeout,
                       bool shares_rows)
    : rank_(rank),
      device_(std::move(device)),
      link_(std::move(link)),
      silence_timeout_(silence_timeout),
      shares_rows_(shares_rows),
      last_look_(observability::MonotonicNow()),
      silence_(absl::ZeroDuration()) {}

absl::Status RemoteRank::health() {
  if (absl::Status status = link_->status(); !status.ok()) {
    return MakeError(ErrorReason::kEngineFailed, absl::StrCat("rank ", rank_, " is gone: ", std::string(status.message())));
  }
  const int64_t messages = link_->messages();
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
  return MakeError(ErrorReason::kEngineFailed, absl::StrCat("rank ", rank_, " has been silent for ",
                                                            absl::FormatDuration(silence_timeout_), " (rank_timeout)"));
}

RankTimes RemoteRank::times() const {
  const v1::RankAlive alive = link_->alive();
  return {absl::Microseconds(alive.computing_us()), absl::Microseconds(alive.waiting_us()),
          absl::Microseconds(alive.communicating_us())};
}

int64_t RemoteRank::ElementBytesOf(uint64_t head, HeadTensor tensor) const {
  const auto found = data_types_.find(head);
  const bool stored = tensor == HeadTensor::kWeight || tensor == HeadTensor::kBias;
  return stored && found != data_types_.end() ? ElementBytes(found->second) : 4;
}

absl::StatusOr<v1::RankReply> RemoteRank::AwaitReply() {
  absl::StatusOr<v1::RankReply> reply = link_->AwaitReply();
  if (!reply.ok()) return reply;
  if (absl::Status status = DecodeStatus(reply->status()); !status.ok()) return status;
  return reply;
}

absl::StatusOr<v1::RankReply> RemoteRank::Ask(const v1::JoinResponse& command) {
  HEADWATER_RETURN_IF_ERROR(link_->Send(command));
  return AwaitReply();
}

absl::StatusOr<MemoryPlan> RemoteRank::PlanHead(const HeadSpec& spec) {
  v1::JoinResponse command;
  EncodeHeadSpec(spec, command.mutable_plan_head()->mutable_spec());
  const absl::StatusOr<v1::RankReply> reply = Ask(command);
  if (!reply.ok()) return reply.status();
  MemoryPlan plan;
  for (int i = 0; i < std::min(reply->plan_purposes_size(), reply->plan_bytes_size()); ++i) {
    plan.items.push_back({reply->plan_purposes(i), reply->plan_bytes(i)});
  }
  plan.total_bytes = reply->plan_total_bytes();
  plan.token_chunk_rows = reply->token_chunk_rows();
  return plan;
}

absl::Status RemoteRank::CreateHead(uint64_t head, const HeadSpec& spec) {
  v1::JoinResponse command;
  command.mutable_create_head()->set_head(head);
  EncodeHeadSpec(spec, command.mutable_create_head()->mutable_spec());
  HEADWATER_RETURN_IF_ERROR(Tell(command));
  data_types_[head] = spec.data_type;
  return absl::OkStatus();
}

absl::Status RemoteRank::Release(absl::Span<const uint64_t> contributions, absl::Span<const uint64_t> heads) {
  v1::JoinResponse command;
  v1::RankRelease* const release = command.mutable_release();
  for (const uint64_t id : contributions) release->add_contributions(id);
  for (const uint64_t id : heads) {
    release->add_heads(id);
    data_types_.erase(id);
  }
  return Tell(command);
}

absl::Status RemoteRank::ReadTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, void* out) {
  v1::JoinResponse command;
  v1::RankReadTensor* const read = command.mutable_read_tensor();
  read->set_head(head);
  read->set_tensor(static_cast<int32_t>(tensor));
  read->set_start(start);
  read->set_count(count);
  int64_t missing = count * ElementBytesOf(head, tensor);
  absl::StatusOr<v1::RankReply> reply = Ask(command);
  for (char* to = static_cast<char*>(out); reply.ok(); reply = AwaitReply()) {
    const int64_t bytes = static_cast<int64_t>(reply->data().size());
    if (bytes > missing || (bytes < missing && !reply->more())) {
      return WrongAnswer("bytes");
    }
    std::memcpy(to, reply->data().data(), reply->data().size());
    to += bytes;
    missing -= bytes;
    if (!reply->more()) return absl::OkStatus();
  }
  return reply.status();
}

absl::Status RemoteRank::SendData(int32_t stream, const void* data, int64_t bytes) {
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

absl::Status RemoteRank::WriteTensor(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, const void* in) {
  v1::JoinResponse command;
  v1::RankWriteTensor* const write = command.mutable_write_tensor();
  write->set_head(head);
  write->set_tensor(static_cast<int32_t>(tensor));
  write->set_start(start);
  write->set_count(count);
  HEADWATER_RETURN_IF_ERROR(link_->Send(command));
  HEADWATER_RETURN_IF_ERROR(SendData(0, in, count * ElementBytesOf(head, tensor)));
  return AwaitReply().status();
}

absl::Status RemoteRank::ZeroGradient(uint64_t head) { return Tell(HeadCommand(head, v1::RankHeadCommand::ZERO_GRADIENT)); }

absl::Status RemoteRank::AddToGradient(uint64_t head, HeadTensor tensor, int64_t start, int64_t count, double factor,
                                       const float* in) {
  v1::JoinResponse command;
  v1::RankWriteTensor* const write = command.mutable_write_tensor();
  write->set_head(head);
  write->set_tensor(static_cast<int32_t>(tensor));
  write->set_start(start);
  write->set_count(count);
  write->set_factor(factor);
  HEADWATER_RETURN_IF_ERROR(link_->Send(command));
  HEADWATER_RETURN_IF_ERROR(SendData(0, in, count * static_cast<int64_t>(sizeof(float))));
  return AwaitReply().status();
}

absl::Status RemoteRank::ReduceGradient(uint64_t head) { return Tell(HeadCommand(head, v1::RankHeadCommand::REDUCE_GRADIENT)); }

absl::Status RemoteRank::ResetOptimizerState(uint64_t head) {
  return Tell(HeadCommand(head, v1::RankHeadCommand::RESET_OPTIMIZER_STATE));
}

absl::StatusOr<GradientStats> RemoteRank::ComputeGradientStats(uint64_t head) {
  const absl::StatusOr<v1::RankReply> reply = Ask(HeadCommand(head, v1::RankHeadCommand::STATS));
  if (!reply.ok()) return reply.status();
  return GradientStats{reply->norm_squared(), reply->non_finite_count()};
}

absl::Status RemoteRank::ApplyOptimizer(uint64_t head, const OptimizerStep& step) {
  v1::JoinResponse command;
  v1::RankApplyOptimizer* const apply = command.mutable_apply_optimizer();
  apply->set_head(head);
  apply->set_learning_rate(step.learning_rate);
  apply->set_gradient_multiplier(step.gradient_multiplier);
  apply->set_update_count(step.update_count);
  EncodeOptimizer(step.settings, apply->mutable_settings());
  return Tell(command);
}

absl::Status RemoteRank::SendRows(const MicroBatch& micro_batch, int64_t row_start, int64_t row_end) {
  const auto send = [this](int32_t stream, const RowsView& rows, int64_t start, int64_t end) {
    const int64_t row_bytes = rows.column_count * ElementBytes(rows.data_type);
    if (end <= start || row_bytes == 0) return absl::OkStatus();
    return SendData(stream, static_cast<const char*>(rows.data) + start * row_bytes, (end - start) * row_bytes);
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

absl::Status RemoteRank::SendAllRows(const RankCall& call) {
  const int64_t row_count = call.micro_batch.hidden.row_count;
  if (call.flow == nullptr) return SendRows(call.micro_batch, 0, row_count);
  v1::JoinResponse message;
  for (int64_t sent = 0; sent < row_count;) {
    const absl::StatusOr<int64_t> here = call.flow->AwaitMore(sent);
    if (!here.ok()) {
      EncodeStatus(here.status(), message.mutable_data()->mutable_ended());
      return link_->Send(message);
    }
    HEADWATER_RETURN_IF_ERROR(SendRows(call.micro_batch, sent, *here));
    sent = *here;
  }
  return SendDecision(*call.flow);
}

absl::Status RemoteRank::SendDecision(RankFlow& flow) {
  v1::JoinResponse message;
  EncodeStatus(flow.AwaitDecision(), message.mutable_decision()->mutable_status());
  return link_->Send(message);
}

absl::StatusOr<RankResult> RemoteRank::Compute(const RankCall& call) {
  v1::JoinResponse command;
  EncodeCompute(call, command.mutable_compute());
  command.mutable_compute()->set_shared_rows(shares_rows_);
  HEADWATER_RETURN_IF_ERROR(link_->Send(command));
  if (!shares_rows_) {
    HEADWATER_RETURN_IF_ERROR(SendAllRows(call));
  } else if (call.flow != nullptr) {
    HEADWATER_RETURN_IF_ERROR(SendDecision(*call.flow));
  }
  const absl::StatusOr<v1::RankReply> reply = AwaitReply();
  if (!reply.ok()) return reply.status();
  RankResult result;
  result.staged = reply->staged();
  return result;
}

absl::StatusOr<RankResult> RemoteRank::ComputeWhole(const RankCall& call) {
  RowFlow* const flow = call.micro_batch.flow;
  v1::JoinResponse command;
  EncodeCompute(call, command.mutable_compute());
  command.mutable_compute()->set_whole(true);
  command.mutable_compute()->set_flow(flow != nullptr);
  HEADWATER_RETURN_IF_ERROR(link_->Send(command));
  HEADWATER_RETURN_IF_ERROR(SendRows(call.micro_batch, 0, call.micro_batch.hidden.row_count));
  absl::Status decision;
  if (flow != nullptr) {
    decision = flow->Decide(nullptr);
    v1::JoinResponse message;
    EncodeStatus(decision, message.mutable_decision()->mutable_status());
    HEADWATER_RETURN_IF_ERROR(link_->Send(message));
  }
  const absl::StatusOr<v1::RankReply> reply = AwaitOutputs(call.micro_batch);
  if (!decision.ok() && !HasReason(reply.status(), ErrorReason::kEngineFailed)) return decision;
  if (!reply.ok()) return reply.status();
  RankResult result;
  for (const v1::LossTermResult& sums : reply->terms()) result.terms.push_back(DecodeLossSums(sums));
  if (result.terms.size() != call.micro_batch.terms.size()) return WrongAnswer("terms");
  result.staged = reply->staged();
  return result;
}

absl::StatusOr<v1::RankReply> RemoteRank::AwaitOutputs(const MicroBatch& micro_batch) {
  const std::vector<Output> outputs = OutputsOf(micro_batch);
  const int64_t row_bytes = micro_batch.grad_hidden.column_count * ElementBytes(micro_batch.grad_hidden.data_type);
  const bool tells_rows = micro_batch.flow != nullptr && micro_batch.grad_hidden.data != nullptr && row_bytes > 0;
  size_t index = 0;
  int64_t done = 0;  // bytes of outputs[index]
  absl::StatusOr<v1::RankReply> reply = AwaitReply();
  for (; reply.ok(); reply = AwaitReply()) {
    const std::string& data = reply->data();
    for (size_t taken = 0; taken < data.size();) {
      if (index == outputs.size()) return WrongAnswer("bytes of outputs");
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
      return WrongAnswer("bytes of outputs");
    }
    return reply;
  }
  return reply;
}

absl::Status RemoteRank::WrongAnswer(const char* what) const {
  return MakeError(ErrorReason::kEngineFailed,
                   absl::StrCat("rank ", rank_, " sends another number of ", what, " than was asked for"));
}

absl::Status RemoteRank::Commit(uint64_t contribution, double factor) {
  v1::JoinResponse command;
  command.mutable_commit()->set_contribution(contribution);
  command.mutable_commit()->set_factor(factor);
  return Tell(command);
}

}  // namespace headwater::group
