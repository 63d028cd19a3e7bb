// A safetensors file around a header that need not be one.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SAFETENSORS_FILE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SAFETENSORS_FILE_H_

#include <string>

namespace headwater::fuzz {

// The length of `header`, the header, and bytes of `fill` up to the largest end that it claims, but no more than 64 KiB.
std::string SafetensorsFile(const std::string& header, char fill);

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SAFETENSORS_FILE_H_
