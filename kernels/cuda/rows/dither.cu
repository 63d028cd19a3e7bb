// Mapping   one block a row; a thread takes 16 bytes of M at a time. A divergence's row is summed up first, for its resolution, and
//           read again: with one block of 1024 threads on a multiprocessor all rows that are under way stay in L2.
// Traffic   M is read and written once: N4096 V128256 in 16 bits 2.1 GB.
// Work      about 20 instructions an element in bf16 (device/dither_chunk.cuh).
// Numerics  a thread counts in int32 and sums in fp32; over threads both are fp64.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "kernels/cuda/device/dither_chunk.cuh"
#include "kernels/cuda/rows/dither.h"

namespace headwater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDivergenceThreads = 1024;
constexpr int kSums = 3;
// Smaller resolutions are not applied: their reciprocals come near fp32's range.
constexpr double kSmallestUnit = 7.888609052210118e-31;  // 2^-100

template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(16) Vector {
  T values[kVector<T>];
};

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float ToFloat(__half value) { return __half2float(value); }
__device__ __forceinline__ void FromFloat(float value, float* out) { *out = value; }
__device__ __forceinline__ void FromFloat(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }
__device__ __forceinline__ void FromFloat(float value, __half* out) { *out = __float2half_rn(value); }

// A block's sums, on its first thread.
template <int kBlock>
__device__ __forceinline__ void SumOverBlock(double (&own)[kSums]) {
  constexpr int kWarps = kBlock / 32;
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

// A thread's sums over a row.
struct EntrySums {
  int32_t large = 0;  // entries that are not below the resolution
  float error = 0.0f;
  float norm = 0.0f;
};

// Entries of columns `column` to column + kVector<T> of the vocabulary.
template <typename T>
__device__ __forceinline__ Vector<T> Dithered(Vector<T> vector, uint32_t column, DitherKey key, float unit, float inverse_unit,
                                              EntrySums* sums) {
  if (std::is_same_v<T, __nv_bfloat16> && column % 2 == 0) {
    ChunkSums of_chunk{{}, sums->error, sums->norm};
    const uint4 dithered = DitherChunk<true>(reinterpret_cast<const uint4&>(vector), column, key, unit, inverse_unit, &of_chunk);
    sums->large += static_cast<int32_t>(__low2float(of_chunk.large) + __high2float(of_chunk.large));
    sums->error = of_chunk.error;
    sums->norm = of_chunk.norm;
    return reinterpret_cast<const Vector<T>&>(dithered);
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    const float ratio = ToFloat(vector.values[i]) * inverse_unit;
    const float size = fabsf(ratio);
    const bool below = size < 1.0f;  // a NaN stays one
    if (below) {
      const bool survives = DitherSurvives(size, key, column + static_cast<uint32_t>(i));
      FromFloat(survives ? copysignf(unit, ratio) : 0.0f, &vector.values[i]);
    }
    sums->large += below ? 0 : 1;
    sums->error += below ? size * (1.0f - size) : 0.0f;
    sums->norm = fmaf(size, size, sums->norm);
  }
  return vector;
}

// A block's part in a row of a shard.
template <int kBlock, typename T>
__device__ __forceinline__ void DitherInPlace(T* row, int32_t columns, uint32_t vocab_start, DitherKey key, float unit,
                                              EntrySums* sums) {
  constexpr int32_t kCount = kVector<T>;
  const float inverse_unit = 1.0f / unit;
  auto* const vectors = reinterpret_cast<Vector<T>*>(row);
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kCount; j < columns; j += kBlock * kCount) {
    Vector<T> vector = vectors[j / kCount];
    if (j + kCount > columns) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (j + i >= columns) FromFloat(0.0f, &vector.values[i]);
      }
    }
    vectors[j / kCount] = Dithered(vector, vocab_start + static_cast<uint32_t>(j), key, unit, inverse_unit, sums);
  }
}

// A thread's part of a row's sum of |M|.
template <int kBlock, typename T>
__device__ __forceinline__ float SumMagnitudes(const T* row, int32_t columns) {
  const auto* const vectors = reinterpret_cast<const Vector<T>*>(row);
  float magnitude = 0.0f;
#pragma unroll 4
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kVector<T>; j < columns; j += kBlock * kVector<T>) {
    const Vector<T> vector = vectors[j / kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) magnitude += j + i < columns ? fabsf(ToFloat(vector.values[i])) : 0.0f;
  }
  return magnitude;
}

