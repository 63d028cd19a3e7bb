#include "server/group/ranks/rank_worker.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "headwater/kernels/communicator.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/v1/group_service.grpc.pb.h"
#include "server/group/ranks/rank.h"
#include "server/observability/logging.h"
#include "server/observability/repeated_task.h"

namespace headwater::group {
namespace {

absl::Status LeaderGone() { return MakeError(ErrorReason::kEngineFailed, "the leader is gone"); }

// Writes the worker's messages: answers, and a heartbeat now and then. Aborts the rank when the leader is gone, or when the engine
// has failed while a command may wait for it.
class HeartbeatWriter {
 public:
  HeartbeatWriter(WorkerChannel& channel, const WorkerOptions& options) : channel_(channel), options_(options) {}

  bool Write(const v1::JoinRequest& message) {
    absl::MutexLock lock(&write_mutex_);
    return channel_.Write(message);
  }
  void Start() {
    beats_.emplace(options_.alive_interval, [this] { Beat(); });
  }
  bool ended() const { return ended_.load(); }
  // Sets the rank's communicator, which End() aborts: commands that wait for other ranks return then.
  void Guard(std::shared_ptr<Communicator> communicator) {
    absl::MutexLock lock(&mutex_);
    communicator_ = std::move(communicator);
    if (ended_.load()) communicator_->Abort(LeaderGone());
  }
  // From now on heartbeats report the rank's progress. Null: no longer. The rank outlives the watch.
  void Watch(const Rank* rank) {
    absl::MutexLock lock(&mutex_);
    rank_ = rank;
  }

 private:
  void Beat() {
    if (ended_.load()) return;
    v1::JoinRequest message;
    v1::RankAlive* const alive = message.mutable_alive();
    const Rank* rank = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      rank = rank_;
      if (rank != nullptr) {
        const RankTimes times = rank->times();
        alive->set_progress(rank->engine->progress());
        alive->set_computing_us(absl::ToInt64Microseconds(times.computing));
        alive->set_waiting_us(absl::ToInt64Microseconds(times.waiting));
        alive->set_communicating_us(absl::ToInt64Microseconds(times.communicating));
      }
    }
    if (options_.is_leaving) alive->set_leaving(options_.is_leaving());
    // Without the lock: a lost device may delay health().
    const absl::Status health = rank == nullptr ? absl::OkStatus() : rank->engine->health();
    // The command may never return: this is its answer.
    if (!health.ok()) EncodeStatus(health, message.mutable_reply()->mutable_status());
    const bool is_heard = Write(message);
    if (!health.ok()) return End(health);
    if (!is_heard) return End(LeaderGone());
  }

  void End(const absl::Status& reason) {
    {
      absl::MutexLock lock(&mutex_);
      ended_ = true;
      if (communicator_ != nullptr) communicator_->Abort(reason);
    }
    if (options_.on_call_ended) options_.on_call_ended();
  }

