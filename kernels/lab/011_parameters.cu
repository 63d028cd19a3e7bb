// 011: what moves and updates flat arrays. Checks the product's conversions, optimizer updates, gradient statistics and additions
// against loops in fp64 on the CPU (every type, odd sizes, unaligned arrays), then takes their bandwidth at 128256 x 4096.
// Run: 011_parameters [check]   (check: no bandwidth)
// Links: kernels/cuda/rows/conversions.cu kernels/cuda/rows/parameters.cu

#include <array>
#include <cstring>
#include <limits>
#include <random>

#include "bench.cuh"
#include "kernels/cuda/rows/conversions.h"
#include "kernels/cuda/rows/parameters.h"

namespace {

using namespace headwater::cuda;  // NOLINT: the experiment is about this namespace
using headwater::lab::Check;
using headwater::lab::DeviceArray;

constexpr Element kInputs[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16};
constexpr Element kOutputs[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16, Element::kFloat64};

const char* Name(Element element) {
  return element == Element::kFloat32    ? "fp32"
         : element == Element::kBFloat16 ? "bf16"
         : element == Element::kFloat16  ? "fp16"
                                         : "fp64";
}

// --- Numbers on the host, without CUDA's own conversions
// --------------------------------------------------------------------------

template <class To, class From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

double Decode(const uint8_t* data, Element element) {
  if (element == Element::kFloat64) {
    double value;
    std::memcpy(&value, data, 8);
    return value;
  }
  if (element == Element::kFloat32) {
    float value;
    std::memcpy(&value, data, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data, 2);
  if (element == Element::kBFloat16) return BitCast<float>(static_cast<uint32_t>(bits) << 16);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

// The nearest value of the type, even among equals; infinity beyond the largest by half a unit or more.
double RoundTo(double x, Element element) {
  if (element == Element::kFloat64 || !std::isfinite(x) || x == 0) return x;
  const int precision = element == Element::kFloat32 ? 24 : element == Element::kBFloat16 ? 8 : 11;
  const int smallest = element == Element::kFloat16 ? -14 : -126, largest = element == Element::kFloat16 ? 15 : 127;
  int exponent;
  std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
  const int unit = std::max(exponent - precision, smallest - precision + 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
  return std::fabs(rounded) >= std::ldexp(1.0, largest + 1) ? std::copysign(HUGE_VAL, x) : rounded;
}

// Equal, with signs of zeros; any NaN equals any other.
bool Same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

// Random bits that are a finite number of the type, of every magnitude, ties between narrower types among them.
void PutFinite(std::mt19937_64& random, uint8_t* data, Element element) {
  do {
    uint64_t bits = random();
    if (element == Element::kFloat32) {
      if (bits >> 62 == 0) bits = (bits & ~uint64_t{0xFFFF}) | 0x8000;  // a tie in bf16
      if (bits >> 62 == 1)
        bits = (bits & ~uint64_t{0x3F801FFF}) | 0x38001000 | (bits & 0x07800000);  // in the range of fp16, a tie there
      if (bits >> 62 == 2) bits = (bits & ~uint64_t{0x7F800000}) | ((uint64_t{96} + (bits >> 40) % 24) << 23);  // fp16's subnormals
    }
    std::memcpy(data, &bits, static_cast<size_t>(BytesOf(element)));
  } while (!std::isfinite(Decode(data, element)));
}

void PutNonFinite(std::mt19937_64& random, uint8_t* data, Element element) {
  const uint64_t kind = random() % 3;  // NaN, infinity, negative infinity
  const uint32_t top = element == Element::kFloat16 ? 0x7C00 : 0x7F80;
  const uint32_t bits = (top | (kind == 0 ? 0x40 : 0) | (kind == 2 ? 0x8000 : 0)) << (element == Element::kFloat32 ? 16 : 0);
  std::memcpy(data, &bits, static_cast<size_t>(BytesOf(element)));
}

std::vector<uint8_t> Download(const DeviceArray<uint8_t>& array) { return array.ToHost(); }

// --- Conversions
// ------------------------------------------------------------------------------------------------------------------

struct RowsCase {
  int64_t rows, columns, in_stride, out_stride;
  int64_t offset;  // elements by which both matrices are moved from their alignment
  bool index, flags;
};

// Wrong elements and wrong flags of one gather (and of the check alone).
int64_t GatherFaults(const RowsCase& c, Element in_element, Element out_element) {
  std::mt19937_64 random(static_cast<uint64_t>(c.rows * 1000 + c.columns));
  const int64_t source_rows = c.index ? c.rows + 3 : c.rows;
  const int64_t in_bytes = BytesOf(in_element), out_bytes = BytesOf(out_element);
  // 0xff is NaN in every type: whatever is read beyond `columns` shows.
  std::vector<uint8_t> in(static_cast<size_t>((c.offset + source_rows * c.in_stride) * in_bytes), 0xff);
  const auto at = [&](int64_t row, int64_t column) { return in.data() + (c.offset + row * c.in_stride + column) * in_bytes; };
  std::vector<bool> bad(static_cast<size_t>(source_rows), false);
  for (int64_t row = 0; row < source_rows; ++row) {
    for (int64_t column = 0; column < c.columns; ++column) PutFinite(random, at(row, column), in_element);
    if (c.columns > 0 && random() % 3 == 0) {
      PutNonFinite(random, at(row, static_cast<int64_t>(random() % static_cast<uint64_t>(c.columns))), in_element);
      bad[static_cast<size_t>(row)] = true;
    }
  }
  std::vector<int32_t> index;
  for (int64_t row = 0; row < c.rows; ++row) {
    index.push_back(static_cast<int32_t>(c.index ? random() % static_cast<uint64_t>(source_rows) : row));
  }
  const DeviceArray<uint8_t> device_in(in), device_out((c.offset + c.rows * c.out_stride + 1) * out_bytes);
  const DeviceArray<int32_t> device_index(index);
  const DeviceArray<uint8_t> flags(std::vector<uint8_t>(static_cast<size_t>(c.rows), 0x55));
  const DeviceArray<uint8_t> check_flags(std::vector<uint8_t>(static_cast<size_t>(source_rows), 0x55));
  const ConstMatrix from{device_in.get() + c.offset * in_bytes, source_rows, c.columns, c.in_stride, in_element};
  const MutableMatrix to{device_out.get() + c.offset * out_bytes, c.rows, c.columns, c.out_stride, out_element};
  LAB_CUDA(LaunchGatherRows(from, c.index ? device_index.get() : nullptr, to, c.flags ? flags.get() : nullptr, nullptr));
  LAB_CUDA(LaunchCheckRows(from, check_flags.get(), nullptr));
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<uint8_t> out = Download(device_out), found = Download(flags), checked = Download(check_flags);

  int64_t faults = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t source = index[static_cast<size_t>(row)];
    for (int64_t column = 0; column < c.out_stride; ++column) {
      const uint8_t* actual = out.data() + (c.offset + row * c.out_stride + column) * out_bytes;
      const double expected = column < c.columns ? RoundTo(Decode(at(source, column), in_element), out_element) : 0;
      faults += Same(Decode(actual, out_element), expected) ? 0 : 1;
      // A type that stays keeps its bits, those of NaN too.
      if (in_element == out_element && column < c.columns) {
        faults += std::memcmp(actual, at(source, column), static_cast<size_t>(in_bytes)) == 0 ? 0 : 1;
      }
    }
    const uint8_t expected_flag = c.flags && bad[static_cast<size_t>(source)] ? 1 : 0x55;
    faults += found[static_cast<size_t>(row)] == expected_flag ? 0 : 1;
  }
  for (int64_t row = 0; row < source_rows; ++row) {
    faults += checked[static_cast<size_t>(row)] == (bad[static_cast<size_t>(row)] ? 1 : 0x55) ? 0 : 1;
  }
  // Nothing before the first row and behind the last was touched.
  for (int64_t i = 0; i < c.offset * out_bytes; ++i) faults += out[static_cast<size_t>(i)] == 0xff ? 0 : 1;
  for (size_t i = out.size() - static_cast<size_t>(out_bytes); i < out.size(); ++i) faults += out[i] == 0xff ? 0 : 1;
  return faults;
}

void CheckRowsOfAllTypes() {
  std::vector<RowsCase> cases = {{37, 4096, 4096, 4096, 0, true, true}, {1, 4096, 4096, 4096, 0, false, true},
                                 {5, 0, 8, 8, 0, false, true},          {300, 8, 8, 8, 0, true, false},
                                 {19, 9000, 9000, 9000, 0, true, true}, {40, 64, 96, 72, 0, true, true}};
  for (const int64_t columns : {1, 7, 8, 9, 31, 100, 129, 2050, 4097}) {
    for (const int64_t offset : {0, 1}) {
      cases.push_back({23, columns, columns, RoundUp(columns, 8), offset, offset == 0, true});  // unpadded to padded
      cases.push_back({23, columns, RoundUp(columns, 8), columns, offset, offset == 1, true});  // and back
      cases.push_back({23, columns, RoundUp(columns, 8), RoundUp(columns, 8) + 8, offset, true, columns % 2 == 0});
    }
  }
  for (const Element in : kInputs) {
    for (const Element out : kOutputs) {
      int64_t faults = 0;
      for (const RowsCase& c : cases) faults += GatherFaults(c, in, out);
      Check(std::string("rows, ") + Name(in) + " to " + Name(out) + ": wrong elements", static_cast<double>(faults), 0);
    }
  }
}

void CheckConvert() {
  for (const Element in : kInputs) {
    // Every 16-bit number; of fp32, a million and their special values.
    const int64_t count = (in == Element::kFloat32 ? 1 << 20 : 1 << 16) + 5;
    std::mt19937_64 random(5);
    std::vector<uint8_t> values(static_cast<size_t>((count + 1) * BytesOf(in)));
    for (int64_t i = 0; i <= count; ++i) {
      uint8_t* value = values.data() + i * BytesOf(in);
      if (in != Element::kFloat32) {
        const auto bits = static_cast<uint16_t>(i);
        std::memcpy(value, &bits, 2);
      } else if (i % 50 == 0) {
        PutNonFinite(random, value, in);
      } else {
        PutFinite(random, value, in);
      }
    }
    const DeviceArray<uint8_t> device_in(values);
    for (const Element out : kOutputs) {
      int64_t faults = 0;
      for (const int64_t offset : {0, 1}) {
        const DeviceArray<uint8_t> device_out((count + 2) * BytesOf(out));
        LAB_CUDA(LaunchConvert(device_in.get() + offset * BytesOf(in), in, count, device_out.get() + offset * BytesOf(out), out,
                               nullptr));
        LAB_CUDA(cudaDeviceSynchronize());
        const std::vector<uint8_t> actual = Download(device_out);
        for (int64_t i = offset; i < offset + count; ++i) {
          const double expected = RoundTo(Decode(values.data() + i * BytesOf(in), in), out);
          faults += Same(Decode(actual.data() + i * BytesOf(out), out), expected) ? 0 : 1;
        }
        for (int64_t i = (offset + count) * BytesOf(out); i < static_cast<int64_t>(actual.size()); ++i) {
          faults += actual[static_cast<size_t>(i)] == 0xff ? 0 : 1;
        }
      }
      Check(std::string("flat, ") + Name(in) + " to " + Name(out) + ": wrong elements", static_cast<double>(faults), 0);
    }
  }
}

void CheckFillNormal() {
  constexpr int64_t kCount = (1 << 20) + 5;
  std::array<std::vector<uint8_t>, 4> filled;
  for (size_t i = 0; i < 4; ++i) {
    const DeviceArray<uint8_t> array(kCount * BytesOf(kOutputs[i]));
    LAB_CUDA(LaunchFillNormal(array.get(), kOutputs[i], kCount, 7, 0.5f, nullptr));
    LAB_CUDA(cudaDeviceSynchronize());
    filled[i] = Download(array);
  }
  double sum = 0, squares = 0, neighbours = 0, previous = 0, faults = 0;
  for (int64_t j = 0; j < kCount; ++j) {
    const double x = Decode(filled[0].data() + j * 4, Element::kFloat32);
    sum += x;
    squares += x * x;
    neighbours += x * previous;
    previous = x;
    for (size_t i = 1; i < 4; ++i) {
      faults += Same(Decode(filled[i].data() + j * BytesOf(kOutputs[i]), kOutputs[i]), RoundTo(x, kOutputs[i])) ? 0 : 1;
    }
  }
  // Five standard errors of each.
  Check("normal values: mean", std::fabs(sum / kCount), 5 * 0.5 / 1024);
  Check("normal values: variance, relative", std::fabs(squares / kCount / 0.25 - 1), 5 * std::sqrt(2.0) / 1024);
  Check("normal values: correlation of neighbours", std::fabs(neighbours / kCount / 0.25), 5.0 / 1024);
  Check("normal values: types that are not the same values", faults, 0);
}

// --- Parameters
// -------------------------------------------------------------------------------------------------------------------

constexpr int64_t kCount = 1000003;

std::vector<float> Normal(int64_t count, uint64_t seed, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = scale * headwater::lab::NormalAt(seed, i);
  return values;
}

// A float array that begins `offset` elements after an aligned address, and has one element behind it that nobody may write.
struct OffsetArray {
  OffsetArray(const std::vector<float>& values, int64_t by) : memory(static_cast<int64_t>(values.size()) + by + 1), offset(by) {
    LAB_CUDA(cudaMemcpy(get(), values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  }
  float* get() const { return memory.get() + offset; }
  // Without the elements around it; `faults` counts those of them that were written.
  std::vector<float> ToHost(double* faults) const {
    std::vector<float> all = memory.ToHost();
    for (int64_t i = 0; i < offset; ++i) *faults += BitCast<uint32_t>(all[static_cast<size_t>(i)]) == 0xffffffffu ? 0 : 1;
    *faults += BitCast<uint32_t>(all.back()) == 0xffffffffu ? 0 : 1;
    return {all.begin() + offset, all.end() - 1};
  }
  DeviceArray<float> memory;
  int64_t offset;
};

double DifferentBits(const std::vector<float>& a, const std::vector<float>& b) {
  double count = a.size() == b.size() ? 0 : HUGE_VAL;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += BitCast<uint32_t>(a[i]) == BitCast<uint32_t>(b[i]) ? 0 : 1;
  return count;
}

// One optimizer: how the GPU and the reference make update number `step`.
struct Optimizer {
  std::string name;
  bool has_moment1, has_moment2;
  std::function<cudaError_t(const ParameterArrays&, int step)> launch;
  // p, m, v in fp64 from a gradient.
  std::function<void(double g, int step, double* p, double* m, double* v)> update;
};

Optimizer AdamW(const std::string& name, double beta1, double beta2, double weight_decay) {
  const auto scalars = [=](int step) {
    return AdamWScalars{0.5f,
                        static_cast<float>(1 - 0.01 * weight_decay),
                        static_cast<float>(1 - beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(1 - beta2),
                        static_cast<float>(0.01 / (1 - std::pow(beta1, step))),
                        static_cast<float>(std::sqrt(1 - std::pow(beta2, step))),
                        1e-8f};
  };
  return {name, true, true, [=](const ParameterArrays& arrays, int step) { return LaunchAdamW(scalars(step), arrays, nullptr); },
          [=](double g, int step, double* p, double* m, double* v) {
            const AdamWScalars s = scalars(step);
            g *= s.multiplier;
            *m += double{s.one_minus_beta1} * (g - *m);
            *v = double{s.beta2} * *v + double{s.one_minus_beta2} * g * g;
            *p = double{s.decay} * *p - double{s.step_size} * *m / (std::sqrt(*v) / double{s.root_correction} + double{s.epsilon});
          }};
}

Optimizer Sgd(const std::string& name, float weight_decay, float momentum, float dampening, bool nesterov) {
  const auto scalars = [=](int step) {
    return SgdScalars{0.5f, 0.01f, weight_decay, momentum, 1 - dampening, step == 1, nesterov};
  };
  return {name, momentum > 0, false,
          [=](const ParameterArrays& arrays, int step) { return LaunchSgd(scalars(step), arrays, nullptr); },
          [=](double g, int step, double* p, double* m, double*) {
            const SgdScalars s = scalars(step);
            g = g * double{s.multiplier} + double{s.weight_decay} * *p;
            double direction = g;
            if (momentum > 0) {
              *m = s.first_step ? g : double{s.momentum} * *m + double{s.one_minus_dampening} * g;
              direction = s.nesterov ? g + double{s.momentum} * *m : *m;
            }
            *p -= double{s.learning_rate} * direction;
          }};
}

// Five updates. The state begins as garbage where an optimizer must not look at it (SGD's first step).
void CheckOptimizer(const Optimizer& optimizer, Element stored_element) {
  constexpr int kSteps = 5;
  const std::vector<float> parameter = Normal(kCount, 1, 0.02f), none;
  const std::vector<float> moments = optimizer.has_moment2 ? std::vector<float>(kCount, 0.0f) : Normal(kCount, 2, 1.0f);
  std::vector<double> p(parameter.begin(), parameter.end()), m(moments.begin(), moments.end()), v(kCount, 0.0);
  std::vector<std::vector<float>> results[2];
  double guards = 0, gradients_left = 0, stored_faults = 0;
  for (const int64_t offset : {0, 1}) {
    const OffsetArray device_p(parameter, offset), device_m(moments, offset), device_v(std::vector<float>(kCount, 0.0f), offset);
    const OffsetArray device_g(Normal(kCount, 10, 0.3f), offset);
    const DeviceArray<uint8_t> stored((kCount + 2) * 2);
    ParameterArrays arrays;
    arrays.parameter = device_p.get();
    arrays.gradient = device_g.get();
    arrays.moment1 = optimizer.has_moment1 ? device_m.get() : nullptr;
    arrays.moment2 = optimizer.has_moment2 ? device_v.get() : nullptr;
    arrays.stored = stored_element == Element::kFloat32 ? nullptr : stored.get() + offset * 2;
    arrays.stored_element = stored_element;
    arrays.count = kCount;
    for (int step = 1; step <= kSteps; ++step) {
      // Every fifth gradient is 0.
      std::vector<float> gradient = Normal(kCount, static_cast<uint64_t>(10 + step), 0.3f);
      for (size_t i = 0; i < gradient.size(); i += 5) gradient[i] = 0;
      LAB_CUDA(cudaMemcpy(device_g.get(), gradient.data(), gradient.size() * 4, cudaMemcpyHostToDevice));
      LAB_CUDA(optimizer.launch(arrays, step));
      LAB_CUDA(cudaDeviceSynchronize());
      if (offset == 0) {
        for (size_t i = 0; i < gradient.size(); ++i) optimizer.update(gradient[i], step, &p[i], &m[i], &v[i]);
      }
    }
    results[offset] = {device_p.ToHost(&guards), device_m.ToHost(&guards), device_v.ToHost(&guards)};
    for (const float g : device_g.ToHost(&guards)) gradients_left += BitCast<uint32_t>(g) == 0 ? 0 : 1;
    const std::vector<uint8_t> copy = Download(stored);
    for (int64_t i = 0; i < kCount + 2; ++i) {
      const uint8_t* element = copy.data() + i * 2;
      const bool inside = arrays.stored != nullptr && i >= offset && i < offset + kCount;
      const bool right = inside ? Same(Decode(element, stored_element),
                                       RoundTo(results[offset][0][static_cast<size_t>(i - offset)], stored_element))
                                : element[0] == 0xff && element[1] == 0xff;
      stored_faults += right ? 0 : 1;
    }
  }
  const std::string name = optimizer.name + ", stored " + (stored_element == Element::kFloat32 ? "nothing" : Name(stored_element));
  Check(name + ": parameters", headwater::lab::RelativeDifference(results[0][0], p), 3e-7);
  if (optimizer.has_moment1) Check(name + ": first moments", headwater::lab::RelativeDifference(results[0][1], m), 3e-7);
  if (optimizer.has_moment2) Check(name + ": second moments", headwater::lab::RelativeDifference(results[0][2], v), 3e-7);
  double different = 0;
  for (size_t i = 0; i < 3; ++i) different += DifferentBits(results[0][i], results[1][i]);
  Check(name + ": other bits where unaligned", different, 0);
  Check(name + ": gradients that are not 0", gradients_left, 0);
  Check(name + ": wrong 16-bit copies", stored_faults, 0);
  Check(name + ": writes beyond the arrays", guards, 0);
}

void CheckStats() {
  std::mt19937_64 random(3);
  for (const int64_t count : {0, 1, 3, 4, 5, 255, 2097152, 2097155, 10000019}) {
    std::vector<float> values = Normal(count, 4, 1e17f);
    if (count > 100) values[static_cast<size_t>(count) / 2] = 1e22f;  // its square overflows fp32
    long double sum = 0;                                              // fp64, summed in a row, errs by more than the bound
    for (const float x : values) sum += static_cast<double>(x) * static_cast<double>(x);
    const auto expected = static_cast<double>(sum);
    int64_t bad = 0;
    double errors = 0, faults = 0, different = 0;
    for (const bool poisoned : {false, true}) {
      if (poisoned) {
        for (int64_t i = 0; i < std::min<int64_t>(count, 7); ++i) {
          // One of them at the very end.
          const size_t where =
              i == 0 ? static_cast<size_t>(count - 1) : static_cast<size_t>(random() % static_cast<uint64_t>(count));
          if (std::isfinite(values[where])) ++bad;
          values[where] = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : -HUGE_VALF;
        }
      }
      GradientStatsResult first = {};
      for (const int64_t offset : {0, 0, 1}) {
        const OffsetArray array(values, offset);
        const DeviceArray<uint8_t> scratch(kGradientStatsBytes);
        const DeviceArray<GradientStatsResult> device(1);
        LAB_CUDA(LaunchGradientStats(array.get(), count, scratch.get(), device.get(), nullptr));
        LAB_CUDA(cudaDeviceSynchronize());
        const GradientStatsResult result = device.ToHost()[0];
        faults += result.non_finite_count == bad ? 0 : 1;
        if (bad == 0) {
          errors = std::max(errors, expected == 0 ? std::fabs(result.norm_squared) : std::fabs(result.norm_squared / expected - 1));
        } else {
          faults += std::isfinite(result.norm_squared) ? 1 : 0;
        }
        if (first.norm_squared == 0) first = result;
        different += BitCast<uint64_t>(result.norm_squared) == BitCast<uint64_t>(first.norm_squared) ? 0 : 1;
      }
    }
    const std::string name = "gradient statistics of " + std::to_string(count);
    Check(name + ": sum of squares", errors, 1e-13);
    Check(name + ": wrong counts", faults, 0);
    Check(name + ": other bits when repeated or unaligned", different, 0);
  }
}

void CheckAdditions() {
  const std::vector<float> x = Normal(kCount, 20, 3.0f), y = Normal(kCount, 21, 1.0f);
  for (const bool fused : {true, false}) {
    std::vector<float> expected(y);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (fused) {
        expected[i] = std::fma(0.3f, x[i], y[i]);
      } else {
        const volatile float product = 0.3f * x[i];
        expected[i] = y[i] + product;
      }
    }
    double different = 0;
    for (const int64_t x_offset : {0, 1}) {
      for (const int64_t y_offset : {0, 1}) {
        const OffsetArray device_x(x, x_offset), device_y(y, y_offset);
        LAB_CUDA(fused ? LaunchAddScaled(device_x.get(), kCount, 0.3f, device_y.get(), nullptr)
                       : LaunchAddProduct(device_x.get(), kCount, 0.3f, device_y.get(), nullptr));
        LAB_CUDA(cudaDeviceSynchronize());
        double guards = 0;
        different += DifferentBits(device_y.ToHost(&guards), expected) + DifferentBits(device_x.ToHost(&guards), x);
        different += guards;
      }
    }
    Check(fused ? "addition in one rounding: other bits" : "addition in two roundings: other bits", different, 0);
  }
}

void CheckParameters() {
  for (const Element stored : kInputs) {
    CheckOptimizer(AdamW("AdamW", 0.9, 0.999, 0.01), stored);
    CheckOptimizer(Sgd("SGD", 0.1f, 0, 0, false), stored);
    CheckOptimizer(Sgd("SGD with momentum", 0.01f, 0.9f, 0.3f, false), stored);
  }
  CheckOptimizer(AdamW("AdamW, small beta", 0.2, 0.8, 0.2), Element::kFloat32);
  CheckOptimizer(AdamW("AdamW, no moments", 0, 0, 0), Element::kFloat32);
  CheckOptimizer(Sgd("SGD, Nesterov", 0.01f, 0.9f, 0, true), Element::kFloat32);
  CheckStats();
  CheckAdditions();
}

// --- Bandwidth
// --------------------------------------------------------------------------------------------------------------------

void MeasureBandwidth() {
  constexpr int64_t kElements = int64_t{128256} * 4096, kRows = 8192, kWidth = 4096;
  DeviceArray<float> parameter(kElements), gradient(kElements), moment1(kElements), moment2(kElements);
  DeviceArray<__nv_bfloat16> stored(kElements);
  for (const DeviceArray<float>* array : {&parameter, &gradient, &moment1}) {
    LAB_CUDA(LaunchFillNormal(array->get(), Element::kFloat32, kElements, 1, 0.02f, nullptr));
  }
  const AdamWScalars adamw{1.0f, 1.0f - 1e-7f, 0.001f, 0.9999f, 0.0001f, 1e-7f, 0.9f, 1e-8f};
  const SgdScalars sgd{1.0f, 1e-7f, 1e-4f, 0.999f, 1.0f, false, true};
  // Second moments are not negative: an update that makes them the gradient's square and leaves the parameters.
  moment2.Zero();
  const AdamWScalars square{1, 1, 1, 0, 1, 0, 1, 1};
  LAB_CUDA(LaunchAdamW(
      square, {parameter.get(), gradient.get(), moment1.get(), moment2.get(), nullptr, Element::kFloat32, kElements}, nullptr));
  LAB_CUDA(LaunchFillNormal(gradient.get(), Element::kFloat32, kElements, 2, 0.02f, nullptr));
  const DeviceArray<uint8_t> scratch(kGradientStatsBytes);
  const DeviceArray<GradientStatsResult> result(1);
  const auto arrays = [&](bool copy) {
    return ParameterArrays{parameter.get(),    gradient.get(), moment1.get(), moment2.get(), copy ? stored.get() : nullptr,
                           Element::kBFloat16, kElements};
  };
  const auto sgd_arrays = [&] {
    ParameterArrays a = arrays(false);
    a.moment2 = nullptr;
    return a;
  };
  const ConstMatrix rows{stored.get(), kRows, kWidth, kWidth, Element::kBFloat16};
  const MutableMatrix gathered{stored.get() + kRows * kWidth, kRows, kWidth, kWidth, Element::kBFloat16};
  const DeviceArray<uint8_t> flags(kRows);
  LAB_CUDA(cudaDeviceSynchronize());  // the bench's stream does not wait for the default stream
  const double count = static_cast<double>(kElements);
  headwater::lab::Bench bench;
  bench.Run(
      "128256 x 4096",
      {{"copy, fp32",
        [&](cudaStream_t stream) {
          LAB_CUDA(cudaMemcpyAsync(moment1.get(), gradient.get(), moment1.bytes(), cudaMemcpyDeviceToDevice, stream));
        },
        0.0, 8 * count},
       {"AdamW, bf16 copy", [&](cudaStream_t stream) { LAB_CUDA(LaunchAdamW(adamw, arrays(true), stream)); }, 0.0, 34 * count},
       {"AdamW, no copy", [&](cudaStream_t stream) { LAB_CUDA(LaunchAdamW(adamw, arrays(false), stream)); }, 0.0, 32 * count},
       {"SGD with momentum, no copy", [&](cudaStream_t stream) { LAB_CUDA(LaunchSgd(sgd, sgd_arrays(), stream)); }, 0.0,
        24 * count},
       {"gradient statistics",
        [&](cudaStream_t stream) { LAB_CUDA(LaunchGradientStats(gradient.get(), kElements, scratch.get(), result.get(), stream)); },
        0.0, 4 * count},
       {"addition", [&](cudaStream_t stream) { LAB_CUDA(LaunchAddScaled(gradient.get(), kElements, 0.5f, moment1.get(), stream)); },
        0.0, 12 * count},
       {"conversion, fp32 to bf16",
        [&](cudaStream_t stream) {
          LAB_CUDA(LaunchConvert(parameter.get(), Element::kFloat32, kElements, stored.get(), Element::kBFloat16, stream));
        },
        0.0, 6 * count},
       {"8192 rows of 4096 bf16, checked",
        [&](cudaStream_t stream) { LAB_CUDA(LaunchGatherRows(rows, nullptr, gathered, flags.get(), stream)); }, 0.0,
        4.0 * kRows * kWidth}},
      headwater::lab::BenchOptions{1.0, 0.4, 2, false});
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("011_parameters");
  CheckRowsOfAllTypes();
  CheckConvert();
  CheckFillNormal();
  CheckParameters();
  if (argc < 2 || std::string(argv[1]) != "check") MeasureBandwidth();
  std::printf("%s\n", headwater::lab::AnyCheckFailed() ? "FAILED" : "all checks passed");
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
