// JSON from outside. Input: the text.
#include "server/model_files/strict_json.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {
namespace {

constexpr size_t kMaxDepth = 8;  // of strict_json.cc

// What a JSON text that a parser has accepted is made of, told without one.
struct JsonForm {
  size_t depth = 0;
  size_t keys = 0;
  bool repeated_key = false;  // spelled alike
};

JsonForm ReadJsonForm(const std::string& text) {
  struct Open {
    bool object = false;
    bool key_next = false;
    std::set<std::string> keys;
  };
  JsonForm form;
  std::vector<Open> open;
  for (size_t i = 0; i < text.size(); ++i) {
    switch (text[i]) {
      case '{':
      case '[':
        open.push_back({text[i] == '{', text[i] == '{', {}});
        form.depth = std::max(form.depth, open.size());
        break;
      case '}':
      case ']':
        open.pop_back();
        break;
      case ',':
        open.back().key_next = open.back().object;
        break;
      case '"': {
        const size_t begin = i + 1;
        for (++i; text[i] != '"'; ++i) i += text[i] == '\\' ? 1 : 0;
        if (open.empty() || !open.back().key_next) break;
        open.back().key_next = false;
        ++form.keys;
        form.repeated_key = !open.back().keys.insert(text.substr(begin, i - begin)).second || form.repeated_key;
        break;
      }
      default:
        break;
    }
  }
  return form;
}

size_t CountMembers(const nlohmann::json& value) {
  size_t count = value.is_object() ? value.size() : 0;
  if (value.is_structured()) {
    for (const nlohmann::json& inner : value) count += CountMembers(inner);
  }
  return count;
}

}  // namespace

void CheckInput(InputReader input) {
  const std::string text = input.Rest();
  const auto parsed = model_files::ParseStrictJson(text, "the text");
  if (!parsed.ok()) CheckRefusal(parsed.status());
  const nlohmann::json lenient = ParseLeniently(text);
  // For the lenient parser the text ends at a zero byte.
  if (!lenient.is_object() || text.find('\0') != std::string::npos) {
    FUZZ_CHECK(!parsed.ok());
    return;
  }
  const JsonForm form = ReadJsonForm(text);
  // A key that is spelled in two ways is one key: then the object has fewer members than the text has keys.
  const bool repeated = form.repeated_key || CountMembers(lenient) != form.keys;
  FUZZ_CHECK(parsed.ok() == (form.depth <= kMaxDepth && !repeated), std::string(parsed.status().message()));
  if (parsed.ok()) FUZZ_CHECK(parsed->dump() == lenient.dump());
}

}  // namespace headwater::fuzz