// Stores the block's sums over its row in *sums, or with `add` adds them. A target in these columns is no entry.
template <int kBlock>
__device__ __forceinline__ void StoreSums(const EntrySums& own, int32_t columns, uint32_t vocab_start, const int32_t* target,
                                          bool add, DitherSums* sums) {
  double total[kSums] = {static_cast<double>(own.large), static_cast<double>(own.error), static_cast<double>(own.norm)};
  SumOverBlock<kBlock>(total);
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
  EntrySums own;
  DitherInPlace<kThreads>(matrix + row * stride, columns, vocab_start, keys[row], unit, &own);
  if (sums == nullptr) return;
  StoreSums<kThreads>(own, columns, vocab_start, targets == nullptr ? nullptr : targets + row, add, sums + row);
}

// A block's entries on their way to a pool: they take one addition to its count. An entry without room takes one addition
// of its own.
template <int kBlock>
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
    for (uint32_t i = threadIdx.x; i < count; i += kBlock) Write(shared_->base + i, shared_->columns[i], shared_->values[i]);
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

// Appends a row's entries behind its dense columns to a pool, all dithered if `unit` is positive, and stores the row's sums.
template <int kBlock>
__device__ __forceinline__ void ListRow(__nv_bfloat16* row, int32_t dense, int32_t columns, uint32_t vocab_start,
                                        const int32_t* target, DitherKey key, float unit, const EntryPool& pool,
                                        typename RowEntries<kBlock>::Shared* shared, DitherSums* sums) {
  constexpr int32_t kEight = kVector<__nv_bfloat16>;
  const bool dithers = unit > 0.0f;
  const float inverse_unit = dithers ? 1.0f / unit : 0.0f;
  RowEntries<kBlock> entries(pool, shared);
  EntrySums own;
  auto* const vectors = reinterpret_cast<Vector<__nv_bfloat16>*>(row);
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kEight; j < columns; j += kBlock * kEight) {
    Vector<__nv_bfloat16> vector = vectors[j / kEight];
    if (j + kEight > columns) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (j + i >= columns) FromFloat(0.0f, &vector.values[i]);
      }
    }
    if (dithers) vector = Dithered(vector, vocab_start + static_cast<uint32_t>(j), key, unit, inverse_unit, &own);
    if (j < dense) {
      vectors[j / kEight] = vector;
      continue;
    }
    const uint4 words = reinterpret_cast<const uint4&>(vector);
    if (((words.x | words.y | words.z | words.w) & 0x7fff7fffu) == 0) continue;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const float value = ToFloat(vector.values[i]);
      if (value != 0.0f) entries.Append(j + i, value);
    }
  }
  entries.Flush();
  if (dithers) {
    StoreSums<kBlock>(own, columns, vocab_start, target, /*add=*/false, sums);
  } else if (threadIdx.x == 0) {
    *sums = DitherSums();
  }
}

// As DitherKernel, but that entries behind the dense columns go to a pool.
__global__ void __launch_bounds__(kThreads)
    ListKernel(__nv_bfloat16* matrix, int64_t stride, int32_t dense, int32_t columns, uint32_t vocab_start, const int32_t* targets,
               const DitherRow* rows, const DitherKey* keys, const EntryPool pool, DitherSums* sums) {
  __shared__ RowEntries<kThreads>::Shared shared;
  const int64_t row = blockIdx.x;
  ListRow<kThreads>(matrix + row * stride, dense, columns, vocab_start, targets + row, keys[row], rows[row].unit, pool, &shared,
                    sums + row);
}

// Writes the entries that are expected of a row behind each prefix. Entries that are not below the unit count as one.
template <int kBlock>
__device__ __forceinline__ void ExpectEntries(const __nv_bfloat16* row, const DensePrefixes& prefixes, int32_t columns, float unit,
                                              float* entries) {
  static_assert(DensePrefixes::kCount == kSums);
  constexpr int32_t kEight = kVector<__nv_bfloat16>;
  const auto* const vectors = reinterpret_cast<const Vector<__nv_bfloat16>*>(row);
  float own[kSums] = {};
  for (int32_t j = static_cast<int32_t>(threadIdx.x) * kEight; j < columns; j += kBlock * kEight) {
    const Vector<__nv_bfloat16> vector = vectors[j / kEight];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const float size = j + i < columns ? fabsf(ToFloat(vector.values[i])) : 0.0f;
      sum += size >= unit ? (size != 0.0f ? 1.0f : 0.0f) : size / unit;
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k) own[k] += j < prefixes.columns[k] ? 0.0f : sum;
  }
  double total[kSums] = {static_cast<double>(own[0]), static_cast<double>(own[1]), static_cast<double>(own[2])};
  SumOverBlock<kBlock>(total);
  for (int k = 0; threadIdx.x == 0 && k < kSums; ++k) entries[k] = static_cast<float>(total[k]);
}

