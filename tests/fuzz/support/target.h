// A fuzz target is one source that defines CheckInput(). libFuzzer calls it with what it makes up (libfuzzer.cc); corpus_test.cc,
// in builds without libFuzzer, with the files of the target's corpus.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_TARGET_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_TARGET_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace headwater::fuzz {

// Takes pieces from the front of an input; every input can be read to any length, as zeros beyond its end.
class InputReader {
 public:
  InputReader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Up to a byte 1, which is skipped, or up to the end.
  std::string Text() {
    const uint8_t* const end = std::find(data_, data_ + size_, uint8_t{1});
    std::string text(data_, end);
    const size_t taken = std::min(text.size() + 1, size_);
    data_ += taken;
    size_ -= taken;
    return text;
  }
  std::string Rest() {
    std::string rest(reinterpret_cast<const char*>(data_), size_);
    size_ = 0;
    return rest;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// A finding ends the process.
void CheckInput(InputReader input);

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_TARGET_H_
