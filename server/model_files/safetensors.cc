#include "server/model_files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
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

// Collects the tensors of a header while it is parsed. A header may have as many values as its bytes allow, and a tree of them
// would take many times the header's size.
class HeaderCollector : public nlohmann::json_sax<json> {
 public:
  HeaderCollector(int64_t data_start, int64_t data_bytes) : data_start_(data_start), data_bytes_(data_bytes) {}

  SafetensorsHeader& header() { return header_; }
  const std::string& problem() const { return problem_; }

  bool null() override { return Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(number_integer_t) override { return Other(); }
  bool number_unsigned(number_unsigned_t value) override {
    if (list_ == nullptr || value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return Other();
    list_->push_back(static_cast<int64_t>(value));
    return true;
  }
  bool number_float(number_float_t, const string_t&) override { return Other(); }
  bool string(string_t& value) override {
    if (field_ != Field::kDataType) return Other();
    tensor_.data_type = value;
    field_ = Field::kNone;
    return true;
  }
  bool binary(binary_t&) override { return Other(); }
  bool start_object(std::size_t) override {
    if (field_ == Field::kIgnored) return Deeper();
    if (place_ == Place::kOutside) {
      place_ = Place::kHeader;
      return true;
    }
    if (place_ != Place::kTensorStart) return Malformed();
    place_ = Place::kTensor;
    return true;
  }
  bool key(string_t& name) override {
    if (field_ == Field::kIgnored) return true;
    if (place_ == Place::kHeader && name == kMetadataKey) {
      field_ = Field::kIgnored;
    } else if (place_ == Place::kHeader) {
      name_ = name;
      tensor_ = SafetensorsTensor();
      offsets_.clear();
      seen_ = 0;
      place_ = Place::kTensorStart;
    } else {
      field_ = name == "dtype"          ? Field::kDataType
               : name == "shape"        ? Field::kShape
               : name == "data_offsets" ? Field::kOffsets
                                        : Field::kIgnored;
      if (field_ == Field::kIgnored) return true;
      const int bit = 1 << static_cast<int>(field_);
      if ((seen_ & bit) != 0) return Refuse(absl::StrCat("has more than one ", name));
      seen_ |= bit;
    }
    return true;
  }
  bool end_object() override {
    if (field_ == Field::kIgnored) return Shallower();
    if (place_ == Place::kHeader) return true;
    place_ = Place::kHeader;
    return AddTensor();
  }
  bool start_array(std::size_t) override {
    if (field_ == Field::kIgnored) return Deeper();
    if (list_ != nullptr || (field_ != Field::kShape && field_ != Field::kOffsets)) return Malformed();
    list_ = field_ == Field::kShape ? &tensor_.shape : &offsets_;
    return true;
  }
  bool end_array() override {
    if (field_ == Field::kIgnored) return Shallower();
    list_ = nullptr;
    field_ = Field::kNone;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    problem_ = absl::StrCat(kHeaderTitle, " is not JSON");
    return false;
  }

 private:
  enum class Place { kOutside, kHeader, kTensorStart, kTensor };
  enum class Field { kNone, kDataType, kShape, kOffsets, kIgnored };

  bool Refuse(const std::string& problem) {
    problem_ = absl::StrCat("tensor '", Shown(name_), "' of the safetensors file ", problem);
    return false;
  }
  bool Malformed() {
    if (place_ == Place::kOutside) {
      problem_ = absl::StrCat(kHeaderTitle, " is not a JSON object");
      return false;
    }
    if (list_ == &tensor_.shape) return Refuse("has a dimension that is not a count");
    if (list_ == &offsets_) return Refuse("has data_offsets that are not [begin, end]");
    return Refuse("does not have dtype, shape and data_offsets");
  }
  // A value that is not read.
  bool Other() {
    if (field_ != Field::kIgnored) return Malformed();
    if (ignored_depth_ == 0) field_ = Field::kNone;
    return true;
  }
  bool Deeper() {
    ++ignored_depth_;
    return true;
  }
  bool Shallower() {
    if (--ignored_depth_ == 0) field_ = Field::kNone;
    return true;
  }

  bool AddTensor() {
    constexpr int kAll =
        1 << static_cast<int>(Field::kDataType) | 1 << static_cast<int>(Field::kShape) | 1 << static_cast<int>(Field::kOffsets);
    if (seen_ != kAll) return Refuse("does not have dtype, shape and data_offsets");
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1]) return Refuse("has data_offsets that are not [begin, end]");
    const int64_t begin = offsets_[0], end = offsets_[1];
    if (end > data_bytes_) return Refuse(absl::StrCat("ends at byte ", end, ", the file has ", data_bytes_, " bytes of data"));
    int64_t bits = ElementBits(tensor_.data_type);
    if (bits > 0) {
      for (const int64_t size : tensor_.shape) {
        if (__builtin_mul_overflow(bits, size, &bits)) return Refuse("has a shape whose size overflows");
      }
      if (bits % 8 != 0 || end - begin != bits / 8) {
        return Refuse(absl::StrCat("has ", end - begin, " bytes, its shape takes ", bits / 8));
      }
    }
    tensor_.begin = data_start_ + begin;
    tensor_.end = data_start_ + end;
    header_.tensors[name_] = std::move(tensor_);
    return true;
  }

  const int64_t data_start_, data_bytes_;
  SafetensorsHeader header_;
  std::string problem_;
  Place place_ = Place::kOutside;
  Field field_ = Field::kNone;  // whose value comes next, or is being read
  int ignored_depth_ = 0;
  std::vector<int64_t>* list_ = nullptr;  // the array that is being read
  // The tensor that is being read.
  std::string name_;
  SafetensorsTensor tensor_;
  std::vector<int64_t> offsets_;
  int seen_ = 0;  // a bit for each Field
};

}  // namespace

const char* SafetensorsType(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "F32";
    case DataType::kBFloat16:
      return "BF16";
    case DataType::kFloat16:
      return "F16";
  }
  return "";
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
  // The parser would take a NUL for the end of the text, and ignore the rest.
  if (text.find('\0') != std::string::npos) return CorruptError(absl::StrCat(kHeaderTitle, " is not JSON"));
  const int64_t data_start = kLengthBytes + header_bytes;
  HeaderCollector collector(data_start, file.size() - data_start);
  if (!json::sax_parse(text, &collector)) return CorruptError(collector.problem());
  SafetensorsHeader header = std::move(collector.header());
  std::vector<std::pair<int64_t, int64_t>> ranges;
  ranges.reserve(header.tensors.size());
  for (const auto& [name, tensor] : header.tensors) ranges.emplace_back(tensor.begin, tensor.end);
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
