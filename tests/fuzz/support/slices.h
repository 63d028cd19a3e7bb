// Bytes cut into slices of their own, so that AddressSanitizer sees a read beyond any of them.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SLICES_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SLICES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace headwater::fuzz {

// Cut where `seed` says: 0 is one slice, 1 a slice for each byte, others make some of 0 to 16 bytes.
inline std::vector<std::vector<uint8_t>> Cut(const std::string& bytes, uint8_t seed) {
  std::vector<std::vector<uint8_t>> slices;
  uint32_t state = seed;
  for (size_t begin = 0; begin < bytes.size();) {
    state = state * 1664525 + 1013904223;
    const size_t wanted = seed == 0 ? bytes.size() : seed == 1 ? 1 : (state >> 16) % 17;
    const size_t count = wanted < bytes.size() - begin ? wanted : bytes.size() - begin;
    slices.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                        bytes.begin() + static_cast<std::ptrdiff_t>(begin + count));
    begin += count;
  }
  return slices;
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SLICES_H_
