// FileSource: opens the files of models.
#ifndef HEADWATER_SERVER_MODEL_FILES_FILE_SOURCE_H_
#define HEADWATER_SERVER_MODEL_FILES_FILE_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

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

// Const methods may be called from any thread.
class FileSource {
 public:
  virtual ~FileSource() = default;
  // absl::NotFoundError for a missing file; kInvalidField for a forbidden path; kFileCorrupt for an unreadable file.
  virtual absl::StatusOr<std::shared_ptr<ReadableFile>> Open(const std::string& path) const = 0;
  // Names of a folder's entries, sorted, for messages. Empty if the folder cannot be read, or may not.
  virtual std::vector<std::string> List(const std::string& folder) const = 0;
};

// The files under one directory, also through symbolic links within it. An absolute path, `..`, and a link out of the directory are
// kInvalidField. Messages never show the directory's own path.
std::unique_ptr<FileSource> FilesUnder(const std::string& root);

// Every file that this process may read.
std::unique_ptr<FileSource> LocalFiles();

// Names of a folder's entries, sorted. With `error`, those read before it.
std::vector<std::string> SortedNames(const std::string& folder, std::error_code& error);

// Foreign text for a message: printable, and shortened.
std::string Shown(const std::string& text);

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_FILE_SOURCE_H_
