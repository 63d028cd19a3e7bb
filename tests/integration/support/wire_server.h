// WireServer: a real server in this process, over a Unix socket in a temporary directory, on a CpuEngine; with stubs and the calls
// that most tests make. Helpers that return values fail the test (and throw) when a call that must work does not.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_WIRE_SERVER_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_WIRE_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "headwater/kernels/engine.h"
#include "headwater/v1/error.pb.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "server/service/server.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/test_tensors.h"
#include "tests/integration/support/gated_engine.h"
#include "tests/integration/support/open_stream.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::testing {

using e2e::Await;
using e2e::Bytes;
using e2e::Value;

// What a failed call says.
struct WireError {
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string reason;  // of ErrorInfo; empty without one
  std::string domain;
  std::string message;
  std::map<std::string, std::string> metadata;
  std::optional<int64_t> retry_ms;  // of RetryInfo

  std::string at(const std::string& key) const;  // metadata, or "" if absent
};
WireError DecodeError(const grpc::Status& status);
// The canonical code that belongs to a reason's name; kUnknown if there is no such reason.
absl::StatusCode CodeOf(const std::string& reason);
// The reason, or "OK"; for EXPECT_EQ.
std::string ReasonOf(const grpc::Status& status);
// Expects an error with this reason, the reason's code and these metadata; returns it, for what else it says.
WireError ExpectError(const grpc::Status& status, const std::string& reason,
                      const std::map<std::string, std::string>& metadata = {});
// Throws unless OK.
void Require(const grpc::Status& status, const std::string& what);

// A head's weights, known to the test.
struct TestHead {
  v1::Head head;  // as the last call that changed it answered
  std::vector<float> weight = {};
  const std::string& name() const { return head.name(); }
  v1::HeadStep At(int64_t step) const;
};

// A request on a head, or on a step of it, as far as the request names them.
template <typename Request>
Request RequestOn(const TestHead& head, int64_t step = 0) {
  Request request;
  if constexpr (requires { request.set_name(""); }) request.set_name(head.name());
  if constexpr (requires { request.set_epoch(""); }) request.set_epoch(head.head.epoch());
  if constexpr (requires { *request.mutable_head() = head.At(step); }) *request.mutable_head() = head.At(step);
  if constexpr (requires { *request.add_heads() = head.At(step); }) *request.add_heads() = head.At(step);
  return request;
}

// CommitMicroBatch or DiscardMicroBatch.
struct Decision {
  int64_t id = 0;
  int64_t step = 0;
  int64_t attempt = 0;
  double factor = 1;
  std::string session = {};
};
template <typename Request>
Request RequestOn(const TestHead& head, const Decision& decision) {
  auto request = RequestOn<Request>(head, decision.step);
  request.set_micro_batch(decision.id);
  request.set_attempt(decision.attempt);
  if constexpr (requires { request.set_factor(1); }) request.set_factor(decision.factor);
  request.set_session_id(decision.session);
  return request;
}

// SealStep or ApplyOptimizerStep.
struct StepEnd {
  int64_t step = 0;
  std::vector<int64_t> ids = {};  // expected
  bool wait = false;
  double learning_rate = 0.01;
};
template <typename Request>
Request RequestOn(const TestHead& head, const StepEnd& end) {
  auto request = RequestOn<Request>(head, end.step);
  request.mutable_expected()->mutable_ids()->mutable_ids()->Assign(end.ids.begin(), end.ids.end());
  if constexpr (requires { request.set_wait(true); }) request.set_wait(end.wait);
  if constexpr (requires { request.set_learning_rate(1); }) request.set_learning_rate(end.learning_rate);
  return request;
}

struct ServerSetup {
  service::ServerOptions options = {};  // the listen address is filled in
  EngineOptions engine = {};
  bool ready = true;  // BecomeReady() has run
};
// A setup with another value for one of the server's limits, or of its options.
template <typename T>
ServerSetup WithLimit(T service::Limits::*limit, std::type_identity_t<T> value, ServerSetup setup = {}) {
  setup.options.limits.*limit = value;
  return setup;
}
template <typename T>
ServerSetup WithOption(T service::ServerOptions::*option, std::type_identity_t<T> value, ServerSetup setup = {}) {
  setup.options.*option = value;
  return setup;
}

