// WireServer: a real server in this process, over a Unix socket in a temporary directory, on a CpuEngine; with stubs and the calls
// that most tests make. Helpers that return values fail the test (and throw) when a call that must work does not.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_WIRE_SERVER_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_WIRE_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "headwater/v1/error.pb.h"
#include "headwater/v1/head_service.grpc.pb.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "server/service/server.h"
#include "tests/integration/support/gated_engine.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::testing {

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
// The value; throws if there is none.
template <typename T>
T Valued(absl::StatusOr<T> value, const std::string& what) {
  if (!value.ok()) throw std::runtime_error(what + ": " + std::string(value.status().message()));
  return *std::move(value);
}
// Throws unless OK.
void Require(const grpc::Status& status, const std::string& what);

// A head's weights, known to the test.
struct TestHead {
  v1::Head head;  // as the last call that changed it answered
  std::vector<float> weight;
  std::vector<float> bias;
  const std::string& name() const { return head.name(); }
};

// What a ComputeLoss call brought.
struct LossReply {
  grpc::Status status;
  v1::MicroBatchSummary summary;
  std::string grad_hidden;  // bytes
  std::vector<int64_t> chunk_starts;
  std::multimap<std::string, std::string> initial_metadata;
};

// How the rows are sent.
struct SendOptions {
  int64_t chunk_rows = 3;
  bool reversed = false;
  std::string request_id = {};  // empty: none is sent
  std::optional<int> deadline_ms = std::nullopt;
  std::map<int32_t, std::string> teacher_rows = {};  // by term, beside those of term 0
};

// Waits until `holds`; false if it does not within 20 s.
bool Await(const std::function<bool()>& holds);

struct ServerSetup {
  service::ServerOptions options;  // the listen address is filled in
  EngineOptions engine;
  bool ready = true;  // BecomeReady() has run
};
// A setup with another value for one of the server's limits.
template <typename T>
ServerSetup WithLimit(T service::Limits::*limit, std::type_identity_t<T> value, ServerSetup setup = {}) {
  setup.options.limits.*limit = value;
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
  std::shared_ptr<grpc::Channel> NewChannel() const;  // its own connection
  // A unary call of one of the services, such as &Heads::GetHead.
  template <typename Stub, typename Request, typename Response>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const std::type_identity_t<Request>& request, std::type_identity_t<Response>* response = nullptr,
                    std::optional<int> deadline_ms = std::nullopt) const {
    grpc::ClientContext context;
    if (deadline_ms.has_value()) context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(*deadline_ms));
    Response unused;
    return (std::get<Stub&>(stubs()).*method)(&context, request, response == nullptr ? &unused : response);
  }

  // ---- heads
  grpc::Status Create(const std::string& name, const v1::HeadSpec& spec, v1::Head* head);
  // Creates it and uploads pseudo-random weights (and a bias), scaled so that the softmax is not flat.
  TestHead MakeHead(const std::string& id, const v1::HeadSpec& spec, uint32_t seed = 1);
  // Uploads fp32 values; the head that the server answered.
  grpc::Status Upload(const v1::Head& head, v1::HeadTensor tensor, const std::vector<float>& values, v1::Head* updated,
                      std::optional<int64_t> closes_step = std::nullopt);
  v1::Head Get(const std::string& name);

  // ---- micro-batches
  // `rows` and `teacher_rows` are bytes in the header's types.
  LossReply Compute(const v1::MicroBatchHeader& header, const std::string& rows, const std::string& teacher_rows = "",
                    const SendOptions& send = {});
  // The same for a call that must work.
  LossReply MustCompute(const v1::MicroBatchHeader& header, const std::string& rows, const std::string& teacher_rows = "",
                        const SendOptions& send = {});

  // ---- steps
  v1::HeadStep At(const TestHead& head, int64_t step) const;
  grpc::Status Commit(const TestHead& head, int64_t step, int64_t micro_batch, double factor, const std::string& session = "");
  grpc::Status Discard(const TestHead& head, int64_t step, int64_t micro_batch);
  grpc::Status Seal(const TestHead& head, int64_t step, const std::vector<int64_t>& ids);
  grpc::Status Apply(const v1::ApplyOptimizerStepRequest& request, v1::ApplyOptimizerStepResponse* response = nullptr);
  // Rows of the weight's gradient from `row_start` on.
  grpc::Status AddGradient(const v1::AddGradientHeader& header, const std::vector<float>& rows, bool* replayed = nullptr);
  // With `epoch`, only if it is still the head's.
  grpc::Status Take(TestHead* head, const std::string& epoch = "", const std::vector<std::string>& recovers_epochs = {});
  v1::GetStepResponse Steps(const TestHead& head);
  // A micro-batch of the open step; an empty one if there is none.
  v1::MicroBatchState Find(const TestHead& head, int64_t micro_batch);
  // Bytes of the accumulator, weight then bias.
  std::string Gradient(const TestHead& head, int64_t step = 0, double factor = 1);
  // Bytes of the weight (and bias) as fp32.
  std::string Weights(const TestHead& head);
  // ---- sessions
  std::string OpenSession(int64_t lease_ms);

  // The line of a metric, up to its end; empty if there is none.
  std::string MetricLine(const std::string& name) const;
  // Waits until the metric has the value; false if it does not within 20 s.
  bool AwaitMetric(const std::string& name, int64_t value) const;
  // Wait until calls hold bytes, or none; false if that does not come within 20 s.
  bool AwaitInFlight() const;
  bool AwaitNothingInFlight() const { return AwaitMetric("headwater_in_flight_bytes", 0); }

  // Everything that a client can see of a head: description, steps, accumulator, weights.
  std::string Snapshot(const TestHead& head, int64_t step = 0);

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
// A trainable fp32 head with AdamW.
v1::HeadSpec SmallSpec(int64_t vocab_size = 13, int64_t hidden_size = 5);
// The same for a head that is not trainable.
v1::HeadSpec FrozenSpec(int64_t vocab_size = 13, int64_t hidden_size = 5);
std::vector<float> Random(size_t count, uint32_t seed, float scale);
std::string Bytes(const std::vector<float>& values);
std::vector<float> Floats(const std::string& bytes);
v1::Tensor Int32Tensor(const std::vector<int32_t>& values);
v1::Tensor FloatTensor(const std::vector<float>& values);
// Of a head's fp32 weight; its default size is SmallSpec()'s.
v1::UploadWeightsHeader UploadHeader(const v1::Head& head, const std::string& id, int64_t total_bytes = 13 * 5 * 4);
// FORWARD_BACKWARD cross entropy of fp32 rows with these targets.
v1::MicroBatchHeader CrossEntropyHeader(const TestHead& head, int64_t step, int64_t micro_batch,
                                        const std::vector<int32_t>& targets);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_WIRE_SERVER_H_
