// JSON as the library reads it, to compare with the product's readers. A function of its own, because the parser is slow to
// compile.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_LENIENT_JSON_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_LENIENT_JSON_H_

#include <nlohmann/json.hpp>
#include <string>

namespace headwater::fuzz {

// A discarded value if the text is not JSON.
nlohmann::json ParseLeniently(const std::string& text);

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_LENIENT_JSON_H_