using Heads = v1::HeadService::Stub;
using Loss = v1::LossService::Stub;
using Sessions = v1::SessionService::Stub;

class WireServer {
 public:
  explicit WireServer(const ServerSetup& setup = {});
  ~WireServer();

  Loss& loss() { return *loss_; }
  Heads& heads() { return *heads_; }
  Sessions& sessions() { return *sessions_; }
  service::Server& server() { return *server_; }
  Gate& gate() { return *gate_; }
  const std::string& directory() const { return folder_.path(); }
  std::shared_ptr<grpc::Channel> NewChannel() const { return OwnChannel(server_->addresses().back()); }
  // Of the address that the setup has added.
  int tcp_port() const {
    const std::string& address = server_->addresses().front();
    return std::stoi(address.substr(address.rfind(':') + 1));
  }
  // A unary call of one of the services, such as &Heads::GetHead.
  template <typename Stub, typename Request, typename Response>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const std::type_identity_t<Request>& request, std::type_identity_t<Response>* response = nullptr,
                    int deadline_ms = 60000) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    Response unused;
    return (std::get<Stub&>(stubs()).*method)(&context, request, response == nullptr ? &unused : response);
  }
  // The response of a unary call that must work.
  template <typename Stub, typename Request, typename Response>
  Response Must(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                const std::type_identity_t<Request>& request) const {
    Response response;
    Require(Call(method, request, &response), Request::descriptor()->name());
    return response;
  }

  // ---- heads
  grpc::Status Create(const std::string& name, const v1::HeadSpec& spec, v1::Head* head = nullptr);
  // Creates it and uploads pseudo-random weights (and a bias), scaled so that the softmax is not flat.
  TestHead MakeHead(const std::string& id, const v1::HeadSpec& spec, uint32_t seed = 1);
  // Uploads fp32 values; the head that the server answered.
  grpc::Status Upload(const v1::Head& head, v1::HeadTensor tensor, const std::vector<float>& values, v1::Head* updated,
                      std::optional<int64_t> closes_step = std::nullopt);
  v1::Head Get(const std::string& name);
  // With `epoch`, only if it is still the head's.
  grpc::Status Take(TestHead* head, const std::string& epoch = "", const std::vector<std::string>& recovers_epochs = {});
  grpc::Status Save(const TestHead& head, const std::string& checkpoint) const {
    auto request = RequestOn<v1::SaveCheckpointRequest>(head);
    request.set_checkpoint(checkpoint);
    return Call(&Heads::SaveCheckpoint, request);
  }

  // ---- micro-batches
  // `rows` are bytes in the header's type.
  LossReply Compute(const v1::MicroBatchHeader& header, const std::string& rows, const SendOptions& send = {}) {
    return ComputeLoss(*loss_, header, rows, send);
  }
  // The same for a call that must work.
  LossReply MustCompute(const v1::MicroBatchHeader& header, const std::string& rows, const SendOptions& send = {}) {
    LossReply reply = Compute(header, rows, send);
    Require(reply.status, "ComputeLoss");
    return reply;
  }

  // ---- steps
  grpc::Status Commit(const TestHead& head, const Decision& decision) const {
    return Call(&Loss::CommitMicroBatch, RequestOn<v1::CommitMicroBatchRequest>(head, decision));
  }
  grpc::Status Discard(const TestHead& head, const Decision& decision) const {
    return Call(&Loss::DiscardMicroBatch, RequestOn<v1::DiscardMicroBatchRequest>(head, decision));
  }
  grpc::Status Seal(const TestHead& head, const StepEnd& end) const {
    return Call(&Heads::SealStep, RequestOn<v1::SealStepRequest>(head, end));
  }
  // Rows of the weight's gradient from `row_start` on.
  grpc::Status AddGradient(const v1::AddGradientHeader& header, const std::vector<float>& rows, bool* replayed = nullptr);
  v1::GetStepResponse Steps(const TestHead& head) { return Must(&Heads::GetStep, RequestOn<v1::GetStepRequest>(head)); }
  // A micro-batch of the open step; an empty one if there is none.
  v1::MicroBatchState Find(const TestHead& head, int64_t micro_batch);
  // Bytes of the accumulator, weight then bias.
  std::string Gradient(const TestHead& head, int64_t step = 0);
  // Bytes of the weight (and bias) as fp32.
  std::string Weights(const TestHead& head);
  // Everything that a client can see of a head: description, steps, accumulator, weights.
  std::string Snapshot(const TestHead& head, int64_t step = 0);

  // ---- sessions
  std::string OpenSession(int64_t lease_ms);
  grpc::Status CloseSession(const std::string& session) const {
    v1::CloseSessionRequest request;
    request.set_session_id(session);
    return Call(&Sessions::CloseSession, request);
  }

  // The value of a metric; empty if there is none.
  std::string Metric(const std::string& name) const;
  // Waits until the metric has the value; false if that does not come.
  bool AwaitMetric(const std::string& name, int64_t value) const {
    return Await([&] { return Metric(name) == std::to_string(value); });
  }
  // Wait until calls hold bytes, or none; false if that does not come.
  bool AwaitInFlight() const {
    return Await([&] { return Metric("headwater_in_flight_bytes") != "0"; });
  }
  bool AwaitNothingInFlight() const { return AwaitMetric("headwater_in_flight_bytes", 0); }

 private:
  std::tuple<Loss&, Heads&, Sessions&> stubs() const { return {*loss_, *heads_, *sessions_}; }

  const TemporaryDirectory folder_;
  std::shared_ptr<Gate> gate_;
  std::unique_ptr<service::Server> server_;
  std::unique_ptr<Loss> loss_;
  std::unique_ptr<Heads> heads_;
  std::unique_ptr<Sessions> sessions_;
};

