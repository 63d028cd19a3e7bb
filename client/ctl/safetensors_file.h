// Reads single tensors out of a local safetensors file.
#ifndef HEADWATER_CLIENT_CTL_SAFETENSORS_FILE_H_
#define HEADWATER_CLIENT_CTL_SAFETENSORS_FILE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/client/tensor.h"

namespace headwater::ctl {

// Whether a file is named as one of several that a model is cut into: "model-00001-of-00004.safetensors".
bool IsPartOfModel(const std::string& path);

// An open file: 8 bytes of header length, a JSON header, tensor bytes. Move-only; not thread-safe.
// Format: https://github.com/huggingface/safetensors, "Format".
class SafetensorsFile {
 public:
  struct Entry {
    std::string type_name;                      // as the file has it: "BF16"
    std::optional<client::DataType> data_type;  // nullopt: one that heads do not have
    std::vector<int64_t> shape;
    int64_t offset_bytes = 0;  // from the file's beginning
    int64_t bytes = 0;
  };

  // NOT_FOUND if the file cannot be opened; DATA_LOSS if header or offsets do not fit the file. The bytes of every tensor of a type
  // that heads have lie within the file afterwards.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;

  const std::map<std::string, Entry>& entries() const { return entries_; }
  // NOT_FOUND, with the names that there are, if `name` is not among them; INVALID_ARGUMENT if heads do not have its type.
  absl::StatusOr<client::TensorBuffer> Read(const std::string& name) const;

 private:
  SafetensorsFile(int descriptor, std::map<std::string, Entry> entries) : descriptor_(descriptor), entries_(std::move(entries)) {}

  int descriptor_ = -1;
  std::map<std::string, Entry> entries_;
};

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_SAFETENSORS_FILE_H_
