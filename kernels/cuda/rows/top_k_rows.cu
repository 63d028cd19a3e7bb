// The entries of top-k teachers: taken out of the products before a row's statistics, and put into M behind the gradient pass. One
// thread an entry; an entry's product is in one shard.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/device/elements.cuh"
#include "kernels/cuda/rows/top_k_rows.h"

namespace headwater::cuda {
namespace {

constexpr int kThreads = 256;

unsigned BlocksOf(int64_t entries) { return static_cast<unsigned>((entries + kThreads - 1) / kThreads); }

__device__ __forceinline__ double BiasAt(const void* bias, Element element, int64_t column) {
  if (bias == nullptr) return 0;
  switch (element) {
    case Element::kBFloat16:
      return elements::ValueOf<double>(static_cast<const __nv_bfloat16*>(bias)[column]);
    case Element::kFloat16:
      return elements::ValueOf<double>(static_cast<const __half*>(bias)[column]);
    default:
      return static_cast<double>(static_cast<const float*>(bias)[column]);
  }
}

// `nowhere`: the product of which the logit is -inf.
template <class T>
__global__ void __launch_bounds__(kThreads) TakeKernel(const LogitsView logits, const TopKRows rows, T nowhere) {
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= rows.row_count * rows.k || rows.columns[entry] < 0) return;
  const int64_t column = rows.columns[entry] - logits.vocab_start;
  if (column < 0 || column >= logits.columns) return;
  T* const product = static_cast<T*>(const_cast<void*>(logits.products)) + entry / rows.k * logits.stride + column;
  rows.logits[entry] =
      logits.transform.logit_scale * (static_cast<double>(*product) + BiasAt(logits.bias, logits.bias_element, column));
  *product = nowhere;
}

template <class Out>
__global__ void __launch_bounds__(kThreads)
    PutKernel(const TopKRows rows, int64_t vocab_start, Out* matrix, int64_t stride, int64_t columns) {
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= rows.row_count * rows.k || rows.columns[entry] < 0) return;
  const int64_t column = rows.columns[entry] - vocab_start;
  if (column < 0 || column >= columns) return;
  matrix[entry / rows.k * stride + column] = elements::Rounded<Out>(rows.gradient[entry]);
}

template <class T>
cudaError_t RunTake(const LogitsView& logits, const TopKRows& rows, cudaStream_t stream) {
  const T infinity = static_cast<T>(INFINITY);
  TakeKernel<T><<<BlocksOf(rows.row_count * rows.k), kThreads, 0, stream>>>(
      logits, rows, logits.transform.logit_scale < 0 ? infinity : -infinity);
  return cudaGetLastError();
}

template <class Out>
cudaError_t RunPut(const TopKRows& rows, int64_t vocab_start, const MutableMatrix& matrix, cudaStream_t stream) {
  PutKernel<Out><<<BlocksOf(rows.row_count * rows.k), kThreads, 0, stream>>>(rows, vocab_start, static_cast<Out*>(matrix.data),
                                                                             matrix.stride, matrix.columns);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchTakeTopK(const LogitsView& logits, const TopKRows& rows, cudaStream_t stream) {
  if (rows.row_count == 0 || logits.columns == 0) return cudaSuccess;
  if (logits.transform.softcap != 0) return cudaErrorInvalidValue;
  return logits.element == Element::kFloat64 ? RunTake<double>(logits, rows, stream) : RunTake<float>(logits, rows, stream);
}

cudaError_t LaunchPutTopK(const TopKRows& rows, int64_t vocab_start, const MutableMatrix& matrix, cudaStream_t stream) {
  if (rows.row_count == 0 || matrix.columns == 0) return cudaSuccess;
  switch (matrix.element) {
    case Element::kBFloat16:
      return RunPut<__nv_bfloat16>(rows, vocab_start, matrix, stream);
    case Element::kFloat16:
      return RunPut<__half>(rows, vocab_start, matrix, stream);
    case Element::kFloat32:
      return RunPut<float>(rows, vocab_start, matrix, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace headwater::cuda
