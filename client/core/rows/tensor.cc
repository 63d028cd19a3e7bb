#include "headwater/client/tensor.h"

#include "client/core/link/name_of.h"
#include "headwater/client/options.h"

namespace headwater::client {

const char* DataTypeName(DataType type) { return internal::NameOf(type, {"unknown", "float32", "bfloat16", "float16"}); }

const char* TransportName(Transport transport) {
  return internal::NameOf(transport, {"auto", "grpc", "shared_memory", "cuda_ipc"}, "unknown");
}

TensorBuffer::TensorBuffer(DataType data_type, std::vector<int64_t> shape) : data_type_(data_type), shape_(std::move(shape)) {
  element_count_ = 1;
  for (const int64_t size : shape_) element_count_ *= size;
  // new[] of unsigned char is aligned for every fundamental type that fits, and is not cleared.
  data_ = std::make_unique_for_overwrite<unsigned char[]>(static_cast<size_t>(bytes()));
}

}  // namespace headwater::client
