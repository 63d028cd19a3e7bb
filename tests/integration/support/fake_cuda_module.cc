// A module with the CUDA engine's symbols and a CpuEngine behind them, so that everything around the real one can be tested
// without a GPU: how it is found, checked and told its options, and what a server does when its device is lost.
//
//   device_index 6        computes, but wrong by a thousandth
//   device_index 7        there is no such GPU: FEATURE_NOT_BUILT
//   device_index 8        null, without a reason
//   device_index 9        INVALID_FIELD
//   a micro-batch of 13 rows    the device is lost, told to on_device_lost; the call fails
//   of 14 rows                  the same, but only health() says so
//   of 15 rows                  the device is lost, and the call never comes back
//   of 16 rows                  the call never comes back, and nobody says why
//
// While there is a file `hold` in the folder that HEADWATER_FAKE_HOLD names, the last shard stops in the middle of what changes a
// head: when the others may have changed already. It makes a file `held` there.
//
// Compiled with FAKE_MODULE_VERSION, it says that instead of its version.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "kernels/core/engine_module.h"
#include "tests/unit/forwarding_engine.h"

namespace headwater {
namespace {

class FakeCudaEngine final : public testing::ForwardingEngine {
 public:
  FakeCudaEngine(std::unique_ptr<LossEngine> engine, EngineOptions options)
      : ForwardingEngine(std::move(engine)), options_(std::move(options)) {}

  std::string name() const override { return "cuda"; }
  std::vector<EngineDevice> devices() const override {
    // What it was told, where a test can see it.
    const std::string cache = options_.algorithm_cache_path.empty() ? "none" : options_.algorithm_cache_path;
    return {{"cuda:" + std::to_string(options_.device_index),
             "Fake GPU, cache " + cache + (options_.timed_search ? ", timed" : ", untimed"),
             ForwardingEngine::devices()[0].memory_budget_bytes}};
  }
  absl::StatusOr<MemoryPlan> PlanHead(const HeadSpec& spec) const override {
    auto plan = ForwardingEngine::PlanHead(spec);
    if (plan.ok()) plan->token_chunk_rows = 4321;  // so that its plans are told from a CpuEngine's
    return plan;
  }
  absl::Status DoHealth() const override { return is_lost_.load() ? Lost() : absl::OkStatus(); }
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override {
    const int64_t rows = micro_batch.hidden.row_count;
    if (rows >= 13 && rows <= 15 && !is_lost_.exchange(true) && rows != 14 && options_.on_device_lost) {
      options_.on_device_lost(Lost());
    }
    while (rows == 15 || rows == 16) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (is_lost_.load()) return Lost();
    auto result = ForwardingEngine::DoCompute(micro_batch);
    if (result.ok() && options_.device_index == 6) result->terms.front().loss_sum += 0.001;
    return result;
  }

 private:
  static absl::Status Lost() { return MakeError(ErrorReason::kEngineFailed, "an illegal memory access was encountered"); }

  const EngineOptions options_;
  std::atomic<bool> is_lost_{false};
};

// EngineOptions::shard_probe.
absl::Status HoldTheLastShard(const std::filesystem::path& folder, int32_t last_rank, ShardPhase phase, int32_t rank) {
  if (phase != ShardPhase::kAct || rank != last_rank || !std::filesystem::exists(folder / "hold")) return absl::OkStatus();
  std::ofstream(folder / "held") << "held\n";
  while (std::filesystem::exists(folder / "hold")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return absl::OkStatus();
}

}  // namespace
}  // namespace headwater

#define HEADWATER_FAKE_EXPORT __attribute__((visibility("default")))

extern "C" {

HEADWATER_FAKE_EXPORT const char* headwater_cuda_module_version() {
#ifdef FAKE_MODULE_VERSION
  return FAKE_MODULE_VERSION;
#else
  return headwater::EngineModuleVersion().c_str();
#endif
}

HEADWATER_FAKE_EXPORT headwater::LossEngine* headwater_cuda_create_engine(const headwater::EngineOptions* options,
                                                                          absl::Status* status) {
  if (options->device_index == 7) {
    *status = headwater::MakeError(headwater::ErrorReason::kFeatureNotBuilt, "no fake GPU is visible");
    return nullptr;
  }
  if (options->device_index == 8) return nullptr;
  if (options->device_index == 9) {
    *status = headwater::MakeError(headwater::ErrorReason::kInvalidField, "device_index must be in [0, 9), got 9");
    return nullptr;
  }
  headwater::EngineOptions cpu_options = *options;
  if (const char* const folder = std::getenv("HEADWATER_FAKE_HOLD"); folder != nullptr) {
    cpu_options.shard_probe = [path = std::filesystem::path(folder), last_rank = options->shard_count - 1](
                                  headwater::ShardPhase phase, int32_t rank) {
      return headwater::HoldTheLastShard(path, last_rank, phase, rank);
    };
  }
  auto engine = headwater::CreateCpuEngine(cpu_options);
  if (engine.ok()) return new headwater::FakeCudaEngine(*std::move(engine), *options);
  *status = engine.status();
  return nullptr;
}

HEADWATER_FAKE_EXPORT void headwater_cuda_make_group_id(std::string* id, absl::Status*) { *id = "fake group"; }

}  // extern "C"
