// The bytes of a message and of its chunk: cut into slices, read by protobuf without the message's type, and compared.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_WIRE_FORM_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_WIRE_FORM_H_

#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>

#include <cstdint>
#include <string>
#include <vector>

#include "headwater/v1/loss_service.pb.h"
#include "proto/headwater/v1/row_chunk_wire.h"
#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {

// Bytes in slices of their own, so that AddressSanitizer sees a read beyond any of them. Cut where `seed` says: 0 is one slice, 1 a
// slice for each byte, others make some of 0 to 16 bytes.
inline std::vector<std::vector<uint8_t>> Cut(const std::string& bytes, uint8_t seed) {
  std::vector<std::vector<uint8_t>> slices;
  uint32_t state = seed;
  for (size_t begin = 0; begin < bytes.size();) {
    state = state * 1664525 + 1013904223;
    const size_t wanted = seed == 0 ? bytes.size() : seed == 1 ? 1 : (state >> 16) % 17;
    const size_t count = wanted < bytes.size() - begin ? wanted : bytes.size() - begin;
    slices.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                        bytes.begin() + static_cast<std::ptrdiff_t>(begin + count));
    begin += count;
  }
  return slices;
}

inline void ExpectSame(const v1::ChunkView& chunk, const v1::RowChunk& expected) {
  FUZZ_CHECK(chunk.role == static_cast<int32_t>(expected.role()));
  FUZZ_CHECK(chunk.term_index == expected.term_index());
  FUZZ_CHECK(chunk.row_start == expected.row_start());
  FUZZ_CHECK(chunk.row_count == expected.row_count());
  FUZZ_CHECK(chunk.data_bytes == static_cast<int64_t>(expected.data().size()));
  for (const v1::ByteSpan& span : chunk.data) FUZZ_CHECK(!span.empty());
  std::string rows(expected.data().size(), '\0');
  v1::CopySpans(chunk.data, reinterpret_cast<uint8_t*>(rows.data()));
  FUZZ_CHECK(rows == expected.data());
}

struct WireForm {
  bool valid = false;     // protobuf can read the bytes as a message without known fields
  bool shortest = false;  // every tag, length and number takes as few bytes as it can
  bool groups = false;    // there is one
  // The fields of wire type 2 in order, by number.
  struct Bytes {
    int number = 0;
    std::string value;
  };
  std::vector<Bytes> bytes;
};

inline WireForm ReadWireForm(const std::string& message) {
  WireForm form;
  google::protobuf::Empty empty;
  form.valid = empty.ParseFromString(message);
  if (!form.valid) return form;
  const google::protobuf::UnknownFieldSet& fields = empty.GetReflection()->GetUnknownFields(empty);
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.type() == google::protobuf::UnknownField::TYPE_GROUP) form.groups = true;
    if (field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      form.bytes.push_back({field.number(), field.length_delimited()});
    }
  }
  form.shortest = empty.SerializeAsString() == message;
  return form;
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_WIRE_FORM_H_
