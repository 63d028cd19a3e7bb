// The suite's engine: CudaEngine. HEADWATER_SUITE_PORTABLE_KERNELS: only the kernels that every supported GPU runs.
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/cuda/cuda_test_environment.h"
#include "tests/kernels/support/kernel_suite.h"

namespace headwater::testing {
namespace {

#ifdef HEADWATER_SUITE_PORTABLE_KERNELS
constexpr bool kPortableKernels = true;
#else
constexpr bool kPortableKernels = false;
#endif

// The suite makes engines by the thousand for problems of a few rows.
constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

}  // namespace

const SuiteEngine& Suite() {
  static const SuiteEngine engine = {
      .make =
          [](EngineOptions options) {
            if (options.workspace_bytes == 0) options.workspace_bytes = kWorkspaceBytes;
            options.portable_kernels = kPortableKernels;
            options.timed_search = false;  // the suite compares engines bit by bit: all of them must run the same products
            return CreateCudaEngine(options);
          },
      // Still holds the workspace of the library that multiplies matrices.
      .small_workspace_bytes = int64_t{80} << 20,
      .large_workspace_bytes = kWorkspaceBytes,
      // Several shards keep the finished product. A few rows fit into a slot that is meant for many; the suite has nothing in
      // between.
      .keeps_staged_rows = [](int64_t rows, int64_t hidden_size,
                              int32_t shard_count) { return shard_count == 1 && rows <= hidden_size; },
      // The exponential form rounds twice: as E, and as the hidden states multiplied by the factor 1 / (1 + S). The others do so in
      // rows of which one column has most.
      .grad_weight_factor = 1.42,
      .accumulation_error = 1.5e-9,
      .dither = {.has_smoothing = false, .rounds_entries = true},
      .has_int8_teacher = !kPortableKernels && GpuCapability() == 90};
  return engine;
}

}  // namespace headwater::testing
