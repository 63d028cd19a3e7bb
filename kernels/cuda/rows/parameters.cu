// Optimizer updates, gradient statistics and sums over flat arrays.
//
// Mapping   one thread for four elements (one 16-byte vector of each array); single elements where an array is not aligned, with
// the
//           same results.
// Traffic   every array is read once and written once. AdamW with a 16-bit copy moves 34 bytes an element: 128256 x 4096 elements
//           are 17.9 GB, 4.3 ms at 4.2 TB/s. The statistics read 4 bytes an element: 2.1 GB, 0.5 ms.
// Numerics  fp32, every operation spelled out (rounded to nearest, fused only where fmaf says so), so that no compiler flag changes
// a
//           bit. The statistics sum squares in fp64, where a square of fp32 is exact and cannot overflow.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/rows/parameters.h"

namespace headwater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;  // elements of a vector
// Arrays of up to 2^40 elements need 2^30 blocks at four elements a thread; unaligned ones loop.
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

template <int W>
struct Floats {
  float v[W];
};

template <int W>
__device__ __forceinline__ Floats<W> Load(const float* source) {
  Floats<W> result;
  if constexpr (W == kWidth) {
    const auto vector = *reinterpret_cast<const float4*>(source);
    result.v[0] = vector.x;
    result.v[1] = vector.y;
    result.v[2] = vector.z;
    result.v[3] = vector.w;
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) result.v[i] = source[i];
  }
  return result;
}

template <int W>
__device__ __forceinline__ void Store(float* target, const Floats<W>& x) {
  if constexpr (W == kWidth) {
    *reinterpret_cast<float4*>(target) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) target[i] = x.v[i];
  }
}

__device__ __forceinline__ uint16_t ToBits(float x, __nv_bfloat16) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ uint16_t ToBits(float x, __half) { return __half_as_ushort(__float2half_rn(x)); }

// The 16-bit tensor that follows a master, or none.
struct NotStored {
  template <int W>
  __device__ __forceinline__ void Put(int64_t, const Floats<W>&) const {}
};

template <class T>
struct Stored {
  uint16_t* data;
  template <int W>
  __device__ __forceinline__ void Put(int64_t start, const Floats<W>& x) const {
    if constexpr (W == kWidth) {
      const uint32_t low = ToBits(x.v[0], T()) | static_cast<uint32_t>(ToBits(x.v[1], T())) << 16;
      const uint32_t high = ToBits(x.v[2], T()) | static_cast<uint32_t>(ToBits(x.v[3], T())) << 16;
      *reinterpret_cast<uint2*>(data + start) = make_uint2(low, high);
    } else {
#pragma unroll
      for (int i = 0; i < W; ++i) data[start + i] = ToBits(x.v[i], T());
    }
  }
};

// --- What is done to elements [start, start + W)
// ----------------------------------------------------------------------------------

// g = multiplier grad;  m = m + (1 - b1)(g - m);  v = b2 v + (1 - b2) g g;
// p = decay p - step m / (sqrt(v) / root + eps);  grad = 0.
template <class StoredTensor>
struct AdamWUpdate {
  AdamWScalars s;
  float* parameter;
  float* gradient;
  float* moment1;
  float* moment2;
  StoredTensor stored;

  template <int W>
  __device__ __forceinline__ void Apply(int64_t start) const {
    Floats<W> p = Load<W>(parameter + start), m = Load<W>(moment1 + start), v = Load<W>(moment2 + start);
    const Floats<W> gradients = Load<W>(gradient + start);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float g = __fmul_rn(gradients.v[i], s.multiplier);
      // lerp, as PyTorch takes it for weights below and above one half: exact where the weight is 1.
      const float difference = __fsub_rn(g, m.v[i]);
      m.v[i] = s.one_minus_beta1 < 0.5f ? __fmaf_rn(s.one_minus_beta1, difference, m.v[i])
                                        : __fmaf_rn(-difference, __fsub_rn(1.0f, s.one_minus_beta1), g);
      v.v[i] = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(v.v[i], s.beta2));
      const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v.v[i]), s.root_correction), s.epsilon);
      p.v[i] = __fmaf_rn(-s.step_size, __fdiv_rn(m.v[i], denominator), __fmul_rn(p.v[i], s.decay));
    }
    Store<W>(parameter + start, p);
    Store<W>(moment1 + start, m);
    Store<W>(moment2 + start, v);
    Store<W>(gradient + start, Floats<W>{});
    stored.Put(start, p);
  }
};

// g = multiplier grad + weight_decay p;  p = p - lr g;  grad = 0.
template <class StoredTensor>
struct PlainSgdUpdate {
  SgdScalars s;
  float* parameter;
  float* gradient;
  StoredTensor stored;

  template <int W>
  __device__ __forceinline__ void Apply(int64_t start) const {
    Floats<W> p = Load<W>(parameter + start);
    const Floats<W> gradients = Load<W>(gradient + start);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float g = __fmaf_rn(s.weight_decay, p.v[i], __fmul_rn(gradients.v[i], s.multiplier));
      p.v[i] = __fmaf_rn(-s.learning_rate, g, p.v[i]);
    }
    Store<W>(parameter + start, p);
    Store<W>(gradient + start, Floats<W>{});
    stored.Put(start, p);
  }
};

