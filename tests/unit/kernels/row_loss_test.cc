// A row's loss out of its statistics where formulas lose digits or meet numbers that are not finite. tests/kernels compares every
// option with fp64.
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
