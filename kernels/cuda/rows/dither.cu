// Mapping   one block a row; a thread takes 16 bytes of M at a time.
// Traffic   M is read and written once: N4096 V128256 in 16 bits 2.1 GB. A list leaves it unwritten. A divergence's is read before,
//           for its resolutions.
// Work      about 20 instructions an element in bf16; for a list 15, and 20 where something may be left (device/dither_chunk.cuh).
// Numerics  a thread counts in int32 and sums in fp32; over threads both are fp64.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "kernels/cuda/device/dither_chunk.cuh"
#include "kernels/cuda/device/elements.cuh"
#include "kernels/cuda/rows/dither.h"

namespace headwater::cuda {
namespace {

using elements::Rounded;
using elements::ValueOf;

constexpr int kThreads = 256;
constexpr int kSums = 3;
// Smaller resolutions are not applied: their reciprocals come near fp32's range.
constexpr double kSmallestUnit = 7.888609052210118e-31;  // 2^-100

template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(16) Vector {
  T values[kVector<T>];
};

// A block's sums, on its first thread.
__device__ __forceinline__ void SumOverBlock(double (&own)[kSums]) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double by_warp[kWarps][kSums];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) own[i] += __shfl_down_sync(0xffffffffu, own[i], offset);
  }
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kSums; ++i) by_warp[threadIdx.x / 32][i] = own[i];
  }
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < kWarps; ++warp) {
    for (int i = 0; i < kSums; ++i) own[i] += by_warp[warp][i];
  }
}

// The nearest number of M's type.
__device__ float Rounded(double value, Element element) {
  const auto single = static_cast<float>(value);
  if (element == Element::kBFloat16) return __bfloat162float(__float2bfloat16_rn(single));
  if (element == Element::kFloat16) return __half2float(__float2half_rn(single));
  return single;
}

// A divergence's row with this sum of |M|.
__device__ DitherRow MakeRow(const DivergenceResolution& of, int64_t row, Element element, double magnitude) {
  const double to_g = fabs(static_cast<double>(of.row_factor[row]) / (of.factor * static_cast<double>(of.token_weights[row])));
  const double bound = of.resolution * magnitude * to_g / 2;
  DitherRow out;
  if (bound > kSmallestUnit && isfinite(bound)) {
    int exponent = 0;
    frexp(bound, &exponent);
    out.unit = Rounded(ldexp(1.0, exponent - 1) / to_g, element);
    out.unit_in_g = static_cast<double>(out.unit) * to_g;
  }
  return out;
}

// Entries of columns `column` to column + kVector<T> of the vocabulary.
template <typename T>
__device__ __forceinline__ Vector<T> Dithered(Vector<T> vector, uint32_t column, DitherKey key, float unit, float inverse_unit,
                                              EntrySums* sums) {
  if (std::is_same_v<T, __nv_bfloat16> && column % 2 == 0) {
    const uint4 dithered = DitherChunk(reinterpret_cast<const uint4&>(vector), column, key, unit, inverse_unit, sums);
    return reinterpret_cast<const Vector<T>&>(dithered);
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    const float ratio = ValueOf<float>(vector.values[i]) * inverse_unit;
    const float size = fabsf(ratio);
    const bool below = size < 1.0f;  // a NaN stays one
    if (below) {
      const bool survives = DitherSurvives(size, key, column + static_cast<uint32_t>(i));
      vector.values[i] = Rounded<T>(survives ? copysignf(unit, ratio) : 0.0f);
    }
    sums->large += below ? 0 : 1;
    sums->error += below ? size * (1.0f - size) : 0.0f;
    sums->norm = fmaf(size, size, sums->norm);
  }
  return vector;
}

// The vector of columns from j on, with zeros behind the last one.
template <typename T>
__device__ __forceinline__ Vector<T> LoadVector(const Vector<T>* row, int32_t j, int32_t columns) {
  constexpr int32_t kCount = kVector<T>;
  Vector<T> vector = row[j / kCount];
  if (j + kCount > columns) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (j + i >= columns) vector.values[i] = Rounded<T>(0.0f);
    }
  }
  return vector;
}

