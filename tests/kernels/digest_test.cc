// The digest against values that a separate implementation of its specification (digest.h), in Python, gave; and its algebra.
#include "headwater/kernels/digest.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace headwater {
namespace {

std::vector<uint8_t> Bytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(i * 131 + 7);
  return bytes;
}

std::string Hex(const DigestBuilder& builder, const std::string& header) { return DigestToHex(builder.Finish(header)); }

std::string LongHeader() {
  std::string header;
  for (int i = 0; i < 2000; ++i) header += "abc";
  return header;
}

TEST(Digest, MatchesTheSpecification) {
  EXPECT_EQ(Hex(DigestBuilder(), ""), "0607a2780f54c78486b8956094827f79");
  EXPECT_EQ(Hex(DigestBuilder(), "headwater"), "73f5c99eb31e86a6d9eeede513de5e36");
  // Rows of two blocks, the second partial, beside rows of another stream; a header of two blocks.
  DigestBuilder builder;
  builder.AddRows(0, 0, 3, 5000, Bytes(15000).data());
  builder.AddRows(1, 4, 2, 10, Bytes(20).data());
  EXPECT_EQ(Hex(builder, LongHeader()), "3cdedb98fa00552ff408d6feef17945b");
}

// Chunks, order of arrival and who hashed them do not matter.
TEST(Digest, IsIndependentOfArrival) {
  const std::vector<uint8_t> bytes = Bytes(7 * 4100);
  DigestBuilder whole;
  whole.AddRows(0, 0, 7, 4100, bytes.data());
  DigestBuilder late;
  late.AddRows(0, 5, 2, 4100, bytes.data() + 5 * 4100);
  DigestBuilder parts;
  parts.AddRows(0, 1, 4, 4100, bytes.data() + 4100);
  parts.AddRows(0, 0, 1, 4100, bytes.data());
  parts.AddRows(0, 3, 0, 4100, nullptr);
  parts.Merge(late);
  EXPECT_EQ(Hex(parts, "h"), Hex(whole, "h"));
}

// Rows in unaligned memory hash as the same rows elsewhere.
TEST(Digest, AcceptsUnalignedRows) {
  const std::vector<uint8_t> bytes = Bytes(3 * 40);
  std::vector<uint8_t> shifted(1, 0);
  shifted.insert(shifted.end(), bytes.begin(), bytes.end());
  DigestBuilder aligned, unaligned;
  aligned.AddRows(0, 0, 3, 40, bytes.data());
  unaligned.AddRows(0, 0, 3, 40, shifted.data() + 1);
  EXPECT_EQ(Hex(aligned, ""), Hex(unaligned, ""));
}

// Every change shows: any bit of a row, a row's place, its stream, equal rows swapped for others, the header, zeros at an end.
TEST(Digest, SeesEveryChange) {
  std::set<std::string> seen;
  const auto add = [&](const DigestBuilder& builder, const std::string& header) {
    EXPECT_TRUE(seen.insert(Hex(builder, header)).second) << header;
  };
  std::vector<uint8_t> bytes = Bytes(64);
  const auto rows = [&](int32_t stream, int64_t row_start, int64_t row_count, int64_t row_bytes) {
    DigestBuilder builder;
    builder.AddRows(stream, row_start, row_count, row_bytes, bytes.data());
    return builder;
  };
  add(rows(0, 0, 2, 32), "");
  add(rows(0, 0, 1, 64), "");
  add(rows(0, 0, 4, 16), "");
  add(rows(0, 1, 2, 32), "");
  add(rows(1, 0, 2, 32), "");
  add(rows(0, 0, 2, 32), "a");
  add(rows(0, 0, 2, 32), std::string("a\0", 2));
  add(rows(0, 0, 2, 31), "");
  for (size_t bit = 0; bit < 64 * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    add(rows(0, 0, 2, 32), "");
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
  }
  std::swap_ranges(bytes.begin(), bytes.begin() + 32, bytes.begin() + 32);
  add(rows(0, 0, 2, 32), "");
  std::fill(bytes.begin(), bytes.end(), static_cast<uint8_t>(0));
  add(rows(0, 0, 1, 32), "");
  add(rows(0, 0, 2, 32), "");
}

}  // namespace
}  // namespace headwater
