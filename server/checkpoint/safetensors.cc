#include "server/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/strict_json.h"

namespace headwater::checkpoint {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kAlignment = 8;
constexpr char kMetadataKey[] = "__metadata__";
constexpr char kHeaderTitle[] = "the safetensors header";

// Bits of an element; 0 for a type that the format does not have.
int64_t ElementBits(const std::string& data_type) {
  static constexpr struct {
    const char* name;
    int64_t bits;
  } kTypes[] = {{"F64", 64},    {"F32", 32},    {"F16", 16}, {"BF16", 16}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8},
                {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},   {"I64", 64},  {"I32", 32},    {"I16", 16},    {"I8", 8},
                {"U64", 64},    {"U32", 32},    {"U16", 16}, {"U8", 8},    {"BOOL", 8},    {"C64", 64}};
  for (const auto& type : kTypes) {
    if (data_type == type.name) return type.bits;
  }
  return 0;
}

// Tensor names come from the file: only their printable part may stand in a message.
std::string Quote(const std::string& name) {
  std::string text = name.substr(0, 100);
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

absl::StatusOr<SafetensorsTensor> ParseTensor(const std::string& name, const json& value, int64_t data_start, int64_t data_bytes) {
  const auto corrupt = [&name](const std::string& problem) {
    return CorruptError(absl::StrCat("tensor '", Quote(name), "' of the safetensors file ", problem));
  };
  const json* data_type = FindMember(value, "dtype", json::value_t::string);
  const json* shape = FindMember(value, "shape", json::value_t::array);
  const json* offsets = FindMember(value, "data_offsets", json::value_t::array);
  if (data_type == nullptr || shape == nullptr || offsets == nullptr || value.size() != 3) {
    return corrupt("does not have exactly dtype, shape and data_offsets");
  }
  SafetensorsTensor tensor;
  tensor.data_type = data_type->get<std::string>();
  int64_t bits = ElementBits(tensor.data_type);
  if (bits == 0) return corrupt(absl::StrCat("has the unknown data type '", Quote(tensor.data_type), "'"));
  if (static_cast<int64_t>(shape->size()) > kMaxSafetensorsDimensions) {
    return corrupt(absl::StrCat("has ", shape->size(), " dimensions, the maximum is ", kMaxSafetensorsDimensions));
  }
  for (const json& dimension : *shape) {
    int64_t size = 0;
    if (!GetCount(dimension, &size)) return corrupt("has a dimension that is not a count");
    tensor.shape.push_back(size);
    if (__builtin_mul_overflow(bits, size, &bits)) return corrupt("has a shape whose size overflows");
  }
  int64_t begin = 0;
  int64_t end = 0;
  if (offsets->size() != 2 || !GetCount((*offsets)[0], &begin) || !GetCount((*offsets)[1], &end) || begin > end) {
    return corrupt("has data_offsets that are not [begin, end]");
  }
  if (end > data_bytes) return corrupt(absl::StrCat("ends at byte ", end, ", the file has ", data_bytes, " bytes of data"));
  if (bits % 8 != 0 || end - begin != bits / 8) {
    return corrupt(absl::StrCat("has ", end - begin, " bytes, its shape takes ", bits / 8));
  }
  tensor.begin = data_start + begin;
  tensor.end = data_start + end;
  return tensor;
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const ReadableFile& file) {
  unsigned char length_bytes[kLengthBytes];
  if (file.size() < kLengthBytes)
    return CorruptError(absl::StrCat("a safetensors file has at least 8 bytes, this one ", file.size()));
  if (absl::Status status = file.ReadAt(0, kLengthBytes, length_bytes); !status.ok()) return status;
  uint64_t length = 0;
  for (int64_t i = kLengthBytes; i-- > 0;) length = length << 8 | length_bytes[i];
  const int64_t limit = std::min(file.size() - kLengthBytes, kMaxSafetensorsHeaderBytes);
  if (length > static_cast<uint64_t>(limit)) {
    return CorruptError(absl::StrCat(kHeaderTitle, " claims ", length, " bytes; the file and the limit allow ", limit));
  }
  const int64_t header_bytes = static_cast<int64_t>(length);
  std::string text(length, '\0');
  if (absl::Status status = file.ReadAt(kLengthBytes, header_bytes, text.data()); !status.ok()) return status;
  absl::StatusOr<json> parsed = ParseStrictJson(text, kHeaderTitle);
  if (!parsed.ok()) return parsed.status();
  if (static_cast<int64_t>(parsed->size()) > kMaxSafetensorsTensors) {
    return CorruptError(absl::StrCat(kHeaderTitle, " names ", parsed->size(), " tensors, the maximum is ", kMaxSafetensorsTensors));
  }
  const int64_t data_start = kLengthBytes + header_bytes;
  const int64_t data_bytes = file.size() - data_start;
  SafetensorsHeader header;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, value] : parsed->items()) {
    if (name == kMetadataKey) continue;
    absl::StatusOr<SafetensorsTensor> tensor = ParseTensor(name, value, data_start, data_bytes);
    if (!tensor.ok()) return tensor.status();
    ranges.emplace_back(tensor->begin, tensor->end);
    header.tensors[name] = *std::move(tensor);
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t next = data_start;
  for (const auto& [begin, end] : ranges) {
    if (begin != next) return CorruptError("the tensors of the safetensors file overlap or leave a gap");
    next = end;
  }
  if (next != file.size()) {
    return CorruptError(absl::StrCat("the tensors of the safetensors file end at byte ", next, ", the file at ", file.size()));
  }
  return header;
}

std::string MakeSafetensorsHeader(const std::vector<SafetensorsOutput>& tensors) {
  json header = json::object();
  int64_t offset = 0;
  for (const SafetensorsOutput& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.data_type}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.byte_count}}};
    offset += tensor.byte_count;
  }
  std::string text = header.dump();
  while (static_cast<int64_t>(text.size()) % kAlignment != 0) text.push_back(' ');
  std::string bytes(kLengthBytes, '\0');
  for (int64_t i = 0; i < kLengthBytes; ++i) bytes[static_cast<size_t>(i)] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return bytes + text;
}

}  // namespace headwater::checkpoint
