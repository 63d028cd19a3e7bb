// The hand-written parser of chunks against protobuf's own: on every kind of message, however it is cut into slices, and on bytes
// that are broken at random.
#include "server/service/request/chunk_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace headwater::service {
namespace {

// The bytes in slices that end at `cuts` (ascending); equal ones make empty slices.
std::vector<ByteSpan> Cut(const std::string& bytes, const std::vector<size_t>& cuts) {
  const auto* const data = reinterpret_cast<const uint8_t*>(bytes.data());
  std::vector<ByteSpan> slices;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    slices.emplace_back(data + begin, cut - begin);
    begin = cut;
  }
  slices.emplace_back(data + begin, bytes.size() - begin);
  return slices;
}

std::string DataOf(const ChunkView& chunk) {
  std::string data(static_cast<size_t>(chunk.data_bytes), '\0');
  v1::CopySpans(chunk.data, reinterpret_cast<uint8_t*>(data.data()));
  return data;
}

// What the parser says must be what protobuf says. Returns whether the parser took it.
bool ExpectAsProtobuf(const std::string& bytes, const std::vector<ByteSpan>& slices) {
  ChunkView chunk;
  const bool taken = ReadChunkMessage(slices, v1::ChunkField::kOfRequest, &chunk);
  if (!taken) return false;
  v1::ComputeLossRequest message;
  EXPECT_TRUE(message.ParseFromString(bytes));
  EXPECT_EQ(message.message_case(), v1::ComputeLossRequest::kChunk);
  const v1::RowChunk& expected = message.chunk();
  EXPECT_EQ(chunk.role, static_cast<int>(expected.role()));
  EXPECT_EQ(chunk.term_index, expected.term_index());
  EXPECT_EQ(chunk.row_start, expected.row_start());
  EXPECT_EQ(chunk.row_count, expected.row_count());
  EXPECT_EQ(chunk.data_bytes, static_cast<int64_t>(expected.data().size()));
  EXPECT_EQ(DataOf(chunk), expected.data());
  for (const ByteSpan& span : chunk.data) EXPECT_FALSE(span.empty());
  return true;
}

v1::ComputeLossRequest Chunk(int64_t row_start, int64_t row_count, const std::string& data) {
  v1::ComputeLossRequest message;
  message.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
  message.mutable_chunk()->set_row_start(row_start);
  message.mutable_chunk()->set_row_count(row_count);
  message.mutable_chunk()->set_data(data);
  return message;
}

void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

std::string Field(uint32_t number, uint64_t value) {
  std::string out;
  AppendVarint(number << 3, &out);
  AppendVarint(value, &out);
  return out;
}

std::string Field(uint32_t number, const std::string& value) {
  std::string out;
  AppendVarint(number << 3 | 2, &out);
  AppendVarint(value.size(), &out);
  return out + value;
}

TEST(ChunkParser, ReadsWhatProtobufWrites) {
  for (const int64_t start : {int64_t{0}, int64_t{1}, int64_t{300}, int64_t{1} << 40, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    v1::ComputeLossRequest message = Chunk(start, start, "some rows");
    message.mutable_chunk()->set_term_index(static_cast<int32_t>(start));
    const std::string bytes = message.SerializeAsString();
    EXPECT_TRUE(ExpectAsProtobuf(bytes, Cut(bytes, {}))) << start;
  }
  const std::string empty = Chunk(0, 0, "").SerializeAsString();
  EXPECT_TRUE(ExpectAsProtobuf(empty, Cut(empty, {})));
  v1::TransferRowsRequest stripe;
  *stripe.mutable_chunk() = Chunk(3, 4, "rows").chunk();
  const std::string bytes = stripe.SerializeAsString();
  EXPECT_TRUE(ExpectAsProtobuf(bytes, Cut(bytes, {})));
}

TEST(ChunkParser, DoesNotMindWhereSlicesEnd) {
  v1::ComputeLossRequest message = Chunk(1 << 20, 300, std::string(40, 'x'));
  message.mutable_chunk()->set_term_index(-1);  // ten bytes
  const std::string bytes = message.SerializeAsString();
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      ASSERT_TRUE(ExpectAsProtobuf(bytes, Cut(bytes, {first, second}))) << first << " " << second;
    }
  }
  std::vector<size_t> every;
  for (size_t i = 0; i < bytes.size(); ++i) every.push_back(i);
  EXPECT_TRUE(ExpectAsProtobuf(bytes, Cut(bytes, every)));
}

