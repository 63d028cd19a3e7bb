#include "tests/kernels/cuda/cuda_group.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "headwater/kernels/device_group_id.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/cuda/cuda_support.h"

namespace headwater::testing {
namespace {

// GPUs that ranks can be on: as many as there are, or with RanksShareGpu() any number, all of them the first.
int RankGpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  return count > 0 && RanksShareGpu() ? std::numeric_limits<int>::max() : count;
}

int32_t GpuOf(int32_t rank) { return RanksShareGpu() ? 0 : rank; }

}  // namespace

bool RanksShareGpu() { return std::getenv("HEADWATER_RANKS_SHARE_GPU") != nullptr; }

std::string ReasonForNoGroup(int32_t world_size) {
  const int count = RankGpus();
  if (count < world_size) {
    return "no GPU: " + std::to_string(world_size) + " are needed, and there are " + std::to_string(count);
  }
  const absl::StatusOr<std::string> id = MakeCudaGroupId();
  // A module that is not built with NCCL, or a machine that does not have it; anything else is for the tests to find.
  if (!id.ok() && HasReason(id.status(), ErrorReason::kFeatureNotBuilt)) return "no GPU: " + id.status().ToString();
  return "";
}

CudaGroup::CudaGroup(int32_t world_size, EngineOptions options, std::chrono::seconds patience) : patience_(patience) {
  const absl::StatusOr<std::string> id = MakeCudaGroupId();
  CheckStatus(id.status(), "MakeCudaGroupId");
  for (auto& communicator : MakeInProcessCommunicators(world_size)) communicators_.push_back(std::move(communicator));
  engines_.resize(static_cast<size_t>(world_size));
  options.shard_count = world_size;
  options.group.world_size = world_size;
  options.group.device_group_id = *id;
  options.group.shared_views = false;
  Run([&](int32_t rank) {
    EngineOptions own = options;
    own.device_index = GpuOf(rank);
    own.group.rank = rank;
    own.group.communicator = communicators_[static_cast<size_t>(rank)];
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(own);
    CheckStatus(engine.status(), "CreateCudaEngine");
    engines_[static_cast<size_t>(rank)] = *std::move(engine);
  });
}

CudaGroup::~CudaGroup() {
  Run([this](int32_t rank) { engines_[static_cast<size_t>(rank)].reset(); });
}

void CudaGroup::Run(const std::function<void(int32_t rank)>& work) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done(communicators_.size());
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < communicators_.size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::exception_ptr caught;
      try {
        CheckCuda(cudaSetDevice(GpuOf(static_cast<int32_t>(rank))), "cudaSetDevice");
        work(static_cast<int32_t>(rank));
      } catch (...) {
        caught = std::current_exception();
        // No rank waits for this one any longer.
        communicators_[rank]->Abort(MakeError(ErrorReason::kEngineFailed, "rank " + std::to_string(rank) + " of the test failed"));
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (failure == nullptr) failure = caught;
      done[rank] = true;
      changed.notify_all();
    });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    const auto all_done = [&] { return std::find(done.begin(), done.end(), false) == done.end(); };
    if (!changed.wait_for(lock, patience_, all_done)) {
      for (size_t rank = 0; rank < done.size(); ++rank) {
        if (!done[rank])
          std::fprintf(stderr, "rank %zu is still busy after %lld s\n", rank, static_cast<long long>(patience_.count()));
      }
      communicators_.front()->Abort(MakeError(ErrorReason::kEngineFailed, "the test's patience has ended"));
      if (!changed.wait_for(lock, patience_, all_done)) {
        std::fprintf(stderr, "and does not come back when its group is aborted\n");
        std::fflush(stderr);
        std::_Exit(1);
      }
      if (failure == nullptr) failure = std::make_exception_ptr(std::runtime_error("a rank was busy for too long"));
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace headwater::testing
