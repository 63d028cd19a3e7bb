// The client's hand-written decoder of answers against protobuf's own. Input: a byte that says how the message is cut into slices,
// then the message.
#include <string>
#include <vector>

#include "client/core/rows/transfer/chunk_wire.h"
#include "headwater/v1/loss_service.pb.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/target.h"
#include "tests/fuzz/support/wire_form.h"

namespace headwater::fuzz {
namespace {

using client::internal::DecodedResponse;

constexpr int kSummaryField = 2;

void CheckResponse(const std::string& bytes, const grpc::ByteBuffer& message) {
  const absl::StatusOr<DecodedResponse> decoded = client::internal::DecodeResponse(message);
  v1::ComputeLossResponse expected;
  const bool parsed = expected.ParseFromString(bytes);
  if (parsed) FUZZ_CHECK(decoded.ok(), std::string(decoded.status().message()));
  const WireForm form = ReadWireForm(bytes);
  int summaries = 0;
  for (const WireForm::Bytes& field : form.bytes) summaries += field.number == kSummaryField ? 1 : 0;
  if (decoded.ok()) {
    FUZZ_CHECK(decoded->chunk.data_bytes >= 0 && decoded->chunk.data_bytes <= static_cast<int64_t>(bytes.size()));
    FUZZ_CHECK(form.valid);
    v1::TransferRowsResponse stripe;
    if (summaries == 0) {
      // Without a summary both types of message are the same bytes.
      FUZZ_CHECK(parsed && stripe.ParseFromString(bytes));
      FUZZ_CHECK(stripe.has_chunk() == decoded->has_chunk);
      if (stripe.has_chunk()) ExpectSame(decoded->chunk, stripe.chunk());
    }
  }
  // A summary in pieces, or one that a chunk replaces, is none that an encoder makes; and one that cannot be read is found later.
  if (!decoded.ok() || !parsed || summaries > 1) return;
  FUZZ_CHECK(decoded->has_chunk == expected.has_chunk());
  FUZZ_CHECK(decoded->summary.has_value() == expected.has_summary());
  if (expected.has_chunk()) ExpectSame(decoded->chunk, expected.chunk());
  if (expected.has_summary()) {
    v1::MicroBatchSummary summary;
    FUZZ_CHECK(summary.ParseFromString(*decoded->summary));
    FUZZ_CHECK(summary.SerializeAsString() == expected.summary().SerializeAsString());
  }
}

// What the client sends is read by protobuf as it was meant.
void CheckRequest(const v1::RowChunk& chunk) {
  const v1::ChunkView header = {
      chunk.role(), chunk.term_index(), chunk.row_start(), chunk.row_count(), {}, static_cast<int64_t>(chunk.data().size())};
  v1::ComputeLossRequest request;
  FUZZ_CHECK(request.ParseFromString(v1::ChunkMessagePrefix(v1::ChunkField::kOfRequest, header) + chunk.data()));
  v1::RowChunk plain = chunk;
  plain.DiscardUnknownFields();
  FUZZ_CHECK(request.has_chunk());
  FUZZ_CHECK(request.chunk().SerializeAsString() == plain.SerializeAsString());
}

}  // namespace

void CheckInput(InputReader input) {
  const uint8_t cut = input.Byte();
  const std::string bytes = input.Rest();
  std::vector<grpc::Slice> slices;
  for (const std::vector<uint8_t>& slice : Cut(bytes, cut)) slices.emplace_back(slice.data(), slice.size());
  const grpc::ByteBuffer buffer(slices.data(), slices.size());
  if (slices.empty()) return;  // gRPC gives no slices of an empty buffer
  CheckResponse(bytes, buffer);
  v1::ComputeLossResponse response;
  if (response.ParseFromString(bytes) && response.has_chunk()) CheckRequest(response.chunk());
}

}  // namespace headwater::fuzz
