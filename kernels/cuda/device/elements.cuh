// Eight consecutive elements at a time, of any element type: 16-byte loads and stores, conversions in registers.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_ELEMENTS_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace headwater::cuda::elements {

// Exact, except for an fp64 element read as float.
template <class Value, class Stored>
__device__ __forceinline__ Value ValueOf(Stored stored) {
  if constexpr (sizeof(Stored) == 2) {
    return static_cast<Value>(static_cast<float>(stored));
  } else {
    return static_cast<Value>(stored);
  }
}

// Rounded to nearest even; fp16 overflow gives infinity.
template <class Stored>
__device__ __forceinline__ Stored Rounded(float value);
template <>
__device__ __forceinline__ float Rounded<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 Rounded<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half Rounded<__half>(float value) {
  return __float2half_rn(value);
}

// in[0..8) of memory that the kernel does not write, at a multiple of 16 bytes.
template <class Value, class Stored>
__device__ __forceinline__ void Load8(const Stored* in, Value (&out)[8]) {
  constexpr int kPerVector = 16 / static_cast<int>(sizeof(Stored));
#pragma unroll
  for (int i = 0; i < 8 / kPerVector; ++i) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(in) + i);
    Stored vector[kPerVector];
    memcpy(vector, &raw, 16);
#pragma unroll
    for (int j = 0; j < kPerVector; ++j) out[i * kPerVector + j] = ValueOf<Value>(vector[j]);
  }
}

// out[0..8) at a multiple of 16 bytes.
template <class Stored>
__device__ __forceinline__ void Store8(Stored* out, const Stored (&values)[8]) {
  constexpr int kPerVector = 16 / static_cast<int>(sizeof(Stored));
#pragma unroll
  for (int i = 0; i < 8 / kPerVector; ++i) {
    uint4 raw;
    memcpy(&raw, values + i * kPerVector, 16);
    reinterpret_cast<uint4*>(out)[i] = raw;
  }
}

// `count` elements at any alignment; the rest 0.
template <class Value, class Stored>
__device__ __forceinline__ void LoadUpTo8(const Stored* in, int64_t count, Value (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = i < count ? ValueOf<Value>(in[i]) : Value{0};
}

__device__ __forceinline__ bool IsAligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class Value>
__device__ __forceinline__ Value WarpSum(Value value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

}  // namespace headwater::cuda::elements

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_ELEMENTS_CUH_
