// Conversion between storage types and the types that products take.
#ifndef HEADWATER_KERNELS_CPU_ROWS_CONVERT_H_
#define HEADWATER_KERNELS_CPU_ROWS_CONVERT_H_

#include <cstdint>
#include <cstring>

#include "headwater/kernels/types.h"
#include "kernels/cpu/rows/row_kernels.h"

namespace headwater::cpu {

// Element `index` of a tensor of `type`.
inline const void* ElementAt(const void* data, DataType type, int64_t index) {
  return static_cast<const char*>(data) + index * ElementBytes(type);
}
inline void* ElementAt(void* data, DataType type, int64_t index) { return static_cast<char*>(data) + index * ElementBytes(type); }

// out [count] = in [count] of `type`; exact.
inline void ToFloat(const void* in, DataType type, int64_t count, float* out) {
  switch (type) {
    case DataType::kFloat32:
      std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
      return;
    case DataType::kBFloat16:
      GetRowKernels().bfloat16_to_float(static_cast<const uint16_t*>(in), count, out);
      return;
    case DataType::kFloat16:
      GetRowKernels().float16_to_float(static_cast<const uint16_t*>(in), count, out);
      return;
  }
}

inline void ToDouble(const void* in, DataType type, int64_t count, double* out) {
  switch (type) {
    case DataType::kFloat32:
      GetRowKernels().float_to_double(static_cast<const float*>(in), count, out);
      return;
    case DataType::kBFloat16:
      GetRowKernels().bfloat16_to_double(static_cast<const uint16_t*>(in), count, out);
      return;
    case DataType::kFloat16:
      GetRowKernels().float16_to_double(static_cast<const uint16_t*>(in), count, out);
      return;
  }
}

// out [count] of `type` = in [count], rounded to nearest even.
inline void FromFloat(const float* in, int64_t count, DataType type, void* out) {
  switch (type) {
    case DataType::kFloat32:
      std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
      return;
    case DataType::kBFloat16:
      GetRowKernels().float_to_bfloat16(in, count, static_cast<uint16_t*>(out));
      return;
    case DataType::kFloat16:
      GetRowKernels().float_to_float16(in, count, static_cast<uint16_t*>(out));
      return;
  }
}

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_ROWS_CONVERT_H_
