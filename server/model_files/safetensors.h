// The safetensors format: 8 bytes with the header's length (little-endian), a JSON header, then the tensors' bytes.
// Specification: https://github.com/huggingface/safetensors. Reader and writer for trusted and hostile files alike.
#ifndef HEADWATER_SERVER_MODEL_FILES_SAFETENSORS_H_
#define HEADWATER_SERVER_MODEL_FILES_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/types.h"
#include "server/model_files/file_source.h"

namespace headwater::model_files {

// The format's name of a type that heads have.
const char* SafetensorsType(DataType type);

// The most bytes of a header, as in the format's own library.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsTensor {
  std::string data_type;       // as the file says it: "F32", "BF16", "F16", ...
  std::vector<int64_t> shape;  // row-major
  int64_t begin = 0;           // first byte in the file
  int64_t end = 0;             // one past the last
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsTensor> tensors;
};

// Reads and checks a file's header, by the rules of the format's own library. The header is one JSON object, and every tensor has
// dtype, shape and data_offsets. A shape's product times the element size equals the tensor's bytes; the tensors fill the rest of
// the file without gaps or overlaps. Further keys of a tensor are ignored.
//
// Differences: an unknown data type is accepted, and its tensor's size is not checked against its shape. Repeated names, deep
// nesting and millions of values are refused, as by ParseStrictJson().
//
// Errors: kLimitExceeded for a header of more than kMaxSafetensorsHeaderBytes, else kFileCorrupt.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const ReadableFile& file);

struct SafetensorsOutput {
  std::string name;
  std::string data_type;
  std::vector<int64_t> shape;
  int64_t byte_count = 0;
};

// The bytes before the first tensor's; the tensors must follow in the same order. Padded so that they begin at a multiple of 8.
std::string MakeSafetensorsHeader(const std::vector<SafetensorsOutput>& tensors);

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_SAFETENSORS_H_
