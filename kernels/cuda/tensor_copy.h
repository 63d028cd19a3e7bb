// Elements of a head's tensor between host memory, where they lie without gaps, and the device, where rows are padded. For the
// holder of the work lock.
//
// Everything passes through the engine's page-locked memory, block by block: while one block is on the bus the host copies the
// next. Values that change their type, or are added to existing ones, lie in the workspace in between.
#ifndef HEADWATER_KERNELS_CUDA_TENSOR_COPY_H_
#define HEADWATER_KERNELS_CUDA_TENSOR_COPY_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/engine_core.h"
#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// A tensor of one shard on the device: rows of `columns` elements, `stride` apart; a vector has columns 1 and stride 1.
struct TensorPlace {
  char* data = nullptr;
  Element element = Element::kFloat32;
  int64_t columns = 1;
  int64_t stride = 1;

  // Where element `index`, counted without padding, is stored.
  int64_t OffsetOf(int64_t index) const { return columns == stride ? index : index / columns * stride + index % columns; }
  char* At(int64_t index) const { return data + OffsetOf(index) * BytesOf(element); }
};

class TensorCopy {
 public:
  explicit TensorCopy(EngineCore& core);
  ~TensorCopy();
  TensorCopy(const TensorCopy&) = delete;
  TensorCopy& operator=(const TensorCopy&) = delete;

  // All of them take elements [first, first + count) of a tensor, and have finished with host memory when they return.

  // out [count] of `out_element`: the tensor's own type, or fp32.
  absl::Status Read(const TensorPlace& from, int64_t first, int64_t count, Element out_element, void* out);
  // in [count] of `in_element`, rounded to nearest even if the tensor's type is narrower. `follower`, if not null, is a tensor of
  // the same shape that gets the same values, converted from the stored ones.
  absl::Status Write(const void* in, Element in_element, const TensorPlace& to, int64_t first, int64_t count,
                     const TensorPlace* follower);
  // y = fp32(y + fp32(factor * in)), of an fp32 tensor.
  absl::Status AddProduct(const float* in, float factor, const TensorPlace& to, int64_t first, int64_t count);

 private:
  static constexpr int kBuffers = 2;

  absl::Status Open();
  // Waits until a buffer is no longer in use.
  absl::Status Await(int buffer);
  absl::Status Release(int buffer);
  // Calls enqueue(start, count, host copy) for blocks of `in`, in order, and waits for the last.
  absl::Status SendBlocks(const void* in, int64_t element_bytes, int64_t count,
                          absl::FunctionRef<absl::Status(int64_t, int64_t, const void*)> enqueue);
  // Enqueues the copy of elements [first, first + count) between `host` and the device, where element i is at
  // `data` + place.OffsetOf(i) - origin elements.
  absl::Status CopyElements(const TensorPlace& place, char* data, int64_t origin, int64_t first, int64_t count, char* host,
                            cudaMemcpyKind kind);
  // Uploads a block to the workspace, laid out as in `place` from element `first` on, with the padding 0.
  absl::Status UploadToScratch(const TensorPlace& place, Element element, int64_t first, int64_t count, const void* host);
  absl::Status Check(cudaError_t error) { return core_.Check(error, "copying a tensor"); }

  EngineCore& core_;
  const cudaStream_t stream_;
  char* const scratch_;
  int64_t block_elements_ = 0;
  std::array<cudaEvent_t, kBuffers> free_{};
  std::array<bool, kBuffers> in_use_{};
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_TENSOR_COPY_H_