// A block a sample.
__global__ void __launch_bounds__(kThreads)
    EstimateEntriesKernel(const __nv_bfloat16* matrix, int64_t stride, int64_t row_count, const DensePrefixes prefixes,
                          int32_t columns, const DitherRow* rows, float* entries) {
  const int64_t row = row_count * blockIdx.x / gridDim.x;
  ExpectEntries<kThreads>(matrix + row * stride, prefixes, columns, rows[row].unit, entries + blockIdx.x * kSums);
}

template <typename T>
__global__ void __launch_bounds__(kDivergenceThreads, 1)
    DitherDivergenceKernel(const __grid_constant__ DivergenceMatrix matrix, const DivergenceResolution of, const DitherKey* keys,
                           DitherRow* rows, DitherSums* sums) {
  __shared__ float unit;
  const int64_t row = blockIdx.x;
  const auto row_of = [&](int32_t rank) { return static_cast<T*>(matrix.shards[rank].data) + row * matrix.shards[rank].stride; };
  float magnitude = 0.0f;
  for (int32_t rank = 0; rank < matrix.shard_count; ++rank) {
    magnitude += SumMagnitudes<kDivergenceThreads>(row_of(rank), matrix.shards[rank].columns);
  }
  double total[kSums] = {static_cast<double>(magnitude), 0, 0};
  SumOverBlock<kDivergenceThreads>(total);
  if (threadIdx.x == 0) {
    rows[row] = MakeRow(of, row, matrix.element, total[0]);
    unit = rows[row].unit;
    sums[row] = DitherSums();
  }
  __syncthreads();
  if (!(unit > 0.0f)) return;
  EntrySums own;
  double entries = 0;
  for (int32_t rank = 0; rank < matrix.shard_count; ++rank) {
    const auto& shard = matrix.shards[rank];
    DitherInPlace<kDivergenceThreads>(row_of(rank), shard.columns, shard.vocab_start, keys[row], unit, &own);
    entries += shard.columns;
  }
  total[0] = own.large;
  total[1] = own.error;
  total[2] = own.norm;
  SumOverBlock<kDivergenceThreads>(total);
  if (threadIdx.x == 0) sums[row] = {entries - total[0], total[1], total[2]};
}

// A row of a divergence's only shard, whose M is bf16: the resolution of its sum of |M|, on every thread.
__device__ DitherRow MakeOnlyRow(const __nv_bfloat16* row, int32_t columns, const DivergenceResolution& of, int64_t number,
                                 DitherRow* shared) {
  double total[kSums] = {static_cast<double>(SumMagnitudes<kDivergenceThreads>(row, columns)), 0, 0};
  SumOverBlock<kDivergenceThreads>(total);
  if (threadIdx.x == 0) *shared = MakeRow(of, number, Element::kBFloat16, total[0]);
  __syncthreads();
  return *shared;
}

// As DitherDivergenceKernel, but that entries behind the dense columns go to a pool.
__global__ void __launch_bounds__(kDivergenceThreads, 1)
    ListDivergenceKernel(__nv_bfloat16* matrix, int64_t stride, int32_t dense, int32_t columns, uint32_t vocab_start,
                         const DivergenceResolution of, const DitherKey* keys, const EntryPool pool, DitherRow* rows,
                         DitherSums* sums) {
  __shared__ DitherRow shared_row;
  __shared__ RowEntries<kDivergenceThreads>::Shared shared;
  const int64_t row = blockIdx.x;
  __nv_bfloat16* const of_row = matrix + row * stride;
  const DitherRow made = MakeOnlyRow(of_row, columns, of, row, &shared_row);
  if (threadIdx.x == 0) rows[row] = made;
  ListRow<kDivergenceThreads>(of_row, dense, columns, vocab_start, nullptr, keys[row], made.unit, pool, &shared, sums + row);
}

