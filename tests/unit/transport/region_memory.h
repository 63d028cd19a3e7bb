// Memory as clients make it for regions.
#ifndef HEADWATER_TESTS_UNIT_TRANSPORT_REGION_MEMORY_H_
#define HEADWATER_TESTS_UNIT_TRANSPORT_REGION_MEMORY_H_

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>

namespace headwater::testing {

inline constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A memfd with these seals, allocated unless `sparse`. The caller closes it.
inline int MakeMemory(int64_t bytes, int seals = kAllSeals, bool sparse = false, unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING) {
  const int fd = memfd_create("region", flags);
  if (fd < 0 || ftruncate(fd, bytes) != 0 || (!sparse && bytes > 0 && fallocate(fd, 0, 0, bytes) != 0) ||
      (seals != 0 && fcntl(fd, F_ADD_SEALS, seals) != 0)) {
    throw std::runtime_error("memfd");
  }
  return fd;
}

// Descriptors that this process has open.
inline int OpenDescriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) throw std::runtime_error("/proc/self/fd");
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_TRANSPORT_REGION_MEMORY_H_
