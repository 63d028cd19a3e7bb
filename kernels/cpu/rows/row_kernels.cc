// Picks the row kernels for this processor. By hand rather than with target_clones: those are resolved by the dynamic loader
// before a sanitizer's runtime is ready.
#include "kernels/cpu/rows/row_kernels.h"

namespace headwater::cpu {

namespace portable {
extern const RowKernels kRowKernels;
}
#ifdef HEADWATER_X86_ROW_KERNELS
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}
#endif

namespace {

struct Available {
  const RowKernels* kernels[4] = {};
  int count = 0;

  Available() {
    kernels[count++] = &portable::kRowKernels;
#ifdef HEADWATER_X86_ROW_KERNELS
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                          __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
    if (has_avx2) kernels[count++] = &avx2::kRowKernels;
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
      kernels[count++] = &avx512::kRowKernels;
    }
#endif
  }
};

const Available& GetAvailable() {
  static const Available available;
  return available;
}

}  // namespace

const RowKernels& GetRowKernels() { return *GetAvailable().kernels[GetAvailable().count - 1]; }

const RowKernels* const* AllRowKernels() { return GetAvailable().kernels; }

}  // namespace headwater::cpu