TEST(ChunkParser, KnowsTheRulesOfTheWire) {
  const std::string rows = "\1\2\3\4";
  const std::string plain = Field(1, 1) + Field(4, 2) + Field(15, rows);
  const struct {
    const char* what;
    std::string bytes;
    bool taken;
  } cases[] = {
      {"data first", Field(2, Field(15, rows) + Field(4, 2) + Field(1, 1)), true},
      {"the last value counts", Field(2, plain + Field(4, 7) + Field(15, "other") + Field(1, 2)), true},
      {"an empty value clears", Field(2, plain + Field(15, "")), true},
      {"two chunks are merged", Field(2, plain) + Field(2, Field(3, 9) + Field(15, "z")), true},
      {"unknown fields inside",
       Field(2, Field(77, 5) + plain + Field(78, "text") +
                    "\x49"
                    "12345678" +
                    "\x4d"
                    "1234"),
       true},
      {"unknown fields outside", Field(77, 5) + Field(2, plain) + Field(78, "text"), true},
      {"a known number of another type", Field(2, Field(1, "text") + Field(15, 3) + plain), true},
      {"the chunk's number of another type", Field(2, 5) + Field(2, plain), true},
      {"an enum that is not known", Field(2, Field(1, 1000) + Field(4, 2)), true},
      {"an int32 of more than 32 bits", Field(2, Field(2, (uint64_t{1} << 40) + 3)), true},
      {"a varint that is longer than it need be", Field(2, std::string("\x20\x82\x80\x00", 4)), true},
      {"an empty chunk", Field(2, ""), true},
      {"nothing", "", false},
      {"only unknown fields", Field(77, 5), false},
      {"a header", Field(1, ""), false},
      {"a header, then a chunk", Field(1, "") + Field(2, plain), false},
      {"a chunk, then a header", Field(2, plain) + Field(1, ""), false},
      {"a group", Field(2, plain) + "\x2b\x2c", false},
      {"a group inside", Field(2, plain + "\x2b\x2c"), false},
      {"field 0", Field(2, plain) + Field(0, 1), false},
      {"wire type 6", Field(2, plain) + "\x1e", false},
      {"the end of a group", Field(2, plain) + "\x0c", false},
      {"a length beyond the end", std::string("\x12\x05", 2) + Field(1, 1), false},
      {"an inner length beyond the chunk", Field(2, std::string("\x7a\x05", 2) + "abc") + Field(77, "abcdef"), false},
      {"a varint of eleven bytes", Field(2, std::string("\x20") + std::string(10, '\xff') + "\1"), false},
      {"a varint that does not end", Field(2, std::string("\x20\x80", 2)), false},
      {"a fixed64 that does not end",
       Field(2, std::string("\x49"
                            "1234567")),
       false},
      {"a length of 2^35", std::string("\x12\x80\x80\x80\x80\x80\x01", 7), false},
  };
  for (const auto& row : cases) {
    SCOPED_TRACE(row.what);
    EXPECT_EQ(ExpectAsProtobuf(row.bytes, Cut(row.bytes, {})), row.taken);
    std::vector<size_t> every;
    for (size_t i = 0; i < row.bytes.size(); ++i) every.push_back(i);
    EXPECT_EQ(ExpectAsProtobuf(row.bytes, Cut(row.bytes, every)), row.taken);
  }
}