// g = multiplier grad + weight_decay p;  b = momentum b + (1 - dampening) g, at the first step g;
// p = p - lr (nesterov: g + momentum b, else b);  grad = 0.
template <class StoredTensor>
struct MomentumSgdUpdate {
  SgdScalars s;
  float* parameter;
  float* gradient;
  float* buffer;
  StoredTensor stored;

  template <int W>
  __device__ __forceinline__ void Apply(int64_t start) const {
    Floats<W> p = Load<W>(parameter + start), b = Load<W>(buffer + start);
    const Floats<W> gradients = Load<W>(gradient + start);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float g = __fmaf_rn(s.weight_decay, p.v[i], __fmul_rn(gradients.v[i], s.multiplier));
      b.v[i] = s.first_step ? g : __fmaf_rn(s.one_minus_dampening, g, __fmul_rn(s.momentum, b.v[i]));
      const float direction = s.nesterov ? __fmaf_rn(s.momentum, b.v[i], g) : b.v[i];
      p.v[i] = __fmaf_rn(-s.learning_rate, direction, p.v[i]);
    }
    Store<W>(parameter + start, p);
    Store<W>(buffer + start, b);
    Store<W>(gradient + start, Floats<W>{});
    stored.Put(start, p);
  }
};

// y = y + alpha x; kFused: one rounding, else two.
template <bool kFused>
struct Addition {
  const float* x;
  float alpha;
  float* y;

  template <int W>
  __device__ __forceinline__ void Apply(int64_t start) const {
    Floats<W> sum = Load<W>(y + start);
    const Floats<W> added = Load<W>(x + start);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      sum.v[i] = kFused ? __fmaf_rn(alpha, added.v[i], sum.v[i]) : __fadd_rn(sum.v[i], __fmul_rn(alpha, added.v[i]));
    }
    Store<W>(y + start, sum);
  }
};

// --- Kernels
// ----------------------------------------------------------------------------------------------------------------------

// op.Apply() for all elements, W at a time, and the remainder one at a time.
template <int W, class Op>
__global__ void __launch_bounds__(kThreads) ForEachKernel(const Op op, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * W;
  for (int64_t start = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) * W; start < count; start += step) {
    if (W == 1 || start + W <= count) {
      op.template Apply<W>(start);
    } else {
      for (int64_t i = start; i < count; ++i) op.template Apply<1>(i);
    }
  }
}

struct Partial {
  double sum;
  int64_t non_finite;
};

// The grid does not depend on the device, so neither does the order of the sum.
constexpr int kStatsBlocks = 2048;
static_assert(kStatsBlocks * sizeof(Partial) <= kGradientStatsBytes, "the partial sums fit the scratch memory");
static_assert(kStatsBlocks % kThreads == 0, "every thread of the last kernel sums the same number of them");

// The block's sum, in thread 0: lanes in pairs, then warps in order.
__device__ __forceinline__ Partial SumOverBlock(Partial x) {
  __shared__ Partial of_warp[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x.sum += __shfl_down_sync(0xffffffffu, x.sum, distance);
    x.non_finite += __shfl_down_sync(0xffffffffu, static_cast<long long>(x.non_finite), distance);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();  // the warps' sums are in shared memory
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) {
      x.sum += of_warp[warp].sum;
      x.non_finite += of_warp[warp].non_finite;
    }
  }
  return x;
}

// Each thread sums the squares of groups of four elements, every (kStatsBlocks kThreads)-th group, each place of the group for
// itself. The order is the same whether the array is read in vectors or not.
template <bool kVector>
__global__ void __launch_bounds__(kThreads) GradientStatsKernel(const float* gradient, int64_t count, Partial* partials) {
  constexpr int64_t kStride = static_cast<int64_t>(kStatsBlocks) * kThreads;  // groups
  constexpr int kBatch = 4;                                                   // groups loaded before the first is summed
  double sums[kWidth] = {};
  int64_t non_finite = 0;
  const auto add = [&](const Floats<kWidth>& x) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      non_finite += (__float_as_uint(x.v[i]) & 0x7F800000u) == 0x7F800000u ? 1 : 0;
      const double wide = static_cast<double>(x.v[i]);
      sums[i] = __fma_rn(wide, wide, sums[i]);
    }
  };
  const auto load = [&](int64_t group) {
    const float* source = gradient + group * kWidth;
    if constexpr (kVector) return Load<kWidth>(source);
    return Floats<kWidth>{source[0], source[1], source[2], source[3]};
  };
  const int64_t whole_groups = count / kWidth;
  int64_t group = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  for (; group + (kBatch - 1) * kStride < whole_groups; group += kBatch * kStride) {
    Floats<kWidth> batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = load(group + i * kStride);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add(batch[i]);
  }
  for (; group < whole_groups; group += kStride) add(load(group));
  if (group == whole_groups) {  // exactly one thread comes here with the remainder
    Floats<kWidth> rest = {};
    for (int64_t i = whole_groups * kWidth; i < count; ++i) rest.v[i - whole_groups * kWidth] = gradient[i];
    add(rest);
  }
  const Partial total = SumOverBlock({(sums[0] + sums[1]) + (sums[2] + sums[3]), non_finite});
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// One block: each thread sums neighbouring partial sums in order.
__global__ void __launch_bounds__(kThreads) FinishGradientStatsKernel(const Partial* partials, GradientStatsResult* result) {
  constexpr int kEach = kStatsBlocks / kThreads;
  Partial x = {0, 0};
  for (int i = 0; i < kEach; ++i) {
    const Partial next = partials[threadIdx.x * kEach + i];
    x.sum += next.sum;
    x.non_finite += next.non_finite;
  }
  x = SumOverBlock(x);
  if (threadIdx.x == 0) *result = {x.sum, x.non_finite};
}

