#include "tests/unit/group/worker_threads.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace headwater::testing {

bool Await(const std::function<bool()>& condition) {
  for (const absl::Time end = absl::Now() + absl::Seconds(60); absl::Now() < end; absl::SleepFor(absl::Milliseconds(2))) {
    if (condition()) return true;
  }
  return false;
}

group::AssemblyOptions LocalAssemblyOptions() {
  return {.version = "test", .listen_host = "127.0.0.1", .silence_timeout = absl::Seconds(60)};
}

group::WorkerOptions LocalWorkerOptions() { return {.version = "test", .leader_host = "127.0.0.1", .listen_host = "127.0.0.1"}; }

absl::StatusOr<std::unique_ptr<ThreadedGroup>> ThreadedGroup::Create(const EngineOptions& options,
                                                                     const group::EngineMaker& make_engine) {
  auto group = Begin(options, make_engine);
  if (!group.ok()) return group;
  if (absl::Status formed = (*group)->Form(); !formed.ok()) return formed;
  return group;
}

absl::StatusOr<std::unique_ptr<ThreadedGroup>> ThreadedGroup::Begin(const EngineOptions& options,
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
  const size_t workers = static_cast<size_t>(assembly.workers);
  result->ends_.resize(workers);
  for (size_t i = 0; i < workers; ++i) {
    TestCall* const call = result->calls_.emplace_back(std::make_unique<TestCall>()).get();
    result->handlers_.emplace_back([assembly = result->assembly_.get(), call] { assembly->Serve(*call).IgnoreError(); });
    result->workers_.emplace_back([call, end = &result->ends_[i], budget = options.memory_budget_bytes, make_engine] {
      group::WorkerOptions worker = LocalWorkerOptions();
      worker.engine_options.memory_budget_bytes = budget;
      worker.make_engine = make_engine;
      *end = group::RunWorker(*call, worker);
      call->Cancel();
    });
  }
  return result;
}

absl::Status ThreadedGroup::AwaitEnd(size_t worker) {
  workers_[worker - 1].join();
  return ends_[worker - 1];
}

ThreadedGroup::~ThreadedGroup() {
  for (const auto& call : calls_) call->Cancel();
  for (std::thread& handler : handlers_) handler.join();
  for (std::thread& worker : workers_) {
    if (worker.joinable()) worker.join();
  }
}

}  // namespace headwater::testing
