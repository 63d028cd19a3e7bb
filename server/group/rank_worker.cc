#include "server/group/rank_worker.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/group/head_spec_codec.h"
#include "server/group/local_rank.h"
#include "server/group/rank_codec.h"
#include "server/group/rank_follower.h"
#include "server/observability/logging.h"
#include "server/observability/pause.h"

namespace headwater::group {
namespace {

absl::Status LeaderGone() { return MakeError(ErrorReason::kEngineFailed, "the leader is gone"); }

// Writes of the commands' thread and of the one that tells that the worker lives, and notices when nobody listens any more, or when
// the engine can compute nothing any more while a command waits for it.
class Voice {
 public:
  Voice(WorkerChannel& channel, const WorkerOptions& options) : channel_(channel), options_(options) {}
  ~Voice() {
    pause_.Stop();
    if (thread_.joinable()) thread_.join();
  }

  bool Write(const v1::JoinRequest& message) {
    absl::MutexLock lock(&write_mutex_);
    return channel_.Write(message);
  }
  // From now on tells every now and then that the worker lives.
  void StayAlive() {
    thread_ = std::thread([this] { Main(); });
  }
  // Nobody listens any more.
  bool ended() const { return ended_.load(); }
  // The rank's, which is aborted then: a command that waits for other ranks must come back, whatever has become of them.
  void Guard(std::shared_ptr<Communicator> communicator) {
    absl::MutexLock lock(&mutex_);
    communicator_ = std::move(communicator);
    if (ended_.load()) communicator_->Abort(LeaderGone());
  }
  // How the rank gets on goes with it; null: there is none any more. It lives as long as this.
  void Watch(Rank* rank) {
    absl::MutexLock lock(&mutex_);
    rank_ = rank;
  }

 private:
  void Main() {
    while (!pause_.WaitFor(options_.alive_interval)) {
      v1::JoinRequest alive;
      Rank* rank = nullptr;
      {
        absl::MutexLock lock(&mutex_);
        Describe(alive.mutable_alive());
        if (options_.is_leaving) alive.mutable_alive()->set_leaving(options_.is_leaving());
        rank = rank_;
      }
      // Not under the lock: an engine that finds its device lost may take its time.
      if (const absl::Status health = rank == nullptr ? absl::OkStatus() : rank->health(); !health.ok()) {
        // The command may never come back: this is its answer.
        v1::JoinRequest lost;
        EncodeStatus(health, lost.mutable_reply()->mutable_status());
        Write(lost);
        return End(health);
      }
      if (!Write(alive)) return End(LeaderGone());
    }
  }

  void End(const absl::Status& reason) {
    {
      absl::MutexLock lock(&mutex_);
      ended_ = true;
      if (communicator_ != nullptr) communicator_->Abort(reason);
    }
    if (options_.on_call_ended) options_.on_call_ended();
  }

  void Describe(v1::RankAlive* alive) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    if (rank_ == nullptr) return;
    const RankTimes times = rank_->times();
    alive->set_progress(rank_->progress());
    alive->set_computing_us(absl::ToInt64Microseconds(times.computing));
    alive->set_waiting_us(absl::ToInt64Microseconds(times.waiting));
    alive->set_communicating_us(absl::ToInt64Microseconds(times.communicating));
  }

