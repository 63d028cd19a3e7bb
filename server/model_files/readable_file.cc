#include "server/model_files/readable_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::model_files {
namespace {

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

}  // namespace

absl::StatusOr<std::unique_ptr<ReadableFile>> ReadableFromDescriptor(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor);
    return MakeError(ErrorReason::kFileCorrupt, "a regular file was expected");
  }
  return std::make_unique<PosixReadableFile>(descriptor, static_cast<int64_t>(status.st_size));
}

}  // namespace headwater::model_files
