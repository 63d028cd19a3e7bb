#include "server/service/request/tensor_field.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

std::string ShapeText(const v1::Tensor& tensor) {
  std::string shape = "[";
  for (int i = 0; i < tensor.shape_size() && i < 8; ++i) absl::StrAppend(&shape, i == 0 ? "" : ", ", tensor.shape(i));
  return shape + (tensor.shape_size() > 8 ? ", ...]" : "]");
}

}  // namespace

absl::Status CheckVector(const v1::Tensor& tensor, const std::string& field, const TensorRule& rule) {
  const std::string type_field = field + ".data_type";
  if (tensor.data_type() == v1::DATA_TYPE_UNSPECIFIED) return MissingField(type_field, rule.data_type_name);
  if (tensor.data_type() != rule.data_type) {
    return FieldError(ErrorReason::kDataTypeMismatch, type_field, rule.data_type_name,
                      v1::DataType_IsValid(tensor.data_type()) ? v1::DataType_Name(tensor.data_type())
                                                               : absl::StrCat(static_cast<int>(tensor.data_type())));
  }
  const bool is_matrix = rule.columns > 0;
  if (tensor.shape_size() != (is_matrix ? 2 : 1) || tensor.shape(0) < 0 || (rule.size >= 0 && tensor.shape(0) != rule.size) ||
      tensor.shape(0) > rule.size_max || (is_matrix && tensor.shape(1) != rule.columns)) {
    std::string expected = absl::StrCat("one dimension of at most ", rule.size_max);
    if (rule.size >= 0)
      expected = is_matrix ? absl::StrCat("[", rule.size, ", ", rule.columns, "]") : absl::StrCat("[", rule.size, "]");
    return FieldError(ErrorReason::kShapeMismatch, field + ".shape", expected, ShapeText(tensor));
  }
  const int64_t elements = tensor.shape(0) * (is_matrix ? rule.columns : 1);
  if (tensor.data().size() / 4 != static_cast<uint64_t>(elements) || tensor.data().size() % 4 != 0) {
    return FieldError(ErrorReason::kDataLengthMismatch, field + ".data", absl::StrCat(elements, " elements of 4 bytes"),
                      absl::StrCat(tensor.data().size(), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckFloats(const v1::Tensor& tensor, const std::string& field, int64_t size, int64_t size_max) {
  HEADWATER_RETURN_IF_ERROR(CheckVector(tensor, field, {v1::DATA_TYPE_FLOAT32, "FLOAT32", size, size_max}));
  for (size_t i = 0; i < tensor.data().size() / sizeof(float); ++i) {
    float value = 0;
    std::memcpy(&value, tensor.data().data() + i * sizeof(float), sizeof(float));
    if (std::isfinite(value)) continue;
    return FieldError(ErrorReason::kInvalidField, field + ".data", "finite elements", absl::StrCat(value, " at index ", i));
  }
  return absl::OkStatus();
}

}  // namespace headwater::service
