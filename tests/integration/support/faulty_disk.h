// A disk that is full, or takes its time. The linker sends every write() of our own code through here (--wrap=write).
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_FAULTY_DISK_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_FAULTY_DISK_H_

#include <atomic>

namespace headwater::testing {

// While set, no file takes a byte: writing fails.
extern std::atomic<bool> disk_is_full;
// While set, no file takes a byte: writing waits.
extern std::atomic<bool> disk_hangs;
// How many have waited so far.
extern std::atomic<int> hanging_writes;

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_FAULTY_DISK_H_
