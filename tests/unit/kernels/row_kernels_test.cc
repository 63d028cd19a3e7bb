// Row kernels of every instruction set that this machine has, against libm in higher precision.
#include "kernels/cpu/rows/row_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/storage.h"

namespace headwater::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<const RowKernels*> Variants() {
  std::vector<const RowKernels*> variants;
  for (const RowKernels* const* kernels = AllRowKernels(); *kernels != nullptr; ++kernels) variants.push_back(*kernels);
  return variants;
}

class Kernels : public ::testing::TestWithParam<const RowKernels*> {
 protected:
  const RowKernels& kernels() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(All, Kernels, ::testing::ValuesIn(Variants()),
                         [](const auto& test) { return std::string(test.param->instruction_set); });

std::vector<float> Normal(size_t count, double spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, spread);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(normal(random));
  return values;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The values of all 16-bit patterns.
std::vector<double> AllValues(DataType type) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  return reference::Decode(type, patterns.data(), 65536);
}

bool IsSame(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST_P(Kernels, WideningIsExactForAllPatterns) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> bfloat16(patterns.size()), float16(patterns.size());
  std::vector<double> wide(patterns.size());
  kernels().bfloat16_to_float(patterns.data(), 65536, bfloat16.data());
  kernels().float16_to_float(patterns.data(), 65536, float16.data());
  kernels().float16_to_double(patterns.data(), 65536, wide.data());
  const std::vector<double> of_bfloat16 = AllValues(DataType::kBFloat16), of_float16 = AllValues(DataType::kFloat16);
  for (size_t i = 0; i < patterns.size(); ++i) {
    EXPECT_TRUE(IsSame(static_cast<double>(bfloat16[i]), of_bfloat16[i])) << i;
    EXPECT_TRUE(IsSame(static_cast<double>(float16[i]), of_float16[i])) << i;
    EXPECT_TRUE(IsSame(wide[i], of_float16[i])) << i;
  }
}

TEST_P(Kernels, NarrowingRoundsToNearestEven) {
  std::mt19937_64 random(5);
  std::vector<float> values;
  for (int i = 0; i < 20000; ++i) values.push_back(FromBits(static_cast<uint32_t>(random())));
  const std::vector<double> of_float16 = AllValues(DataType::kFloat16);
  for (uint32_t i = 0; i < 65536; i += 3) {
    // Every fp16's neighbourhood, with ties.
    const float exact = static_cast<float>(of_float16[i]);
    const float next = static_cast<float>(of_float16[(i + 1) % 65536]);
    values.insert(values.end(), {exact, (exact + next) / 2, std::nextafter((exact + next) / 2, 0.0f)});
    values.push_back(FromBits(i << 16 | 0x8000u));
    values.push_back(FromBits(i << 16 | 0x7FFFu));
  }
  values.insert(values.end(), {65504.0f, 65519.99f, 65520.0f, 65536.0f, 1e30f, -1e30f, 5.96e-8f, 2.98e-8f, 2.99e-8f, 0.0f, -0.0f});
  const auto count = static_cast<int64_t>(values.size());
  for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
    std::vector<uint16_t> actual(values.size()), expected(values.size());
    (type == DataType::kBFloat16 ? kernels().float_to_bfloat16 : kernels().float_to_float16)(values.data(), count, actual.data());
    const std::vector<uint8_t> encoded = reference::Encode(type, std::vector<double>(values.begin(), values.end()));
    std::memcpy(expected.data(), encoded.data(), encoded.size());
    const std::vector<double> numbers = reference::Decode(type, actual.data(), count);
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) {
        EXPECT_TRUE(std::isnan(numbers[i])) << i;
      } else {
        EXPECT_EQ(actual[i], expected[i]) << values[i] << " as " << DataTypeName(type);
      }
    }
  }
}

