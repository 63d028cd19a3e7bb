// Moving rows between types, strides and orders.
//
// Mapping   rows: one block for each row, eight elements a thread (16 bytes of a 16-bit type, 32 of fp32); flat arrays: one thread
//           for eight elements. Where a base or a stride is no multiple of 16 bytes, one element at a time.
// Traffic   what is read is read once, what is written is written once: 4096 rows of 4096 bf16 elements are 67 MB, 16 us at 4.2
// TB/s. Numerics  every conversion rounds once, to nearest even; a type that stays keeps its bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/rows/conversions.h"

namespace headwater::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kPack = 8;  // elements that a thread handles at once
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

// --- Elements
// ---------------------------------------------------------------------------------------------------------------------

template <class T>
struct Tag {
  using Type = T;
};

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

__device__ __forceinline__ float FromFloat(float x, Tag<float>) { return x; }
__device__ __forceinline__ double FromFloat(float x, Tag<double>) { return static_cast<double>(x); }
__device__ __forceinline__ __nv_bfloat16 FromFloat(float x, Tag<__nv_bfloat16>) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ __half FromFloat(float x, Tag<__half>) { return __float2half_rn(x); }

template <class Out, class In>
__device__ __forceinline__ Out Convert(In x) {
  if constexpr (std::is_same_v<In, Out>) {
    return x;
  } else {
    return FromFloat(ToFloat(x), Tag<Out>());
  }
}

// Widening keeps NaN and infinities.
template <class T>
__device__ __forceinline__ bool IsNonFinite(T x) {
  return (__float_as_uint(ToFloat(x)) & 0x7F800000u) == 0x7F800000u;
}

// Eight elements, moved in 16-byte words.
template <class T>
struct alignas(16) Pack {
  T v[kPack];
};

template <class T>
__device__ __forceinline__ Pack<T> LoadPack(const T* source) {
  Pack<T> result;
#pragma unroll
  for (size_t i = 0; i < sizeof(result) / 16; ++i) {
    reinterpret_cast<uint4*>(&result)[i] = reinterpret_cast<const uint4*>(source)[i];
  }
  return result;
}

template <class T>
__device__ __forceinline__ void StorePack(T* target, const Pack<T>& pack) {
#pragma unroll
  for (size_t i = 0; i < sizeof(pack) / 16; ++i) {
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(&pack)[i];
  }
}

// Elements [start, start + kPack) of a row of `columns`, 0 from there on.
template <class T>
__device__ __forceinline__ Pack<T> LoadPackOfRow(const T* row, int64_t start, int64_t columns) {
  if (start + kPack <= columns) return LoadPack(row + start);
  Pack<T> result;
#pragma unroll
  for (int i = 0; i < kPack; ++i) result.v[i] = start + i < columns ? row[start + i] : FromFloat(0.0f, Tag<T>());
  return result;
}

// --- Kernels
// ----------------------------------------------------------------------------------------------------------------------

// Sets *flag to 1 if any thread of the block found something. Every thread of the block calls it, or none.
__device__ __forceinline__ void Report(bool found, uint8_t* flag) {
  if (__syncthreads_or(found ? 1 : 0) != 0 && threadIdx.x == 0) *flag = 1;
}

// out[row, c] = c < columns ? in[index[row], c] : 0 for c < out_stride.
template <class In, class Out, bool kVector>
__global__ void __launch_bounds__(kMaxThreads)
    GatherRowsKernel(const In* in, int64_t columns, int64_t in_stride, const int32_t* index, Out* out, int64_t rows,
                     int64_t out_stride, uint8_t* non_finite) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const In* source = in + (index != nullptr ? static_cast<int64_t>(index[row]) : row) * in_stride;
    Out* target = out + row * out_stride;
    bool found = false;
    if constexpr (kVector) {
      for (int64_t start = threadIdx.x * kPack; start < out_stride; start += blockDim.x * kPack) {
        const Pack<In> pack = LoadPackOfRow(source, start, columns);
        Pack<Out> converted;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          found |= IsNonFinite(pack.v[i]);
          converted.v[i] = Convert<Out>(pack.v[i]);
        }
        StorePack(target + start, converted);
      }
    } else {
      for (int64_t column = threadIdx.x; column < out_stride; column += blockDim.x) {
        const In x = column < columns ? source[column] : FromFloat(0.0f, Tag<In>());
        found |= IsNonFinite(x);
        target[column] = Convert<Out>(x);
      }
    }
    if (non_finite != nullptr) Report(found, non_finite + row);
  }
}