// A thread's part of a row's sum of |M|.
template <typename T>
__device__ __forceinline__ float SumMagnitudes(const T* row, int32_t columns) {
  const auto* const vectors = reinterpret_cast<const Vector<T>*>(row);
  float magnitude = 0.0f;
#pragma unroll 4
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kVector<T>; j < columns; j += kThreads * kVector<T>) {
    const Vector<T> vector = LoadVector(vectors, j, columns);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) magnitude += fabsf(ValueOf<float>(vector.values[i]));
  }
  return magnitude;
}

// Stores the block's sums over its row in *sums, or with `add` adds them. A target in these columns is no entry.
__device__ __forceinline__ void StoreSums(const EntrySums& own, int32_t columns, uint32_t vocab_start, const int32_t* target,
                                          bool add, DitherSums* sums) {
  double total[kSums] = {static_cast<double>(own.large), static_cast<double>(own.error), static_cast<double>(own.norm)};
  SumOverBlock(total);
  if (threadIdx.x != 0) return;
  const bool has_target = target != nullptr && static_cast<uint32_t>(*target) - vocab_start < static_cast<uint32_t>(columns);
  const double entries = columns - (has_target ? 1 : 0);
  const DitherSums before = add ? *sums : DitherSums();
  *sums = {before.entry_count + entries - total[0], before.squared_error + total[1], before.squared_norm + total[2]};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DitherKernel(T* matrix, int64_t stride, int32_t columns, uint32_t vocab_start, const int32_t* targets, const DitherRow* rows,
                 const DitherKey* keys, bool add, DitherSums* sums) {
  const int64_t row = blockIdx.x;
  const float unit = rows[row].unit;
  if (!(unit > 0.0f)) {
    if (threadIdx.x == 0 && !add && sums != nullptr) sums[row] = DitherSums();
    return;
  }
  const DitherKey key = keys[row];
  const float inverse_unit = 1.0f / unit;
  auto* const vectors = reinterpret_cast<Vector<T>*>(matrix + row * stride);
  EntrySums own;
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kVector<T>; j < columns; j += kThreads * kVector<T>) {
    const Vector<T> vector = LoadVector(vectors, j, columns);
    vectors[j / kVector<T>] = Dithered(vector, vocab_start + static_cast<uint32_t>(j), key, unit, inverse_unit, &own);
  }
  if (sums == nullptr) return;
  StoreSums(own, columns, vocab_start, targets == nullptr ? nullptr : targets + row, add, sums + row);
}

// A block's entries on their way to a pool: they take one addition to its count. An entry without room takes one addition
// of its own.
class RowEntries {
 public:
  static constexpr uint32_t kRoom = 1024;
  struct Shared {
    uint32_t columns[kRoom];
    float values[kRoom];
    uint32_t count;
    uint32_t base;
  };
  __device__ RowEntries(const EntryPool& pool, Shared* shared) : pool_(pool), shared_(shared) {
    if (threadIdx.x == 0) shared_->count = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void Append(int32_t column, float value) {
    const uint32_t place = atomicAdd(&shared_->count, 1u);
    if (place < kRoom) {
      shared_->columns[place] = static_cast<uint32_t>(column);
      shared_->values[place] = value;
    } else {
      Write(atomicAdd(pool_.count, 1u), static_cast<uint32_t>(column), value);
    }
  }
  __device__ void Flush() {
    __syncthreads();
    const uint32_t count = min(shared_->count, kRoom);
    if (threadIdx.x == 0) shared_->base = atomicAdd(pool_.count, count);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) Write(shared_->base + i, shared_->columns[i], shared_->values[i]);
  }

 private:
  __device__ __forceinline__ void Write(uint32_t place, uint32_t column, float value) {
    if (place >= pool_.capacity) return;
    pool_.keys[place] = column << pool_.row_bits | (static_cast<uint32_t>(pool_.first_row) + blockIdx.x);
    pool_.values[place] = value;
  }
  const EntryPool& pool_;
  Shared* const shared_;
};

