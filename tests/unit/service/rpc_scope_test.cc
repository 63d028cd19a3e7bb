// RunRpc: calls that find no memory, wherever that is.
#include "server/service/rpc_scope.h"

#include <grpcpp/server_context.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "server/service/server_core.h"
#include "tests/unit/ending_memory.h"

namespace headwater::service {
namespace {

using headwater::testing::allocations_left;
using observability::RpcMethod;

// More than a sentence that fits into a string without memory.
const char kSentence[] = "a sentence that is longer than what a string holds by itself";

TEST(RunRpc, AnswersWhereverTheMemoryEnds) {
  EngineOptions engine;
  engine.thread_count = 1;
  const auto core = ServerCore::Create(ServerOptions(), *CreateCpuEngine(engine));
  ASSERT_TRUE(core.ok()) << core.status();
  // A call that succeeds, one that is refused, and one whose body finds no memory; `allocations` of them succeed, then none does.
  const auto run = [&](int allocations, int body) {
    grpc::CallbackServerContext context;
    allocations_left = allocations;
    const auto answer = [&](RpcScope&) -> absl::Status {
      if (body == 2) throw std::bad_alloc();
      return body == 0 ? absl::OkStatus() : MakeError(ErrorReason::kInvalidField, kSentence, {{kSentence, kSentence}});
    };
    const grpc::Status status = RunRpc(**core, context, RpcMethod::kCommitMicroBatch, answer, /*always=*/true);
    allocations_left = -1;
    return status;
  };
  const grpc::StatusCode complete[] = {grpc::StatusCode::OK, grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::INTERNAL};
  for (int body = 0; body < 3; ++body) {
    EXPECT_EQ(run(-1, body).error_code(), complete[body]);
    int without_words = 0;
    int allocations = 0;
    for (;; ++allocations) {
      ASSERT_LT(allocations, 10000) << "no number of allocations is enough";
      const grpc::Status status = run(allocations, body);
      if (status.error_code() == complete[body] && status.error_message() != "out of memory") break;
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL) << allocations << " " << status.error_message();
      if (status.error_message() == "out of memory") ++without_words;
    }
    EXPECT_GT(without_words, 0) << body;
  }
}

}  // namespace
}  // namespace headwater::service
