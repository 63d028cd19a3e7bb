// The draws of a dithered gradient: pinned values, and the decision that they make.
#include "kernels/core/loss/dither.h"

#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"

namespace headwater {
namespace {

// Other implementations of the hash must give these. Chi-square tests over 512 rows of 4096 columns found its draws uniform, and
// independent between neighbouring columns, rows and seeds. Another hash needs these tests again.
TEST(DitherBits, HaveThePinnedValues) {
  EXPECT_EQ(DitherBits(MakeDitherKey(0, 0), 0), 0x2F69A059u);
  EXPECT_EQ(DitherBits(MakeDitherKey(1, 0), 0), 0x32422B6Eu);
  EXPECT_EQ(DitherBits(MakeDitherKey(0, 1), 0), 0x27AAF2D7u);
  EXPECT_EQ(DitherBits(MakeDitherKey(0, 0), 1), 0xE0BF45E8u);
  EXPECT_EQ(DitherBits(MakeDitherKey(0x0123456789ABCDEFu, 4095), 128255), 0x67743F7Au);
  EXPECT_EQ(DitherBits(MakeDitherKey(uint64_t{1} << 63, 0), 0), 0xBA15C577u);
  EXPECT_EQ(DitherBits(MakeDitherKey(0xFEDCBA9876543210u, (int64_t{1} << 40) + 3), INT32_MAX), 0x69804CDFu);
}

TEST(DitherDraw, IsHalfOfWhatAPairOfColumnsShares) {
  const DitherKey key = MakeDitherKey(0, 0);
  EXPECT_EQ(DitherDraw(key, 0), 0xA059u);
  EXPECT_EQ(DitherDraw(key, 1), 0x2F69u);
  EXPECT_EQ(DitherDraw(key, 2), 0x45E8u);
  EXPECT_EQ(DitherDraw(key, 3), 0xE0BFu);
}

TEST(DitherTail, HasBitsOfItsOwn) {
  EXPECT_EQ(DitherTail(MakeDitherKey(0, 0), 0), 0x6055F213);
  EXPECT_EQ(DitherTail(MakeDitherKey(0, 0), 1), 0x3E983332);
}

TEST(DitherSurvives, ComparesDrawAndTailWithTheRatio) {
  for (int64_t row = 0; row < 64; ++row) {
    const DitherKey key = MakeDitherKey(7, row);
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
