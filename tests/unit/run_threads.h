// Work on several threads at once.
#ifndef HEADWATER_TESTS_UNIT_RUN_THREADS_H_
#define HEADWATER_TESTS_UNIT_RUN_THREADS_H_

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace headwater::testing {

// Runs `work(i)` for i in [0, count), each on a thread of its own, to the end.
inline void RunThreads(int64_t count, const std::function<void(int64_t)>& work) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_RUN_THREADS_H_