  WorkerChannel& channel_;
  const WorkerOptions& options_;
  std::atomic<bool> ended_{false};
  absl::Mutex write_mutex_;
  observability::Pause pause_;  // between signs of life
  absl::Mutex mutex_;
  std::shared_ptr<Communicator> communicator_ ABSL_GUARDED_BY(mutex_);
  Rank* rank_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;
};

// Takes a micro-batch's rows, and the decision, off the channel when they are asked for, and hands the rows on to the process's
// other ranks.
class ChannelFlow : public RankFlow {
 public:
  // `shared`: null if nobody reads the rows but this rank.
  ChannelFlow(WorkerChannel& channel, const std::shared_ptr<ReceivedCall>& call, ProcessRows* shared)
      : channel_(channel), call_(*call), shared_(shared) {
    if (shared_ == nullptr) return;
    shared_->Begin(call_.contribution(), call);
    shared_->Come(call_.rows_here());
  }
  ~ChannelFlow() override {
    if (shared_ != nullptr) shared_->End(MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows wants no more"));
  }
  ChannelFlow(const ChannelFlow&) = delete;
  ChannelFlow& operator=(const ChannelFlow&) = delete;

  absl::StatusOr<int64_t> AwaitMore(int64_t have) override {
    while (call_.rows_here() <= have) {
      const absl::Status status = Read();
      if (shared_ != nullptr) status.ok() ? shared_->Come(call_.rows_here()) : shared_->End(status);
      if (!status.ok()) return status;
    }
    return call_.rows_here();
  }

  absl::Status AwaitDecision() override {
    while (!decided_) HEADWATER_RETURN_IF_ERROR(Read());
    return decision_;
  }

 private:
  absl::Status Read() {
    v1::JoinResponse message;
    if (!channel_.Read(&message)) return LeaderGone();
    if (message.has_decision()) {
      decided_ = true;
      decision_ = DecodeStatus(message.decision().status());
      return absl::OkStatus();
    }
    if (!message.has_data()) return Malformed("a command where rows should come");
    if (message.data().has_ended()) {
      absl::Status ended = DecodeStatus(message.data().ended());
      return ended.ok() ? Malformed("rows that end without a reason") : ended;
    }
    return call_.AddRows(message.data().stream(), message.data().data());
  }

  WorkerChannel& channel_;
  ReceivedCall& call_;
  ProcessRows* const shared_;
  bool decided_ = false;
  absl::Status decision_;
};

// The same for another rank of the process: the decision alone is told to it.
class NeighbourFlow final : public ChannelFlow {
 public:
  NeighbourFlow(WorkerChannel& channel, const std::shared_ptr<ReceivedCall>& call, ProcessRows& rows)
      : ChannelFlow(channel, call, nullptr), id_(call->contribution()), rows_(rows) {}
  absl::StatusOr<int64_t> AwaitMore(int64_t have) override { return rows_.AwaitMore(id_, have); }

 private:
  const uint64_t id_;
  ProcessRows& rows_;
};

// The rank that gets its process's rows is there.
class SharingRows {
 public:
  explicit SharingRows(ProcessRows* rows) : rows_(rows) {
    if (rows_ != nullptr) rows_->Open();
  }
  ~SharingRows() {
    if (rows_ != nullptr) rows_->Close(MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows has left the group"));
  }
  SharingRows(const SharingRows&) = delete;
  SharingRows& operator=(const SharingRows&) = delete;

 private:
  ProcessRows* const rows_;
};

class Worker {
 public:
  Worker(WorkerChannel& channel, const WorkerOptions& options) : channel_(channel), options_(options), voice_(channel, options) {}

  absl::Status Run() {
    const SharingRows sharing(options_.process_index == 0 ? options_.rows.get() : nullptr);
    HEADWATER_RETURN_IF_ERROR(Begin());
    absl::Status status = Execute();
    voice_.Watch(nullptr);
    rank_->Abort(status);
    return status;
  }

 private:
  absl::Status Begin() {
    absl::StatusOr<std::unique_ptr<TcpMeeting>> meeting = TcpMeeting::Listen(options_.listen_host);
    if (!meeting.ok()) return meeting.status();
    v1::JoinRequest hello;
    hello.mutable_hello()->set_version(options_.version);
    hello.mutable_hello()->set_port((*meeting)->port());
    hello.mutable_hello()->set_engine(options_.engine);
    hello.mutable_hello()->set_process(options_.process);
    hello.mutable_hello()->set_process_index(options_.process_index);
    hello.mutable_hello()->set_process_ranks(options_.process_ranks);
    v1::JoinResponse message;
    if (!voice_.Write(hello) || !channel_.Read(&message)) return LeaderGone();
    if (!message.has_welcome()) return Malformed("no welcome");
    voice_.StayAlive();
    absl::Status status = Settle(message.welcome(), **meeting);
    v1::JoinRequest ready;
    EncodeStatus(status, ready.mutable_ready()->mutable_status());
    if (status.ok()) {
      const EngineDevice device = rank_->device();
      ready.mutable_ready()->set_device(device.name);
      ready.mutable_ready()->set_model(device.model);
      ready.mutable_ready()->set_memory_budget_bytes(device.memory_budget_bytes);
      voice_.Watch(rank_.get());
    }
    if (!voice_.Write(ready)) return LeaderGone();
    return status;
  }

