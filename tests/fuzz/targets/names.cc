// Names from outside: heads, tenants, checkpoints, shared memory, and text that is quoted in messages. Input: the name.
#include <string>

#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head_name.h"
#include "server/service/request/field_check.h"
#include "server/transport/region_registry.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {
namespace {

constexpr char kLower[] = "abcdefghijklmnopqrstuvwxyz0123456789";
constexpr char kMixed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

// 1 to `most` of `letters` and . _ -, with one of `letters` at both ends.
bool IsName(const std::string& text, const std::string& letters, size_t most) {
  return !text.empty() && text.size() <= most && text.find_first_not_of(letters + "._-") == std::string::npos &&
         letters.find(text.front()) != std::string::npos && letters.find(text.back()) != std::string::npos;
}

bool TakePrefix(const std::string& prefix, std::string* text) {
  if (text->compare(0, prefix.size(), prefix) != 0) return false;
  text->erase(0, prefix.size());
  return true;
}

bool IsHeadName(std::string text) {
  if (!TakePrefix("tenants/", &text)) return false;
  const size_t slash = text.find('/');
  if (slash == std::string::npos || !IsName(text.substr(0, slash), kLower, 64)) return false;
  text.erase(0, slash);
  return TakePrefix("/heads/", &text) && IsName(text, kLower, 64);
}

bool IsTenantName(std::string text) { return text.empty() || (TakePrefix("tenants/", &text) && IsName(text, kLower, 64)); }

bool IsRegion(std::string text) {
  return TakePrefix("headwater-", &text) && !text.empty() && text.size() <= 200 &&
         text.find_first_not_of(std::string(kMixed) + "._-") == std::string::npos;
}

}  // namespace

void CheckInput(InputReader input) {
  const std::string name = input.Rest();
  const auto head = heads::ParseHeadName(name, "name");
  FUZZ_CHECK(head.ok() == IsHeadName(name), name);
  if (head.ok()) {
    FUZZ_CHECK(head->ToString() == name);
  } else {
    CheckRefusal(head.status());
  }
  const auto tenant = heads::ParseTenantName(name, "parent");
  FUZZ_CHECK(tenant.ok() == IsTenantName(name), name);
  if (!tenant.ok()) CheckRefusal(tenant.status());
  FUZZ_CHECK(checkpoint::IsValidCheckpointName(name) == IsName(name, kMixed, 128), name);
  FUZZ_CHECK(transport::IsRegionName(name) == IsRegion(name), name);
  const std::string quoted = service::Quoted(name);
  FUZZ_CHECK(quoted.size() <= 64 + 5 && quoted.front() == '"' && quoted.back() == '"');
  for (const char c : quoted) FUZZ_CHECK(c >= 0x20 && c < 0x7f);
}

}  // namespace headwater::fuzz
