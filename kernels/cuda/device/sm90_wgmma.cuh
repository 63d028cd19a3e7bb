// wgmma of one warpgroup, operands from shared memory: bf16 with fp32 accumulators, int8 with int32 ones. Apart from sm90_ptx.cuh
// for its length. sm_90a only.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_SM90_WGMMA_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_SM90_WGMMA_CUH_

#include <cstdint>

namespace headwater::cuda::sm90 {

// Which dimension of an operand is contiguous in memory: its own (M of A, N of B), or the common one.
enum class Major { kK, kMn };

// The accumulators of an instruction: their names in its text, and the operands d[0] on, with a constraint.
#define HEADWATER_WGMMA_REGISTERS_64                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HEADWATER_WGMMA_REGISTERS_96                                                 \
  HEADWATER_WGMMA_REGISTERS_64                                                       \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HEADWATER_WGMMA_8(constraint, d)                                                                                  \
  constraint((d)[0]), constraint((d)[1]), constraint((d)[2]), constraint((d)[3]), constraint((d)[4]), constraint((d)[5]), \
      constraint((d)[6]), constraint((d)[7])
#define HEADWATER_WGMMA_32(constraint, d)                                                                            \
  HEADWATER_WGMMA_8(constraint, d), HEADWATER_WGMMA_8(constraint, (d) + 8), HEADWATER_WGMMA_8(constraint, (d) + 16), \
      HEADWATER_WGMMA_8(constraint, (d) + 24)

// D [64, 192] fp32 (+)= A [64, 16] * B [192, 16]^T, bf16, both operands in shared memory. 96 accumulators a thread.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void WgmmaM64N192K16(float* d, uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" HEADWATER_WGMMA_REGISTERS_96
      "}, %96, %97, p, 1, 1, %99, %100;\n"
      "}\n"
      : HEADWATER_WGMMA_32("+f", d), HEADWATER_WGMMA_32("+f", (d + 32)), HEADWATER_WGMMA_32("+f", (d + 64))
      : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<int32_t>(accumulate)), "n"(kMajorA == Major::kMn ? 1 : 0),
        "n"(kMajorB == Major::kMn ? 1 : 0));
}

// D [64, 128] fp32 (+)= A [64, 16] * B [128, 16]^T, bf16, both operands in shared memory. 64 accumulators a thread.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void WgmmaM64N128K16(float* d, uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HEADWATER_WGMMA_REGISTERS_64
      "}, %64, %65, p, 1, 1, %67, %68;\n"
      "}\n"
      : HEADWATER_WGMMA_32("+f", d), HEADWATER_WGMMA_32("+f", (d + 32))
      : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<int32_t>(accumulate)), "n"(kMajorA == Major::kMn ? 1 : 0),
        "n"(kMajorB == Major::kMn ? 1 : 0));
}

// D [64, 192] int32 (+)= A [64, 32] * B [192, 32]^T, int8, both operands K-major in shared memory. 96 accumulators a thread.
__device__ __forceinline__ void WgmmaInt8M64N192K32(int32_t* d, uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.s32.s8.s8 {" HEADWATER_WGMMA_REGISTERS_96
      "}, %96, %97, p;\n"
      "}\n"
      : HEADWATER_WGMMA_32("+r", d), HEADWATER_WGMMA_32("+r", (d + 32)), HEADWATER_WGMMA_32("+r", (d + 64))
      : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<int32_t>(accumulate)));
}

// D [64, 128] int32 (+)= A [64, 32] * B [128, 32]^T, int8, both operands K-major in shared memory. 64 accumulators a thread.
__device__ __forceinline__ void WgmmaInt8M64N128K32(int32_t* d, uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" HEADWATER_WGMMA_REGISTERS_64
      "}, %64, %65, p;\n"
      "}\n"
      : HEADWATER_WGMMA_32("+r", d), HEADWATER_WGMMA_32("+r", (d + 32))
      : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<int32_t>(accumulate)));
}

#undef HEADWATER_WGMMA_REGISTERS_64
#undef HEADWATER_WGMMA_REGISTERS_96
#undef HEADWATER_WGMMA_8
#undef HEADWATER_WGMMA_32

}  // namespace headwater::cuda::sm90

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_SM90_WGMMA_CUH_
