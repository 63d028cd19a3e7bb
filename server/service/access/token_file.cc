#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head_name.h"
#include "server/model_files/strict_json.h"
#include "server/observability/logging.h"
#include "server/service/access/access.h"

namespace headwater::service {
namespace {

using model_files::CorruptError;
using nlohmann::json;
using observability::Log;
using observability::LogLevel;

constexpr int64_t kMostFileBytes = 1 << 20;
constexpr size_t kMostTokenBytes = 4096;
constexpr size_t kMostNameBytes = 64;

absl::Status Wrong(const std::string& place, const char* expected) {
  return CorruptError(absl::StrCat("the token file: ", place, ": expected ", expected));
}

bool IsName(const std::string& name, const char* more) {
  return !name.empty() && name.size() <= kMostNameBytes && std::all_of(name.begin(), name.end(), [more](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || (c != '\0' && std::strchr(more, c) != nullptr);
  });
}

absl::Status CheckKeys(const json& object, const std::string& place, std::initializer_list<const char*> known) {
  for (const auto& [key, value] : object.items()) {
    if (std::none_of(known.begin(), known.end(), [&key = key](const char* name) { return key == name; })) {
      return Wrong(place, "no other members than those that docs/security.md names");
    }
  }
  return absl::OkStatus();
}

absl::Status ParsePatterns(const json& token, const char* key, const std::string& place, std::vector<std::string>* patterns) {
  if (!token.contains(key)) return absl::OkStatus();
  const json* const array = model_files::FindMember(token, key, json::value_t::array);
  const std::string here = absl::StrCat(place, ".", key);
  if (array == nullptr) return Wrong(here, "an array of patterns");
  for (const json& element : *array) {
    if (!element.is_string() || !IsName(element.get<std::string>(), "._-*")) {
      return Wrong(here, "patterns: strings of 1 to 64 characters of a-z 0-9 . _ - *");
    }
    patterns->push_back(element.get<std::string>());
  }
  return absl::OkStatus();
}

// The text of a member; empty without one.
std::string TextOf(const json& token, const char* key) {
  const json* const text = model_files::FindMember(token, key, json::value_t::string);
  return text == nullptr ? "" : text->get<std::string>();
}

absl::StatusOr<TokenGrant> ParseToken(const json& token, const std::string& place) {
  if (!token.is_object()) return Wrong(place, "an object");
  HEADWATER_RETURN_IF_ERROR(CheckKeys(token, place, {"name", "sha256", "tenant", "compute", "admin"}));
  TokenGrant grant;
  grant.name = TextOf(token, "name");
  if (!IsName(grant.name, "._-")) return Wrong(place + ".name", "1 to 64 letters, digits, or characters of . _ -");
  const std::string hex = TextOf(token, "sha256");
  if (hex.size() != 2 * grant.sha256.size() ||
      !std::all_of(hex.begin(), hex.end(), [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); })) {
    return Wrong(place + ".sha256", "the token's SHA-256 as 64 hexadecimal digits");
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), grant.sha256.begin());
  grant.tenant = heads::kDefaultTenant;
  if (token.contains("tenant")) {
    grant.tenant = TextOf(token, "tenant");
    if (!heads::ParseTenantName("tenants/" + grant.tenant, "tenant").ok()) {
      return Wrong(place + ".tenant", "the id of a tenant: 1 to 64 characters of a-z 0-9 . _ -, a letter or digit first and last");
    }
  }
  HEADWATER_RETURN_IF_ERROR(ParsePatterns(token, "compute", place, &grant.compute));
  HEADWATER_RETURN_IF_ERROR(ParsePatterns(token, "admin", place, &grant.admin));
  return grant;
}

absl::Status Unusable(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("token_file: ", path, ": ", why));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  struct stat about {};
  // Looked at first: to open a pipe would wait for its writer.
  if (stat(path.c_str(), &about) != 0) return Unusable(path, absl::StrCat("cannot open it: ", std::strerror(errno)));
  if (!S_ISREG(about.st_mode) || about.st_size > kMostFileBytes) {
    return Unusable(path, absl::StrCat("expected a file of at most ", kMostFileBytes, " bytes"));
  }
  if ((about.st_mode & S_IWOTH) != 0) return Unusable(path, "everybody may write it; expected mode 0640 or less");
  std::ifstream file(path, std::ios::binary);
  if (!file) return Unusable(path, absl::StrCat("cannot open it: ", std::strerror(errno)));
  std::string text(std::istreambuf_iterator<char>(file), {});
  return text;
}

}  // namespace

