#include "kernels/cuda/rows/row_digest.h"

namespace headwater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockBytes = 4096;
constexpr int kPairs = kBlockBytes / 16;
constexpr int kBlockIndexBits = 40;
// Enough to fill any device; each block goes through its share.
constexpr int64_t kMaxBlocks = 1024;

struct Sum128 {
  unsigned long long low;
  unsigned long long high;
};

__device__ void Add(Sum128* sum, unsigned long long low, unsigned long long high) {
  sum->low += low;
  sum->high += high + (sum->low < low ? 1 : 0);
}

__device__ unsigned long long SplitMix64(unsigned long long x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

__device__ unsigned long long Fmix64(unsigned long long x) {
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDULL;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ULL;
  return x ^ (x >> 33);
}

// 16 bytes at `bytes`, of which `count` (1 to 16) are there; the others are 0.
__device__ ulonglong2 LoadPair(const unsigned char* bytes, int count) {
  if (count == 16 && reinterpret_cast<uintptr_t>(bytes) % 16 == 0) return *reinterpret_cast<const ulonglong2*>(bytes);
  ulonglong2 pair = {0, 0};
  for (int i = 0; i < count; ++i) {
    const unsigned long long byte = bytes[i];
    if (i < 8) {
      pair.x |= byte << (8 * i);
    } else {
      pair.y |= byte << (8 * (i - 8));
    }
  }
  return pair;
}

// A warp for each block of a row.
__global__ void __launch_bounds__(kThreads)
    DigestKernel(const unsigned char* rows, int64_t row_count, int64_t row_bytes, int64_t blocks_per_row,
                 unsigned long long stream_index, const int32_t* numbers, int64_t first_number, unsigned long long* sum) {
  __shared__ ulonglong2 keys[kPairs];
  __shared__ Sum128 warp_sums[kWarps];
  static_assert(kThreads == kPairs, "each thread makes one pair of keys");
  keys[threadIdx.x] = {SplitMix64(0x9E3779B97F4A7C15ULL * (2 * threadIdx.x + 1)),
                       SplitMix64(0x9E3779B97F4A7C15ULL * (2 * threadIdx.x + 2))};
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Sum128 total = {0, 0};
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp; index < row_count * blocks_per_row;
       index += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t row = index / blocks_per_row;
    const int64_t block = index % blocks_per_row;
    const unsigned char* bytes = rows + row * row_bytes + block * kBlockBytes;
    const int64_t rest = row_bytes - block * kBlockBytes;
    const int length = rest < kBlockBytes ? static_cast<int>(rest) : kBlockBytes;
    Sum128 hash = {0, 0};
    for (int pair = lane; pair * 16 < length; pair += 32) {
      const int here = length - pair * 16;
      const ulonglong2 words = LoadPair(bytes + pair * 16, here < 16 ? here : 16);
      const unsigned long long a = words.x + keys[pair].x;
      const unsigned long long b = words.y + keys[pair].y;
      Add(&hash, a * b, __umul64hi(a, b));
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      const unsigned long long low = __shfl_xor_sync(0xFFFFFFFF, hash.low, offset);
      const unsigned long long high = __shfl_xor_sync(0xFFFFFFFF, hash.high, offset);
      Add(&hash, low, high);
    }
    const unsigned long long place = stream_index << kBlockIndexBits | static_cast<unsigned long long>(block);
    const unsigned long long number = static_cast<unsigned long long>(numbers == nullptr ? first_number + row : numbers[row]);
    const unsigned long long low = Fmix64(hash.low ^ Fmix64(place + 0x9E3779B97F4A7C15ULL));
    const unsigned long long high = Fmix64(hash.high + low + Fmix64(number ^ 0xD1B54A32D192ED03ULL));
    Add(&total, Fmix64(low + high), high);
  }
  if (lane == 0) warp_sums[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) Add(&total, warp_sums[i].low, warp_sums[i].high);
  // Each carry out of the lower half shows in the value that one addition found there, whatever the order.
  const unsigned long long found = atomicAdd(&sum[0], total.low);
  atomicAdd(&sum[1], total.high + (found + total.low < found ? 1 : 0));
}

}  // namespace

cudaError_t LaunchDigestRows(const void* rows, int64_t row_count, int64_t row_bytes, int32_t stream_index, const int32_t* numbers,
                             int64_t first_number, uint64_t* sum, cudaStream_t stream) {
  if (row_count == 0 || row_bytes == 0) return cudaSuccess;
  static_assert(sizeof(uint64_t) == sizeof(unsigned long long), "the device's 64-bit atomics take unsigned long long");
  const int64_t blocks_per_row = (row_bytes + kBlockBytes - 1) / kBlockBytes;
  const int64_t needed = (row_count * blocks_per_row + kWarps - 1) / kWarps;
  const int64_t grid = needed < kMaxBlocks ? needed : kMaxBlocks;
  DigestKernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(
      static_cast<const unsigned char*>(rows), row_count, row_bytes, blocks_per_row, static_cast<unsigned long long>(stream_index),
      numbers, first_number, reinterpret_cast<unsigned long long*>(sum));
  return cudaGetLastError();
}

}  // namespace headwater::cuda
