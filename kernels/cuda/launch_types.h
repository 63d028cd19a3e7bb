// The arguments of kernel launches: plain types that the host code (C++20) and the .cu files (C++17) share.
//
// Every launch function enqueues on `stream`, allocates nothing, synchronises nothing, and returns cudaGetLastError(). Pointers are
// device memory unless a name says otherwise. Sums have a fixed order: same inputs, same bits.
//
// Layout of matrices. Row-major; `stride` counts elements from row to row. Tensors of a head, and hidden states in the workspace,
// have rows of PaddedWidth(hidden_size) elements, whose padding is 0. So every row begins at a multiple of 16 bytes.
#ifndef HEADWATER_KERNELS_CUDA_LAUNCH_TYPES_H_
#define HEADWATER_KERNELS_CUDA_LAUNCH_TYPES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace headwater::cuda {

// Element types; the first three have the values of headwater::DataType.
enum class Element : int32_t { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3, kFloat64 = 4 };

constexpr int64_t BytesOf(Element element) { return element == Element::kFloat64 ? 8 : element == Element::kFloat32 ? 4 : 2; }

constexpr int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Elements of a stored row: a multiple of 8.
constexpr int64_t PaddedWidth(int64_t width) { return RoundUp(width, 8); }

struct ConstMatrix {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements
  Element element = Element::kFloat32;
};

struct MutableMatrix {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  Element element = Element::kFloat32;
};

// The rows of a head that one shard holds, as far as they have logits: vocabulary [vocab_start, vocab_start + columns).
struct ShardWeights {
  const void* weight = nullptr;  // [columns, stride]
  const void* bias = nullptr;    // [columns], or null
  Element element = Element::kFloat32;
  int64_t vocab_start = 0;
  int64_t columns = 0;  // rows of `weight` below valid_vocab_size; may be 0
  int64_t width = 0;    // hidden_size
  int64_t stride = 0;   // PaddedWidth(width)
};

// z = softcap * tanh(a / softcap), a = logit_scale * (x . w + bias); z = a if softcap is 0.
struct Transform {
  double logit_scale = 1;
  double softcap = 0;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_LAUNCH_TYPES_H_
