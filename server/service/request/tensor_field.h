// Tensors in fields of requests: their check, and a copy of their elements.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_TENSOR_FIELD_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_TENSOR_FIELD_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "headwater/v1/tensor.pb.h"

namespace headwater::service {

// The type and shape that a tensor field must have.
struct TensorRule {
  v1::DataType data_type;
  const char* data_type_name;
  int64_t size;  // of the first dimension; -1: any size >= 0 up to size_max
  int64_t size_max = std::numeric_limits<int64_t>::max();
  int64_t columns = 0;  // > 0: there is a second dimension, of this size; `size` is >= 0 then
};

// Checks type, shape and length of a tensor of 4-byte elements.
absl::Status CheckVector(const v1::Tensor& tensor, const std::string& field, const TensorRule& rule);

// Checks a vector of finite fp32 elements.
absl::Status CheckFloats(const v1::Tensor& tensor, const std::string& field, int64_t size,
                         int64_t size_max = std::numeric_limits<int64_t>::max());

template <typename T>
std::vector<T> CopyElements(const v1::Tensor& tensor) {
  std::vector<T> elements(tensor.data().size() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), tensor.data().data(), tensor.data().size());
  return elements;
}

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_TENSOR_FIELD_H_
