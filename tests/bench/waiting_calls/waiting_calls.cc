// The cost of waiting calls: a server's threads and memory, and the time of a small call beside them.
//
//   waiting_calls [--calls=10000] [--connections=100] [--seconds=5]
//
// A headwaterd with the CPU engine on loopback. The calls are seals that wait for a micro-batch, decisions and updates of the next
// step, and joins, a quarter each. A join is a teacher's stream that has announced a row. Two small calls are timed one after the
// other, before and while all of them wait. They are GetStep and GetGradientNorm, which runs where the waiting calls do. Then half
// of the calls are cancelled. The rest end with the step, and a join with its row. Prints the figures, and adds them to the file
// that HEADWATER_FIGURES names. Exits 1 if a figure misses what is required, or a call did not wait or end as it should. With few
// calls nothing is required.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "headwater/client/client.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "tests/bench/common/serve.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/kernels/support/figure_file.h"

namespace headwater::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Stub = v1::HeadService::Stub;

constexpr int kAllCalls = 10000;  // from here on figures are required
constexpr double kMostThreads = 16;
constexpr double kMostMib = 200;
constexpr double kMostRatio = 1.5;
constexpr int kKinds = 4;
constexpr int kRowSize = 16;                        // of a join's only row, fp32
constexpr int64_t kJoinBytes = kRowSize * 4 + 128;  // of --max_join_bytes, with what each row takes beside its data

// Calls that wait cannot be taken down in order.
[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// A number of /proc/PID/status: threads, or kB.
int64_t ReadStatus(pid_t pid, const std::string& name) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::stoll(line.substr(name.size() + 1));
  }
  Fail("/proc has no " + name);
}

// A teacher's stream that announces a set of one row, and waits until it brings the row.
class Join final : public grpc::ClientWriteReactor<v1::StreamTeacherRequest> {
 public:
  using Done = std::function<void(const grpc::Status&)>;
  Join(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context, const std::string& key, Done done)
      : done_(std::move(done)) {
    v1::StreamTeacherHeader* const header = request_.mutable_header();
    header->set_tenant("tenants/default");
    header->set_join_key(key);
    header->set_total_row_count(1);
    header->set_data_type(v1::DATA_TYPE_FLOAT32);
    header->set_hidden_size(kRowSize);
    v1::LossService::NewStub(channel)->async()->StreamTeacher(context, &response_, this);
    AddHold();  // until Bring() or Leave()
    StartWrite(&request_);
    StartCall();
  }
  void Bring() {
    v1::RowChunk* const chunk = request_.mutable_chunk();
    chunk->set_role(v1::CHUNK_ROLE_TEACHER_HIDDEN);
    chunk->set_row_count(1);
    chunk->set_data(std::string(kRowSize * 4, '\0'));
    StartWriteLast(&request_, grpc::WriteOptions());
    RemoveHold();
  }
  // The call has been cancelled.
  void Leave() { RemoveHold(); }
  bool was_taken() const { return response_.row_count() == 1; }

 private:
  void OnDone(const grpc::Status& status) override { done_(status); }

  const Done done_;
  v1::StreamTeacherRequest request_;
  v1::StreamTeacherResponse response_;
};

// One call that waits.
struct WaitingCall {
  grpc::ClientContext context;
  v1::SealStepRequest seal;
  v1::SealStepResponse sealed;
  v1::ApplyOptimizerStepRequest apply;
  v1::ApplyOptimizerStepResponse applied;
  v1::DiscardMicroBatchRequest discard;
  v1::DiscardMicroBatchResponse discarded;
  std::unique_ptr<Join> join;
};

class Bench {
 public:
  Bench(int calls, int connections, double seconds)
      : seconds_(seconds),
        server_({"--listen_addresses=127.0.0.1:0", "--max_waiting_calls=" + std::to_string(calls - calls / kKinds),
                 "--max_join_bytes=" + std::to_string(calls / kKinds * kJoinBytes),
                 "--max_connection_streams=" + std::to_string(calls / connections + 2),
                 "--max_cancel_rate=" + std::to_string(calls)}) {  // half of them are cancelled at once
    grpc::ChannelArguments own_connection;
    own_connection.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    for (int i = 0; i <= connections; ++i) {
      channels_.push_back(grpc::CreateCustomChannel(server_.address(), grpc::InsecureChannelCredentials(), own_connection));
    }
    small_channel_ = channels_.back();
    small_ = v1::HeadService::NewStub(small_channel_);
    channels_.pop_back();
    calls_.resize(static_cast<size_t>(calls));
  }

