// The CUDA row passes' elementary functions, as the host computes them, against long double. The host has exact functions where the
// device has approximations (their errors are in row_math.cuh); this checks everything around them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/device/row_math.cuh"

namespace headwater::cuda::row_math {
namespace {

using Real = long double;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
constexpr double kUnit = std::numeric_limits<T>::epsilon() / 2;

double RelativeError(double value, Real expected) {
  return static_cast<double>(std::abs(static_cast<Real>(value) - expected) / std::abs(expected));
}

// Magnitudes from 1e-9 to `largest`, evenly in the logarithm, with jitter.
std::vector<double> Magnitudes(double largest) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> jitter(0, 1);
  std::vector<double> values;
  const int count = 20000;
  for (int i = 0; i < count; ++i) {
    values.push_back(1e-9 * std::pow(largest / 1e-9, (i + jitter(random)) / count));
  }
  return values;
}

template <typename T>
class RowMathTest : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(RowMathTest, Types);

TYPED_TEST(RowMathTest, ExponentialsKeepTheirDigits) {
  using T = TypeParam;
  double worst_exp = 0, worst_expm1 = 0;
  for (const double magnitude : Magnitudes(85)) {
    const T x = static_cast<T>(-magnitude);
    worst_exp = std::max(worst_exp, RelativeError(Exp(x), std::exp(static_cast<Real>(x))));
    worst_expm1 = std::max(worst_expm1, RelativeError(ExpBoth(x).expm1, std::expm1(static_cast<Real>(x))));
  }
  EXPECT_LE(worst_exp, 3 * kUnit<T>);
  EXPECT_LE(worst_expm1, 5 * kUnit<T>);
}

TYPED_TEST(RowMathTest, ExponentialsOfWhatIsNotFinite) {
  using T = TypeParam;
  EXPECT_EQ(Exp(static_cast<T>(-kInfinity)), 0);
  EXPECT_EQ(Exp(static_cast<T>(-1e30)), 0);
  EXPECT_EQ(ExpBoth(static_cast<T>(-kInfinity)).expm1, -1);
  EXPECT_EQ(Exp(T(0)), 1);
  EXPECT_TRUE(std::isnan(Exp(static_cast<T>(kRowNan))));
  EXPECT_TRUE(std::isnan(ExpBoth(static_cast<T>(kRowNan)).expm1));
  // The factor of an exponential is finite.
  EXPECT_EQ(ClampExponent(static_cast<T>(-kInfinity)) * ExpClamped(ClampExponent(static_cast<T>(-kInfinity))), 0);
}

// `softcap(a, cap)`: the capped logit and its derivative.
template <typename T, typename SoftcapFunction>
void CheckSoftcap(const SoftcapFunction& softcap) {
  double worst_z = 0, worst_derivative = 0;
  for (const double cap : {0.5, 30.0, 50.0}) {
    for (const double magnitude : Magnitudes(40)) {
      const T a = static_cast<T>(-magnitude * cap);
      const CappedLogit<T> capped = softcap(a, static_cast<T>(cap));
      const Real u = static_cast<Real>(a) / cap;
      const Real cosine = std::cosh(u);
      worst_z = std::max(worst_z, RelativeError(capped.z, cap * std::tanh(u)));
      // The rounding of a / cap is amplified by the argument's size.
      const double allowed = 1 + magnitude;
      worst_derivative = std::max(worst_derivative, RelativeError(capped.derivative, 1 / (cosine * cosine)) / allowed);
      EXPECT_EQ(softcap(-a, static_cast<T>(cap)).z, -capped.z);
    }
  }
  EXPECT_LE(worst_z, 6 * kUnit<T>);
  EXPECT_LE(worst_derivative, 6 * kUnit<T>);
  const T cap = 30, infinity = static_cast<T>(kInfinity), nan = static_cast<T>(kRowNan);
  EXPECT_EQ(softcap(infinity, cap).z, cap);
  EXPECT_EQ(softcap(-infinity, cap).z, -cap);
  EXPECT_EQ(softcap(-infinity, cap).derivative, 0);
  EXPECT_EQ(softcap(0, cap).z, 0);
  EXPECT_EQ(softcap(0, cap).derivative, 1);
  EXPECT_TRUE(std::isnan(softcap(nan, cap).z));
}

TYPED_TEST(RowMathTest, SoftcapNeitherCancelsNorOverflows) {
  CheckSoftcap<TypeParam>([](TypeParam a, TypeParam cap) { return Softcap(a, cap, 1 / cap); });
}

TEST(RowMathQuickTest, SoftcapNeitherCancelsNorOverflows) {
  CheckSoftcap<float>([](float a, float cap) {
    const QuickCappedLogit capped = SoftcapQuick(a, a * static_cast<float>(SoftcapExponent(cap)), cap, 0.5f / cap);
    if (std::isnan(a)) {
      EXPECT_TRUE(std::isnan(capped.quarter_derivative));
    }
    return CappedLogit<float>{capped.z, 4 * capped.quarter_derivative};
  });
}

TEST(RowMathQuickTest, ExponentialsRelativeToAPowerOfTwo) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<float> below(0, 60);
  double worst = 0;
  for (const float max : {-900.0f, -3.25f, 0.0f, 17.5f, 4000.0f}) {
    const float k = NearestExponent(max);
    EXPECT_EQ(k, std::rint(k));
    EXPECT_LE(std::abs(ExponentOver(max, k)), 0.5f + std::abs(max) * 2e-7f);
    for (int i = 0; i < 2000; ++i) {
      const float z = max - below(random);
      const Real expected = std::exp(static_cast<Real>(z) - static_cast<Real>(k) * std::log(Real(2)));
      // A half unit of the exponent, log2 e's rounding, and the result's.
      const double allowed = 0.5 * std::abs(ExponentOver(z, k)) + 0.25 * std::abs(z) + 2;
      worst = std::max(worst, RelativeError(Exp2Approx(ExponentOver(z, k)), expected) / allowed);
    }
  }
  EXPECT_LE(worst, 2 * kUnit<float>);
  const auto infinity = static_cast<float>(kInfinity);
  EXPECT_EQ(Exp2Approx(ExponentOver(-infinity, 12)), 0);
  EXPECT_EQ(PowerOfTwo(3, 5), 0.25);
  EXPECT_EQ(PowerOfTwo(-7, -7), 1);
  EXPECT_EQ(PowerOfTwo(-3e38f, 12), 0);
  EXPECT_EQ(PowerOfTwo(3, infinity), 0);
  EXPECT_EQ(PowerOfTwo(infinity, infinity), 0);
}

