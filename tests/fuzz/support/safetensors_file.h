// A safetensors file around a header that need not be one.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SAFETENSORS_FILE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SAFETENSORS_FILE_H_

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace headwater::fuzz {

// The length of `header`, the header, and bytes of `fill` up to the largest end that it claims, but no more than 64 KiB.
inline std::string SafetensorsFile(const std::string& header, char fill) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i)));
  bytes += header;
  uint64_t end = 0;
  const nlohmann::json json = nlohmann::json::parse(header, nullptr, /*allow_exceptions=*/false);
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

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SAFETENSORS_FILE_H_
