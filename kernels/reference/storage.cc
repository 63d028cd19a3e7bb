#include "kernels/reference/storage.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace headwater::reference {
namespace {

// An IEEE 754 binary format: `mantissa_bits` behind the point, smallest normal 2^min_exponent, largest below 2^(max_exponent + 1).
struct Format {
  int mantissa_bits;
  int min_exponent;
  int max_exponent;
};

Format FormatOf(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return {23, -126, 127};
    case DataType::kBFloat16:
      return {7, -126, 127};
    case DataType::kFloat16:
      return {10, -14, 15};
  }
  return {};
}

// The bits of a value that the 16-bit format holds exactly.
uint16_t Bits16(const Format& format, double value) {
  const int exponent_bits = 15 - format.mantissa_bits;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << format.mantissa_bits);
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | (1 << (format.mantissa_bits - 1)));
  const double magnitude = std::abs(value);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  const int scaled = static_cast<int>(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // A normal number's scaled mantissa has its leading one at bit `mantissa_bits`, which adds the one that a biased exponent lacks.
  return static_cast<uint16_t>(sign | (((exponent - format.min_exponent) << format.mantissa_bits) + scaled));
}

double ValueOf16(const Format& format, uint16_t bits) {
  const int exponent_bits = 15 - format.mantissa_bits;
  const int biased = (bits >> format.mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  double magnitude = 0;
  if (biased == (1 << exponent_bits) - 1) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (biased == 0) {
    magnitude = std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << format.mantissa_bits), biased - 1 + format.min_exponent - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace

double RoundTo(DataType type, double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const Format format = FormatOf(type);
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const int unit = exponent - format.mantissa_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  const double limit = std::ldexp(2.0, format.max_exponent);
  return std::abs(rounded) >= limit ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

std::vector<uint8_t> Encode(DataType type, absl::Span<const double> values) {
  std::vector<uint8_t> bytes(values.size() * static_cast<size_t>(ElementBytes(type)));
  uint8_t* out = bytes.data();
  for (const double value : values) {
    const double rounded = RoundTo(type, value);
    if (type == DataType::kFloat32) {
      const float element = static_cast<float>(rounded);
      std::memcpy(out, &element, sizeof(element));
      out += sizeof(element);
    } else {
      const uint16_t element = Bits16(FormatOf(type), rounded);
      std::memcpy(out, &element, sizeof(element));
      out += sizeof(element);
    }
  }
  return bytes;
}

std::vector<double> Decode(DataType type, const void* bytes, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  const uint8_t* in = static_cast<const uint8_t*>(bytes);
  for (double& value : values) {
    if (type == DataType::kFloat32) {
      float element;
      std::memcpy(&element, in, sizeof(element));
      in += sizeof(element);
      value = element;
    } else {
      uint16_t element;
      std::memcpy(&element, in, sizeof(element));
      in += sizeof(element);
      value = ValueOf16(FormatOf(type), element);
    }
  }
  return values;
}

}  // namespace headwater::reference
