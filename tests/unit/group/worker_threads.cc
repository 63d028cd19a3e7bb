#include "tests/unit/group/worker_threads.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tests/unit/expect_status.h"

namespace headwater::testing {

v1::JoinRequest HelloOf(const std::string& version) {
  v1::JoinRequest hello;
  hello.mutable_hello()->set_version(version);
  hello.mutable_hello()->set_port(1);
  return hello;
}

group::AssemblyOptions LocalAssemblyOptions() {
  return {.version = "test", .listen_host = "127.0.0.1", .silence_timeout = absl::Seconds(60)};
}

group::WorkerOptions LocalWorkerOptions() { return {.version = "test", .leader_host = "127.0.0.1", .listen_host = "127.0.0.1"}; }

absl::StatusOr<std::unique_ptr<ThreadedGroup>> ThreadedGroup::Create(const EngineOptions& options,
                                                                     const group::EngineMaker& make_engine,
                                                                     absl::Duration setup_timeout) {
  group::AssemblyOptions assembly = LocalAssemblyOptions();
  assembly.engine = options;
  assembly.engine.thread_count = std::max(1, options.thread_count);
  assembly.workers = options.shard_count - 1;
  assembly.setup_timeout = setup_timeout;
  auto made = group::GroupAssembly::Create(assembly);
  if (!made.ok()) return made.status();
  std::unique_ptr<ThreadedGroup> result(new ThreadedGroup(*std::move(made)));
  group::WorkerOptions worker = LocalWorkerOptions();
  worker.engine_options.memory_budget_bytes = options.memory_budget_bytes;
  worker.make_engine = make_engine;
  for (int32_t i = 0; i < assembly.workers; ++i) result->workers_.Join(worker);
  if (absl::Status formed = result->assembly_->Form(); !formed.ok()) return formed;
  return result;
}

std::unique_ptr<ThreadedGroup> ThreadedGroup::Make(const EngineOptions& options, const group::EngineMaker& make_engine) {
  auto group = Create(options, make_engine);
  if (!group.ok()) throw std::runtime_error(group.status().ToString());
  return *std::move(group);
}

TestCall& WorkerThreads::Join(const group::WorkerOptions& options) {
  Worker& worker = workers_.emplace_back();
  worker.handler = std::thread([this, &worker] { assembly_.Serve(worker.call).IgnoreError(); });
  worker.thread = std::thread([this, &worker, options] {
    worker.end = group::RunWorker(worker.call, options);
    ++ended_;
    worker.call.Cancel();
  });
  return worker.call;
}

absl::Status WorkerThreads::AwaitEnd(size_t worker) {
  workers_[worker].thread.join();
  return workers_[worker].end;
}

WorkerThreads::~WorkerThreads() {
  for (Worker& worker : workers_) worker.call.Cancel();
  for (Worker& worker : workers_) {
    worker.handler.join();
    if (worker.thread.joinable()) worker.thread.join();
  }
}

}  // namespace headwater::testing
