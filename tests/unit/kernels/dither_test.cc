// The draws of a dithered gradient: pinned values, uniformity, independence of neighbours; and the decision that they make.
#include "kernels/core/loss/dither.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "gtest/gtest.h"

namespace headwater {
namespace {

constexpr int64_t kRows = 512;
constexpr int64_t kColumns = 4096;
constexpr uint64_t kSeed = 7;
// Normal deviates: one in 1e9 is beyond it.
constexpr double kSixSigma = 6;

// The 47 bits of a draw and its tail, without the last 15.
uint32_t Bits(DitherKey key, uint32_t column) {
  return DitherDraw(key, column) << 16 | static_cast<uint32_t>(DitherTail(key, column)) >> 15;
}

std::vector<uint32_t> Draws(uint64_t seed) {
  std::vector<uint32_t> draws;
  for (int64_t row = 0; row < kRows; ++row) {
    const DitherKey key = MakeDitherKey(seed, row);
    for (int64_t column = 0; column < kColumns; ++column) draws.push_back(Bits(key, static_cast<uint32_t>(column)));
  }
  return draws;
}

// (chi^2 - degrees of freedom) / its standard deviation, for equally likely cells.
double ChiSquareDeviation(const std::vector<int64_t>& counts) {
  double total = 0, chi = 0;
  for (const int64_t count : counts) total += static_cast<double>(count);
  const double expected = total / static_cast<double>(counts.size());
  for (const int64_t count : counts)
    chi += (static_cast<double>(count) - expected) * (static_cast<double>(count) - expected) / expected;
  const double degrees = static_cast<double>(counts.size() - 1);
  return (chi - degrees) / std::sqrt(2 * degrees);
}

// Other implementations of the hash must give these.
TEST(DitherBits, HaveThePinnedValues) {
  EXPECT_EQ(DitherBits(MakeDitherKey(0, 0), 0), 0x2F69A059u);
  EXPECT_EQ(DitherBits(MakeDitherKey(1, 0), 0), 0x32422B6Eu);
  EXPECT_EQ(DitherBits(MakeDitherKey(0, 1), 0), 0x27AAF2D7u);
  EXPECT_EQ(DitherBits(MakeDitherKey(0, 0), 1), 0xE0BF45E8u);
  EXPECT_EQ(DitherBits(MakeDitherKey(0x0123456789ABCDEFu, 4095), 128255), 0x67743F7Au);
}

TEST(DitherDraw, IsHalfOfWhatAPairOfColumnsShares) {
  const DitherKey key = MakeDitherKey(0, 0);
  EXPECT_EQ(DitherDraw(key, 0), 0xA059u);
  EXPECT_EQ(DitherDraw(key, 1), 0x2F69u);
  EXPECT_EQ(DitherDraw(key, 2), 0x45E8u);
  EXPECT_EQ(DitherDraw(key, 3), 0xE0BFu);
}

TEST(DitherDraw, IsUniformInEveryByte) {
  for (int shift = 0; shift < 32; shift += 8) {
    std::vector<int64_t> counts(256);
    for (const uint32_t draw : Draws(kSeed)) ++counts[draw >> shift & 255u];
    EXPECT_LT(std::abs(ChiSquareDeviation(counts)), kSixSigma) << "bits from " << shift << " on";
  }
}

// Where few entries survive, it is the smallest draws that decide.
TEST(DitherDraw, SmallDrawsAreSpreadOverRowsAndColumns) {
  std::vector<int64_t> by_row(kRows), by_column(kColumns);
  const std::vector<uint32_t> draws = Draws(kSeed);
  for (size_t i = 0; i < draws.size(); ++i) {
    if (draws[i] >= 1u << 26) continue;
    ++by_row[i / kColumns];
    ++by_column[i % kColumns];
  }
  EXPECT_LT(std::abs(ChiSquareDeviation(by_row)), kSixSigma);
  EXPECT_LT(std::abs(ChiSquareDeviation(by_column)), kSixSigma);
}

// Pairs of neighbours in each coordinate: 16 x 16 cells of their leading bits.
TEST(DitherDraw, NeighboursAreIndependent) {
  const std::vector<uint32_t> draws = Draws(kSeed), next_seed = Draws(kSeed + 1), next_bit = Draws(kSeed | uint64_t{1} << 63);
  const auto expect_independent = [&](const char* what, const std::vector<uint32_t>& other, int64_t rows, int64_t columns) {
    std::vector<int64_t> counts(256);
    for (int64_t row = 0; row + rows < kRows; ++row) {
      for (int64_t column = 0; column + columns < kColumns; ++column) {
        const uint32_t a = draws[static_cast<size_t>(row * kColumns + column)];
        const uint32_t b = other[static_cast<size_t>((row + rows) * kColumns + column + columns)];
        ++counts[(a >> 28) * 16 + (b >> 28)];
      }
    }
    EXPECT_LT(std::abs(ChiSquareDeviation(counts)), kSixSigma) << what;
  };
  expect_independent("columns", draws, 0, 1);
  expect_independent("every second column", draws, 0, 2);
  expect_independent("columns of neighbouring tiles", draws, 0, 256);
  expect_independent("rows", draws, 1, 0);
  expect_independent("rows of a tile's halves", draws, 8, 0);
  expect_independent("diagonal", draws, 1, 1);
  expect_independent("seeds", next_seed, 0, 0);
  expect_independent("seeds that differ in one bit", next_bit, 0, 0);
}

// Entries that the first half does not decide.
TEST(DitherDraw, AndTailAreIndependent) {
  const std::vector<uint32_t> draws = Draws(kSeed);
  std::vector<int64_t> counts(256);
  for (const uint32_t draw : draws) ++counts[(draw >> 28) * 16 + (draw >> 12 & 15u)];
  EXPECT_LT(std::abs(ChiSquareDeviation(counts)), kSixSigma);
}

TEST(DitherSurvives, ComparesDrawAndTailWithTheRatio) {
  for (int64_t row = 0; row < 64; ++row) {
    const DitherKey key = MakeDitherKey(kSeed, row);
    for (uint32_t column = 0; column < 64; ++column) {
      const int64_t bits = int64_t{DitherDraw(key, column)} << 31 | DitherTail(key, column);
      // Ratios on both sides of the bits, of 24 bits as a ratio has, and far away ones.
      const auto fraction = static_cast<float>(std::ldexp(static_cast<double>(bits), -47));
      for (const float ratio : {fraction, std::nextafter(fraction, 0.0f), std::nextafter(fraction, 1.0f), 0x1p-149f, 0x1p-47f,
                                0x1.fep-17f, 0.1f, 0.5f, 0x1.fffffep-1f}) {
        if (ratio >= 1) continue;
        const auto bound = static_cast<int64_t>(std::floor(std::ldexp(static_cast<double>(ratio), 47)));
        EXPECT_EQ(DitherSurvives(ratio, key, column), bits < bound) << ratio << " " << bits;
      }
    }
  }
  EXPECT_FALSE(DitherSurvives(0.0f, MakeDitherKey(0, 0), 0));
}

}  // namespace
}  // namespace headwater
