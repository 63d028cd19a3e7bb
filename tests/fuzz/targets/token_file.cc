// The file of bearer tokens, and the patterns of heads in it. Input, both up to a byte 1: a pattern and a head's id; then the file.
#include <set>
#include <string>
#include <vector>

#include "server/heads/head_name.h"
#include "server/service/access/access.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {
namespace {

constexpr char kNameLetters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
// Longer than any word of a refusal.
constexpr size_t kQuotedBytes = 20;

// Which beginnings of `id` the pattern can match, a character of it at a time.
bool Matches(const std::string& pattern, const std::string& id) {
  std::string reached(id.size() + 1, '\0');
  char* const at = reached.data();
  at[0] = 1;
  for (const char c : pattern) {
    if (c == '*') {
      for (size_t i = 1; i <= id.size(); ++i) at[i] = static_cast<char>(at[i] | at[i - 1]);
    } else {
      for (size_t i = id.size(); i > 0; --i) at[i] = static_cast<char>(at[i - 1] != 0 && id[i - 1] == c);
      at[0] = 0;
    }
  }
  return at[id.size()] != 0;
}

bool IsName(const std::string& text, const std::string& letters) {
  return !text.empty() && text.size() <= 64 && text.find_first_not_of(letters) == std::string::npos;
}

// What is long and in one piece could be a token in the wrong place; a refusal must not say it.
void CheckSilentOn(const std::string& message, const std::string& value) {
  if (value.size() < kQuotedBytes || value.find_first_of(" /") != std::string::npos) return;
  FUZZ_CHECK(message.find(value) == std::string::npos, message);
}

void CheckSilence(const std::string& message, const nlohmann::json& value) {
  if (value.is_string()) CheckSilentOn(message, value.get<std::string>());
  if (!value.is_structured()) return;
  for (const auto& [key, inner] : value.items()) {
    if (value.is_object()) CheckSilentOn(message, key);
    CheckSilence(message, inner);
  }
}

void CheckGrants(const service::TokenGrants& grants, const std::string& id) {
  std::set<std::string> names;
  std::set<std::array<uint8_t, 32>> digests;
  for (const auto& grant : grants) {
    FUZZ_CHECK(IsName(grant->name, kNameLetters) && names.insert(grant->name).second);
    FUZZ_CHECK(digests.insert(grant->sha256).second);
    FUZZ_CHECK(heads::ParseTenantName("tenants/" + grant->tenant, "tenant").ok());
    for (const std::vector<std::string>* patterns : {&grant->compute, &grant->admin}) {
      for (const std::string& pattern : *patterns) {
        FUZZ_CHECK(IsName(pattern, std::string(kNameLetters) + "*"));
        FUZZ_CHECK(service::MatchesPattern(pattern, id) == Matches(pattern, id), pattern);
      }
    }
  }
}

}  // namespace

void CheckInput(InputReader input) {
  const std::string pattern = input.Text();
  const std::string id = input.Text();
  const std::string text = input.Rest();
  FUZZ_CHECK(service::MatchesPattern(pattern, id) == Matches(pattern, id), pattern + " " + id);
  const auto grants = service::ParseTokens(text);
  if (grants.ok()) return CheckGrants(*grants, id);
  CheckRefusal(grants.status());
  const nlohmann::json lenient = ParseLeniently(text);
  if (lenient.is_object()) CheckSilence(std::string(grants.status().message()), lenient);
}

}  // namespace headwater::fuzz
