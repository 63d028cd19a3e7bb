#include "client/cpp/src/calls.h"

#include <new>

#include "absl/strings/str_cat.h"
#include "client/core/rows/tensor_exchanges.h"

namespace headwater::client::internal {

Deadline DeadlineOf(const Core& core, const CallOptions& options) {
  return DeadlineIn(options.timeout.count() == 0 ? core.options().timeout : options.timeout);
}

std::vector<int64_t> ShapeOf(const HeadSpec& spec, HeadTensor tensor) {
  if (tensor == HeadTensor::kBias) return {spec.vocab_size};
  return {spec.vocab_size, spec.hidden_size};
}

absl::StatusOr<TensorBuffer> MakeBuffer(DataType data_type, const std::vector<int64_t>& shape) {
  try {
    return TensorBuffer(data_type, shape);
  } catch (const std::bad_alloc&) {
    int64_t bytes = ElementBytes(data_type);
    for (const int64_t size : shape) bytes *= size;
    return NoMemoryFor(bytes, "a tensor");
  }
}

RowsView RowsOf(const TensorView& values) { return {values.data, values.data_type, values.element_count, 1}; }

RowsView RowsOf(TensorBuffer& buffer) {
  const std::vector<int64_t>& shape = buffer.shape();
  return {buffer.data(), buffer.data_type(), shape[0], shape.size() > 1 ? shape[1] : 1};
}

absl::Status CheckElements(const std::string& field, const TensorView& values) {
  int64_t bytes = 0;
  if (values.element_count < 0 || __builtin_mul_overflow(values.element_count, int64_t{4}, &bytes)) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "a number of elements >= 0, and bytes below 2^63",
                       absl::StrCat(values.element_count));
  }
  if (values.data == nullptr && bytes > 0) {
    return InvalidView(v1::ERROR_REASON_INVALID_FIELD, field, "memory for the elements", "a null pointer");
  }
  return absl::OkStatus();
}

}  // namespace headwater::client::internal