  int Run() {
    const pid_t pid = server_.process().pid();
    const double step_before = P99(&Stub::GetStep), norm_before = P99(&Stub::GetGradientNorm);
    const int64_t threads_before = ReadStatus(pid, "Threads"), kb_before = ReadStatus(pid, "VmRSS");
    for (size_t i = 0; i < calls_.size(); ++i) Begin(i);
    std::this_thread::sleep_for(std::chrono::seconds(10));  // all have come, and threads without a task have ended
    if (ended_ > 0) Fail("a call did not wait: " + first_error_);
    // One more than may wait.
    if (SealOnce() != grpc::StatusCode::RESOURCE_EXHAUSTED) Fail("not every call waits");
    if (JoinOnce() != grpc::StatusCode::RESOURCE_EXHAUSTED) Fail("not every join waits");  // their rows take all bytes
    const int64_t threads = ReadStatus(pid, "Threads"), kb = ReadStatus(pid, "VmRSS");
    const double step_beside = P99(&Stub::GetStep), norm_beside = P99(&Stub::GetGradientNorm);
    if (ended_ > 0) Fail("a call ended by itself: " + first_error_);
    const size_t half = calls_.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      calls_[i].context.TryCancel();
      if (calls_[i].join != nullptr) calls_[i].join->Leave();
    }
    if (!e2e::Await([&] { return ended_ == static_cast<int64_t>(half); })) Fail("not every cancelled call ended");
    EndStep();
    for (size_t i = half; i < calls_.size(); ++i) {
      if (calls_[i].join != nullptr) calls_[i].join->Bring();
    }
    if (!e2e::Await([this] { return ended_ == static_cast<int64_t>(calls_.size()); })) Fail("not every call ended with the step");
    for (size_t i = half; i < calls_.size(); ++i) {
      if (calls_[i].join != nullptr && !calls_[i].join->was_taken()) Fail("a join's row was not taken");
    }