// Reads a download; `offset` as in the request. The bytes, and the header if wanted.
grpc::Status ReadDownload(grpc::ClientReader<v1::DownloadTensorResponse>& reader, std::string* bytes,
                          v1::DownloadTensorHeader* header = nullptr);

// ---- building blocks of requests
// Jensen-Shannon divergence from a teacher whose rows come with the call.
void SetTeacher(v1::LossTerm* term, const std::string& teacher);
inline constexpr int64_t kColumns = 5;  // of SmallSpec()
// A trainable fp32 head with AdamW.
v1::HeadSpec SmallSpec(int64_t vocab_size = 13, int64_t hidden_size = 5);
// The same for a head that is not trainable.
v1::HeadSpec FrozenSpec(int64_t vocab_size = 13, int64_t hidden_size = 5);
inline std::vector<float> Random(int64_t count, uint32_t seed, float scale) { return e2e::RandomFloats(seed, count, scale); }
// Bytes of so many rows.
inline std::string Rows(int64_t row_count, uint32_t seed = 5, int64_t columns = kColumns) {
  return Bytes(Random(row_count * columns, seed, 1));
}
// Of a head's fp32 weight; its default size is SmallSpec()'s.
v1::UploadWeightsHeader UploadHeader(const v1::Head& head, const std::string& id, int64_t total_bytes = 13 * 5 * 4);
// FORWARD_BACKWARD cross entropy of fp32 rows with these targets.
inline v1::MicroBatchHeader CrossEntropyHeader(const TestHead& head, int64_t step, int64_t micro_batch,
                                               const std::vector<int32_t>& targets) {
  return CrossEntropyHeader(head.At(step), head.head.spec().hidden_size(), micro_batch, targets);
}

// A server with a head.
struct HeadServer : WireServer {
  using WireServer::WireServer;
  const TestHead head = MakeHead("h", SmallSpec());
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_WIRE_SERVER_H_