  WorkerChannel& channel_;
  const WorkerOptions& options_;
  std::atomic<bool> ended_{false};
  absl::Mutex write_mutex_;
  absl::Mutex mutex_;
  std::shared_ptr<Communicator> communicator_ ABSL_GUARDED_BY(mutex_);
  const Rank* rank_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<observability::RepeatedTask> beats_;  // last: it uses the members above
};

// Reads a micro-batch's rows, and the decision, from the channel on demand.
class ChannelFlow final : public RowFlow {
 public:
  // `shared`: the rows of all ranks of the process, or null. With `is_neighbour` they come to another rank, and here only the
  // decision. Without, they come here, and this fills `shared`.
  ChannelFlow(WorkerChannel& channel, ReceivedCall& call, RowsHere* shared, bool is_neighbour)
      : channel_(channel), call_(call), shared_(shared), is_neighbour_(is_neighbour) {}
  ~ChannelFlow() override {
    if (shared_ == nullptr || is_neighbour_) return;
    shared_->End(MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows wants no more"));
  }
  ChannelFlow(const ChannelFlow&) = delete;
  ChannelFlow& operator=(const ChannelFlow&) = delete;

  absl::Status AwaitRows(int64_t row_end) override {
    if (is_neighbour_) return shared_->Await(row_end).status();
    while (call_.rows_here() < row_end) {
      const absl::Status status = Read();
      if (shared_ != nullptr) status.ok() ? shared_->Come(call_.rows_here()) : shared_->End(status);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Decide(const DigestBuilder*) override {
    while (!decided_) HEADWATER_RETURN_IF_ERROR(Read());
    return decision_;
  }

  void GradHiddenReady(int64_t) override {}

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
  RowsHere* const shared_;
  const bool is_neighbour_;
  bool decided_ = false;
  absl::Status decision_;
};

class Worker {
 public:
  Worker(WorkerChannel& channel, const WorkerOptions& options) : channel_(channel), options_(options), writer_(channel, options) {}

  absl::Status Run() {
    ProcessRows* const rows = options_.process_index == 0 ? options_.rows.get() : nullptr;
    if (rows != nullptr) rows->Open();
    const absl::Cleanup close = [rows] {
      if (rows != nullptr) rows->Close(MakeError(ErrorReason::kEngineFailed, "the rank that gets the rows has left the group"));
    };
    HEADWATER_RETURN_IF_ERROR(Begin());
    absl::Status status = Execute();
    writer_.Watch(nullptr);
    rank_.abort(status);
    return status;
  }

 private:
  absl::Status Begin() {
    HEADWATER_ASSIGN_OR_RETURN(const std::unique_ptr<TcpMeeting> meeting, TcpMeeting::Listen(options_.listen_host));
    v1::JoinRequest hello;
    WriteFields(options_, *hello.mutable_hello());
    hello.mutable_hello()->set_port(meeting->port());
    v1::JoinResponse message;
    if (!writer_.Write(hello)) return LeaderGone();
    writer_.Start();  // the leader checks at each message whether the worker may still join
    if (!channel_.Read(&message)) return LeaderGone();
    if (!message.has_welcome()) return Malformed("no welcome");
    absl::Status status = Settle(message.welcome(), *meeting);
    v1::JoinRequest ready;
    EncodeStatus(status, ready.mutable_ready()->mutable_status());
    if (status.ok()) {
      const EngineDevice device = engine().devices().front();
      ready.mutable_ready()->set_device(device.name);
      ready.mutable_ready()->set_model(device.model);
      ready.mutable_ready()->set_memory_budget_bytes(device.memory_budget_bytes);
      writer_.Watch(&rank_);
    }
    if (!writer_.Write(ready)) return LeaderGone();
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
    EngineOptions engine_options = options_.engine_options;
    ReadFields(welcome, engine_options);
    ReadFields(welcome, engine_options.group);
    HEADWATER_ASSIGN_OR_RETURN(
        engine_options.group.communicator,
        meeting.Meet(welcome.rank(), addresses, welcome.secret(), std::chrono::milliseconds(welcome.setup_timeout_ms()),
                     [this] { return writer_.ended(); }));
    writer_.Guard(engine_options.group.communicator);
    engine_options.shard_count = welcome.world_size();
    engine_options.shard_weights.assign(welcome.shard_weights().begin(), welcome.shard_weights().end());
    HEADWATER_ASSIGN_OR_RETURN(std::unique_ptr<LossEngine> engine,
                               is_cuda ? options_.make_cuda_engine(engine_options) : options_.make_engine(engine_options));
    rank_ = MakeLocalRank(std::move(engine));
    observability::Log(observability::LogLevel::kInfo, "joined",
                       {{"rank", int64_t{welcome.rank()}}, {"ranks", int64_t{welcome.world_size()}}});
    return absl::OkStatus();
  }

  // Runs until an error or the end of the call.
  absl::Status Execute() {
    v1::JoinResponse command;
    while (channel_.Read(&command)) {
      // Leftovers of a computation that ended early.
      if (command.has_data() || command.has_decision()) continue;
      if (command.has_release()) {
        for (const uint64_t id : command.release().contributions()) contributions_.erase(id);
        for (const uint64_t id : command.release().heads()) heads_.erase(id);
        continue;
      }
      v1::JoinRequest answer;
      v1::RankReply* const reply = answer.mutable_reply();
      const absl::Status status = ExecuteOne(command, reply);
      // The others may be waiting for this rank.
      if (HasReason(status, ErrorReason::kEngineFailed)) rank_.abort(status);
      EncodeStatus(status, reply->mutable_status());
      if (!writer_.Write(answer)) break;
      if (absl::Status health = engine().health(); !health.ok()) return health;
    }
    return LeaderGone();
  }

  absl::Status ExecuteOne(const v1::JoinResponse& command, v1::RankReply* reply) {
    if (command.has_plan_head()) return PlanHead(command.plan_head(), reply);
    if (command.has_create_head()) return CreateHead(command.create_head(), reply);
    if (command.has_read_tensor()) return ReadTensor(command.read_tensor(), reply);
    if (command.has_write_tensor()) return WriteTensor(command.write_tensor());
    if (command.has_head_command()) return RunHeadCommand(command.head_command(), reply);
    if (command.has_apply_optimizer()) return ApplyOptimizer(command.apply_optimizer());
    if (command.has_compute()) return Compute(command.compute(), reply);
    if (command.has_commit()) return Commit(command.commit());
    return Malformed("no command");
  }

  static void EncodePlan(const MemoryPlan& plan, v1::RankReply* reply) {
    for (const MemoryPlan::Item& item : plan.items) {
      reply->add_plan_purposes(item.purpose);
      reply->add_plan_bytes(item.bytes);
    }
    reply->set_plan_total_bytes(plan.total_bytes);
    reply->set_token_chunk_rows(plan.token_chunk_rows);
  }

  absl::Status PlanHead(const v1::RankPlanHead& command, v1::RankReply* reply) {
    HEADWATER_ASSIGN_OR_RETURN(const MemoryPlan plan, engine().PlanHead(DecodeHeadSpec(command.spec())));
    EncodePlan(plan, reply);
    return absl::OkStatus();
  }

  absl::Status CreateHead(const v1::RankCreateHead& command, v1::RankReply* reply) {
    HEADWATER_ASSIGN_OR_RETURN(std::unique_ptr<EngineHead> head, engine().CreateHead(DecodeHeadSpec(command.spec())));
    EncodePlan(head->plan(), reply);
    heads_[command.head()] = std::move(head);
    return absl::OkStatus();
  }

  // Null: unknown id.
  EngineHead* FindHead(uint64_t id) const {
    const auto found = heads_.find(id);
    return found == heads_.end() ? nullptr : found->second.get();
  }

  // A command's range of elements, checked.
  struct Elements {
    EngineHead* head;
    HeadTensor tensor;
    int64_t bytes;  // of one
  };
  template <typename Command>
  absl::StatusOr<Elements> ElementsOf(const Command& command) const {
    const int64_t start = command.start(), count = command.count();
    EngineHead* const head = FindHead(command.head());
    if (head == nullptr || command.tensor() < 1 || command.tensor() > static_cast<int32_t>(HeadTensor::kMoment2Bias)) {
      return Malformed("a tensor");
    }
    const HeadTensor tensor = static_cast<HeadTensor>(command.tensor());
    const int64_t total = head->ElementCount(tensor);
    if (start < 0 || count < 0 || start > total || count > total - start) return Malformed("a range");
    return Elements{head, tensor, ElementBytes(head->TensorDataType(tensor))};
  }

  absl::Status ReadTensor(const v1::RankReadTensor& command, v1::RankReply* reply) {
    HEADWATER_ASSIGN_OR_RETURN(const Elements elements, ElementsOf(command));
    const int64_t part = kDataBytes / elements.bytes;
    for (int64_t done = 0; done < command.count();) {
      const int64_t count = std::min(part, command.count() - done);
      reply->mutable_data()->resize(static_cast<size_t>(count * elements.bytes));
      HEADWATER_RETURN_IF_ERROR(
          elements.head->ReadTensor(elements.tensor, command.start() + done, count, reply->mutable_data()->data()));
      done += count;
      if (done == command.count()) return absl::OkStatus();
      v1::JoinRequest answer;
      *answer.mutable_reply() = *reply;
      answer.mutable_reply()->set_more(true);
      if (!writer_.Write(answer)) return LeaderGone();
    }
    return absl::OkStatus();
  }

  absl::Status WriteTensor(const v1::RankWriteTensor& command) {
    HEADWATER_ASSIGN_OR_RETURN(const Elements elements, ElementsOf(command));
    std::string data;
    const size_t bytes = static_cast<size_t>(command.count() * elements.bytes);
    data.reserve(bytes);
    while (data.size() < bytes) {
      v1::JoinResponse message;
      if (!channel_.Read(&message)) return LeaderGone();
      if (!message.has_data() || message.data().data().size() > bytes - data.size()) return Malformed("a tensor's elements");
      data += message.data().data();
    }
    if (!command.has_factor()) return elements.head->WriteTensor(elements.tensor, command.start(), command.count(), data.data());
    return elements.head->AddToGradient(elements.tensor, command.start(), command.count(), command.factor(),
                                        reinterpret_cast<const float*>(data.data()));
  }

  absl::Status RunHeadCommand(const v1::RankHeadCommand& command, v1::RankReply* reply) {
    EngineHead* const head = FindHead(command.head());
    if (head == nullptr) return Malformed("a head");
    if (command.kind() == v1::RankHeadCommand::ZERO_GRADIENT) return head->ZeroGradient();
    if (command.kind() == v1::RankHeadCommand::REDUCE_GRADIENT) return head->ReduceGradient();
    if (command.kind() == v1::RankHeadCommand::RESET_OPTIMIZER_STATE) return head->ResetOptimizerState();
    HEADWATER_ASSIGN_OR_RETURN(const GradientStats stats, head->ComputeGradientStats());
    reply->set_norm_squared(stats.norm_squared);
    reply->set_non_finite_count(stats.non_finite_count);
    return absl::OkStatus();
  }

  absl::Status ApplyOptimizer(const v1::RankApplyOptimizer& command) {
    EngineHead* const head = FindHead(command.head());
    if (head == nullptr) return Malformed("a head");
    return head->ApplyOptimizer(
        {command.learning_rate(), command.gradient_multiplier(), DecodeOptimizer(command.settings()), command.update_count()});
  }

  absl::Status Commit(const v1::RankCommit& command) {
    const auto found = contributions_.find(command.contribution());
    if (found == contributions_.end()) return Malformed("a contribution");
    absl::Status status = found->second->Commit(command.factor());
    if (!HasReason(status, ErrorReason::kShardNotReady)) contributions_.erase(found);
    return status;
  }

  absl::Status Compute(const v1::RankCompute& command, v1::RankReply* reply) {
    HEADWATER_ASSIGN_OR_RETURN(const std::shared_ptr<ReceivedCall> call,
                               ReceivedCall::Decode(command, [this](uint64_t id) { return FindHead(id); }));
    std::shared_ptr<SharedCall> shared;
    if (!command.whole()) ++shared_number_;
    if (command.shared_rows()) {  // they come to another rank of the process
      if (options_.rows == nullptr || options_.process_index == 0 || command.whole()) return Malformed("shared rows");
      HEADWATER_ASSIGN_OR_RETURN(shared, options_.rows->Await(shared_number_));
      HEADWATER_RETURN_IF_ERROR(call->ShareRowsOf(*shared->call));
    } else if (options_.rows != nullptr && options_.process_index == 0 && !command.whole()) {
      shared = std::make_shared<SharedCall>(call);
      options_.rows->Begin(shared_number_, shared);
    }
    ChannelFlow flow(channel_, *call, shared == nullptr ? nullptr : &shared->rows, command.shared_rows());
    MicroBatch micro_batch = call->micro_batch();
    // Without a flow all rows must have come before the engine is called.
    if (!command.flow()) HEADWATER_RETURN_IF_ERROR(flow.AwaitRows(micro_batch.hidden.row_count));
    if (command.flow()) micro_batch.flow = &flow;
    HEADWATER_ASSIGN_OR_RETURN(MicroBatchResult result, engine().Compute(micro_batch));
    reply->set_staged(result.staged != nullptr);
    if (result.staged != nullptr) contributions_[command.contribution()] = std::move(result.staged);
    return command.whole() ? SendResult(micro_batch, result, reply) : absl::OkStatus();
  }

  absl::Status SendResult(const MicroBatch& micro_batch, const MicroBatchResult& result, v1::RankReply* reply) {
    for (const Output& output : OutputsOf(micro_batch)) {
      for (int64_t done = 0; done < output.bytes; done += kDataBytes) {
        v1::JoinRequest part;
        part.mutable_reply()->set_data(output.data + done, static_cast<size_t>(std::min(kDataBytes, output.bytes - done)));
        part.mutable_reply()->set_more(true);
        if (!writer_.Write(part)) return LeaderGone();
      }
    }
    for (const LossSums& sums : result.terms) EncodeLossSums(sums, reply->add_terms());
    return absl::OkStatus();
  }

  LossEngine& engine() const { return *rank_.engine; }

  WorkerChannel& channel_;
  const WorkerOptions& options_;
  Rank rank_;
  // By the leader's number. Contributions are destroyed before heads.
  std::map<uint64_t, std::unique_ptr<EngineHead>> heads_;
  std::map<uint64_t, std::unique_ptr<StagedContribution>> contributions_;
  uint64_t shared_number_ = 0;  // of micro-batches that all ranks compute
  HeartbeatWriter writer_;      // last: it reads the engine
};

constexpr char kUnixPrefix[] = "unix:";

absl::Status ReadFile(const std::string& path, std::string* out) {
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  out->assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return file && !out->empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(path, " cannot be read, or is empty"));
}

class StreamChannel final : public WorkerChannel {
 public:
  using Stream = grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>;
  explicit StreamChannel(Stream& stream) : stream_(stream) {}
  bool Read(v1::JoinResponse* message) override { return Going(stream_.Read(message)); }
  bool Write(const v1::JoinRequest& message) override { return Going(stream_.Write(message)); }
  // The leader has ended the call.
  bool ended() const { return ended_.load(); }

 private:
  bool Going(bool going) {
    if (!going) ended_.store(true);
    return going;
  }

  Stream& stream_;
  std::atomic<bool> ended_{false};
};

}  // namespace

absl::Status RunWorker(WorkerChannel& channel, const WorkerOptions& options) { return Worker(channel, options).Run(); }

std::string LeaderHost(const std::string& address) {
  return absl::StartsWith(address, kUnixPrefix) ? "" : address.substr(0, address.rfind(':'));
}

absl::Status JoinLeader(const LeaderAddress& leader, const WorkerOptions& options) {
  grpc::SslCredentialsOptions tls;
  std::string token;
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.ca, &tls.pem_root_certs));
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.certificate, &tls.pem_cert_chain));
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.key, &tls.pem_private_key));
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.token_file, &token));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // Each attempt connects again, instead of waiting as long as the failures of earlier ones suggest.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Pings detect a leader whose host is gone: it closes no connection.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(absl::ToInt64Milliseconds(kWorkerPingInterval)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  const auto channel = grpc::CreateCustomChannel(
      leader.address, leader.ca.empty() ? grpc::InsecureChannelCredentials() : grpc::SslCredentials(tls), arguments);
  const auto stub = v1::GroupService::NewStub(channel);
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", absl::StripAsciiWhitespace(token)));
  const auto stream = stub->Join(&context);
  StreamChannel worker_channel(*stream);
  const absl::Status ended = RunWorker(worker_channel, options);
  if (!worker_channel.ended()) context.TryCancel();
  // Reads the rest of the call, which gRPC requires before its end.
  for (v1::JoinResponse rest; stream->Read(&rest);) {
  }
  const grpc::Status status = stream->Finish();
  if (status.ok() || status.error_code() == grpc::StatusCode::CANCELLED) return ended;
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace headwater::group
