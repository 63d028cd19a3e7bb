#include "server/model_files/file_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::model_files {
namespace {

constexpr size_t kMaxPathLength = 4096;
constexpr size_t kMaxShownLength = 200;
constexpr int64_t kMaxIoBytes = int64_t{1} << 30;  // Linux moves at most 2 GiB at once

class PosixReadableFile : public ReadableFile {
 public:
  PosixReadableFile(int descriptor, int64_t size) : descriptor_(descriptor), size_(size) {}
  ~PosixReadableFile() override { close(descriptor_); }
  int64_t size() const override { return size_; }

  absl::Status ReadAt(int64_t offset, int64_t byte_count, void* out) const override {
    char* next = static_cast<char*>(out);
    while (byte_count > 0) {
      const ssize_t got = pread(descriptor_, next, static_cast<size_t>(std::min(byte_count, kMaxIoBytes)), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        const std::string problem = std::error_code(errno, std::generic_category()).message();
        return MakeError(ErrorReason::kFileCorrupt, absl::StrCat("reading a file failed: ", problem));
      }
      if (got == 0) {
        return MakeError(ErrorReason::kFileCorrupt,
                         absl::StrCat("the file ends at byte ", offset, ", ", byte_count, " more were expected"),
                         {{"offsetBytes", absl::StrCat(offset)}, {"missingBytes", absl::StrCat(byte_count)}});
      }
      next += got;
      offset += got;
      byte_count -= got;
    }
    return absl::OkStatus();
  }

 private:
  const int descriptor_;
  const int64_t size_;
};

absl::Status InvalidPath(const std::string& path, const char* problem) {
  const std::string shown = Shown(path);
  return MakeError(
      ErrorReason::kInvalidField,
      absl::StrCat("path must be relative, without `..`, and stay under the server's load root; '", shown, "' ", problem),
      {{"field", "path"}, {"actual", shown}});
}

absl::Status CheckPath(const std::string& path) {
  if (path.size() > kMaxPathLength) return InvalidPath(path, "is too long");
  if (path.find('\0') != std::string::npos) return InvalidPath(path, "has a NUL character");
  if (path.front() == '/') return InvalidPath(path, "is absolute");
  for (const absl::string_view component : absl::StrSplit(path, '/')) {
    if (component == "..") return InvalidPath(path, "has `..`");
  }
  return absl::OkStatus();
}

bool IsBeneath(const std::string& path, const std::string& root) {
  return path.size() > root.size() && path.compare(0, root.size(), root) == 0 && (root == "/" || path[root.size()] == '/');
}

// The path without links; empty if it does not exist.
std::string RealPath(const std::string& path) {
  std::error_code error;
  return std::filesystem::canonical(path, error).string();
}

absl::Status OpenError(int error) {
  if (error == ENOENT || error == ENOTDIR || error == ELOOP) return absl::NotFoundError("no such file");
  return MakeError(ErrorReason::kFileCorrupt,
                   absl::StrCat("the file cannot be opened: ", std::error_code(error, std::generic_category()).message()),
                   {{"errno", absl::StrCat(error)}});
}

class RootedFiles : public FileSource {
 public:
  explicit RootedFiles(const std::string& root) : root_(RealPath(root)) {}

  absl::StatusOr<std::shared_ptr<ReadableFile>> Open(const std::string& path) const override {
    HEADWATER_RETURN_IF_ERROR(CheckPath(path));
    if (root_.empty()) return absl::NotFoundError("the load root is not there");
    const std::string resolved = RealPath(absl::StrCat(root_, "/", path));
    if (resolved.empty()) return absl::NotFoundError("no such file");
    if (!IsBeneath(resolved, root_)) return InvalidPath(path, "leads out of it");
    const int descriptor = open(resolved.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) return OpenError(errno);
    // A directory on the way may have become a link since: the open file's place decides.
    if (RealPath(absl::StrCat("/proc/self/fd/", descriptor)) != resolved) {
      close(descriptor);
      return InvalidPath(path, "changed while it was opened");
    }
    return ReadableFromDescriptor(descriptor);
  }

  std::vector<std::string> List(const std::string& folder) const override {
    if (root_.empty() || !CheckPath(folder).ok()) return {};
    const std::string resolved = RealPath(absl::StrCat(root_, "/", folder));
    if (resolved != root_ && !IsBeneath(resolved, root_)) return {};
    std::error_code error;
    return SortedNames(resolved, error);
  }

 private:
  const std::string root_;
};

class AllFiles : public FileSource {
 public:
  absl::StatusOr<std::shared_ptr<ReadableFile>> Open(const std::string& path) const override {
    // O_NONBLOCK: opening a FIFO must not block.
    const int descriptor = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) return OpenError(errno);
    return ReadableFromDescriptor(descriptor);
  }
  std::vector<std::string> List(const std::string& folder) const override {
    std::error_code error;
    return SortedNames(folder, error);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReadableFile>> ReadableFromDescriptor(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor);
    return MakeError(ErrorReason::kFileCorrupt, "a regular file was expected");
  }
  return std::make_unique<PosixReadableFile>(descriptor, static_cast<int64_t>(status.st_size));
}

std::unique_ptr<FileSource> FilesUnder(const std::string& root) { return std::make_unique<RootedFiles>(root); }

std::unique_ptr<FileSource> LocalFiles() { return std::make_unique<AllFiles>(); }

std::vector<std::string> SortedNames(const std::string& folder, std::error_code& error) {
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string Shown(const std::string& text) { return absl::CHexEscape(text.substr(0, kMaxShownLength)); }

}  // namespace headwater::model_files
