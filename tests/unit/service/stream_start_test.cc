// The streams' Start(): calls that find no memory before anything has been read, wherever that is.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "headwater/kernels/engine.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "server/service/compute_loss_stream.h"
#include "server/service/server_core.h"
#include "server/service/transfer_rows_stream.h"
#include "tests/unit/ending_memory.h"

namespace headwater::service {
namespace {

using headwater::testing::allocations_left;

using Start = RawReactor* (*)(ServerCore&, grpc::CallbackServerContext&);

class Service : public grpc::CallbackGenericService {
 public:
  Service(ServerCore& core, Start start) : core_(core), start_(start) {}
  // Of the next call's Start() so many allocations succeed.
  void set_allocations(int allocations) { allocations_ = allocations; }

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    struct Ends {
      ~Ends() { allocations_left = -1; }
    } ends;
    allocations_left = allocations_.load();
    return start_(core_, *context);
  }

  ServerCore& core_;
  const Start start_;
  std::atomic<int> allocations_{-1};
};

// What becomes of a call that says nothing.
template <typename Request, typename Response>
grpc::Status Finish(grpc::ClientReaderWriter<Request, Response>& stream) {
  stream.WritesDone();
  Response answer;
  while (stream.Read(&answer)) {
  }
  return stream.Finish();
}
grpc::Status Call(v1::LossService::Stub& stub, bool rows) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  return rows ? Finish(*stub.TransferRows(&context)) : Finish(*stub.ComputeLoss(&context));
}

// Calls of a server in this phase, which answers with this code where there is memory.
void EndsWhereverTheMemoryEnds(Start start, bool rows, ServerCore::Phase phase, grpc::StatusCode code) {
  EngineOptions engine;
  engine.thread_count = 1;
  const auto core = ServerCore::Create(ServerOptions(), *CreateCpuEngine(engine));
  ASSERT_TRUE(core.ok()) << core.status();
  (*core)->SetPhase(phase);
  Service service(**core, start);
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const auto stub = v1::LossService::NewStub(server->InProcessChannel({}));
  const grpc::Status complete = Call(*stub, rows);
  EXPECT_EQ(complete.error_code(), code) << complete.error_message();
  int failed = 0;
  for (int allocations = 0;; ++allocations) {
    ASSERT_LT(allocations, 10000) << "no number of allocations is enough";
    service.set_allocations(allocations);
    const grpc::Status status = Call(*stub, rows);
    if (status.error_code() == code && status.error_message() == complete.error_message()) break;
    EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << allocations;
    ++failed;
  }
  EXPECT_GT(failed, 0);
  server->Shutdown();  // waits for the streams
  EXPECT_EQ((*core)->watchdog.watch_count(), 0u) << "a stream is left that gRPC knows nothing of";
}

TEST(StreamStart, AComputeLossEndsWhereverTheMemoryEnds) {
  EndsWhereverTheMemoryEnds(&ComputeLossStream::Start, false, ServerCore::Phase::kServing, grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(StreamStart, ATransferRowsEndsWhereverTheMemoryEnds) {
  EndsWhereverTheMemoryEnds(&TransferRowsStream::Start, true, ServerCore::Phase::kServing, grpc::StatusCode::INVALID_ARGUMENT);
}

// Its refusal has metadata.
TEST(StreamStart, ATransferRowsThatIsRefusedEndsWhereverTheMemoryEnds) {
  EndsWhereverTheMemoryEnds(&TransferRowsStream::Start, true, ServerCore::Phase::kStarting, grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace headwater::service
