#include "tests/unit/group/worker_threads.h"

#include <algorithm>
#include <utility>

namespace headwater::testing {

absl::StatusOr<std::unique_ptr<ThreadedGroup>> ThreadedGroup::Create(const EngineOptions& options) {
  group::AssemblyOptions assembly;
  assembly.engine = options;
  assembly.engine.thread_count = std::max(1, options.thread_count);
  assembly.workers = options.shard_count - 1;
  assembly.version = "test";
  assembly.listen_host = "127.0.0.1";
  assembly.silence_timeout = absl::Seconds(60);
  auto made = group::GroupAssembly::Create(assembly);
  if (!made.ok()) return made.status();
  std::unique_ptr<ThreadedGroup> result(new ThreadedGroup());
  result->assembly_ = *std::move(made);
  result->engine_ = result->assembly_->TakeEngine();
  const size_t workers = static_cast<size_t>(assembly.workers);
  result->ends_.resize(workers);
  for (size_t i = 0; i < workers; ++i) {
    TestCall* const call = result->calls_.emplace_back(std::make_unique<TestCall>()).get();
    result->handlers_.emplace_back([assembly = result->assembly_.get(), call] { assembly->Serve(*call).IgnoreError(); });
    result->workers_.emplace_back([call, end = &result->ends_[i], budget = options.memory_budget_bytes] {
      group::WorkerOptions worker;
      worker.version = "test";
      worker.leader_host = "127.0.0.1";
      worker.listen_host = "127.0.0.1";
      worker.memory_budget_bytes = budget;
      *end = group::RunWorker(*call, worker);
      call->Cancel();
    });
  }
  if (absl::Status formed = result->assembly_->Form([] { return false; }); !formed.ok()) return formed;
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
