#include "server/model_files/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/strict_json.h"

namespace headwater::model_files {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kAlignment = 8;
constexpr char kMetadataKey[] = "__metadata__";
constexpr char kHeaderTitle[] = "the safetensors header";

// Bits of an element; 0 for a type that is not known here.
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

// The tensor `name` of a header. Its bytes lie in the file's `data_bytes` bytes from `data_start` on.
absl::StatusOr<SafetensorsTensor> ReadTensor(const std::string& name, const json& value, int64_t data_start, int64_t data_bytes) {
  const auto corrupt = [&name](const auto&... problem) {
    return CorruptError(absl::StrCat("tensor '", Shown(name), "' of the safetensors file ", problem...));
  };
  const json* const data_type = FindMember(value, "dtype", json::value_t::string);
  const json* const shape = FindMember(value, "shape", json::value_t::array);
  const json* const offsets = FindMember(value, "data_offsets", json::value_t::array);
  if (data_type == nullptr || shape == nullptr || offsets == nullptr) return corrupt("does not have dtype, shape and data_offsets");
  int64_t begin = 0, end = 0;
  if (offsets->size() != 2 || !GetCount((*offsets)[0], &begin) || !GetCount((*offsets)[1], &end) || begin > end) {
    return corrupt("has data_offsets that are not [begin, end]");
  }
  if (end > data_bytes) return corrupt("ends at byte ", end, ", the file has ", data_bytes, " bytes of data");
  SafetensorsTensor tensor = {data_type->get<std::string>(), {}, data_start + begin, data_start + end};
  int64_t bits = ElementBits(tensor.data_type);
  const bool is_known = bits > 0;
  for (const json& dimension : *shape) {
    int64_t& size = tensor.shape.emplace_back();
    if (!GetCount(dimension, &size)) return corrupt("has a dimension that is not a count");
    if (__builtin_mul_overflow(bits, size, &bits)) return corrupt("has a shape whose size overflows");
  }
  if (is_known && (bits % 8 != 0 || end - begin != bits / 8)) {
    return corrupt("has ", end - begin, " bytes, its shape takes ", bits / 8);
  }
  return tensor;
}

}  // namespace

const char* SafetensorsType(DataType type) {
  return type == DataType::kFloat32 ? "F32" : type == DataType::kBFloat16 ? "BF16" : "F16";
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const ReadableFile& file) {
  unsigned char length_bytes[kLengthBytes];
  if (file.size() < kLengthBytes)
    return CorruptError(absl::StrCat("a safetensors file has at least 8 bytes, this one ", file.size()));
  HEADWATER_RETURN_IF_ERROR(file.ReadAt(0, kLengthBytes, length_bytes));
  uint64_t length = 0;
  for (int64_t i = kLengthBytes; i-- > 0;) length = length << 8 | length_bytes[i];
  if (length > static_cast<uint64_t>(file.size() - kLengthBytes)) {
    return CorruptError(absl::StrCat(kHeaderTitle, " claims ", length, " bytes, the file has ", file.size()));
  }
  const int64_t header_bytes = static_cast<int64_t>(length);
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return LimitError("safetensors_header_bytes", kHeaderTitle, header_bytes, kMaxSafetensorsHeaderBytes);
  }
  std::string text(length, '\0');
  HEADWATER_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, header_bytes, text.data()));
  HEADWATER_ASSIGN_OR_RETURN(const json document, ParseStrictJson(text, kHeaderTitle));
  const int64_t data_start = kLengthBytes + header_bytes;
  SafetensorsHeader header;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, value] : document.items()) {
    if (name == kMetadataKey) continue;
    HEADWATER_ASSIGN_OR_RETURN(SafetensorsTensor tensor, ReadTensor(name, value, data_start, file.size() - data_start));
    ranges.emplace_back(tensor.begin, tensor.end);
    header.tensors.emplace(name, std::move(tensor));
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
  json header = {{kMetadataKey, {{"format", "pt"}}}};  // without it, some versions of transformers refuse the file
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

}  // namespace headwater::model_files
