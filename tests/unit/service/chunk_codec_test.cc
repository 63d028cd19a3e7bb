// Chunks in slices: the hand-written parser wherever they are cut, and the answers that are made of several. What the parser takes
// and what it leaves to protobuf is tests/fuzz/targets/chunk_request.cc.
#include "server/service/request/chunk_codec.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headwater::service {
namespace {

TEST(ChunkParser, DoesNotMindWhereSlicesEnd) {
  v1::ComputeLossRequest message;
  v1::RowChunk& sent = *message.mutable_chunk();
  sent.set_role(v1::CHUNK_ROLE_HIDDEN);
  sent.set_term_index(-1);  // ten bytes
  sent.set_row_start(1 << 20);
  sent.set_row_count(300);
  sent.set_data(std::string(40, 'x'));
  const std::string bytes = message.SerializeAsString();
  const ByteSpan all(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {  // an empty slice, if they are equal
      ChunkView chunk;
      ASSERT_TRUE(ReadChunkMessage({all.first(first), all.subspan(first, second - first), all.subspan(second)},
                                   v1::ChunkField::kOfRequest, &chunk));
      std::string data(static_cast<size_t>(chunk.data_bytes), '\0');
      v1::CopySpans(chunk.data, reinterpret_cast<uint8_t*>(data.data()));
      v1::RowChunk read;
      read.set_role(static_cast<v1::ChunkRole>(chunk.role));
      read.set_term_index(chunk.term_index);
      read.set_row_start(chunk.row_start);
      read.set_row_count(chunk.row_count);
      read.set_data(data);
      ASSERT_EQ(read.SerializeAsString(), sent.SerializeAsString()) << first << " " << second;
    }
  }
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

}  // namespace
}  // namespace headwater::service