// --- Launchers
// --------------------------------------------------------------------------------------------------------------------

// Null is aligned.
bool IsAligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <class Op>
cudaError_t LaunchForEach(const Op& op, int64_t count, bool aligned, cudaStream_t stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const int64_t each = int64_t{kThreads} * (aligned ? kWidth : 1);
  const auto blocks = static_cast<unsigned>(std::min((count + each - 1) / each, kMaxBlocks));
  if (aligned) {
    ForEachKernel<kWidth><<<blocks, kThreads, 0, stream>>>(op, count);
  } else {
    ForEachKernel<1><<<blocks, kThreads, 0, stream>>>(op, count);
  }
  return cudaGetLastError();
}

template <class StoredTensor>
cudaError_t LaunchAdamWStoring(const AdamWScalars& s, const ParameterArrays& a, StoredTensor stored, bool aligned,
                               cudaStream_t stream) {
  return LaunchForEach(AdamWUpdate<StoredTensor>{s, a.parameter, a.gradient, a.moment1, a.moment2, stored}, a.count, aligned,
                       stream);
}

template <class StoredTensor>
cudaError_t LaunchSgdStoring(const SgdScalars& s, const ParameterArrays& a, StoredTensor stored, bool aligned,
                             cudaStream_t stream) {
  if (a.moment1 == nullptr) {
    return LaunchForEach(PlainSgdUpdate<StoredTensor>{s, a.parameter, a.gradient, stored}, a.count, aligned, stream);
  }
  return LaunchForEach(MomentumSgdUpdate<StoredTensor>{s, a.parameter, a.gradient, a.moment1, stored}, a.count, aligned, stream);
}

// launch(stored tensor, aligned) for the kind of stored tensor that the arrays have.
template <class Launch>
cudaError_t WithStored(const ParameterArrays& a, const Launch& launch) {
  const bool aligned = IsAligned(a.parameter, 16) && IsAligned(a.gradient, 16) && IsAligned(a.moment1, 16) &&
                       IsAligned(a.moment2, 16) && IsAligned(a.stored, 8);
  if (a.stored == nullptr) return launch(NotStored{}, aligned);
  auto* data = static_cast<uint16_t*>(a.stored);
  switch (a.stored_element) {
    case Element::kBFloat16:
      return launch(Stored<__nv_bfloat16>{data}, aligned);
    case Element::kFloat16:
      return launch(Stored<__half>{data}, aligned);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchAdamW(const AdamWScalars& scalars, const ParameterArrays& arrays, cudaStream_t stream) {
  return WithStored(arrays,
                    [&](const auto& stored, bool aligned) { return LaunchAdamWStoring(scalars, arrays, stored, aligned, stream); });
}

cudaError_t LaunchSgd(const SgdScalars& scalars, const ParameterArrays& arrays, cudaStream_t stream) {
  return WithStored(arrays,
                    [&](const auto& stored, bool aligned) { return LaunchSgdStoring(scalars, arrays, stored, aligned, stream); });
}

cudaError_t LaunchGradientStats(const float* gradient, int64_t count, void* scratch, GradientStatsResult* result,
                                cudaStream_t stream) {
  if (count < 0) return cudaErrorInvalidValue;
  auto* partials = static_cast<Partial*>(scratch);
  if (IsAligned(gradient, 16)) {
    GradientStatsKernel<true><<<kStatsBlocks, kThreads, 0, stream>>>(gradient, count, partials);
  } else {
    GradientStatsKernel<false><<<kStatsBlocks, kThreads, 0, stream>>>(gradient, count, partials);
  }
  FinishGradientStatsKernel<<<1, kThreads, 0, stream>>>(partials, result);
  return cudaGetLastError();
}

cudaError_t LaunchAddScaled(const float* x, int64_t count, float alpha, float* y, cudaStream_t stream) {
  return LaunchForEach(Addition<true>{x, alpha, y}, count, IsAligned(x, 16) && IsAligned(y, 16), stream);
}

cudaError_t LaunchAddProduct(const float* x, int64_t count, float alpha, float* y, cudaStream_t stream) {
  return LaunchForEach(Addition<false>{x, alpha, y}, count, IsAligned(x, 16) && IsAligned(y, 16), stream);
}

}  // namespace headwater::cuda
