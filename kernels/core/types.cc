#include "headwater/kernels/types.h"

#include <cstdio>
#include <string>

namespace headwater {
namespace {

// "512 B", "1.5 KiB", "3.9 GiB".
std::string FormatBytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 6) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

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

const char* ParallelismName(Parallelism parallelism) {
  switch (parallelism) {
    case Parallelism::kVocabulary:
      return "vocabulary";
    case Parallelism::kRows:
      return "rows";
  }
  return "unknown";
}

const char* HeadTensorName(HeadTensor tensor) {
  switch (tensor) {
    case HeadTensor::kWeight:
      return "weight";
    case HeadTensor::kBias:
      return "bias";
    case HeadTensor::kMasterWeight:
      return "master_weight";
    case HeadTensor::kMasterBias:
      return "master_bias";
    case HeadTensor::kGradWeight:
      return "grad_weight";
    case HeadTensor::kGradBias:
      return "grad_bias";
    case HeadTensor::kMoment1Weight:
      return "moment1_weight";
    case HeadTensor::kMoment1Bias:
      return "moment1_bias";
    case HeadTensor::kMoment2Weight:
      return "moment2_weight";
    case HeadTensor::kMoment2Bias:
      return "moment2_bias";
  }
  return "unknown";
}

std::string MemoryPlan::ToString() const {
  std::string text;
  for (const Item& item : items) {
    if (item.bytes == 0) continue;
    if (!text.empty()) text += " + ";
    text += item.purpose + " " + FormatBytes(item.bytes);
  }
  return text + " = " + FormatBytes(total_bytes);
}

}  // namespace headwater