// As DitherKernel, but that entries go to a list, or to the dense columns' matrix, which is 0. Rows without a resolution are listed
// as they are. Most chunks of eight columns leave nothing. A warp collects the others, and takes 32 at a time.
__global__ void __launch_bounds__(kThreads)
    ListKernel(const __nv_bfloat16* matrix, int64_t stride, int32_t columns, const int32_t* targets, const DitherRow* rows,
               const DitherKey* keys, const __grid_constant__ EntryList list, DitherSums* sums) {
  constexpr int32_t kEight = kVector<__nv_bfloat16>, kLanes = 32, kTogether = 4;
  __shared__ RowEntries::Shared shared;
  __shared__ int32_t collected[kThreads / kLanes][(kTogether + 1) * kLanes];
  const int64_t row = blockIdx.x;
  const DitherKey key = keys[row];
  const float unit = rows[row].unit;
  const bool dithers = unit > 0.0f;
  const float inverse_unit = dithers ? 1.0f / unit : 0.0f;
  const DenseColumns& dense = list.dense;
  uint16_t* const dense_row = dense.matrix + row * dense.count;
  RowEntries entries(list.pool, &shared);
  EntrySums own;
  const auto* const chunks = reinterpret_cast<const uint4*>(matrix + row * stride);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanes, lane = static_cast<int32_t>(threadIdx.x) % kLanes;
  const auto may_have = [&](const uint4& words, int32_t chunk) {
    if (!dithers) return ((words.x | words.y | words.z | words.w) & 0x7fff7fffu) != 0;
    return MayHaveEntries(words, static_cast<uint32_t>(chunk * kEight), key, inverse_unit, &own);
  };
  // With zeros behind the last column.
  const auto load = [&](int32_t chunk) {
    const auto vector = LoadVector(reinterpret_cast<const Vector<__nv_bfloat16>*>(chunks), chunk * kEight, columns);
    return reinterpret_cast<const uint4&>(vector);
  };
  const auto take = [&](int32_t chunk) {
    uint4 words = load(chunk);
    if (dithers) {
      EntrySums of_chunk;  // of which `own` has the others
      words = DitherChunk(words, static_cast<uint32_t>(chunk * kEight), key, unit, inverse_unit, &of_chunk);
      own.large += of_chunk.large;
    }
    const uint32_t place = dense.count > 0 ? __ldg(dense.places + chunk) : 0;
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const uint32_t bits = pairs[i / 2] >> 16 * (i % 2) & 0xffffu, before = (1u << i) - 1;
      if ((bits & 0x7fffu) == 0) continue;
      if ((place >> i & 1u) != 0) {
        dense_row[(place >> 8) + static_cast<uint32_t>(__popc(place & before))] = static_cast<uint16_t>(bits);
      } else {
        entries.Append(chunk * kEight + i, __uint_as_float(bits << 16));
      }
    }
  };
  int32_t count = 0;
  const auto collect = [&](bool collects, int32_t chunk) {
    const uint32_t ballot = __ballot_sync(0xffffffffu, collects);
    if (collects) collected[warp][count + __popc(ballot & ((1u << lane) - 1))] = chunk;
    count += __popc(ballot);
  };
  const int32_t whole_chunks = columns / kEight;
  // The same number of times for all lanes of a warp.
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first - lane < whole_chunks; first += kTogether * kThreads) {
    uint4 words[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) words[i] = first + i * kThreads < whole_chunks ? chunks[first + i * kThreads] : uint4{};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int32_t chunk = first + i * kThreads;
      collect(may_have(words[i], chunk) && chunk < whole_chunks, chunk);
    }
    __syncwarp();
    while (count >= kLanes) {
      count -= kLanes;
      take(collected[warp][count + lane]);
    }
    __syncwarp();
  }
  const bool has_cut = columns % kEight != 0 && static_cast<int32_t>(threadIdx.x) == whole_chunks % kThreads;
  collect(has_cut && may_have(load(whole_chunks), whole_chunks), whole_chunks);
  __syncwarp();
  if (lane < count) take(collected[warp][lane]);
  entries.Flush();
  if (dithers) {
    StoreSums(own, columns, /*vocab_start=*/0, targets == nullptr ? nullptr : targets + row, /*add=*/false, sums + row);
  } else if (threadIdx.x == 0) {
    sums[row] = DitherSums();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    ResolutionsKernel(const T* matrix, int64_t stride, int32_t columns, const DivergenceResolution of, Element element,
                      bool is_first, bool is_last, DitherRow* rows) {
  const int64_t row = blockIdx.x;
  double total[kSums] = {static_cast<double>(SumMagnitudes(matrix + row * stride, columns)), 0, 0};
  SumOverBlock(total);
  if (threadIdx.x != 0) return;
  const double sum = is_first ? total[0] : rows[row].unit_in_g + total[0];
  if (is_last) {
    rows[row] = MakeRow(of, row, element, sum);
  } else {
    rows[row].unit_in_g = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    SumDitherKernel(const DitherSums* sums, const DitherRow* rows, int64_t row_count, DitherSums* total) {
  double own[kSums] = {0, 0, 0};
  for (int64_t row = threadIdx.x; row < row_count; row += kThreads) {
    const double unit = rows[row].unit_in_g, target = rows[row].target_entry;
    own[0] += sums[row].entry_count;
    own[1] += unit * unit * sums[row].squared_error;
    own[2] += unit * unit * sums[row].squared_norm + target * target;
  }
  SumOverBlock(own);
  if (threadIdx.x == 0) *total = {own[0], own[1], own[2]};
}

// Calls launch(T()), T the element's type.
template <typename Launch>
cudaError_t WithElement(Element element, const Launch& launch) {
  switch (element) {
    case Element::kFloat32:
      launch(0.0f);
      return cudaGetLastError();
    case Element::kBFloat16:
      launch(__nv_bfloat16());
      return cudaGetLastError();
    case Element::kFloat16:
      launch(__half());
      return cudaGetLastError();
    case Element::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchDither(const MutableMatrix& matrix, int64_t vocab_start, const int32_t* targets, const DitherRow* rows,
                         const DitherKey* keys, bool add, DitherSums* sums, cudaStream_t stream) {
  if (matrix.rows == 0) return cudaSuccess;
  return WithElement(matrix.element, [&](auto zero) {
    DitherKernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream>>>(
        static_cast<decltype(zero)*>(matrix.data), matrix.stride, static_cast<int32_t>(matrix.columns),
        static_cast<uint32_t>(vocab_start), targets, rows, keys, add, sums);
  });
}

cudaError_t LaunchListDithered(const ConstMatrix& matrix, const int32_t* targets, const DitherRow* rows, const DitherKey* keys,
                               const EntryList& list, DitherSums* sums, cudaStream_t stream) {
  if (matrix.element != Element::kBFloat16) return cudaErrorInvalidValue;
  if (list.dense.count > 0) {
    const auto bytes = static_cast<size_t>(matrix.rows * list.dense.count) * sizeof(*list.dense.matrix);
    if (const cudaError_t error = cudaMemsetAsync(list.dense.matrix, 0, bytes, stream); error != cudaSuccess) return error;
  }
  ListKernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(matrix.data),
                                                                          matrix.stride, static_cast<int32_t>(matrix.columns),
                                                                          targets, rows, keys, list, sums);
  return cudaGetLastError();
}

cudaError_t LaunchDivergenceResolutions(const ConstMatrix& shard, const DivergenceResolution& of, bool is_first, bool is_last,
                                        DitherRow* rows, cudaStream_t stream) {
  if (shard.rows == 0) return cudaSuccess;
  return WithElement(shard.element, [&](auto zero) {
    ResolutionsKernel<<<static_cast<unsigned>(shard.rows), kThreads, 0, stream>>>(static_cast<const decltype(zero)*>(shard.data),
                                                                                  shard.stride, static_cast<int32_t>(shard.columns),
                                                                                  of, shard.element, is_first, is_last, rows);
  });
}

cudaError_t LaunchSumDither(const DitherSums* sums, const DitherRow* rows, int64_t row_count, DitherSums* total,
                            cudaStream_t stream) {
  SumDitherKernel<<<1, kThreads, 0, stream>>>(sums, rows, row_count, total);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