template <class In, bool kVector>
__global__ void __launch_bounds__(kMaxThreads)
    CheckRowsKernel(const In* in, int64_t rows, int64_t columns, int64_t stride, uint8_t* non_finite) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const In* source = in + row * stride;
    bool found = false;
    if constexpr (kVector) {
      for (int64_t start = threadIdx.x * kPack; start < columns; start += blockDim.x * kPack) {
        const Pack<In> pack = LoadPackOfRow(source, start, columns);
#pragma unroll
        for (int i = 0; i < kPack; ++i) found |= IsNonFinite(pack.v[i]);
      }
    } else {
      for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) found |= IsNonFinite(source[column]);
    }
    Report(found, non_finite + row);
  }
}

template <class In, class Out, bool kVector>
__global__ void __launch_bounds__(kMaxThreads) ConvertKernel(const In* in, int64_t count, Out* out) {
  constexpr int kEach = kVector ? kPack : 1;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMaxThreads * kEach;
  for (int64_t start = (blockIdx.x * static_cast<int64_t>(kMaxThreads) + threadIdx.x) * kEach; start < count; start += step) {
    if (kVector && start + kPack <= count) {
      const Pack<In> pack = LoadPack(in + start);
      Pack<Out> converted;
#pragma unroll
      for (int i = 0; i < kPack; ++i) converted.v[i] = Convert<Out>(pack.v[i]);
      StorePack(out + start, converted);
    } else {
      for (int64_t i = start; i < start + kEach && i < count; ++i) out[i] = Convert<Out>(in[i]);
    }
  }
}

// Value `index` of stream `seed`: two uniform numbers out of 64 well-mixed bits (the finalizer of splitmix64), by Box and Muller.
__device__ __forceinline__ float NormalAt(uint64_t seed, uint64_t index) {
  uint64_t state = (index + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
  state ^= state >> 31;
  const float u = (static_cast<float>(state >> 40) + 0.5f) * (1.0f / 16777216.0f);  // (0, 1): the logarithm is finite
  const float turn = static_cast<float>(state & 0xFFFFFFu) * (1.0f / 16777216.0f);
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * turn);
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) FillNormalKernel(T* out, int64_t count, uint64_t seed, float scale) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMaxThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kMaxThreads) + threadIdx.x; i < count; i += step) {
    out[i] = FromFloat(scale * NormalAt(seed, static_cast<uint64_t>(i)), Tag<T>());
  }
}

// --- Launchers
// --------------------------------------------------------------------------------------------------------------------

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// True if every row begins at a multiple of 16 bytes.
bool RowsAreAligned(const void* data, int64_t rows, int64_t stride, Element element) {
  return IsAligned(data) && (rows <= 1 || stride * BytesOf(element) % 16 == 0);
}

// Threads that a row of `columns` keeps busy, in whole warps.
int ThreadsOfRow(int64_t columns, bool vector) {
  const int64_t wanted = RoundUp(vector ? (columns + kPack - 1) / kPack : columns, 32);
  return static_cast<int>(std::clamp<int64_t>(wanted, 32, kMaxThreads));
}

unsigned Blocks(int64_t wanted) { return static_cast<unsigned>(std::min(wanted, kMaxBlocks)); }

// run(Tag<type>()) for an element type, kFloat64 only if kWithDouble.
template <bool kWithDouble, class Run>
cudaError_t WithType(Element element, const Run& run) {
  switch (element) {
    case Element::kFloat32:
      return run(Tag<float>());
    case Element::kBFloat16:
      return run(Tag<__nv_bfloat16>());
    case Element::kFloat16:
      return run(Tag<__half>());
    case Element::kFloat64:
      if constexpr (kWithDouble) return run(Tag<double>());
      break;
  }
  return cudaErrorInvalidValue;
}

