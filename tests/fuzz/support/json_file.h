// JSON as the library reads it, to compare with the product's readers, and a safetensors file around a header. A source of its own,
// because the parser is slow to compile.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_JSON_FILE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_JSON_FILE_H_

#include <nlohmann/json.hpp>
#include <string>

namespace headwater::fuzz {

// A discarded value if the text is not JSON.
nlohmann::json ParseLeniently(const std::string& text);

// The length of `header`, which need not be one, the header, and bytes of `fill` up to the largest end that it claims, but no more
// than 64 KiB.
std::string SafetensorsFile(const std::string& header, char fill);

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_JSON_FILE_H_
