// The hand-made encoding and decoding of messages with rows, against protobuf's; the bookkeeping of rows against a plain one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "client/core/rows/transfer/chunk_wire.h"
#include "client/core/rows/transfer/row_queue.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::e2e {
namespace {

using namespace headwater::client::internal;

// A message cut at the given places.
grpc::ByteBuffer Sliced(const std::string& bytes, const std::vector<size_t>& cuts) {
  std::vector<grpc::Slice> slices;
  size_t from = 0;
  for (const size_t cut : cuts) {
    slices.emplace_back(bytes.substr(from, cut - from));
    from = cut;
  }
  slices.emplace_back(bytes.substr(from));
  return {slices.data(), slices.size()};
}

std::string RowsOf(const DecodedResponse& response) {
  std::string rows(static_cast<size_t>(response.chunk.data_bytes), '\0');
  v1::CopySpans(response.chunk.data, reinterpret_cast<uint8_t*>(rows.data()));
  return rows;
}

// Tag and varint, or tag, length and bytes.
std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 128; value >>= 7) out.push_back(static_cast<char>(value | 128));
  out.push_back(static_cast<char>(value));
  return out;
}
std::string VarintField(int field, uint64_t value) { return Varint(static_cast<uint64_t>(field) << 3) + Varint(value); }
std::string BytesField(int field, const std::string& bytes) {
  return Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(bytes.size()) + bytes;
}

TEST(ChunkWire, ProtobufsMessagesAreReadWhereverTheyAreCut) {
  v1::ComputeLossResponse response;
  response.mutable_chunk()->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
  response.mutable_chunk()->set_row_start(300);
  response.mutable_chunk()->set_row_count(5);
  response.mutable_chunk()->set_data("the rows of a chunk");
  const std::string bytes = response.SerializeAsString();
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      const grpc::ByteBuffer message = Sliced(bytes, {first, second});
      const absl::StatusOr<DecodedResponse> decoded = DecodeResponse(message);
      ASSERT_TRUE(decoded.ok()) << first << " " << second;
      EXPECT_TRUE(decoded->has_chunk);
      EXPECT_EQ(decoded->chunk.role, v1::CHUNK_ROLE_GRAD_HIDDEN);
      EXPECT_EQ(decoded->chunk.row_start, 300);
      EXPECT_EQ(decoded->chunk.row_count, 5);
      EXPECT_EQ(RowsOf(*decoded), "the rows of a chunk");
    }
  }
  v1::ComputeLossResponse summary;
  summary.mutable_summary()->set_digest("0123456789abcdef");
  const std::string summary_bytes = summary.SerializeAsString();
  for (size_t cut = 0; cut <= summary_bytes.size(); ++cut) {
    const grpc::ByteBuffer message = Sliced(summary_bytes, {cut});
    const absl::StatusOr<DecodedResponse> decoded = DecodeResponse(message);
    ASSERT_TRUE(decoded.ok());
    ASSERT_TRUE(decoded->summary.has_value());
    EXPECT_EQ(*decoded->summary, summary.summary().SerializeAsString());
  }
}

TEST(ChunkWire, OfSeveralAlternativesTheLastOneCounts) {
  const std::string chunk = BytesField(1, VarintField(4, 1) + BytesField(15, "row"));
  const std::string summary = BytesField(2, VarintField(4, 1));
  EXPECT_TRUE(DecodeResponse(Sliced(chunk + summary, {}))->summary.has_value());
  EXPECT_FALSE(DecodeResponse(Sliced(chunk + summary, {}))->has_chunk);
  EXPECT_TRUE(DecodeResponse(Sliced(summary + chunk, {}))->has_chunk);
  EXPECT_FALSE(DecodeResponse(Sliced(summary + chunk, {}))->summary.has_value());
  const std::string merged = BytesField(1, VarintField(3, 5) + BytesField(15, "old")) + BytesField(1, VarintField(4, 2));
  const absl::StatusOr<DecodedResponse> decoded = DecodeResponse(Sliced(merged, {}));
  EXPECT_EQ(decoded->chunk.row_start, 5);
  EXPECT_EQ(decoded->chunk.row_count, 2);
  EXPECT_FALSE(DecodeResponse(Sliced("", {}))->has_chunk);
}

