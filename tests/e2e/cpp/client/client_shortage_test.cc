// A system that gives the C++ client no thread, or no memory, where a call is about to end: it ends all the same. Replaces operator
// new and pthread_create.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/core/rows/memory/copy_threads.h"
#include "headwater/client/client.h"
#include "headwater/client/error.h"
#include "tests/e2e/cpp/support/scripted_server.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace {

// Allocations of this many bytes fail.
std::atomic<size_t> refused_bytes{0};

// So many threads are given to std::thread; gRPC, whose process ends without them, has its own way to ask, and gets all.
constexpr int kEnough = 1 << 20;
std::atomic<int> threads{kEnough};
using Routine = void* (*)(void*);
std::atomic<bool> learning{false};
std::atomic<Routine> routine_of_std_thread{nullptr};

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory = bytes == refused_bytes ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, Routine routine, void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, Routine, void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (learning) routine_of_std_thread = routine;
  if (routine == routine_of_std_thread && threads.fetch_sub(1) <= 0) return EAGAIN;
  return create(thread, attributes, routine, argument);
}

namespace headwater::e2e {
namespace {

using namespace headwater::client;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr int64_t kHiddenSize = 4;
// Rows of a size that nothing else has.
constexpr size_t kRows = 1003;

class ClientShortage : public testing::Test {
 protected:
  ClientShortage() {
    learning = true;
    std::thread([] {}).join();
    learning = false;
    server_.compute_loss = [this](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
      const v1::MicroBatchHeader header = ScriptedServer::ReadAll(stream).header;
      refused_bytes = refused_after_reading_.load();  // the server, which reads into memory of that size, is this process
      const auto state = server_.WithState([](const ScriptedServer::State& current) { return current; });
      if (state.head_state == v1::HEAD_STATE_RESTORED) {
        return ErrorWithReason(grpc::StatusCode::ABORTED, "STEP_LOST", 0, {{"restoredStep", "0"}, {"checkpoint", "newest"}});
      }
      return ScriptedServer::Answer(stream, header);
    };
    Connect();
  }
  ~ClientShortage() override {
    threads = kEnough;
    refused_bytes = 0;
  }

  void Connect() {
    head_.reset();
    ClientOptions options = {.replay_bytes = 1 << 20, .transport = Transport::kGrpc};
    options.retry = {.max_attempts = 2, .initial_backoff = milliseconds(1), .max_backoff = milliseconds(1)};
    client_.emplace(Value(Client::Connect(server_.target(), options)));
    head_.emplace(Value(client_->OpenHead("h")));
  }

  Future<LossResult> Start(int64_t micro_batch) {
    MicroBatchOptions options = {.step = 0, .micro_batch = micro_batch, .return_grad_hidden = false};
    return head_->CrossEntropy(RowsView::Float32(rows_, kHiddenSize), targets_, {}, options);
  }
  // The call's end, which must come.
  absl::Status Submit(int64_t micro_batch) {
    Future<LossResult> future = Start(micro_batch);
    EXPECT_TRUE(future.WaitFor(seconds(10)));
    return future.Get().status();
  }

  void Restart() {
    server_.WithState([](ScriptedServer::State& state) {
      ++state.incarnation[0];
      state.epoch = std::string(16, 'r');
      state.head_state = v1::HEAD_STATE_RESTORED;
    });
  }

  ScriptedServer server_;
  std::atomic<size_t> refused_after_reading_ = 0;
  std::optional<Client> client_;
  std::optional<Head> head_;
  const std::vector<float> rows_ = std::vector<float>(kRows * kHiddenSize, 0.5F);
  const std::vector<int32_t> targets_ = std::vector<int32_t>(kRows, 1);
};

TEST_F(ClientShortage, StepThatTheLogHasNoMemoryForIsComputedAndCannotBeRepeated) {
  server_.add_gradient = [](const v1::AddGradientHeader&, const std::string& bytes) {
    refused_bytes = bytes.size();  // a copy of it
    return grpc::Status::OK;
  };
  for (const bool is_gradient : {false, true}) {
    server_.WithState([](ScriptedServer::State& state) { state = {}; });
    Connect();
    if (is_gradient) {
      Value(head_->AddGradient(0, 0, RowsView::Float32(rows_, kHiddenSize)));
    } else {
      ASSERT_TRUE(Submit(0).ok());
      refused_after_reading_ = rows_.size() * sizeof(float);
      EXPECT_TRUE(Submit(1).ok());
    }
    refused_bytes = refused_after_reading_ = 0;
    EXPECT_TRUE(Submit(2).ok());
    Restart();
    const absl::Status status = Submit(3);
    EXPECT_EQ(ErrorReason(status), "STEP_LOST");
    EXPECT_THAT(std::string(status.message()), HasSubstr("reaches back to step 1"));
  }
}

TEST_F(ClientShortage, MicroBatchWithoutMemoryForItsGradientsIsRefused) {
  refused_bytes = rows_.size() * sizeof(float);
  MicroBatchOptions options = {.step = 0, .micro_batch = 0};
  const absl::Status status = head_->CrossEntropy(RowsView::Float32(rows_, kHiddenSize), targets_, {}, options).Get().status();
  refused_bytes = 0;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "MEMORY_BUDGET_EXCEEDED");
  EXPECT_TRUE(Submit(0).ok());
}

TEST_F(ClientShortage, RowsAreCopiedByTheThreadsThatThereAre) {
  std::vector<char> from(8 << 20);
  std::iota(from.begin(), from.end(), '\0');
  std::vector<char> to(from.size());
  threads = 0;
  client::internal::CopyThreads(4).Copy(to.data(), from.data(), static_cast<int64_t>(from.size()));
  EXPECT_EQ(to, from);
}

}  // namespace
}  // namespace headwater::e2e
