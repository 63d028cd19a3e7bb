// The server's hand-written parser of chunks against protobuf's own. Input: a byte that says how the message is cut into slices,
// then the message.
#include <string>
#include <vector>

#include "headwater/v1/loss_service.pb.h"
#include "server/service/request/chunk_codec.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/target.h"
#include "tests/fuzz/support/wire_form.h"

namespace headwater::fuzz {
namespace {

constexpr int kHeaderField = 1;
constexpr int kChunkField = 2;

// The parser may leave what is unusual to protobuf, but nothing that an encoder writes: a chunk, no header before or behind it, in
// the shortest form, without groups.
bool MustTake(const std::string& message) {
  const WireForm outer = ReadWireForm(message);
  if (!outer.valid || !outer.shortest || outer.groups) return false;
  bool chunk = false;
  for (const WireForm::Bytes& field : outer.bytes) {
    if (field.number == kHeaderField) return false;
    if (field.number != kChunkField) continue;
    const WireForm inner = ReadWireForm(field.value);
    if (!inner.valid || !inner.shortest || inner.groups) return false;
    chunk = true;
  }
  return chunk;
}

template <typename Message>
void Check(const std::string& bytes, const grpc::ByteBuffer& buffer, bool taken, const v1::ChunkView& chunk) {
  Message expected;
  const bool parsed = expected.ParseFromString(bytes);
  if (taken) {
    FUZZ_CHECK(parsed);
    FUZZ_CHECK(expected.has_chunk());
    ExpectSame(chunk, expected.chunk());
  }
  // The other way in, through protobuf over the same slices.
  grpc::ByteBuffer copy(buffer);
  const service::ReceivedMessage received(&copy);
  Message through_slices;
  FUZZ_CHECK(received.Parse(&through_slices).ok() == parsed);
  if (parsed) FUZZ_CHECK(through_slices.SerializeAsString() == expected.SerializeAsString());
  v1::ChunkView again;
  FUZZ_CHECK(received.ParseChunk(&again) == taken);
  if (taken) ExpectSame(again, expected.chunk());
  if (!parsed || !expected.has_chunk()) return;
  // As an encoder would have written it.
  expected.DiscardUnknownFields();
  const std::string canonical = expected.SerializeAsString();
  const v1::ByteSpan span(reinterpret_cast<const uint8_t*>(canonical.data()), canonical.size());
  FUZZ_CHECK(v1::ReadChunkMessage({span}, v1::ChunkField::kOfRequest, &again));
  ExpectSame(again, expected.chunk());
}

}  // namespace

void CheckInput(InputReader input) {
  const uint8_t cut = input.Byte();
  const std::string bytes = input.Rest();
  const std::vector<std::vector<uint8_t>> slices = Cut(bytes, cut);
  std::vector<v1::ByteSpan> spans(slices.begin(), slices.end());
  std::vector<grpc::Slice> received;
  for (const std::vector<uint8_t>& slice : slices) received.emplace_back(slice.data(), slice.size());
  const grpc::ByteBuffer buffer(received.data(), received.size());

  v1::ChunkView chunk;
  const bool taken = v1::ReadChunkMessage(spans, v1::ChunkField::kOfRequest, &chunk);
  FUZZ_CHECK(taken || !MustTake(bytes));
  Check<v1::ComputeLossRequest>(bytes, buffer, taken, chunk);
  Check<v1::StreamTeacherRequest>(bytes, buffer, taken, chunk);
  Check<v1::TransferRowsRequest>(bytes, buffer, taken, chunk);
}

}  // namespace headwater::fuzz
