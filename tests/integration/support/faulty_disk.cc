#include "tests/integration/support/faulty_disk.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace headwater::testing {

std::atomic<bool> disk_is_full{false};
std::atomic<bool> disk_hangs{false};
std::atomic<int> hanging_writes{0};

}  // namespace headwater::testing

extern "C" ssize_t __real_write(int descriptor, const void* data, size_t byte_count);
extern "C" ssize_t __wrap_write(int descriptor, const void* data, size_t byte_count) {
  using namespace headwater::testing;
  struct stat status;
  if ((disk_hangs || disk_is_full) && descriptor > STDERR_FILENO && fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode)) {
    if (disk_is_full) {
      errno = ENOSPC;
      return -1;
    }
    ++hanging_writes;
    while (disk_hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return __real_write(descriptor, data, byte_count);
}
