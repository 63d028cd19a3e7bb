// The processors and the memory that the machine and the container give this process.
#ifndef HEADWATER_KERNELS_MACHINE_LIMITS_H_
#define HEADWATER_KERNELS_MACHINE_LIMITS_H_

#include <cstdint>
#include <string>

namespace headwater {

// Where the limits of control groups, version 1 and 2, are read. Tests name other places.
struct ControlGroups {
  std::string root = "/sys/fs/cgroup";           // where the groups are mounted
  std::string membership = "/proc/self/cgroup";  // the file that names this process's groups
};

// The processors that this process may use, > 0. They are those of its affinity mask, or fewer if its control group, or a group
// above that one, has a CPU quota. A quota may be a fraction: 0.5 is half the time of one processor.
double ProcessorLimit(const ControlGroups& groups = {});

// How many threads can compute at once, >= 1: ProcessorLimit(), rounded up.
int32_t ComputeThreads(const ControlGroups& groups = {});

// The memory that this process may use, in bytes. It is the machine's, or less if its control group, or a group above that one, has
// a limit.
int64_t MemoryLimitBytes(const ControlGroups& groups = {});

}  // namespace headwater

#endif  // HEADWATER_KERNELS_MACHINE_LIMITS_H_