// A block a sample.
__global__ void __launch_bounds__(kDivergenceThreads)
    EstimateDivergenceKernel(const __nv_bfloat16* matrix, int64_t stride, int64_t row_count, const DensePrefixes prefixes,
                             int32_t columns, const DivergenceResolution of, float* entries) {
  __shared__ DitherRow shared_row;
  const int64_t row = row_count * blockIdx.x / gridDim.x;
  const __nv_bfloat16* const of_row = matrix + row * stride;
  const DitherRow made = MakeOnlyRow(of_row, columns, of, row, &shared_row);
  ExpectEntries<kDivergenceThreads>(of_row, prefixes, columns, made.unit, entries + blockIdx.x * kSums);
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
  SumOverBlock<kThreads>(own);
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

cudaError_t LaunchListDithered(const MutableMatrix& matrix, int32_t dense, int64_t vocab_start, const int32_t* targets,
                               const DitherRow* rows, const DitherKey* keys, const EntryPool& pool, DitherSums* sums,
                               cudaStream_t stream) {
  if (matrix.element != Element::kBFloat16) return cudaErrorInvalidValue;
  ListKernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream>>>(
      static_cast<__nv_bfloat16*>(matrix.data), matrix.stride, dense, static_cast<int32_t>(matrix.columns),
      static_cast<uint32_t>(vocab_start), targets, rows, keys, pool, sums);
  return cudaGetLastError();
}

cudaError_t LaunchListDivergence(const MutableMatrix& matrix, int32_t dense, int64_t vocab_start, const DivergenceResolution& of,
                                 const DitherKey* keys, const EntryPool& pool, DitherRow* rows, DitherSums* sums,
                                 cudaStream_t stream) {
  if (matrix.element != Element::kBFloat16) return cudaErrorInvalidValue;
  ListDivergenceKernel<<<static_cast<unsigned>(matrix.rows), kDivergenceThreads, 0, stream>>>(
      static_cast<__nv_bfloat16*>(matrix.data), matrix.stride, dense, static_cast<int32_t>(matrix.columns),
      static_cast<uint32_t>(vocab_start), of, keys, pool, rows, sums);
  return cudaGetLastError();
}

cudaError_t LaunchEstimateEntries(const ConstMatrix& matrix, const DensePrefixes& prefixes, const DitherRow* rows, int32_t samples,
                                  float* entries, cudaStream_t stream) {
  if (matrix.element != Element::kBFloat16) return cudaErrorInvalidValue;
  EstimateEntriesKernel<<<static_cast<unsigned>(samples), kThreads, 0, stream>>>(
      static_cast<const __nv_bfloat16*>(matrix.data), matrix.stride, matrix.rows, prefixes, static_cast<int32_t>(matrix.columns),
      rows, entries);
  return cudaGetLastError();
}

cudaError_t LaunchEstimateDivergence(const ConstMatrix& matrix, const DensePrefixes& prefixes, const DivergenceResolution& of,
                                     int32_t samples, float* entries, cudaStream_t stream) {
  if (matrix.element != Element::kBFloat16) return cudaErrorInvalidValue;
  EstimateDivergenceKernel<<<static_cast<unsigned>(samples), kDivergenceThreads, 0, stream>>>(
      static_cast<const __nv_bfloat16*>(matrix.data), matrix.stride, matrix.rows, prefixes, static_cast<int32_t>(matrix.columns),
      of, entries);
  return cudaGetLastError();
}

cudaError_t LaunchDitherDivergence(const DivergenceMatrix& matrix, const DivergenceResolution& of, const DitherKey* keys,
                                   DitherRow* rows, DitherSums* sums, cudaStream_t stream) {
  if (matrix.row_count == 0) return cudaSuccess;
  return WithElement(matrix.element, [&](auto zero) {
    DitherDivergenceKernel<decltype(zero)>
        <<<static_cast<unsigned>(matrix.row_count), kDivergenceThreads, 0, stream>>>(matrix, of, keys, rows, sums);
  });
}

cudaError_t LaunchSumDither(const DitherSums* sums, const DitherRow* rows, int64_t row_count, DitherSums* total,
                            cudaStream_t stream) {
  SumDitherKernel<<<1, kThreads, 0, stream>>>(sums, rows, row_count, total);
  return cudaGetLastError();
}

}  // namespace headwater::cuda