template <class In, class Out>
cudaError_t GatherRows(const ConstMatrix& in, const int32_t* index, const MutableMatrix& out, uint8_t* non_finite,
                       cudaStream_t stream) {
  // If rows are picked, the stride counts for a matrix with a single row, too.
  const bool vector = RowsAreAligned(in.data, index != nullptr ? 2 : out.rows, in.stride, in.element) &&
                      RowsAreAligned(out.data, out.rows, out.stride, out.element) && out.stride % kPack == 0;
  const unsigned blocks = Blocks(out.rows);
  const int threads = ThreadsOfRow(out.stride, vector);
  const auto* source = static_cast<const In*>(in.data);
  auto* target = static_cast<Out*>(out.data);
  if (vector) {
    GatherRowsKernel<In, Out, true>
        <<<blocks, threads, 0, stream>>>(source, in.columns, in.stride, index, target, out.rows, out.stride, non_finite);
  } else {
    GatherRowsKernel<In, Out, false>
        <<<blocks, threads, 0, stream>>>(source, in.columns, in.stride, index, target, out.rows, out.stride, non_finite);
  }
  return cudaGetLastError();
}

template <class In>
cudaError_t CheckRows(const ConstMatrix& in, uint8_t* non_finite, cudaStream_t stream) {
  const bool vector = RowsAreAligned(in.data, in.rows, in.stride, in.element);
  const unsigned blocks = Blocks(in.rows);
  const int threads = ThreadsOfRow(in.columns, vector);
  const auto* source = static_cast<const In*>(in.data);
  if (vector) {
    CheckRowsKernel<In, true><<<blocks, threads, 0, stream>>>(source, in.rows, in.columns, in.stride, non_finite);
  } else {
    CheckRowsKernel<In, false><<<blocks, threads, 0, stream>>>(source, in.rows, in.columns, in.stride, non_finite);
  }
  return cudaGetLastError();
}

template <class In, class Out>
cudaError_t ConvertAll(const void* in, int64_t count, void* out, cudaStream_t stream) {
  const bool vector = IsAligned(in) && IsAligned(out);
  const int64_t each = int64_t{kMaxThreads} * (vector ? kPack : 1);
  const unsigned blocks = Blocks((count + each - 1) / each);
  const auto* source = static_cast<const In*>(in);
  auto* target = static_cast<Out*>(out);
  if (vector) {
    ConvertKernel<In, Out, true><<<blocks, kMaxThreads, 0, stream>>>(source, count, target);
  } else {
    ConvertKernel<In, Out, false><<<blocks, kMaxThreads, 0, stream>>>(source, count, target);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchGatherRows(const ConstMatrix& in, const int32_t* index, const MutableMatrix& out, uint8_t* non_finite,
                             cudaStream_t stream) {
  if (out.rows < 0 || in.columns < 0 || in.columns > out.stride) return cudaErrorInvalidValue;
  if (out.rows == 0 || out.stride == 0) return cudaSuccess;
  return WithType<false>(in.element, [&](auto in_tag) {
    return WithType<true>(out.element, [&](auto out_tag) {
      return GatherRows<typename decltype(in_tag)::Type, typename decltype(out_tag)::Type>(in, index, out, non_finite, stream);
    });
  });
}

cudaError_t LaunchCheckRows(const ConstMatrix& in, uint8_t* non_finite, cudaStream_t stream) {
  if (in.rows < 0 || in.columns < 0) return cudaErrorInvalidValue;
  if (in.rows == 0 || in.columns == 0) return cudaSuccess;
  return WithType<false>(in.element, [&](auto tag) { return CheckRows<typename decltype(tag)::Type>(in, non_finite, stream); });
}

cudaError_t LaunchConvert(const void* in, Element in_element, int64_t count, void* out, Element out_element, cudaStream_t stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return WithType<false>(in_element, [&](auto in_tag) {
    return WithType<true>(out_element, [&](auto out_tag) {
      return ConvertAll<typename decltype(in_tag)::Type, typename decltype(out_tag)::Type>(in, count, out, stream);
    });
  });
}

cudaError_t LaunchFillNormal(void* out, Element element, int64_t count, uint64_t seed, float scale, cudaStream_t stream) {
  if (count < 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  return WithType<true>(element, [&](auto tag) {
    using Type = typename decltype(tag)::Type;
    const unsigned blocks = Blocks((count + kMaxThreads - 1) / kMaxThreads);
    FillNormalKernel<Type><<<blocks, kMaxThreads, 0, stream>>>(static_cast<Type*>(out), count, seed, scale);
    return cudaGetLastError();
  });
}

}  // namespace headwater::cuda
