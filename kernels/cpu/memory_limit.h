// What the machine and the container give this process.
#ifndef HEADWATER_KERNELS_CPU_MEMORY_LIMIT_H_
#define HEADWATER_KERNELS_CPU_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace headwater::cpu {

// The smaller of the cgroup's memory limit and the physical memory.
int64_t MemoryLimitBytes();
// "Intel(R) Xeon(R) Processor"; "unknown" if the system does not say.
std::string ProcessorModel();

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_MEMORY_LIMIT_H_
