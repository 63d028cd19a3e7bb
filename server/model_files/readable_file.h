// ReadableFile: a file that is open for reading.
#ifndef HEADWATER_SERVER_MODEL_FILES_READABLE_FILE_H_
#define HEADWATER_SERVER_MODEL_FILES_READABLE_FILE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace headwater::model_files {

// Reads with pread, never maps: truncating the file causes an error, not a signal. Const methods may be called from any thread.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual int64_t size() const = 0;  // when it was opened
  // Reads exactly `byte_count` bytes; kFileCorrupt if the file ends earlier.
  virtual absl::Status ReadAt(int64_t offset, int64_t byte_count, void* out) const = 0;
};

// A ReadableFile over an open descriptor, which it owns. kFileCorrupt unless the descriptor is a regular file's.
absl::StatusOr<std::unique_ptr<ReadableFile>> ReadableFromDescriptor(int descriptor);

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_READABLE_FILE_H_