    const bool is_full = static_cast<int>(calls_.size()) >= kAllCalls;
    const auto at_most = [&](double bound) { return is_full ? std::optional(bound) : std::nullopt; };
    testing::FigureFile file = testing::FigureFile::FromEnvironment("x86_64; 2 cores; CPU engine");
    file.Add({"waiting_calls", static_cast<double>(calls_.size()), "calls", std::nullopt});
    file.Add({"waiting_calls_connections", static_cast<double>(channels_.size()), "connections", std::nullopt});
    file.Add({"waiting_calls_threads", static_cast<double>(threads - threads_before), "threads", at_most(kMostThreads)});
    file.Add({"waiting_calls_server_threads", static_cast<double>(threads), "threads", std::nullopt});
    file.Add({"waiting_calls_memory_mib", static_cast<double>(kb - kb_before) / 1024, "MiB", at_most(kMostMib)});
    file.Add({"waiting_calls_get_step_p99_us", step_beside, "us", std::nullopt});
    file.Add({"waiting_calls_get_step_p99_alone_us", step_before, "us", std::nullopt});
    file.Add({"waiting_calls_get_step_p99_ratio", step_beside / step_before, "x alone", at_most(kMostRatio)});
    file.Add({"waiting_calls_gradient_norm_p99_us", norm_beside, "us", std::nullopt});
    file.Add({"waiting_calls_gradient_norm_p99_alone_us", norm_before, "us", std::nullopt});
    file.Add({"waiting_calls_gradient_norm_p99_ratio", norm_beside / norm_before, "x alone", at_most(kMostRatio)});
    bool is_missed = false;
    for (const testing::Figure& figure : file.figures()) {
      const bool misses = figure.at_most.has_value() && !(figure.value <= *figure.at_most);
      is_missed = is_missed || misses;
      std::printf("%-44s %10.2f %s%s\n", figure.name.c_str(), figure.value, figure.unit.c_str(), misses ? "  TOO MUCH" : "");
    }
    if (const std::string error = file.Write(); !error.empty()) Fail(error);
    return is_missed ? 1 : 0;
  }

 private:
  client::Head MakeHead(const std::string& name) {
    client::HeadSpec spec = {.vocab_size = 32, .hidden_size = 16, .trainable = true};
    client::Head head = Require(client_.CreateHead(name, spec));
    const std::vector<float> weight(static_cast<size_t>(spec.vocab_size * spec.hidden_size));
    Require(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight)));
    return head;
  }

  v1::HeadStep At(int64_t step) const { return At(head_, step); }
  static v1::HeadStep At(const client::Head& head, int64_t step) {
    v1::HeadStep at;
    at.set_head(head.name());
    at.set_head_epoch(head.epoch());
    at.set_step(step);
    return at;
  }

  void Begin(size_t index) {
    WaitingCall& call = calls_[index];
    const std::shared_ptr<grpc::Channel>& channel = channels_[index % channels_.size()];
    const auto done = [this](const grpc::Status& status) {
      if (ended_.fetch_add(1) == 0) first_error_ = status.error_message();
    };
    if (index % kKinds == 0) {
      *call.seal.mutable_head() = At(0);
      call.seal.mutable_expected()->set_count(1);
      call.seal.set_wait(true);
      v1::HeadService::NewStub(channel)->async()->SealStep(&call.context, &call.seal, &call.sealed, done);
    } else if (index % kKinds == 1) {
      *call.discard.add_heads() = At(1);
      call.discard.set_micro_batch(static_cast<int64_t>(index));
      v1::LossService::NewStub(channel)->async()->DiscardMicroBatch(&call.context, &call.discard, &call.discarded, done);
    } else if (index % kKinds == 2) {
      *call.apply.mutable_head() = At(1);
      call.apply.mutable_expected()->set_count(1);
      call.apply.set_learning_rate(0.1);
      v1::HeadService::NewStub(channel)->async()->ApplyOptimizerStep(&call.context, &call.apply, &call.applied, done);
    } else {
      call.join = std::make_unique<Join>(channel, &call.context, std::to_string(index), done);
    }
  }

  // One more call that waits, for a moment at most.
  grpc::StatusCode SealOnce() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
    v1::SealStepRequest request;
    *request.mutable_head() = At(0);
    request.mutable_expected()->set_count(1);
    request.set_wait(true);
    v1::SealStepResponse response;
    return small_->SealStep(&context, request, &response).error_code();
  }

  // One more join, for a moment at most.
  grpc::StatusCode JoinOnce() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    std::promise<grpc::StatusCode> code;
    Join join(small_channel_, &context, "one more", [&](const grpc::Status& status) { code.set_value(status.error_code()); });
    join.Leave();
    return code.get_future().get();
  }

  void EndStep() {
    grpc::ClientContext context;
    v1::DiscardGradientRequest request;
    *request.mutable_head() = At(0);
    v1::DiscardGradientResponse response;
    const grpc::Status status = small_->DiscardGradient(&context, request, &response);
    if (!status.ok()) Fail(status.error_message());
  }

  // In microseconds, of one call after the other.
  template <typename Request, typename Response>
  double P99(grpc::Status (Stub::*call)(grpc::ClientContext*, const Request&, Response*)) {
    Request request;
    *request.mutable_head() = At(other_, 0);
    std::vector<double> times;
    for (const auto end = Clock::now() + std::chrono::duration<double>(seconds_); Clock::now() < end;) {
      grpc::ClientContext context;
      Response response;
      const auto start = Clock::now();
      const grpc::Status status = ((*small_).*call)(&context, request, &response);
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
      if (!status.ok()) Fail(status.error_message());
    }
    const auto p99 = times.begin() + static_cast<int64_t>(0.99 * static_cast<double>(times.size() - 1));
    std::nth_element(times.begin(), p99, times.end());
    return *p99;
  }

  const double seconds_;
  e2e::ServerProcess server_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::shared_ptr<grpc::Channel> small_channel_;  // of the small calls
  std::unique_ptr<Stub> small_;
  client::Client client_ = Require(client::Client::Connect(server_.address()));
  client::Head head_ = MakeHead("waited_for"), other_ = MakeHead("other");
  std::deque<WaitingCall> calls_;
  std::atomic<int64_t> ended_{0};
  std::string first_error_;
};

int Main(int argc, char** argv) {
  try {
    Request flags(argc, argv);
    const int calls = flags.Take("calls", kAllCalls), connections = flags.Take("connections", 100);
    const double seconds = flags.Take("seconds", 5.0);
    flags.ExpectEmpty();
    return Bench(calls, connections, seconds).Run();
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) { return headwater::bench::Main(argc, argv); }
