#include "server/heads/head_name.h"

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

constexpr char kTenants[] = "tenants/";
constexpr char kHeads[] = "/heads/";
constexpr size_t kMaxIdLength = 64;
constexpr size_t kMaxQuotedLength = 160;  // of a wrong name in a message: names come from outside

bool IsAlphanumeric(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

bool IsValidId(const std::string& id) {
  if (id.empty() || id.size() > kMaxIdLength || !IsAlphanumeric(id.front()) || !IsAlphanumeric(id.back())) return false;
  for (const char c : id) {
    if (!IsAlphanumeric(c) && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

// A name as it may stand in a message: printable ASCII, not too long.
std::string Quote(const std::string& name) {
  std::string text = name.substr(0, kMaxQuotedLength);
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return name.size() > kMaxQuotedLength ? absl::StrCat(text, "...") : text;
}

absl::Status NameError(const std::string& name, const std::string& field_name, const char* pattern) {
  return MakeError(
      ErrorReason::kInvalidName,
      absl::StrCat(field_name, " must be ", pattern, ", ids of 1 to 64 characters of a-z 0-9 . _ - that begin and end with ",
                   "a letter or digit; it is '", Quote(name), "'"),
      {{"field", field_name}, {"expected", pattern}, {"actual", Quote(name)}});
}

}  // namespace

std::string HeadName::ToString() const { return absl::StrCat(kTenants, tenant, kHeads, head); }

absl::StatusOr<HeadName> ParseHeadName(const std::string& name, const std::string& field_name) {
  const size_t tenant_start = sizeof(kTenants) - 1;
  const size_t separator = name.find('/', tenant_start);
  HeadName parsed;
  if (name.compare(0, tenant_start, kTenants) == 0 && separator != std::string::npos &&
      name.compare(separator, sizeof(kHeads) - 1, kHeads) == 0) {
    parsed.tenant = name.substr(tenant_start, separator - tenant_start);
    parsed.head = name.substr(separator + sizeof(kHeads) - 1);
  }
  if (!IsValidId(parsed.tenant) || !IsValidId(parsed.head)) return NameError(name, field_name, "tenants/{tenant}/heads/{head}");
  return parsed;
}

absl::StatusOr<std::string> ParseTenantName(const std::string& name, const std::string& field_name) {
  if (name.empty()) return std::string(kDefaultTenant);
  const size_t tenant_start = sizeof(kTenants) - 1;
  if (name.compare(0, tenant_start, kTenants) != 0 || !IsValidId(name.substr(tenant_start))) {
    return NameError(name, field_name, "tenants/{tenant}");
  }
  return name.substr(tenant_start);
}

}  // namespace headwater::heads
