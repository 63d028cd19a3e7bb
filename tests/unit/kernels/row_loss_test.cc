// A row's loss out of its statistics, against the textbook formulas in long double.
#include "kernels/core/loss/row_loss.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/loss/cross_entropy_term.h"

namespace headwater {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Statistics of columns [start, end) of a row.
RowStats StatsOf(const std::vector<double>& z, int64_t target, size_t start, size_t end) {
  RowStats stats;
  for (size_t v = start; v < end; ++v) {
    if (z[v] > stats.best) {
      stats.best = z[v];
      stats.best_column = static_cast<double>(v);
    }
    if (static_cast<int64_t>(v) == target) {
      stats.target_logit = z[v];
    } else {
      MergeStats(PieceStats{z[v], z[v] == -kInfinity ? 0.0 : 1.0, 0, z[v], 0, 0, z[v]}, &stats.others);
    }
  }
  return stats;
}

void ExpectClose(double actual, long double expected, double relative) {
  EXPECT_LE(std::abs(static_cast<long double>(actual) - expected), relative * std::abs(expected));
}

TEST(RowLoss, MatchesTheTextbook) {
  const std::vector<double> z = {0.3, -2, 7, 1.5, 6.5};
  CrossEntropyTerm term = MakeCrossEntropyTerm(CrossEntropySpec(), 5);
  term.z_loss = 0.01;
  term.label_smoothing = 0.2;
  long double sum = 0;
  for (const double value : z) sum += std::exp(static_cast<long double>(value));
  const long double lse = std::log(sum);
  for (int64_t target = 0; target < 5; ++target) {
    // The statistics of pieces, merged, are those of the row.
    RowStats stats = StatsOf(z, target, 0, 2);
    MergeStats(StatsOf(z, target, 2, 3), &stats);
    MergeStats(StatsOf(z, target, 3, 5), &stats);
    EXPECT_EQ(stats.best_column, 2);
    const RowLoss row = FinishRow(stats, target, term);
    long double hard = 0.8L * (lse - z[static_cast<size_t>(target)]);
    long double entropy = 0;
    for (const double value : z) {
      hard += 0.04L * (lse - value);
      entropy += std::exp(value - lse) * (lse - value);
    }
    ExpectClose(row.hard, hard, 1e-14);
    ExpectClose(row.lse, lse, 1e-15);
    ExpectClose(row.z_loss, 0.01L * lse * lse, 1e-14);
    ExpectClose(row.target_log_probability, z[static_cast<size_t>(target)] - lse, 1e-13);
    ExpectClose(row.entropy, entropy, 1e-13);
    ExpectClose(row.mean_logit, 13.3L / 5, 1e-14);
    long double squares = 0;
    for (const double value : z) squares += std::exp(2 * (value - lse));
    ExpectClose(row.log_sum_sq_probs, std::log(squares), 1e-13);
    const long double p_y = std::exp(z[static_cast<size_t>(target)] - lse);
    ExpectClose(row.target_gradient, (1 + 0.02L * lse) * p_y - 0.8L - 0.04L, 1e-13);
    ExpectClose(row.probability_factor * std::exp(-row.max), (1 + 0.02L * lse) / sum, 1e-13);
    // The objective's gradient, at the target and at any other column.
    const RowGradient gradient = GradientOf(row, {0.5, -2, 3});
    const auto of_entropy = [&](double value) { return -std::exp(value - lse) * (value - lse + entropy); };
    ExpectClose(gradient.target, 0.5 * row.target_gradient - 2 * of_entropy(z[static_cast<size_t>(target)]) + 3 * p_y, 1e-13);
    const double other = z[target == 1 ? 0 : 1];
    const long double p = std::exp(other - lse);
    const long double e = std::exp(static_cast<long double>(other) - row.max);
    ExpectClose(e * (gradient.probability_factor + gradient.distance_factor * (row.max - other)) - gradient.class_factor,
                0.5L * ((1 + 0.02L * lse) * p - 0.04L) - 2 * of_entropy(other) + 3 * p, 1e-13);
  }
}

TEST(RowLoss, TokenScalingMultipliesWhatIsTheLosss) {
  const std::vector<double> z = {0.3, -2, 7, 1.5, 6.5};
  CrossEntropyTerm term = MakeCrossEntropyTerm(CrossEntropySpec(), 5);
  term.z_loss = 0.01;
  term.label_smoothing = 0.2;
  const RowLoss plain = FinishRow(StatsOf(z, 4, 0, 5), 4, term);
  term.token_scaling = true;
  const RowLoss scaled = FinishRow(StatsOf(z, 4, 0, 5), 4, term);
  const long double p = plain.target_probability;
  ExpectClose(scaled.hard, p * plain.hard, 1e-15);
  ExpectClose(scaled.z_loss, p * plain.z_loss, 1e-15);
  ExpectClose(scaled.probability_factor, p * plain.probability_factor, 1e-15);
  ExpectClose(scaled.class_factor, p * plain.class_factor, 1e-15);
  ExpectClose(scaled.target_gradient, p * plain.target_gradient, 1e-15);
  EXPECT_EQ(scaled.entropy, plain.entropy);
  EXPECT_EQ(scaled.inverse_sum, plain.inverse_sum);
}

// Whichever column the target is, and in whatever pieces the columns come.
TEST(RowLoss, ConfidentRowsKeepTheirDigits) {
  const CrossEntropyTerm term = MakeCrossEntropyTerm(CrossEntropySpec(), 3);
  for (const double margin : {1.0, 20.0, 40.0, 300.0, 700.0}) {
    for (const int64_t target : {0, 1, 2}) {
      RowStats stats = StatsOf({0, margin, 0.5}, target, 2, 3);
      MergeStats(StatsOf({0, margin, 0.5}, target, 0, 2), &stats);
      const RowLoss row = FinishRow(stats, target, term);
      const long double small = std::exp(-static_cast<long double>(margin)), large = std::exp(0.5L - margin);
      const long double rest = small + large;
      const long double distance = margin * small + (margin - 0.5L) * large;
      ExpectClose(row.entropy, std::log1p(rest) + distance / (1 + rest), 1e-14);
      ExpectClose(row.log_sum_sq_probs, std::log1p(small * small + large * large) - 2 * std::log1p(rest), 1e-14);
      if (target != 1) continue;
      ExpectClose(row.hard, std::log1p(rest), 1e-14);
      ExpectClose(row.target_gradient, -rest / (1 + rest), 1e-14);
      ExpectClose(row.target_entropy_gradient, -distance / ((1 + rest) * (1 + rest)), 1e-13);
    }
  }
}

TEST(RowLoss, RowsOfOneColumnLoseNothing) {
  const RowLoss row = FinishRow(StatsOf({4}, 0, 0, 1), 0, MakeCrossEntropyTerm(CrossEntropySpec(), 1));
  EXPECT_EQ(row.hard, 0);
  EXPECT_EQ(row.lse, 4);
  EXPECT_EQ(row.entropy, 0);
  EXPECT_EQ(row.target_gradient, 0);
}

TEST(RowLoss, ColumnsRuledOutTakeNoPart) {
  const CrossEntropyTerm term = MakeCrossEntropyTerm(CrossEntropySpec(), 3);
  const RowLoss row = FinishRow(StatsOf({1, -kInfinity, 2}, 0, 0, 3), 0, term);
  ExpectClose(row.hard, std::log1p(std::exp(1.0L)), 1e-14);
  // A target that is ruled out has an infinite loss, and the others' gradient stays finite.
  const RowLoss impossible = FinishRow(StatsOf({1, -kInfinity, 2}, 1, 0, 3), 1, term);
  EXPECT_EQ(impossible.hard, kInfinity);
  EXPECT_EQ(impossible.target_gradient, -1);
  EXPECT_TRUE(std::isfinite(impossible.probability_factor));
}

TEST(RowLoss, NanNeverDisappears) {
  const CrossEntropyTerm term = MakeCrossEntropyTerm(CrossEntropySpec(), 3);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double target_logit : {-1e300, -800.0, 0.0, 800.0, 1e300, nan, kInfinity}) {
    RowStats stats = StatsOf({target_logit, 1, 2}, 0, 0, 3);
    if (std::isfinite(target_logit)) stats.others.sum = nan;
    EXPECT_TRUE(std::isnan(FinishRow(stats, 0, term).hard)) << target_logit;
    EXPECT_TRUE(std::isnan(FinishRow(stats, 0, term).lse)) << target_logit;
    EXPECT_TRUE(std::isnan(FinishRow(stats, 0, term).probability_factor)) << target_logit;
  }
  // Not by merging with larger or smaller pieces either.
  for (const double max : {-800.0, 0.0, 800.0}) {
    PieceStats stats = {0, 1, 0, 0};
    MergeStats(PieceStats{max, nan, 0, 0}, &stats);
    EXPECT_TRUE(std::isnan(stats.sum)) << max;
  }
}

TEST(RowLoss, SoftcapDerivativeDoesNotCancel) {
  EXPECT_EQ(SoftcapDerivative(5, 0), 1);
  for (const double u : {0.0, 1e-9, 0.5, 3.0, 20.0, 300.0}) {
    const long double cosine = std::cosh(static_cast<long double>(u));
    ExpectClose(SoftcapDerivative(30 * u, 30), 1 / (cosine * cosine), 1e-13);
    ExpectClose(SoftcapDerivative(-30 * u, 30), 1 / (cosine * cosine), 1e-13);
  }
}

}  // namespace
}  // namespace headwater
