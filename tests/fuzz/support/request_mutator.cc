// libFuzzer's mutations for request.cc: of fields, and now and then of the bytes that they are sent as.
#include <algorithm>
#include <cstring>

#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/message_input.h"
#include "tests/fuzz/support/message_mutator.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  using namespace headwater::fuzz;  // NOLINT(google-build-using-namespace)
  MessageMutator mutator(seed, {"tenants/default/heads/a", "tenants/a/heads/b", "tenants/a", "a", "../a", "a/../b", "headwater-x",
                                std::string(16, 'e'), std::string(32, 's'), std::string(64, 'h'), std::string("\0\0\x80\x3f", 4),
                                std::string("\0\0\xc0\x7f", 4), std::string("\1\0\0\0\2\0\0\0\3\0\0\0", 12)});
  Call request;
  if (mutator.Below(16) == 0 || !ReadMessageInput(data, size, &request)) return LLVMFuzzerMutate(data, size, max_size);
  mutator.Mutate(&request);
  const std::string bytes = WriteMessageInput(request, /*text=*/false);
  if (bytes.size() > max_size) return size;
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}
