#include "tests/fuzz/support/json_file.h"

#include <algorithm>
#include <cstdint>

namespace headwater::fuzz {

nlohmann::json ParseLeniently(const std::string& text) { return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false); }

std::string SafetensorsFile(const std::string& header, char fill) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i)));
  bytes += header;
  uint64_t end = 0;
  const nlohmann::json json = ParseLeniently(header);
  if (json.is_object()) {
    for (const auto& [name, tensor] : json.items()) {
      if (!tensor.is_object()) continue;
      const auto offsets = tensor.find("data_offsets");
      if (offsets == tensor.end() || !offsets->is_array() || offsets->size() != 2 || !(*offsets)[1].is_number_unsigned()) continue;
      end = std::max(end, (*offsets)[1].get<uint64_t>());
    }
  }
  bytes.append(static_cast<size_t>(std::min<uint64_t>(end, 64 << 10)), fill);
  return bytes;
}

}  // namespace headwater::fuzz