  absl::Status Settle(const v1::RankWelcome& welcome, TcpMeeting& meeting) {
    const bool is_cuda = welcome.engine() == "cuda";
    if ((!is_cuda && welcome.engine() != "cpu") || (options_.engine != "auto" && options_.engine != welcome.engine())) {
      return MakeError(ErrorReason::kFeatureNotBuilt,
                       absl::StrCat("the leader's engine is ", welcome.engine(), ", this worker's ", options_.engine));
    }
    std::vector<std::string> addresses(welcome.addresses().begin(), welcome.addresses().end());
    for (std::string& address : addresses) {
      if (absl::StartsWith(address, ":")) address = options_.leader_host + address;
    }
    if (static_cast<int32_t>(addresses.size()) != welcome.world_size()) return Malformed("the addresses");
    if (welcome.rank() < 1 || welcome.rank() >= welcome.world_size()) return Malformed("the rank");
    auto communicator = meeting.Meet(welcome.rank(), addresses, welcome.secret(),
                                     std::chrono::milliseconds(welcome.setup_timeout_ms()), [this] { return voice_.ended(); });
    if (!communicator.ok()) return communicator.status();
    EngineOptions engine_options;
    engine_options.group.rank = welcome.rank();
    engine_options.group.world_size = welcome.world_size();
    engine_options.group.communicator = *std::move(communicator);
    engine_options.group.device_group_id = welcome.device_group_id();
    voice_.Guard(engine_options.group.communicator);
    engine_options.shard_count = welcome.world_size();
    engine_options.shard_weights.assign(welcome.shard_weights().begin(), welcome.shard_weights().end());
    engine_options.memory_budget_bytes = options_.memory_budget_bytes;
    engine_options.workspace_bytes = welcome.workspace_bytes();
    engine_options.token_chunk_rows = welcome.token_chunk_rows();
    engine_options.thread_count = welcome.thread_count();
    engine_options.deterministic = welcome.deterministic();
    engine_options.device_index = options_.device_index;
    engine_options.algorithm_cache_path = options_.algorithm_cache_path;
    engine_options.timed_search = welcome.timed_search();
    engine_options.on_device_lost = options_.on_device_lost;
    auto engine = is_cuda ? options_.make_cuda_engine(engine_options) : options_.make_engine(engine_options);
    if (!engine.ok()) return engine.status();
    rank_ = std::make_unique<LocalRank>(*std::move(engine));
    observability::Log(observability::LogLevel::kInfo, "joined",
                       {{"rank", int64_t{welcome.rank()}}, {"ranks", int64_t{welcome.world_size()}}});
    return absl::OkStatus();
  }

  // Until something ends it.
  absl::Status Execute() {
    v1::JoinResponse command;
    while (channel_.Read(&command)) {
      // What a computation that ended early has left on its way.
      if (command.has_data() || command.has_decision()) continue;
      v1::JoinRequest answer;
      v1::RankReply* const reply = answer.mutable_reply();
      const absl::Status status = ExecuteOne(command, reply);
      // The others may be waiting for this rank.
      if (HasReason(status, ErrorReason::kEngineFailed)) rank_->Abort(status);
      EncodeStatus(status, reply->mutable_status());
      if (!voice_.Write(answer)) break;
      if (absl::Status health = rank_->health(); !health.ok()) return health;
    }
    return LeaderGone();
  }

  absl::Status ExecuteOne(const v1::JoinResponse& command, v1::RankReply* reply) {
    switch (command.kind_case()) {
      case v1::JoinResponse::kPlanHead:
        return PlanHead(command.plan_head(), reply);
      case v1::JoinResponse::kCreateHead:
        return rank_->CreateHead(command.create_head().head(), DecodeHeadSpec(command.create_head().spec()));
      case v1::JoinResponse::kRelease: {
        const v1::RankRelease& release = command.release();
        return rank_->Release(std::vector<uint64_t>(release.contributions().begin(), release.contributions().end()),
                              std::vector<uint64_t>(release.heads().begin(), release.heads().end()));
      }
      case v1::JoinResponse::kReadTensor:
        return ReadTensor(command.read_tensor(), reply);
      case v1::JoinResponse::kWriteTensor:
        return WriteTensor(command.write_tensor());
      case v1::JoinResponse::kHeadCommand:
        return RunHeadCommand(command.head_command(), reply);
      case v1::JoinResponse::kApplyOptimizer: {
        const v1::RankApplyOptimizer& apply = command.apply_optimizer();
        return rank_->ApplyOptimizer(apply.head(), {apply.learning_rate(), apply.gradient_multiplier(),
                                                    DecodeOptimizer(apply.settings()), apply.update_count()});
      }
      case v1::JoinResponse::kCompute:
        return Compute(command.compute(), reply);
      case v1::JoinResponse::kCommit:
        return rank_->Commit(command.commit().contribution(), command.commit().factor());
      default:
        return Malformed("no command");
    }
  }