TEST_P(Kernels, StatsMatchLongDouble) {
  for (const int64_t count : {1, 2, 15, 17, 1023, 1024, 1025, 5000}) {
    for (const double spread : {0.1, 4.0, 100.0}) {
      for (const double cap : {0.0, 7.0}) {
        SCOPED_TRACE(std::to_string(count) + " columns, spread " + std::to_string(spread) + ", cap " + std::to_string(cap));
        const std::vector<float> a = Normal(static_cast<size_t>(count), spread, 3);
        std::vector<double> wide(a.begin(), a.end());
        const std::vector<float> class_weights(a.size(), 0.5f);
        StatsOptions options = {
            .cap = cap, .class_weights = class_weights.data(), .want_spread = true, .want_linear = true, .want_total = true};
        const PieceStats narrow_stats = kernels().stats_float(a.data(), count, options);
        options.inverse_temperature = 0.5;
        const PieceStats wide_stats = kernels().stats_double(wide.data(), count, options);
        for (const bool is_wide : {false, true}) {
          const PieceStats& stats = is_wide ? wide_stats : narrow_stats;
          std::vector<long double> z;
          for (const float value : a) {
            const long double logit =
                cap > 0 ? cap * std::tanh(static_cast<long double>(value) / cap) : static_cast<long double>(value);
            z.push_back(is_wide ? logit / 2 : logit);
          }
          const long double max = *std::max_element(z.begin(), z.end());
          long double sum = 0, weighted = 0, squares = 0, linear = 0, size = 0;
          for (const long double value : z) {
            sum += std::exp(value - max);
            weighted += std::exp(value - max) * (value - max);
            squares += std::exp(2 * (value - max));
            linear += 0.5L * value;
            size += 0.5L * std::abs(value);
          }
          const long double rest = sum - 1;
          squares -= 1;
          const double tolerance = is_wide ? 1e-14 : 2e-6;
          EXPECT_LE(std::abs(stats.max - max), tolerance * std::max(1.0L, std::abs(max)));
          EXPECT_LE(std::abs(stats.sum * std::exp(stats.max - max) - sum), (is_wide ? 1e-13 : 2e-5) * sum);
          EXPECT_LE(std::abs(stats.weighted - weighted), (is_wide ? 1e-12 : 1e-4) * std::max(std::abs(weighted), sum));
          EXPECT_LE(std::abs(stats.rest - rest), (is_wide ? 1e-13 : 2e-5) * rest + 1e-18);
          EXPECT_LE(std::abs(stats.squares - squares), (is_wide ? 1e-13 : 4e-5) * squares + 1e-18);
          EXPECT_LE(std::abs(stats.linear - linear), tolerance * size + 1e-12);
          EXPECT_LE(std::abs(stats.total - 2 * linear), 2 * tolerance * size + 1e-12);
        }
      }
    }
  }
}

TEST_P(Kernels, StatsKeepNanAndInfinities) {
  // In every place of a vector, and in different blocks than the maximum.
  for (const int64_t place : {0, 1, 7, 16, 1500, 2999}) {
    for (const bool capped : {false, true}) {
      std::vector<float> a = Normal(3000, 2, 9);
      a[700] = 600;
      const StatsOptions options = {.cap = capped ? 50.0 : 0.0};
      a[static_cast<size_t>(place)] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(kernels().stats_float(a.data(), 3000, options).sum)) << place;
      std::vector<double> wide(a.begin(), a.end());
      EXPECT_TRUE(std::isnan(kernels().stats_double(wide.data(), 3000, options).sum)) << place;
    }
  }
  const std::vector<float> ruled_out(20, -std::numeric_limits<float>::infinity());
  const PieceStats nothing = kernels().stats_float(ruled_out.data(), 20, StatsOptions{.want_spread = true});
  EXPECT_EQ(nothing.max, -kInfinity);
  EXPECT_EQ(nothing.sum, 0);
  EXPECT_EQ(nothing.weighted, 0);
  EXPECT_EQ(nothing.rest, 0);
  EXPECT_EQ(nothing.squares, 0);
}

