// FileSystem: the few operations on files that checkpoints need, behind an interface so that tests can fail each of them.
//
// Errors: kDiskFull without space or quota; absl::NotFoundError and absl::AlreadyExistsError, whose reason the caller knows;
// kInternal otherwise. Messages name the operation and the errno text, never a path.
#ifndef HEADWATER_SERVER_CHECKPOINT_FILE_SYSTEM_H_
#define HEADWATER_SERVER_CHECKPOINT_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model_files/file_source.h"

namespace headwater::checkpoint {

// A new file, written from its beginning to its end. Destroying it closes it without syncing.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual absl::Status Append(const void* data, int64_t byte_count) = 0;
  // Data and size have reached the disk, and the file is closed.
  virtual absl::Status SyncAndClose() = 0;
};

using model_files::ReadableFile;

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Marks the directory as in use, for other processes and other callers here, until the result is destroyed or the process ends;
  // an advisory mark. AlreadyExists if it is held; other errors if it cannot be held, for example where nothing can be written.
  virtual absl::StatusOr<std::shared_ptr<void>> HoldDirectory(const std::string&) {
    return absl::UnimplementedError("the file system knows no holds");
  }
  // AlreadyExists if it exists.
  virtual absl::Status CreateDirectory(const std::string& path) = 0;
  // Entries written to the directory have reached the disk.
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Names of the entries but `.` and `..`, sorted. NotFound if there is no such directory.
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) const = 0;
  // True if there is a directory (not a link to one).
  virtual bool IsDirectory(const std::string& path) const = 0;
  // Creates a file that must not exist.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) = 0;
  // Opens a regular file; symbolic links in the last component are refused (kFileCorrupt). NotFound if it is not there.
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) const = 0;
  // Atomic. AlreadyExists if `to` exists.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Swaps two entries atomically. Unimplemented where the file system cannot.
  virtual absl::Status Exchange(const std::string& a, const std::string& b) = 0;
  // Removes a file, a link, or a directory with all it holds. OK if it is not there. Does not follow links.
  virtual absl::Status RemoveTree(const std::string& path) = 0;
};

// The operating system's. Never destroyed.
FileSystem& PosixFileSystem();

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_FILE_SYSTEM_H_
