// Groups whose other ranks are behind links, as in other processes, but on threads of this one: everything between a leader and its
// workers but gRPC.
#ifndef HEADWATER_TESTS_UNIT_GROUP_WORKER_THREADS_H_
#define HEADWATER_TESTS_UNIT_GROUP_WORKER_THREADS_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"
#include "server/group/group_assembly.h"
#include "server/group/ranks/rank_worker.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/unit/forwarding_engine.h"

namespace headwater::testing {

using MadeEngine = absl::StatusOr<std::unique_ptr<LossEngine>>;

// What a worker says first.
v1::JoinRequest HelloOf(const std::string& version);

using e2e::Await;

// Both ends of a call.
class TestCall final : public group::JoinCall, public group::WorkerChannel {
 public:
  // The leader's end.
  bool Read(v1::JoinRequest* message) override {
    {
      absl::MutexLock lock(&mutex_);
      ++reads_;
    }
    return Take(requests_, message);
  }
  bool Send(const v1::JoinResponse& message) override {
    {
      absl::MutexLock lock(&mutex_);
      data_bytes_ += static_cast<int64_t>(message.data().data().size());
    }
    return Put(message, responses_);
  }
  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }
  // Of rows and tensors that the leader has sent.
  int64_t data_bytes() {
    absl::MutexLock lock(&mutex_);
    return data_bytes_;
  }
  // The leader has taken the worker: it reads on after the hello.
  bool IsTaken() {
    absl::MutexLock lock(&mutex_);
    return reads_ > 1;
  }
  std::string host() const override { return "127.0.0.1"; }
  // The worker hears nothing more until the next time.
  void Pause(bool paused) {
    absl::MutexLock lock(&mutex_);
    is_paused_ = paused;
  }
  // The worker's end.
  bool Read(v1::JoinResponse* message) override {
    {
      const auto heard = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return (!is_paused_ && !responses_.empty()) || ended_; };
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&heard));
    }
    return Take(responses_, message);
  }
  bool Write(const v1::JoinRequest& message) override { return Put(message, requests_); }

 private:
  template <typename Message>
  bool Take(std::deque<Message>& queue, Message* message) {
    const auto come = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !queue.empty() || ended_; };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&come));
    if (queue.empty()) return false;
    *message = std::move(queue.front());
    queue.pop_front();
    return true;
  }
  template <typename Message>
  bool Put(const Message& message, std::deque<Message>& queue) {
    absl::MutexLock lock(&mutex_);
    if (ended_) return false;
    queue.push_back(message);
    return true;
  }

  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_paused_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t reads_ ABSL_GUARDED_BY(mutex_) = 0;  // by the leader
  int64_t data_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<v1::JoinRequest> requests_;
  std::deque<v1::JoinResponse> responses_;
};

// Of a leader and of its workers, in one process: of one version, over loopback, and too patient to end by a timeout.
group::AssemblyOptions LocalAssemblyOptions();
group::WorkerOptions LocalWorkerOptions();

// Workers of a leader, each with a call and a thread of its own.
class WorkerThreads {
 public:
  explicit WorkerThreads(group::GroupAssembly& assembly) : assembly_(assembly) {}
  // Ends the calls.
  ~WorkerThreads();

  TestCall& Join(const group::WorkerOptions& options);
  // In the order in which they joined.
  TestCall& call(size_t worker) { return workers_[worker].call; }
  // Why a worker has ended; waits for it.
  absl::Status AwaitEnd(size_t worker);
  int ended() const { return ended_; }

 private:
  struct Worker {
    TestCall call;
    absl::Status end;
    std::thread handler, thread;
  };

  group::GroupAssembly& assembly_;
  std::atomic<int> ended_ = 0;
  std::deque<Worker> workers_;
};

// A leader's engine and its workers.
class ThreadedGroup final : public ForwardingEngine {
 public:
  // As a group of options.shard_count ranks, at least 2. `make_engine`: the workers', which tells them apart by
  // EngineOptions::group. They may take `setup_timeout`.
  static absl::StatusOr<std::unique_ptr<ThreadedGroup>> Create(const EngineOptions& options,
                                                               const group::EngineMaker& make_engine = CreateCpuEngine,
                                                               absl::Duration setup_timeout = absl::Minutes(1));
  // The same where nothing is to go wrong; null, and the test fails, if something does.
  static std::unique_ptr<ThreadedGroup> Make(const EngineOptions& options, const group::EngineMaker& make_engine = CreateCpuEngine);
  // Ends the call of a worker: 1 for the first.
  void Cut(size_t worker) { workers_.call(worker - 1).Cancel(); }
  // A worker hears nothing from then on, or again: 1 for the first.
  void Pause(size_t worker, bool paused) { workers_.call(worker - 1).Pause(paused); }
  group::GroupAssembly& assembly() { return *assembly_; }
  // Why a worker has ended; waits for it.
  absl::Status AwaitEnd(size_t worker) { return workers_.AwaitEnd(worker - 1); }

 private:
  explicit ThreadedGroup(std::unique_ptr<group::GroupAssembly> assembly)
      : ForwardingEngine(assembly->TakeEngine()), assembly_(std::move(assembly)) {}

  const std::unique_ptr<group::GroupAssembly> assembly_;  // which the engine may outlive
  WorkerThreads workers_{*assembly_};
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_GROUP_WORKER_THREADS_H_