TEST_P(Kernels, GradientMatchesItsFormula) {
  const std::vector<float> original = Normal(777, 5, 4);
  const std::vector<float> class_weights = Normal(777, 1, 8);
  for (const double cap : {0.0, 4.0}) {
    for (const int form : {0, 1, 2, 3}) {
      const bool weighted = (form & 1) != 0;
      const double distance_factor = (form & 2) != 0 ? 0.2 : 0.0;
      const GradientCoefficients coefficients = {6.0, 0.75, 0.37, distance_factor, 0.01};
      std::vector<float> narrow = original;
      kernels().gradient_float(narrow.data(), 777, cap, coefficients, weighted ? class_weights.data() : nullptr);
      const std::vector<double> wide(original.begin(), original.end());
      std::vector<float> from_wide(777);
      kernels().gradient_double(wide.data(), 777, cap, coefficients, weighted ? class_weights.data() : nullptr, from_wide.data());
      for (size_t i = 0; i < narrow.size(); ++i) {
        const double a = wide[i];
        const double z = cap > 0 ? cap * std::tanh(a / cap) : a;
        const double derivative = cap > 0 ? 1 / (std::cosh(a / cap) * std::cosh(a / cap)) : 1;
        const double class_weight = weighted ? static_cast<double>(class_weights[i]) : 1.0;
        const double s = 0.75 * (z - 6);
        const double expected = ((0.37 - distance_factor * s) * std::exp(s) - 0.01 * class_weight) * derivative;
        EXPECT_LE(std::abs(static_cast<double>(narrow[i]) - expected), 3e-6 * std::max(std::abs(expected), 0.01 * derivative)) << a;
        EXPECT_LE(std::abs(static_cast<double>(from_wide[i]) - expected), 1e-7 * std::max(std::abs(expected), 1e-6)) << a;
      }
    }
  }
}

TEST_P(Kernels, DivergenceOfEqualAndOfDistantRows) {
  const std::vector<float> narrow = Normal(300, 3, 2);
  const std::vector<double> student(narrow.begin(), narrow.end());
  for (const double beta : {0.0, 0.3, 1.0}) {
    const DivergenceOptions options = {.beta = beta, .student_lse = 11, .teacher_lse = 11};
    double loss = 0, mean = 0;
    kernels().divergence_sums(student.data(), student.data(), 300, options, &loss, &mean);
    EXPECT_EQ(loss, 0);
    EXPECT_EQ(mean, 0);
    // A column that one side rules out: finite where its own probability weighs it, never NaN.
    const double ruled_out[1] = {-kInfinity};
    const double present[1] = {10.0};
    loss = mean = 0;
    kernels().divergence_sums(ruled_out, present, 1, options, &loss, &mean);
    EXPECT_FALSE(std::isnan(loss) || std::isnan(mean)) << beta;
    EXPECT_EQ(std::isinf(loss), beta == 0);
    loss = mean = 0;
    kernels().divergence_sums(present, ruled_out, 1, options, &loss, &mean);
    EXPECT_FALSE(std::isnan(loss)) << beta;
    EXPECT_EQ(std::isinf(loss), beta == 1);
    loss = mean = 0;
    kernels().divergence_sums(ruled_out, ruled_out, 1, options, &loss, &mean);
    EXPECT_EQ(loss, 0);
    EXPECT_EQ(mean, 0);
  }
}

