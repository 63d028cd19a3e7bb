// Host copies of device matrices of any element type, for experiments that call the product's launch functions.

#ifndef HEADWATER_KERNELS_LAB_STORED_CUH_
#define HEADWATER_KERNELS_LAB_STORED_CUH_

#include <cuda_fp16.h>

#include <cstring>

#include "bench.cuh"
#include "kernels/cuda/launch_types.h"

namespace headwater::lab {

using cuda::BytesOf;
using cuda::Element;
using cuda::PaddedWidth;

inline const char* NameOf(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "fp32";
    case Element::kBFloat16:
      return "bf16";
    case Element::kFloat16:
      return "fp16";
    case Element::kFloat64:
      return "fp64";
  }
  return "?";
}

// Largest relative error of one rounding to the element.
inline double RoundingOf(Element element) {
  switch (element) {
    case Element::kFloat32:
      return std::ldexp(1.0, -24);
    case Element::kBFloat16:
      return std::ldexp(1.0, -8);
    case Element::kFloat16:
      return std::ldexp(1.0, -11);
    case Element::kFloat64:
      return std::ldexp(1.0, -53);
  }
  return 0;
}

inline void Encode(Element element, double value, uint8_t* out) {
  const float single = static_cast<float>(value);
  if (element == Element::kFloat64) std::memcpy(out, &value, 8);
  if (element == Element::kFloat32) std::memcpy(out, &single, 4);
  if (element == Element::kBFloat16) {
    const __nv_bfloat16 rounded = __float2bfloat16(single);
    std::memcpy(out, &rounded, 2);
  }
  if (element == Element::kFloat16) {
    const __half rounded = __float2half(single);
    std::memcpy(out, &rounded, 2);
  }
}

inline double Decode(Element element, const uint8_t* in) {
  double wide;
  float single;
  __nv_bfloat16 bfloat;
  __half half;
  switch (element) {
    case Element::kFloat64:
      std::memcpy(&wide, in, 8);
      return wide;
    case Element::kFloat32:
      std::memcpy(&single, in, 4);
      return static_cast<double>(single);
    case Element::kBFloat16:
      std::memcpy(&bfloat, in, 2);
      return static_cast<double>(__bfloat162float(bfloat));
    case Element::kFloat16:
      std::memcpy(&half, in, 2);
      return static_cast<double>(__half2float(half));
  }
  return 0;
}

// A matrix on the device, rows `stride` elements apart and beginning `offset` elements into its memory, with its values on the
// host.
struct Stored {
  Element element;
  int64_t rows, columns, stride, offset;
  std::vector<double> values;  // [rows, columns], as rounded
  DeviceArray<uint8_t> bytes;

  // Not filled: NaN everywhere.
  Stored(Element element_in, int64_t rows_in, int64_t columns_in, int64_t stride_in, int64_t offset_in = 0)
      : element(element_in),
        rows(rows_in),
        columns(columns_in),
        stride(stride_in),
        offset(offset_in),
        values(static_cast<size_t>(rows * columns)),
        bytes((offset + rows * stride) * BytesOf(element)) {}
  // value(i, j); 0 beyond the columns.
  template <class Value>
  Stored(Element element_in, int64_t rows_in, int64_t columns_in, int64_t stride_in, const Value& value)
      : Stored(element_in, rows_in, columns_in, stride_in) {
    std::vector<uint8_t> host(bytes.bytes(), 0);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        uint8_t* place = &host[static_cast<size_t>((i * stride + j) * BytesOf(element))];
        Encode(element, value(i, j), place);
        values[static_cast<size_t>(i * columns + j)] = Decode(element, place);
      }
    }
    LAB_CUDA(cudaMemcpy(bytes.get(), host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  void* data() const { return bytes.get() + offset * BytesOf(element); }
  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * columns + j)]; }
  cuda::ConstMatrix matrix() const { return {data(), rows, columns, stride, element}; }
  cuda::MutableMatrix writable() const { return {data(), rows, columns, stride, element}; }
  // What lies on the device now: [rows, stride].
  std::vector<double> Fetch() const {
    const std::vector<uint8_t> host = bytes.ToHost();
    std::vector<double> out(static_cast<size_t>(rows * stride));
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = Decode(element, &host[(i + static_cast<size_t>(offset)) * static_cast<size_t>(BytesOf(element))]);
    }
    return out;
  }
};

// The larger one; NaN wins.
inline double Larger(double a, double b) { return b <= a || std::isnan(a) ? a : b; }

// Many errors, each against its own bound, told in one line. NaN fails.
class Errors {
 public:
  void Add(const std::string& what, double error, double bound) {
    const double ratio = error / bound;
    if (!(ratio <= 1)) Check(what, error, bound);
    if (!(ratio <= worst_)) {
      worst_ = ratio;
      name_ = what;
    }
    ++count_;
  }
  void Report(const std::string& title) const {
    Check(title + ": " + std::to_string(count_) + " checks, nearest to its bound: " + name_, worst_, 1.0);
  }

 private:
  double worst_ = -1;
  std::string name_;
  int64_t count_ = 0;
};

// Value of a pseudo-random integer stream, for targets and orders.
inline uint64_t HashAt(uint64_t seed, uint64_t index) {
  uint64_t state = (index + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  return (state ^ (state >> 27)) >> 8;
}

// Rows grouped by target in increasing order of target and then row.
struct DeviceGroups {
  DeviceArray<int32_t> order, starts;
  int32_t count = 0;
  explicit DeviceGroups(const std::vector<int32_t>& targets) {
    std::vector<int32_t> host_order(targets.size()), host_starts;
    for (size_t i = 0; i < targets.size(); ++i) host_order[i] = static_cast<int32_t>(i);
    std::stable_sort(host_order.begin(), host_order.end(), [&](int32_t a, int32_t b) { return targets[a] < targets[b]; });
    for (size_t i = 0; i < targets.size(); ++i) {
      if (i == 0 || targets[host_order[i]] != targets[host_order[i - 1]]) host_starts.push_back(static_cast<int32_t>(i));
    }
    count = static_cast<int32_t>(host_starts.size());
    host_starts.push_back(static_cast<int32_t>(targets.size()));
    order = DeviceArray<int32_t>(host_order);
    starts = DeviceArray<int32_t>(host_starts);
  }
};

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_STORED_CUH_
