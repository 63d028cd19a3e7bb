#include "tests/kernels/cuda/cuda_group.h"

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "headwater/kernels/communicator.h"
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

std::vector<EngineOptions> OptionsOfRanks(const EngineOptions& options, bool shared_views) {
  const absl::StatusOr<std::string> id = MakeCudaGroupId();
  CheckStatus(id.status(), "MakeCudaGroupId");
  std::vector<EngineOptions> ranks;
  for (auto& communicator : MakeInProcessCommunicators(options.shard_count)) {
    const auto rank = static_cast<int32_t>(ranks.size());
    EngineOptions& own = ranks.emplace_back(options);
    own.device_index = GpuOf(rank);
    own.group = {rank, options.shard_count, std::move(communicator), *id, shared_views};
  }
  return ranks;
}

CudaGroup::CudaGroup(int32_t world_size, EngineOptions options, std::chrono::seconds patience)
    : patience_(patience), engines_(static_cast<size_t>(world_size)) {
  options.shard_count = world_size;
  const std::vector<EngineOptions> of_ranks = OptionsOfRanks(options, /*shared_views=*/false);
  communicator_ = of_ranks.front().group.communicator;
  Run([&](int32_t rank) {
    absl::StatusOr<std::unique_ptr<LossEngine>> engine = CreateCudaEngine(of_ranks[static_cast<size_t>(rank)]);
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
  size_t running = engines_.size();
  absl::Status failure;
  // No rank waits for another one any longer.
  const auto fail = [&](const std::string& why) {
    if (!failure.ok()) return;
    failure = MakeError(ErrorReason::kEngineFailed, why);
    communicator_->Abort(failure);
  };
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::string error;
      try {
        CheckCuda(cudaSetDevice(GpuOf(rank)), "cudaSetDevice");
        work(rank);
      } catch (const std::exception& exception) {
        error = "rank " + std::to_string(rank) + " of the test: " + exception.what();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error.empty()) fail(error);
      --running;
      changed.notify_all();
    });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    if (!changed.wait_for(lock, patience_, [&] { return running == 0; })) fail("a rank of the test was busy for too long");
  }
  for (std::thread& thread : threads) thread.join();
  CheckStatus(failure, "CudaGroup::Run");
}

}  // namespace headwater::testing
