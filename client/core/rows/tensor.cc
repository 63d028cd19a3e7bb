#include "headwater/client/tensor.h"

#include "headwater/client/options.h"

namespace headwater::client {

const char* DataTypeName(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kFloat16:
      return "float16";
  }
  return "unknown";
}

const char* TransportName(Transport transport) {
  switch (transport) {
    case Transport::kAuto:
      return "auto";
    case Transport::kGrpc:
      return "grpc";
    case Transport::kSharedMemory:
      return "shared_memory";
    case Transport::kCudaIpc:
      return "cuda_ipc";
  }
  return "unknown";
}

TensorBuffer::TensorBuffer(DataType data_type, std::vector<int64_t> shape) : data_type_(data_type), shape_(std::move(shape)) {
  element_count_ = 1;
  for (const int64_t size : shape_) element_count_ *= size;
  // new[] of unsigned char is aligned for every fundamental type that fits, and is not cleared.
  data_ = std::make_unique_for_overwrite<unsigned char[]>(static_cast<size_t>(bytes()));
}

}  // namespace headwater::client