TYPED_TEST(RowMathTest, LogsOverTheMixture) {
  using T = TypeParam;
  double worst = 0;
  for (const double beta : {1e-6, 0.001, 0.1, 0.5, 0.9, 0.999}) {
    const Real share = beta, rest = 1 - share;
    for (const double magnitude : Magnitudes(80)) {
      for (const double sign : {-1.0, 1.0}) {
        const T d = static_cast<T>(sign * magnitude);
        const MixtureLogs<T> logs = LogsOverMixture(d, static_cast<T>(beta), static_cast<T>(1 - beta));
        const Real x = d;
        const bool mirrored = share * std::expm1(x) > 1;
        const Real q_over_m = mirrored ? -x - std::log(share + rest * std::exp(-x)) : -std::log1p(share * std::expm1(x));
        const Real p_over_m = mirrored ? -std::log(share + rest * std::exp(-x)) : x + q_over_m;
        // One of them is exact relative to itself, the other relative to d, from which that one is subtracted.
        const Real q_size = mirrored ? std::abs(x) : std::abs(q_over_m);
        const Real p_size = mirrored ? std::abs(p_over_m) : std::max(std::abs(x), std::abs(q_over_m));
        worst = std::max(worst, static_cast<double>(std::abs(logs.log_q_over_m - q_over_m) / q_size));
        worst = std::max(worst, static_cast<double>(std::abs(logs.log_p_over_m - p_over_m) / p_size));
      }
    }
  }
  EXPECT_LE(worst, 8 * kUnit<T>);
}

// x + e^-x - 1.
Real Excess(Real x) {
  if (std::abs(x) > 0.05L) return x + std::expm1(-x);
  Real sum = 0, term = x * x / 2;
  for (int n = 3; n < 16; ++n) {
    sum += term;
    term *= -x / n;
  }
  return sum;
}

// Each column's share of the loss, relative to itself, and its gradient, relative to q |slope|, for probabilities of any size.
template <typename T, DivergenceForm kForm>
void CheckTerms(double beta) {
  const Real b = beta, rest = 1 - b;
  double worst_loss = 0, worst_slope = 0;
  for (const double log_q : {-0.001, -2.0, -12.0, -40.0}) {
    for (const double magnitude : Magnitudes(30)) {
      for (const double sign : {-1.0, 1.0}) {
        ColumnLogs<T> logs;
        logs.log_q = static_cast<T>(log_q);
        logs.d = static_cast<T>(sign * magnitude);
        logs.log_p = logs.log_q + logs.d;
        const Real d = logs.d, q = std::exp(static_cast<Real>(logs.log_q)), p = q * std::exp(d);
        Real loss, slope;
        if (kForm == DivergenceForm::kForward) {
          loss = p * Excess(d);
          slope = -q * std::expm1(d);
        } else if (kForm == DivergenceForm::kReverse) {
          loss = q * Excess(-d);
          slope = q * -d;
        } else {
          const Real r = -std::log1p(b * std::expm1(d)), s = d + r;
          loss = b * p * Excess(s) + rest * q * Excess(r);
          slope = q * r;
        }
        const ColumnTerms<T> terms = DivergenceTerms<T, kForm>(logs, static_cast<T>(beta), static_cast<T>(1 - beta), T(0));
        EXPECT_GE(terms.loss, 0);
        if (loss < std::numeric_limits<T>::min() || std::abs(slope) < std::numeric_limits<T>::min()) continue;
        // The rounding of log_p is d's size times a unit; below this the loss is of second order and log_p does not matter.
        const Real spread = 1 + std::abs(static_cast<Real>(logs.log_p));
        worst_loss = std::max(worst_loss, static_cast<double>(std::abs(terms.loss - loss) / (spread * loss)));
        worst_slope = std::max(worst_slope, static_cast<double>(std::abs(terms.slope - slope) / (spread * std::abs(slope))));
        const T mean = T(0.25);
        const T gradient = DivergenceGradient<T, kForm>(logs, static_cast<T>(beta), static_cast<T>(1 - beta), T(0), mean);
        const Real expected = kForm == DivergenceForm::kForward ? slope : slope - q * 0.25L;
        const Real size = kForm == DivergenceForm::kForward ? std::abs(slope) : std::abs(slope) + q * 0.25L;
        EXPECT_LE(std::abs(gradient - expected), 10 * kUnit<T> * spread * size)
            << "beta " << beta << " d " << d << " log q " << log_q;
      }
    }
  }
  // Behind the series' end a term of second order is a difference of terms of order 0.
  const double limit = ExcessLimit(T(0));
  EXPECT_LE(worst_loss, 6 / (limit * limit) * kUnit<T>) << "beta " << beta;
  EXPECT_LE(worst_slope, 10 * kUnit<T>) << "beta " << beta;
}

