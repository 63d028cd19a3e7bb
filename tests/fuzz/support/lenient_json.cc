#include "tests/fuzz/support/lenient_json.h"

namespace headwater::fuzz {

nlohmann::json ParseLeniently(const std::string& text) { return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false); }

}  // namespace headwater::fuzz
