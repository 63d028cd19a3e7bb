// Groups of GPUs, each rank on a thread of this process and on a GPU of its own, and engines beside them.
//
// With HEADWATER_RANKS_SHARE_GPU in the environment all ranks are on the first GPU, whatever there are. NCCL refuses that: the
// loader must find the libnccl.so.2 of nccl/shared_gpu.cu first (tests/gpu).
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_GROUP_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_GROUP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// Whether the environment says so.
bool RanksShareGpu();
// Why so many GPUs cannot work together here, or an empty string: there are fewer, or no NCCL.
std::string ReasonForNoGroup(int32_t world_size);

// The options of each rank of a new group of options.shard_count. Rank r is on GPU r, unless ranks share one.
std::vector<EngineOptions> OptionsOfRanks(const EngineOptions& options, bool shared_views);

// As many ranks as one engine, which a server drives. Defined in tests/unit/group, beside the server's groups.
std::unique_ptr<LossEngine> MakeCudaGroupEngine(const EngineOptions& options);

// The ranks themselves, each driven by calls of its own.
class CudaGroup {
 public:
  // `options`: of every rank; group, shard_count and device_index are set here. `patience`: how long a Run() may take; after that
  // it is aborted. Throws std::runtime_error if the group cannot be made.
  CudaGroup(int32_t world_size, EngineOptions options, std::chrono::seconds patience = std::chrono::seconds(30));
  // Destroys the engines, all at once.
  ~CudaGroup();
  CudaGroup(const CudaGroup&) = delete;
  CudaGroup& operator=(const CudaGroup&) = delete;

  int32_t world_size() const { return static_cast<int32_t>(engines_.size()); }
  LossEngine& engine(int32_t rank) { return *engines_[static_cast<size_t>(rank)]; }
  // Calls work(rank) for all ranks at the same time, each with its GPU current, and waits for all. Throws std::runtime_error with
  // the words of the rank that failed first.
  void Run(const std::function<void(int32_t rank)>& work);

 private:
  const std::chrono::seconds patience_;
  std::shared_ptr<Communicator> communicator_;  // rank 0's
  std::vector<std::unique_ptr<LossEngine>> engines_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_GROUP_H_
