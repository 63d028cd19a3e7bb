#include "server/heads/head_name.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

constexpr size_t kMaxIdLength = 64;
constexpr size_t kMaxQuotedLength = 160;  // of a wrong name in a message: names come from outside

bool IsAlphanumeric(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

bool IsValidId(const std::string& id) {
  if (id.empty() || id.size() > kMaxIdLength || !IsAlphanumeric(id.front()) || !IsAlphanumeric(id.back())) return false;
  return std::all_of(id.begin(), id.end(), [](char c) { return IsAlphanumeric(c) || c == '.' || c == '_' || c == '-'; });
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

std::string HeadName::ToString() const { return absl::StrCat("tenants/", tenant, "/heads/", head); }

absl::StatusOr<HeadName> ParseHeadName(const std::string& name, const std::string& field_name) {
  const std::vector<std::string> parts = absl::StrSplit(name, absl::MaxSplits('/', 4));
  if (parts.size() != 4 || parts[0] != "tenants" || !IsValidId(parts[1]) || parts[2] != "heads" || !IsValidId(parts[3])) {
    return NameError(name, field_name, "tenants/{tenant}/heads/{head}");
  }
  return HeadName{parts[1], parts[3]};
}

absl::StatusOr<std::string> ParseTenantName(const std::string& name, const std::string& field_name) {
  if (name.empty()) return std::string(kDefaultTenant);
  const std::vector<std::string> parts = absl::StrSplit(name, absl::MaxSplits('/', 2));
  if (parts.size() != 2 || parts[0] != "tenants" || !IsValidId(parts[1])) return NameError(name, field_name, "tenants/{tenant}");
  return parts[1];
}

}  // namespace headwater::heads
