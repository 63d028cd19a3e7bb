// Memory that ends: replaces operator new for the whole program. Included by one source of a program, which is its only one, and
// left out of sanitized builds: sanitizers replace it, too.
#ifndef HEADWATER_TESTS_UNIT_ENDING_MEMORY_H_
#define HEADWATER_TESTS_UNIT_ENDING_MEMORY_H_

#include <cstdlib>
#include <new>

namespace headwater::testing {

// How many more allocations of this thread succeed; negative: all of them.
inline thread_local int allocations_left = -1;

}  // namespace headwater::testing

// Not inlined: GCC would take free() for the end of what its own operator new gave.
[[gnu::noinline]] void* operator new(size_t bytes) {
  int& left = headwater::testing::allocations_left;
  if (left == 0) throw std::bad_alloc();
  if (left > 0) --left;
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#endif  // HEADWATER_TESTS_UNIT_ENDING_MEMORY_H_
