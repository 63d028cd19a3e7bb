// The safetensors format: 8 bytes with the header's length (little-endian), a JSON header, then the tensors' bytes.
// Specification: https://github.com/huggingface/safetensors. Reader and writer for trusted and hostile files alike.
#ifndef HEADWATER_SERVER_CHECKPOINT_SAFETENSORS_H_
#define HEADWATER_SERVER_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/file_system.h"

namespace headwater::checkpoint {

// What a header may be at most.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{16} << 20;
inline constexpr int64_t kMaxSafetensorsTensors = 1 << 16;
inline constexpr int64_t kMaxSafetensorsDimensions = 8;

// One tensor of a file.
struct SafetensorsTensor {
  std::string data_type;       // as the file says it: "F32", "BF16", "F16", ...
  std::vector<int64_t> shape;  // row-major
  int64_t begin = 0;           // first byte in the file
  int64_t end = 0;             // one past the last
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsTensor> tensors;
};

// Reads and checks a file's header. kFileCorrupt unless: the header fits the file and the limits above; it is one JSON object
// without repeated keys; every data type is known; every shape's product times the element size equals the tensor's bytes; and the
// tensors fill the rest of the file without gaps or overlaps, as the specification asks.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const ReadableFile& file);

// A tensor to be written.
struct SafetensorsOutput {
  std::string name;
  std::string data_type;
  std::vector<int64_t> shape;
  int64_t byte_count = 0;
};

// The bytes that stand before the first tensor's; the tensors must follow in the same order. Padded so that they begin at a
// multiple of 8.
std::string MakeSafetensorsHeader(const std::vector<SafetensorsOutput>& tensors);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_SAFETENSORS_H_