  absl::Status PlanHead(const v1::RankPlanHead& command, v1::RankReply* reply) {
    const absl::StatusOr<MemoryPlan> plan = rank_->PlanHead(DecodeHeadSpec(command.spec()));
    if (!plan.ok()) return plan.status();
    for (const MemoryPlan::Item& item : plan->items) {
      reply->add_plan_purposes(item.purpose);
      reply->add_plan_bytes(item.bytes);
    }
    reply->set_plan_total_bytes(plan->total_bytes);
    reply->set_token_chunk_rows(plan->token_chunk_rows);
    return absl::OkStatus();
  }

  // Bytes of an element, or an error for a range that the head does not have.
  absl::StatusOr<int64_t> ElementBytesOf(uint64_t head, int32_t tensor, int64_t start, int64_t count) const {
    const EngineHead* const found = rank_->FindHead(head);
    if (found == nullptr || tensor < 1 || tensor > static_cast<int32_t>(HeadTensor::kMoment2Bias)) return Malformed("a tensor");
    const int64_t total = found->ElementCount(static_cast<HeadTensor>(tensor));
    if (start < 0 || count < 0 || start > total || count > total - start) return Malformed("a range");
    return ElementBytes(found->TensorDataType(static_cast<HeadTensor>(tensor)));
  }

  absl::Status ReadTensor(const v1::RankReadTensor& command, v1::RankReply* reply) {
    const auto element_bytes = ElementBytesOf(command.head(), command.tensor(), command.start(), command.count());
    if (!element_bytes.ok()) return element_bytes.status();
    const int64_t part = kDataBytes / *element_bytes;
    for (int64_t done = 0; done < command.count();) {
      const int64_t count = std::min(part, command.count() - done);
      reply->mutable_data()->resize(static_cast<size_t>(count * *element_bytes));
      HEADWATER_RETURN_IF_ERROR(rank_->ReadTensor(command.head(), static_cast<HeadTensor>(command.tensor()), command.start() + done,
                                                  count, reply->mutable_data()->data()));
      done += count;
      if (done == command.count()) return absl::OkStatus();
      v1::JoinRequest answer;
      *answer.mutable_reply() = *reply;
      answer.mutable_reply()->set_more(true);
      if (!voice_.Write(answer)) return LeaderGone();
    }
    return absl::OkStatus();
  }

  absl::Status WriteTensor(const v1::RankWriteTensor& command) {
    const auto element_bytes = ElementBytesOf(command.head(), command.tensor(), command.start(), command.count());
    if (!element_bytes.ok()) return element_bytes.status();
    std::string data;
    const size_t bytes = static_cast<size_t>(command.count() * *element_bytes);
    data.reserve(bytes);
    while (data.size() < bytes) {
      v1::JoinResponse message;
      if (!channel_.Read(&message)) return LeaderGone();
      if (!message.has_data() || message.data().data().size() > bytes - data.size()) return Malformed("a tensor's elements");
      data += message.data().data();
    }
    const HeadTensor tensor = static_cast<HeadTensor>(command.tensor());
    if (!command.has_factor()) return rank_->WriteTensor(command.head(), tensor, command.start(), command.count(), data.data());
    return rank_->AddToGradient(command.head(), tensor, command.start(), command.count(), command.factor(),
                                reinterpret_cast<const float*>(data.data()));
  }

