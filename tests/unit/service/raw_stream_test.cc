// RawStream: calls whose reactions find no memory.
#include "server/service/raw_stream.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "headwater/kernels/engine.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "server/service/server_core.h"

namespace headwater::service {
namespace {

enum class Reaction { kNone, kMessage, kWritten, kGone };

// Sends each message back. One of its reactions finds no memory.
class Echo : public RawStream {
 public:
  Echo(ServerCore& core, grpc::CallbackServerContext& context, Reaction failing) : RawStream(core, context), failing_(failing) {}

 private:
  void OnMessage(bool ok, grpc::ByteBuffer* message) override {
    if (!ok) return Finish(grpc::Status::OK);
    if (failing_ == Reaction::kMessage) throw std::bad_alloc();
    Write(*message);
  }
  void OnWritten(bool) override {
    if (failing_ == Reaction::kWritten) throw std::bad_alloc();
    Read(/*watched=*/false);
  }
  void OnGone() override {
    Finish(grpc::Status(grpc::StatusCode::CANCELLED, "cancelled"));
    if (failing_ == Reaction::kGone) throw std::bad_alloc();
  }
  bool OnEnded(const absl::Status&) override { return false; }

  const Reaction failing_;
};

class EchoService : public grpc::CallbackGenericService {
 public:
  EchoService(ServerCore& core, Reaction failing) : core_(core), failing_(failing) {}

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    const auto stream = std::make_shared<Echo>(core_, *context, failing_);
    RawReactor* const reactor = stream->Own();
    stream->Read(/*watched=*/false);
    return reactor;
  }

  ServerCore& core_;
  const Reaction failing_;
};

// What becomes of a call that sends a message and takes the answers. The server has let go of it when this returns.
grpc::StatusCode Call(Reaction failing) {
  EngineOptions engine;
  engine.thread_count = 1;
  const auto core = ServerCore::Create(ServerOptions(), *CreateCpuEngine(engine));
  EchoService service(**core, failing);
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  const auto stream = v1::LossService::NewStub(server->InProcessChannel({}))->ComputeLoss(&context);
  stream->Write({});
  v1::ComputeLossResponse answer;
  if (failing == Reaction::kGone) {
    EXPECT_TRUE(stream->Read(&answer));  // the server has the call: it will see that it is cancelled
    context.TryCancel();
  }
  stream->WritesDone();
  while (stream->Read(&answer)) {
  }
  const grpc::Status status = stream->Finish();
  server->Shutdown();
  return status.error_code();
}

TEST(RawStream, ACallThatFindsNoMemoryIsCancelledAndOver) {
  EXPECT_EQ(Call(Reaction::kNone), grpc::StatusCode::OK);
  EXPECT_EQ(Call(Reaction::kMessage), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(Call(Reaction::kWritten), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(Call(Reaction::kGone), grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace headwater::service