bool MatchesPattern(absl::string_view pattern, absl::string_view id) {
  // Goes back to the last `*` only: what an earlier one has matched need never grow.
  size_t p = 0, i = 0, star = absl::string_view::npos, star_id = 0;
  while (i < id.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_id = i;
    } else if (p < pattern.size() && pattern[p] == id[i]) {
      ++p;
      ++i;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      i = ++star_id;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

absl::StatusOr<TokenGrants> ParseTokens(const std::string& text) {
  HEADWATER_ASSIGN_OR_RETURN(const json parsed, model_files::ParseStrictJson(text, "the token file"));
  HEADWATER_RETURN_IF_ERROR(CheckKeys(parsed, "the object", {"tokens"}));
  const json* const tokens = model_files::FindMember(parsed, "tokens", json::value_t::array);
  if (tokens == nullptr) return Wrong("tokens", "an array");
  TokenGrants grants;
  for (size_t i = 0; i < tokens->size(); ++i) {
    const std::string place = absl::StrCat("tokens[", i, "]");
    HEADWATER_ASSIGN_OR_RETURN(auto grant, ParseToken((*tokens)[i], place));
    for (const auto& earlier : grants) {
      if (earlier->name == grant.name) return Wrong(place + ".name", "one that no earlier token has");
      if (earlier->sha256 == grant.sha256) return Wrong(place + ".sha256", "one that no earlier token has");
    }
    grants.push_back(std::make_shared<const TokenGrant>(std::move(grant)));
  }
  return grants;
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path) {
  HEADWATER_ASSIGN_OR_RETURN(auto text, ReadFile(path));
  auto grants = ParseTokens(text);
  if (!grants.ok()) return Unusable(path, grants.status().message());
  return std::unique_ptr<TokenFile>(new TokenFile(path, std::move(text), *std::move(grants)));
}

TokenFile::TokenFile(std::string path, std::string text, TokenGrants grants)
    : path_(std::move(path)),
      text_(std::move(text)),
      grants_(std::make_shared<const TokenGrants>(std::move(grants))),
      look_(absl::Seconds(1), [this] { Reload(); }) {}

std::shared_ptr<const TokenGrant> TokenFile::Find(absl::string_view token) const {
  if (token.empty() || token.size() > kMostTokenBytes) return nullptr;
  std::array<uint8_t, 32> digest{};
  SHA256(reinterpret_cast<const uint8_t*>(token.data()), token.size(), digest.data());
  return FindSha256(digest);
}

std::shared_ptr<const TokenGrant> TokenFile::FindSha256(const std::array<uint8_t, 32>& sha256) const {
  std::shared_ptr<const TokenGrants> grants;
  {
    absl::MutexLock lock(&mutex_);
    grants = grants_;
  }
  // Compares with every token in full, so that the time does not depend on the result.
  const std::shared_ptr<const TokenGrant>* found = nullptr;
  for (const auto& grant : *grants) {
    if (CRYPTO_memcmp(grant->sha256.data(), sha256.data(), sha256.size()) == 0) found = &grant;
  }
  return found == nullptr ? nullptr : *found;
}

void TokenFile::Reload() {
  auto text = ReadFile(path_);
  if (text.ok() && *text == text_) {
    trouble_.clear();
    return;
  }
  auto grants = text.ok() ? ParseTokens(*text) : text.status();
  if (!grants.ok()) {
    const std::string trouble(grants.status().message());
    if (trouble == trouble_) return;
    trouble_ = trouble;
    Log(LogLevel::kError, "token_file_not_taken", {{"message", trouble}, {"note", "the tokens known before stay in force"}});
    return;
  }
  trouble_.clear();
  text_ = *std::move(text);
  Log(LogLevel::kInfo, "token_file_taken", {{"tokens", static_cast<int64_t>(grants->size())}});
  auto taken = std::make_shared<const TokenGrants>(*std::move(grants));
  absl::MutexLock lock(&mutex_);
  version_.fetch_add(1);
  grants_ = std::move(taken);
}

}  // namespace headwater::service
