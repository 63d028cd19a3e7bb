// Views of the caller's tensors, and buffers that the library hands out.
//
// Everywhere: host memory unless a view says otherwise, little-endian, row-major, contiguous, no padding between rows. bfloat16 and
// float16 elements are passed as their 16 bits.
#ifndef HEADWATER_CLIENT_TENSOR_H_
#define HEADWATER_CLIENT_TENSOR_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace headwater::client {

// Storage type of tensor elements. The values are those of the wire API.
enum class DataType : int32_t {
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
};

// 4 or 2.
constexpr int64_t ElementBytes(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// `float32`, `bfloat16`, `float16`.
const char* DataTypeName(DataType type);

// Where a caller's memory lies. The values are those of c_api.h.
enum class Memory : int32_t {
  kHost = 0,  // ordinary or page-locked memory, or a RowsBuffer
  kCuda = 1,  // device memory of this process, of one allocation
  // Device memory in an allocation that the server must not open, such as a framework allocator's pool. Rows are copied on the
  // device, into memory of the client and back.
  kCudaPrivate = 2,
};

// Rows of hidden states, `[row_count, hidden_size]`. Owns nothing.
struct RowsView {
  const void* data = nullptr;  // row_count * hidden_size elements; may be null if there are none
  DataType data_type = DataType::kFloat32;
  int64_t row_count = 0;          // >= 0
  int64_t hidden_size = 0;        // >= 1
  Memory memory = Memory::kHost;  // device memory: see CallOptions::cuda_stream

  int64_t row_bytes() const { return hidden_size * ElementBytes(data_type); }
  int64_t bytes() const { return row_count * row_bytes(); }
  bool on_device() const { return memory != Memory::kHost; }

  // Rows of float32: values.size() / hidden_size of them. REQUIRES: hidden_size >= 1 divides values.size().
  static RowsView Float32(absl::Span<const float> values, int64_t hidden_size) {
    return Of(values.data(), DataType::kFloat32, values.size(), hidden_size);
  }
  // A view of bfloat16 bits.
  static RowsView BFloat16(absl::Span<const uint16_t> bits, int64_t hidden_size) {
    return Of(bits.data(), DataType::kBFloat16, bits.size(), hidden_size);
  }
  // A view of float16 bits.
  static RowsView Float16(absl::Span<const uint16_t> bits, int64_t hidden_size) {
    return Of(bits.data(), DataType::kFloat16, bits.size(), hidden_size);
  }

 private:
  static RowsView Of(const void* data, DataType data_type, size_t element_count, int64_t hidden_size) {
    return {data, data_type, static_cast<int64_t>(element_count) / hidden_size, hidden_size};
  }
};

// Elements of a whole tensor in row-major order. Owns nothing.
struct TensorView {
  const void* data = nullptr;
  DataType data_type = DataType::kFloat32;
  int64_t element_count = 0;

  int64_t bytes() const { return element_count * ElementBytes(data_type); }

  static TensorView Float32(absl::Span<const float> values) {
    return {values.data(), DataType::kFloat32, static_cast<int64_t>(values.size())};
  }
  static TensorView BFloat16(absl::Span<const uint16_t> bits) {
    return {bits.data(), DataType::kBFloat16, static_cast<int64_t>(bits.size())};
  }
  static TensorView Float16(absl::Span<const uint16_t> bits) {
    return {bits.data(), DataType::kFloat16, static_cast<int64_t>(bits.size())};
  }
};

// A tensor that the library allocated. Owns its memory; move-only.
class TensorBuffer {
 public:
  TensorBuffer() = default;
  // Uninitialized. REQUIRES: every size >= 0 and the product of all times the element size fits int64_t.
  TensorBuffer(DataType data_type, std::vector<int64_t> shape);

  bool empty() const { return element_count_ == 0; }
  DataType data_type() const { return data_type_; }
  // Outermost first; empty for a buffer that was not filled in.
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t element_count() const { return element_count_; }
  int64_t bytes() const { return element_count_ * ElementBytes(data_type_); }
  // Aligned for every element type.
  const void* data() const { return data_.get(); }
  void* data() { return data_.get(); }

  // All elements. REQUIRES: data_type() is kFloat32.
  absl::Span<const float> float32() const { return {static_cast<const float*>(data()), static_cast<size_t>(element_count_)}; }
  // All elements as bits. REQUIRES: data_type() is kBFloat16 or kFloat16.
  absl::Span<const uint16_t> bits16() const { return {static_cast<const uint16_t*>(data()), static_cast<size_t>(element_count_)}; }

 private:
  DataType data_type_ = DataType::kFloat32;
  std::vector<int64_t> shape_;
  int64_t element_count_ = 0;
  std::unique_ptr<unsigned char[]> data_;
};

// Memory for rows that Client::AllocateRows() handed out. Where the server shares this host's memory, micro-batches whose rows or
// gradients lie in it are not copied on this side. Owns its memory; move-only. It keeps the connection, and may outlive the Client.
// Destroying it must wait until no call uses it any more.
class RowsBuffer {
 public:
  RowsBuffer() = default;
  // Used by the library.
  RowsBuffer(std::shared_ptr<void> memory, void* data, DataType data_type, int64_t row_count, int64_t hidden_size, bool shared)
      : memory_(std::move(memory)),
        data_(data),
        data_type_(data_type),
        row_count_(row_count),
        hidden_size_(hidden_size),
        shared_(shared) {}
  RowsBuffer(RowsBuffer&&) = default;
  RowsBuffer& operator=(RowsBuffer&&) = default;

  // Aligned to 4096 bytes. Its first contents are whatever was there.
  void* data() { return data_; }
  const void* data() const { return data_; }
  DataType data_type() const { return data_type_; }
  int64_t row_count() const { return row_count_; }
  int64_t hidden_size() const { return hidden_size_; }
  int64_t bytes() const { return row_count_ * hidden_size_ * ElementBytes(data_type_); }
  // Whether it lies in a region that a server of the same host can map.
  bool shared() const { return shared_; }

  // All rows, to be sent.
  RowsView view() const { return {data_, data_type_, row_count_, hidden_size_}; }
  // All bytes, as MicroBatchOptions::grad_hidden takes them.
  absl::Span<unsigned char> span() { return {static_cast<unsigned char*>(data_), static_cast<size_t>(bytes())}; }

 private:
  std::shared_ptr<void> memory_;
  void* data_ = nullptr;
  DataType data_type_ = DataType::kFloat32;
  int64_t row_count_ = 0;
  int64_t hidden_size_ = 0;
  bool shared_ = false;
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_TENSOR_H_
