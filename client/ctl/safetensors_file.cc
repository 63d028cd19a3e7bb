#include "client/ctl/safetensors_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace headwater::ctl {
namespace {

using client::DataType;

constexpr size_t kMostTypeBytes = 32;           // of a type's name, in a message
constexpr int64_t kMaxHeaderBytes = 100 << 20;  // what the format's own reader accepts

absl::Status ReadFully(int descriptor, int64_t offset, int64_t bytes, void* destination) {
  auto* cursor = static_cast<unsigned char*>(destination);
  while (bytes > 0) {
    const ssize_t count = pread(descriptor, cursor, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::DataLossError(count == 0 ? "the file became shorter" : std::strerror(errno));
    cursor += count;
    offset += count;
    bytes -= count;
  }
  return absl::OkStatus();
}

std::optional<DataType> ParseType(const std::string& name) {
  if (name == "F32") return DataType::kFloat32;
  if (name == "BF16") return DataType::kBFloat16;
  if (name == "F16") return DataType::kFloat16;
  return std::nullopt;
}

// One entry of the header. Of a type that heads do not have nothing but names and sizes is known.
absl::StatusOr<SafetensorsFile::Entry> ParseEntry(const std::string& name, const nlohmann::json& value, int64_t data_start,
                                                  int64_t file_bytes) {
  SafetensorsFile::Entry entry;
  std::vector<int64_t> offsets;
  try {
    entry.type_name = value.at("dtype").get<std::string>();
    entry.shape = value.at("shape").get<std::vector<int64_t>>();
    offsets = value.at("data_offsets").get<std::vector<int64_t>>();
  } catch (const nlohmann::json::exception& error) {
    return absl::DataLossError(absl::StrCat("tensor ", name, ": ", error.what()));
  }
  entry.data_type = ParseType(entry.type_name);
  if (!entry.data_type.has_value()) return entry;
  int64_t bytes = client::ElementBytes(*entry.data_type);
  for (const int64_t size : entry.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      return absl::DataLossError(absl::StrCat("tensor ", name, " has a size that is not possible"));
    }
  }
  const int64_t data_bytes = file_bytes - data_start;
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0] || offsets[1] > data_bytes ||
      offsets[1] - offsets[0] != bytes) {
    return absl::DataLossError(absl::StrCat("tensor ", name, ": its offsets do not fit its shape or the file"));
  }
  entry.offset_bytes = data_start + offsets[0];
  entry.bytes = bytes;
  return entry;
}

absl::StatusOr<std::map<std::string, SafetensorsFile::Entry>> ReadHeader(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return absl::DataLossError(std::strerror(errno));
  const int64_t file_bytes = status.st_size;
  unsigned char length_bytes[8];
  if (file_bytes < 8) return absl::DataLossError("shorter than the 8 bytes of a safetensors file's header length");
  if (absl::Status read = ReadFully(descriptor, 0, 8, length_bytes); !read.ok()) return read;
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
  if (length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - 8))) {
    return absl::DataLossError(absl::StrCat("not a safetensors file: a header of ", length, " bytes in a file of ", file_bytes));
  }
  std::string text(length, '\0');
  if (absl::Status read = ReadFully(descriptor, 8, static_cast<int64_t>(length), text.data()); !read.ok()) return read;
  const nlohmann::json header = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return absl::DataLossError("not a safetensors file: the header is not a JSON object");
  std::map<std::string, SafetensorsFile::Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    absl::StatusOr<SafetensorsFile::Entry> entry = ParseEntry(name, value, 8 + static_cast<int64_t>(length), file_bytes);
    if (!entry.ok()) return entry.status();
    entries.emplace(name, *std::move(entry));
  }
  return entries;
}

}  // namespace

bool IsPartOfModel(const std::string& path) {
  absl::string_view rest = path;
  const auto number_at_end = [](absl::string_view* text) {
    const size_t begin = text->find_last_not_of("0123456789") + 1;
    int64_t number = 0;
    const bool is_number = absl::SimpleAtoi(text->substr(begin), &number);
    text->remove_suffix(text->size() - begin);
    return is_number ? number : 0;
  };
  if (!absl::ConsumeSuffix(&rest, ".safetensors")) return false;
  const int64_t count = number_at_end(&rest);
  if (!absl::ConsumeSuffix(&rest, "-of-")) return false;
  const size_t before = rest.size();
  number_at_end(&rest);
  return count > 1 && rest.size() < before && absl::EndsWith(rest, "-");
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  SafetensorsFile file(descriptor, {});  // closes it in any case
  absl::StatusOr<std::map<std::string, Entry>> entries = ReadHeader(descriptor);
  if (!entries.ok()) return absl::Status(entries.status().code(), absl::StrCat(path, ": ", entries.status().message()));
  file.entries_ = *std::move(entries);
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), entries_(std::move(other.entries_)) {}

absl::StatusOr<client::TensorBuffer> SafetensorsFile::Read(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    std::string names;
    for (const auto& [key, entry] : entries_) absl::StrAppend(&names, names.empty() ? "" : ", ", key);
    return absl::NotFoundError(absl::StrCat("the file has no tensor ", name, "; it has: ", names.empty() ? "none" : names));
  }
  const Entry& entry = found->second;
  if (!entry.data_type.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " is of type ", entry.type_name.substr(0, kMostTypeBytes), ", heads have F32, BF16 or F16"));
  }
  client::TensorBuffer buffer(*entry.data_type, entry.shape);
  if (absl::Status read = ReadFully(descriptor_, entry.offset_bytes, entry.bytes, buffer.data()); !read.ok()) return read;
  return buffer;
}

}  // namespace headwater::ctl