TEST_P(Kernels, DivergenceMatchesLongDouble) {
  const std::vector<float> student_narrow = Normal(257, 6, 12);
  const std::vector<float> teacher_narrow = Normal(257, 6, 13);
  const std::vector<double> student(student_narrow.begin(), student_narrow.end());
  const std::vector<double> teacher(teacher_narrow.begin(), teacher_narrow.end());
  for (const double beta : {0.0, 0.01, 0.5, 0.99, 1.0}) {
    const DivergenceOptions options = {.beta = beta,
                                       .student_inverse_temperature = 0.8,
                                       .student_lse = 18,
                                       .teacher_lse = 17,
                                       .reference = beta == 0 ? 0.0 : 0.25};
    double loss = 0, mean = 0;
    kernels().divergence_sums(student.data(), teacher.data(), 257, options, &loss, &mean);
    std::vector<float> gradient(257, 1.0f);
    kernels().divergence_gradient(student.data(), teacher.data(), 257, options, 0.125, 2.0, gradient.data());
    long double expected_loss = 0, expected_mean = 0, size = 0;
    for (size_t i = 0; i < student.size(); ++i) {
      const long double log_q = student[i] * 0.8L - 18;
      const long double log_p = teacher[i] - 17.0L;
      const long double q = std::exp(log_q), p = std::exp(log_p);
      const long double m = beta * static_cast<long double>(p) + (1 - static_cast<long double>(beta)) * q;
      long double slope = 0;
      if (beta == 0) {
        expected_loss += p * (log_p - log_q) + q - p;
        expected_mean += q - p;
        slope = q - p;
      } else if (beta == 1) {
        expected_loss += q * (log_q - log_p) + p - q;
        expected_mean += q * (log_q - log_p - 0.25L);
        slope = q * (log_q - log_p - 0.25L - 0.125L);
      } else {
        expected_loss += beta * p * (log_p - std::log(m)) + (1 - beta) * q * (log_q - std::log(m));
        expected_mean += q * (log_q - std::log(m) - 0.25L);
        slope = (1 - beta) * q * (log_q - std::log(m) - 0.25L - 0.125L);
      }
      size += (p + q) * (1 + std::abs(log_p - log_q));
      EXPECT_LE(std::abs(static_cast<long double>(gradient[i]) - (1 + 2 * slope)), 1e-6L) << beta << " column " << i;
    }
    EXPECT_LE(std::abs(loss - expected_loss), 1e-14L * size) << beta;
    EXPECT_LE(std::abs(mean - expected_mean), 1e-14L * size) << beta;
  }
}

TEST_P(Kernels, SumsCountsAndSearches) {
  const std::vector<float> values = Normal(2500, 1, 6);
  double dot = 0, squares = 0;
  for (const float value : values) {
    dot += static_cast<double>(value) * static_cast<double>(values[0]);
    squares += static_cast<double>(value) * static_cast<double>(value);
  }
  const std::vector<float> constant(2500, values[0]);
  EXPECT_LE(std::abs(kernels().dot(values.data(), constant.data(), 2500) - dot), 1e-11);
  EXPECT_LE(std::abs(kernels().sum_of_squares(values.data(), 2500) - squares), 1e-11 * squares);

  std::vector<float> spoiled = values;
  for (const size_t place : {0u, 1000u, 1024u, 2499u}) spoiled[place] = std::numeric_limits<float>::infinity();
  spoiled[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(kernels().count_non_finite(values.data(), 2500), 0);
  EXPECT_EQ(kernels().count_non_finite(spoiled.data(), 2500), 5);

  const float largest = *std::max_element(values.begin(), values.end());
  const int64_t index = std::max_element(values.begin(), values.end()) - values.begin();
  EXPECT_EQ(kernels().first_at_least_float(values.data(), 2500, 0, 1, static_cast<double>(largest)), index);
  EXPECT_EQ(kernels().first_at_least_float(values.data(), 2500, 0, 1, 1e9), 2500);

  std::vector<int32_t> found(10), expected;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= 2.0f) expected.push_back(static_cast<int32_t>(i));
  }
  ASSERT_GT(expected.size(), 10u);
  EXPECT_EQ(kernels().collect_at_least(values.data(), 2500, 2.0f, 10, found.data()), static_cast<int64_t>(expected.size()));
  expected.resize(10);
  EXPECT_EQ(found, expected);

  std::vector<float> sums(2500 / 5, 1.0f);
  kernels().add_column_sums(values.data(), 5, 500, 500, -2.0f, sums.data());
  for (size_t j = 0; j < 500; ++j) {
    float column = 0;
    for (size_t i = 0; i < 5; ++i) column += values[i * 500 + j];
    EXPECT_LE(std::abs(sums[j] - (1.0f - 2.0f * column)), 1e-5f);
  }
}

}  // namespace
}  // namespace headwater::cpu