TYPED_TEST(RowMathTest, TermsOfADivergence) {
  using T = TypeParam;
  CheckTerms<T, DivergenceForm::kForward>(0);
  CheckTerms<T, DivergenceForm::kReverse>(1);
  for (const double beta : {1e-6, 0.1, 0.5, 0.9, 0.999}) CheckTerms<T, DivergenceForm::kMixture>(beta);
}

// Columns that a bias of -infinity rules out on one side or both.
TYPED_TEST(RowMathTest, TermsOfImpossibleColumns) {
  using T = TypeParam;
  const T none = static_cast<T>(-kInfinity), likely = T(-0.5), all = static_cast<T>(kInfinity);
  const ColumnLogs<T> both = {none, none, static_cast<T>(kRowNan)};
  const ColumnLogs<T> no_student = {likely, none, all};
  const ColumnLogs<T> no_teacher = {none, likely, none};
  const T half = T(0.5), zero = T(0), one = T(1);
  const auto mixture = [&](const ColumnLogs<T>& logs) {
    return DivergenceTerms<T, DivergenceForm::kMixture>(logs, half, half, zero);
  };
  const auto forward = [&](const ColumnLogs<T>& logs) {
    return DivergenceTerms<T, DivergenceForm::kForward>(logs, zero, one, zero);
  };
  const auto reverse = [&](const ColumnLogs<T>& logs) {
    return DivergenceTerms<T, DivergenceForm::kReverse>(logs, one, zero, zero);
  };
  for (const auto& terms : {mixture(both), forward(both), reverse(both)}) {
    EXPECT_EQ(terms.loss, 0);
    EXPECT_EQ(terms.slope, 0);
  }
  const double p = std::exp(-0.5);
  // Half of p log(p / (p / 2)), the other side's share being 0 log 0.
  EXPECT_NEAR(mixture(no_student).loss, half * p * std::log(2.0), 1e-6);
  EXPECT_EQ(mixture(no_student).slope, 0);
  EXPECT_NEAR(mixture(no_teacher).loss, half * p * std::log(2.0), 1e-6);
  EXPECT_NEAR(mixture(no_teacher).slope, p * std::log(2.0), 1e-6);
  EXPECT_EQ(forward(no_student).loss, all);
  EXPECT_NEAR(forward(no_student).slope, -p, 1e-6);
  EXPECT_NEAR(forward(no_teacher).loss, p, 1e-6);
  EXPECT_NEAR(forward(no_teacher).slope, p, 1e-6);
  EXPECT_EQ(reverse(no_teacher).loss, all);
  EXPECT_NEAR(reverse(no_student).loss, p, 1e-6);
}

TEST(RowMathSplitTest, ASplitNumberIsSubtractedExactly) {
  const double lse = 27.123456789012345;
  const Split<float> split = MakeSplit<float>(lse);
  const float logit = 27.0f;
  EXPECT_NEAR(Minus(logit, split), 27.0 - lse, 1e-8);
  EXPECT_EQ(MakeSplit<float>(-kInfinity).low, 0);
  EXPECT_TRUE(std::isnan(MakeSplit<float>(kRowNan).high));
}

TEST(RowMathScaleTest, TheLargestElementIsWellInsideHalfPrecision) {
  for (const double bound : {1e-30, 1e-9, 0.3, 0.5, 1.0, 7.0, 1e9}) {
    const double scale = MatrixScale(bound);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5) << bound;
    if (bound > 1e-25) {
      EXPECT_GE(scale * bound, 4096) << bound;
    }
    EXPECT_LT(scale * bound, 8192) << bound;
  }
  EXPECT_EQ(MatrixScale(0), 1);
  EXPECT_EQ(MatrixScale(kInfinity), 1);
  EXPECT_EQ(MatrixScale(kRowNan), 1);
  EXPECT_EQ(MatrixScale(1e-300), std::ldexp(1.0, 100));
}

}  // namespace
}  // namespace headwater::cuda::row_math