TEST(ChunkWire, BrokenBytesAreErrors) {
  v1::ComputeLossResponse response;
  response.mutable_chunk()->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
  response.mutable_chunk()->set_row_count(1);
  response.mutable_chunk()->set_data("abcdef");
  const std::string bytes = response.SerializeAsString();
  for (size_t length = 1; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeResponse(Sliced(bytes.substr(0, length), {})).ok()) << length;
  }
  const std::string longest(9, '\xff');
  for (const std::string& broken : {std::string("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "\x0a" + longest + "\xff\x01",
                                    std::string("\x00\x01", 2), std::string("\x0b"), std::string("\x0c"), std::string("\x0e"),
                                    BytesField(1,
                                               "\x7a\x05"
                                               "abc"),
                                    BytesField(1, std::string("\x08")), Varint(9 << 3 | 3) + Varint(8 << 3 | 4)}) {
    EXPECT_FALSE(DecodeResponse(Sliced(broken, {})).ok());
  }
  EXPECT_FALSE(DecodeResponse(Sliced(std::string(1000, '\x0b'), {})).ok()) << "groups without end";
}

TEST(RowQueue, FirstRowsOfEveryTensorComeFirstAndEachOnce) {
  const std::vector<unsigned char> memory(100 * 8);
  RowQueue queue(
      {{v1::CHUNK_ROLE_HIDDEN, 0, memory.data(), 100, 8, 0}, {v1::CHUNK_ROLE_TEACHER_HIDDEN, 1, memory.data(), 50, 4, 30}});
  std::vector<int64_t> next = {0, 0};
  bool last = false;
  while (const auto chunk = queue.Next(40)) {
    EXPECT_FALSE(last);
    last = chunk->last;
    const size_t source = chunk->header.role == v1::CHUNK_ROLE_HIDDEN ? 0 : 1;
    EXPECT_EQ(chunk->header.row_start, next[source]);
    EXPECT_EQ(chunk->data, memory.data() + next[source] * (source == 0 ? 8 : 4));
    EXPECT_LE(chunk->header.data_bytes, 40);
    // In rows of the micro-batch, no tensor is ahead of another by more than a chunk.
    if (source == 1 && next[0] < 100) {
      EXPECT_LE(30 + next[1], next[0]);
    }
    if (source == 0 && next[1] < 50) {
      EXPECT_LE(next[0], 30 + next[1]);
    }
    next[source] += chunk->header.row_count;
  }
  EXPECT_TRUE(last);
  EXPECT_THAT(next, testing::ElementsAre(100, 50));
}

TEST(RowQueue, RowLongerThanAChunkIsAChunk) {
  const std::vector<unsigned char> memory(30);
  RowQueue queue({{v1::CHUNK_ROLE_HIDDEN, 0, memory.data(), 3, 10, 0}});
  EXPECT_EQ(queue.Next(1)->header.data_bytes, 10);
  EXPECT_EQ(queue.Next(1)->header.data_bytes, 10);
  EXPECT_TRUE(queue.Next(1)->last);
  EXPECT_FALSE(queue.Next(1).has_value());
  EXPECT_FALSE(RowQueue({}).Next(1).has_value());
}

TEST(RowCoverage, TakesEveryRowOnce) {
  std::mt19937 generator(3);
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = 1 + generator() % 60;
    RowCoverage coverage(rows);
    std::vector<bool> taken(static_cast<size_t>(rows));
    for (int i = 0; i < 100; ++i) {
      const int64_t start = static_cast<int64_t>(generator() % 64) - 2;
      const int64_t count = static_cast<int64_t>(generator() % 8) - 1;
      bool free = start >= 0 && count >= 1 && start + count <= rows;
      for (int64_t row = start; free && row < start + count; ++row) free = !taken[static_cast<size_t>(row)];
      ASSERT_EQ(coverage.Take(start, count), free) << start << " " << count;
      for (int64_t row = start; free && row < start + count; ++row) taken[static_cast<size_t>(row)] = true;
      ASSERT_EQ(coverage.taken(), std::count(taken.begin(), taken.end(), true));
    }
    EXPECT_EQ(coverage.complete(), std::count(taken.begin(), taken.end(), true) == rows);
  }
  EXPECT_FALSE(RowCoverage(5).Take(4, INT64_MAX));
  EXPECT_FALSE(RowCoverage(5).Take(INT64_MAX, 1));
  EXPECT_FALSE(RowCoverage(0).Take(0, 1));
  EXPECT_TRUE(RowCoverage(0).complete());
}

}  // namespace
}  // namespace headwater::e2e
