#include "server/checkpoint/file_system.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::checkpoint {
namespace {

constexpr int64_t kMaxIoBytes = int64_t{1} << 30;  // Linux moves at most 2 GiB at once
// The lock file of a held directory: empty, locked for the hold's life.
constexpr char kHoldName[] = "/.lock";

std::string ErrnoText(int error) { return std::error_code(error, std::generic_category()).message(); }

absl::Status WriteError(const char* operation, int error) {
  const std::string message = absl::StrCat(operation, " failed: ", ErrnoText(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == EEXIST || error == ENOTEMPTY) return absl::AlreadyExistsError(message);
  return MakeError(error == ENOSPC || error == EDQUOT ? ErrorReason::kDiskFull : ErrorReason::kInternal, message);
}

absl::Status ReadError(const char* operation, int error) {
  const std::string message = absl::StrCat(operation, " failed: ", ErrnoText(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  return MakeError(ErrorReason::kFileCorrupt, message);
}

class PosixWritableFile : public WritableFile {
 public:
  explicit PosixWritableFile(int descriptor) : descriptor_(descriptor) {}
  ~PosixWritableFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Status Append(const void* data, int64_t byte_count) override {
    const char* next = static_cast<const char*>(data);
    while (byte_count > 0) {
      const ssize_t written = write(descriptor_, next, static_cast<size_t>(std::min(byte_count, kMaxIoBytes)));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return WriteError("writing a file", errno);
      next += written;
      byte_count -= written;
    }
    return absl::OkStatus();
  }

  absl::Status SyncAndClose() override {
    if (fsync(descriptor_) != 0) return WriteError("syncing a file", errno);
    const int descriptor = descriptor_;
    descriptor_ = -1;
    if (close(descriptor) != 0) return WriteError("closing a file", errno);
    return absl::OkStatus();
  }

 private:
  int descriptor_;
};

class PosixFiles : public FileSystem {
 public:
  absl::StatusOr<std::shared_ptr<void>> HoldDirectory(const std::string& path) override {
    const int descriptor = open((path + kHoldName).c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (descriptor < 0) return WriteError("opening a directory's lock", errno);
    // Closing ends the lock, as the end of the process does.
    std::shared_ptr<void> hold(nullptr, [descriptor](std::nullptr_t) { close(descriptor); });
    if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return hold;
    if (errno == EWOULDBLOCK) return absl::AlreadyExistsError("the directory is held by another process");
    return WriteError("locking a directory", errno);
  }

  absl::Status CreateDirectory(const std::string& path) override {
    return mkdir(path.c_str(), 0755) == 0 ? absl::OkStatus() : WriteError("making a directory", errno);
  }

  absl::Status SyncDirectory(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return WriteError("opening a directory", errno);
    const int error = fsync(descriptor) == 0 ? 0 : errno;
    close(descriptor);
    // Some file systems cannot sync a directory and report EINVAL, which is accepted.
    return error == 0 || error == EINVAL ? absl::OkStatus() : WriteError("syncing a directory", error);
  }

  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) const override {
    std::error_code error;
    std::vector<std::string> names = model_files::SortedNames(path, error);
    if (error) return ReadError("listing a directory", error.value());
    return names;
  }

  bool IsDirectory(const std::string& path) const override {
    struct stat status;
    return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  }

  absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) override {
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (descriptor < 0) return WriteError("creating a file", errno);
    return std::make_unique<PosixWritableFile>(descriptor);
  }

  absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) const override {
    // O_NONBLOCK: opening a FIFO must not block.
    const int descriptor = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) return ReadError("opening a file", errno);
    return model_files::ReadableFromDescriptor(descriptor);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return absl::OkStatus();
    if (errno != EINVAL && errno != ENOSYS) return WriteError("renaming", errno);
    // The file system lacks the flag. Only this process renames here, so a check in advance is enough.
    struct stat status;
    if (lstat(to.c_str(), &status) == 0) return WriteError("renaming", EEXIST);
    return rename(from.c_str(), to.c_str()) == 0 ? absl::OkStatus() : WriteError("renaming", errno);
  }

  absl::Status Exchange(const std::string& a, const std::string& b) override {
    if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return absl::OkStatus();
    if (errno == EINVAL || errno == ENOSYS) return absl::UnimplementedError("the file system cannot exchange two entries");
    return WriteError("exchanging", errno);
  }

  absl::Status RemoveTree(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    return error ? WriteError("removing", error.value()) : absl::OkStatus();
  }
};

}  // namespace

FileSystem& PosixFileSystem() {
  static PosixFiles* const files = new PosixFiles();
  return *files;
}

}  // namespace headwater::checkpoint