  absl::Status RunHeadCommand(const v1::RankHeadCommand& command, v1::RankReply* reply) {
    if (command.kind() == v1::RankHeadCommand::ZERO_GRADIENT) return rank_->ZeroGradient(command.head());
    if (command.kind() == v1::RankHeadCommand::REDUCE_GRADIENT) return rank_->ReduceGradient(command.head());
    if (command.kind() == v1::RankHeadCommand::RESET_OPTIMIZER_STATE) return rank_->ResetOptimizerState(command.head());
    const absl::StatusOr<GradientStats> stats = rank_->ComputeGradientStats(command.head());
    if (!stats.ok()) return stats.status();
    reply->set_norm_squared(stats->norm_squared);
    reply->set_non_finite_count(stats->non_finite_count);
    return absl::OkStatus();
  }

  absl::Status Compute(const v1::RankCompute& command, v1::RankReply* reply) {
    absl::StatusOr<std::unique_ptr<ReceivedCall>> decoded = ReceivedCall::Decode(command);
    if (!decoded.ok()) return decoded.status();
    const std::shared_ptr<ReceivedCall> call = *std::move(decoded);
    if (command.shared_rows()) return ComputeShared(call, reply);
    ChannelFlow flow(channel_, call, call->is_whole() || options_.process_index > 0 ? nullptr : options_.rows.get());
    HEADWATER_RETURN_IF_ERROR(AwaitRows(*call, flow));
    return call->is_whole() ? ComputeWhole(*call, flow, reply) : ComputeShard(*call, flow, reply);
  }

  // Without a flow all rows must be here before the engine is called.
  static absl::Status AwaitRows(const ReceivedCall& call, RankFlow& flow) {
    for (int64_t here = 0; !call.has_flow() && here < call.row_count();) {
      const absl::StatusOr<int64_t> more = flow.AwaitMore(here);
      if (!more.ok()) return more.status();
      here = *more;
    }
    return absl::OkStatus();
  }

  // The rows come to another rank of the process.
  absl::Status ComputeShared(const std::shared_ptr<ReceivedCall>& call, v1::RankReply* reply) {
    if (options_.rows == nullptr || options_.process_index == 0 || call->is_whole()) return Malformed("shared rows");
    const absl::StatusOr<std::shared_ptr<const ReceivedCall>> neighbours = options_.rows->Await(call->contribution());
    if (!neighbours.ok()) return neighbours.status();
    HEADWATER_RETURN_IF_ERROR(call->ShareRowsOf(**neighbours));
    NeighbourFlow flow(channel_, call, *options_.rows);
    HEADWATER_RETURN_IF_ERROR(AwaitRows(*call, flow));
    return ComputeShard(*call, flow, reply);
  }

  absl::Status ComputeShard(ReceivedCall& call, RankFlow& flow, v1::RankReply* reply) {
    const absl::StatusOr<RankResult> result = rank_->Compute(call.ToCall(call.has_flow() ? &flow : nullptr));
    if (!result.ok()) return result.status();
    reply->set_staged(result->staged);
    return absl::OkStatus();
  }

  absl::Status ComputeWhole(ReceivedCall& received, ChannelFlow& flow, v1::RankReply* reply) {
    RankCall call = received.ToCall(nullptr);
    Follower follower(flow);
    if (received.has_flow()) call.micro_batch.flow = &follower;
    const absl::StatusOr<RankResult> result = rank_->ComputeWhole(call);
    if (!result.ok()) return result.status();
    for (const Output& output : OutputsOf(call.micro_batch)) {
      for (int64_t done = 0; done < output.bytes; done += kDataBytes) {
        v1::JoinRequest part;
        part.mutable_reply()->set_data(output.data + done, static_cast<size_t>(std::min(kDataBytes, output.bytes - done)));
        part.mutable_reply()->set_more(true);
        if (!voice_.Write(part)) return LeaderGone();
      }
    }
    for (const LossSums& sums : result->terms) EncodeLossSums(sums, reply->add_terms());
    reply->set_staged(result->staged);
    return absl::OkStatus();
  }

  WorkerChannel& channel_;
  const WorkerOptions& options_;
  std::unique_ptr<LocalRank> rank_;
  Voice voice_;  // last: it looks at the engine
};

}  // namespace

absl::Status RunWorker(WorkerChannel& channel, const WorkerOptions& options) { return Worker(channel, options).Run(); }

}  // namespace headwater::group