TEST(ChunkParser, NeverReadsAnythingThatProtobufReadsDifferently) {
  std::mt19937 random(7);
  const auto up_to = [&](size_t most) { return std::uniform_int_distribution<size_t>(0, most)(random); };
  int64_t taken = 0;
  int64_t refused = 0;
  int64_t left_over = 0;  // chunks that protobuf's parser has to read: with a group, or a header beside them
  for (int round = 0; round < 60000; ++round) {
    // Fields of every kind in any order, then, mostly, some bytes changed, dropped or doubled.
    std::string chunk;
    for (size_t i = up_to(6); i > 0; --i) {
      const uint32_t number = static_cast<uint32_t>(std::vector<size_t>{1, 2, 3, 4, 15, 15, 9, 3000}[up_to(7)]);
      const bool text = number == 15 ? up_to(9) > 0 : up_to(9) == 0;
      chunk += text ? Field(number, std::string(up_to(20), static_cast<char>(up_to(255))))
                    : Field(number, std::uniform_int_distribution<uint64_t>()(random) >> up_to(63));
    }
    std::string bytes = up_to(3) == 0 ? Field(9, up_to(1000)) : "";
    bytes += Field(2, chunk);
    if (up_to(9) == 0) bytes += Field(2, Field(3, up_to(1000)));
    if (up_to(19) == 0) bytes += Field(1, "");
    for (size_t i = up_to(2); i > 0 && !bytes.empty(); --i) {
      const size_t at = up_to(bytes.size() - 1);
      const size_t kind = up_to(3);
      if (kind == 0) bytes[at] = static_cast<char>(up_to(255));
      if (kind == 1) bytes[at] = static_cast<char>(bytes[at] ^ (1 << up_to(7)));
      if (kind == 2) bytes.erase(at, up_to(3));
      if (kind == 3) bytes.insert(at, bytes.substr(at, up_to(4)));
    }
    std::vector<size_t> cuts = {up_to(bytes.size()), up_to(bytes.size()), up_to(bytes.size())};
    std::sort(cuts.begin(), cuts.end());
    ++(ExpectAsProtobuf(bytes, Cut(bytes, cuts)) ? taken : refused);
    v1::ComputeLossRequest message;
    ChunkView view;
    left_over += message.ParseFromString(bytes) && message.has_chunk() &&
                 !ReadChunkMessage(Cut(bytes, cuts), v1::ChunkField::kOfRequest, &view);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(taken, 10000);
  EXPECT_GT(refused, 5000);
  EXPECT_LT(left_over, refused / 5);
}

TEST(ReceivedMessage, IsParsedFromAnySlices) {
  v1::ComputeLossRequest sent;
  sent.mutable_header()->set_row_count(77);
  sent.mutable_header()->set_session_id(std::string(500, 's'));
  const std::string bytes = sent.SerializeAsString();
  for (const size_t piece : {size_t{1}, size_t{7}, bytes.size()}) {
    std::vector<grpc::Slice> slices;
    for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
    grpc::ByteBuffer buffer(slices.data(), slices.size());
    const ReceivedMessage received(&buffer);
    ChunkView chunk;
    EXPECT_FALSE(received.ParseChunk(&chunk));
    v1::ComputeLossRequest message;
    ASSERT_TRUE(received.Parse(&message).ok()) << piece;
    EXPECT_EQ(message.SerializeAsString(), bytes);
  }
  grpc::ByteBuffer nothing;
  v1::ComputeLossRequest message;
  EXPECT_TRUE(ReceivedMessage(&nothing).Parse(&message).ok());
  EXPECT_EQ(message.message_case(), v1::ComputeLossRequest::MESSAGE_NOT_SET);
  const grpc::Slice garbage(std::string("\xff\xff\xff"));
  grpc::ByteBuffer bad(&garbage, 1);
  EXPECT_FALSE(ReceivedMessage(&bad).Parse(&message).ok());
}

TEST(GradChunk, IsWhatProtobufReads) {
  for (const int64_t row_start : {int64_t{0}, int64_t{1}, int64_t{127}, int64_t{128}, int64_t{1} << 40}) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{70000}}) {
      auto rows = std::make_shared<std::string>(size, 'r');
      std::weak_ptr<std::string> watch = rows;
      const auto* const data = reinterpret_cast<const uint8_t*>(rows->data());
      auto buffer =
          std::make_unique<grpc::ByteBuffer>(EncodeGradChunk(row_start, 5, data, static_cast<int64_t>(size), std::move(rows)));
      std::vector<grpc::Slice> slices;
      ASSERT_TRUE(buffer->Dump(&slices).ok());
      std::string bytes;
      for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      v1::ComputeLossResponse response;
      ASSERT_TRUE(response.ParseFromString(bytes));
      EXPECT_EQ(response.chunk().role(), v1::CHUNK_ROLE_GRAD_HIDDEN);
      EXPECT_EQ(response.chunk().row_start(), row_start);
      EXPECT_EQ(response.chunk().row_count(), 5);
      EXPECT_EQ(response.chunk().data().size(), size);
      v1::TransferRowsResponse stripe;
      ASSERT_TRUE(stripe.ParseFromString(bytes));
      EXPECT_EQ(stripe.chunk().SerializeAsString(), response.chunk().SerializeAsString());
      if (size > 0) {
        EXPECT_EQ(response.SerializeAsString(), bytes);
      }
      // The rows live as long as anybody has a slice of them.
      buffer.reset();
      EXPECT_FALSE(watch.expired());
      slices.clear();
      EXPECT_TRUE(watch.expired());
    }
  }
}

TEST(EncodedMessage, IsWhatProtobufWrites) {
  v1::ComputeLossResponse sent;
  sent.mutable_summary()->set_transport("grpc");
  grpc::ByteBuffer buffer = EncodeMessage(sent);
  v1::ComputeLossResponse received;
  ASSERT_TRUE(ReceivedMessage(&buffer).Parse(&received).ok());
  EXPECT_EQ(received.SerializeAsString(), sent.SerializeAsString());
}

}  // namespace
}  // namespace headwater::service
