// The header of a safetensors file. Input: an odd first byte means that the rest is a JSON header, to which the length before it
// and as many bytes behind it as its tensors claim are added; an even one that the rest is the whole file.
#include "server/model_files/safetensors.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {
namespace {

__extension__ using Wide = __int128;

int64_t BitsOf(const std::string& type) {
  if (type == "F64" || type == "I64" || type == "U64" || type == "C64") return 64;
  if (type == "F32" || type == "I32" || type == "U32") return 32;
  if (type == "F16" || type == "BF16" || type == "I16" || type == "U16") return 16;
  if (type == "F8_E4M3" || type == "F8_E5M2" || type == "F8_E8M0" || type == "I8" || type == "U8" || type == "BOOL") return 8;
  if (type == "F6_E2M3" || type == "F6_E3M2") return 6;
  if (type == "F4") return 4;
  return 0;  // not known: its size says nothing of its shape
}

// The tensors lie in the file one behind the other, each as long as its shape says, without a product that wraps.
void CheckTensors(const model_files::SafetensorsHeader& header, int64_t file_bytes) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, tensor] : header.tensors) {
    Wide bits = BitsOf(tensor.data_type);
    bool empty = false;
    for (const int64_t size : tensor.shape) {
      FUZZ_CHECK(size >= 0);
      empty = empty || size == 0;
      if (bits < (static_cast<Wide>(1) << 100)) bits *= size;
    }
    FUZZ_CHECK(tensor.begin >= 8 && tensor.begin <= tensor.end && tensor.end <= file_bytes);
    if (BitsOf(tensor.data_type) > 0) FUZZ_CHECK((empty ? 0 : bits) == static_cast<Wide>(tensor.end - tensor.begin) * 8);
    ranges.emplace_back(tensor.begin, tensor.end);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) FUZZ_CHECK(ranges[i].first == ranges[i - 1].second);
  if (!ranges.empty()) FUZZ_CHECK(ranges.back().second == file_bytes);
}

// Written again it reads the same.
void CheckRoundTrip(const model_files::SafetensorsHeader& header) {
  std::vector<std::pair<std::string, model_files::SafetensorsTensor>> tensors(header.tensors.begin(), header.tensors.end());
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.begin, a.second.end) < std::pair(b.second.begin, b.second.end);
  });
  std::vector<model_files::SafetensorsOutput> outputs;
  int64_t data_bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    outputs.push_back({name, tensor.data_type, tensor.shape, tensor.end - tensor.begin});
    data_bytes += tensor.end - tensor.begin;
  }
  const std::string prefix = model_files::MakeSafetensorsHeader(outputs);
  FUZZ_CHECK(prefix.size() % 8 == 0);
  const MemoryFile file(prefix + std::string(static_cast<size_t>(data_bytes), '\0'));
  const auto again = model_files::ReadSafetensorsHeader(file);
  FUZZ_CHECK(again.ok(), std::string(again.status().message()));
  FUZZ_CHECK(again->tensors.size() == header.tensors.size());
  for (const auto& [name, tensor] : again->tensors) {
    const auto known = header.tensors.find(name);
    FUZZ_CHECK(known != header.tensors.end() && known->second.shape == tensor.shape &&
               known->second.data_type == tensor.data_type && known->second.end - known->second.begin == tensor.end - tensor.begin);
  }
}

}  // namespace

void CheckInput(InputReader input) {
  const bool whole = input.Byte() % 2 == 0;
  const std::string rest = input.Rest();
  const MemoryFile file(whole ? rest : SafetensorsFile(rest, '\x5a'));
  const auto header = model_files::ReadSafetensorsHeader(file);
  if (!header.ok()) return CheckRefusal(header.status());
  CheckTensors(*header, file.size());
  CheckRoundTrip(*header);
}

}  // namespace headwater::fuzz
