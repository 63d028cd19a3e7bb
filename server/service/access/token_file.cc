#include "server/service/access/token_file.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/heads/head_name.h"
#include "server/model_files/strict_json.h"
#include "server/observability/logging.h"
#include "server/transport/file_descriptor.h"

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

absl::StatusOr<TokenGrant> ParseToken(const json& token, const std::string& place) {
  if (!token.is_object()) return Wrong(place, "an object");
  if (absl::Status status = CheckKeys(token, place, {"name", "sha256", "tenant", "compute", "admin"}); !status.ok()) return status;
  TokenGrant grant;
  const json* const name = model_files::FindMember(token, "name", json::value_t::string);
  if (name == nullptr || !IsName(name->get<std::string>(), "._-")) {
    return Wrong(place + ".name", "1 to 64 letters, digits, or characters of . _ -");
  }
  grant.name = name->get<std::string>();
  const json* const digest = model_files::FindMember(token, "sha256", json::value_t::string);
  const std::string hex = digest == nullptr ? "" : digest->get<std::string>();
  if (hex.size() != 2 * grant.sha256.size() ||
      !std::all_of(hex.begin(), hex.end(), [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); })) {
    return Wrong(place + ".sha256", "the token's SHA-256 as 64 hexadecimal digits");
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), grant.sha256.begin());
  grant.tenant = heads::kDefaultTenant;
  if (token.contains("tenant")) {
    const json* const tenant = model_files::FindMember(token, "tenant", json::value_t::string);
    if (tenant == nullptr || !heads::ParseTenantName("tenants/" + tenant->get<std::string>(), "tenant").ok()) {
      return Wrong(place + ".tenant", "the id of a tenant: 1 to 64 characters of a-z 0-9 . _ -, a letter or digit first and last");
    }
    grant.tenant = tenant->get<std::string>();
  }
  if (absl::Status status = ParsePatterns(token, "compute", place, &grant.compute); !status.ok()) return status;
  if (absl::Status status = ParsePatterns(token, "admin", place, &grant.admin); !status.ok()) return status;
  return grant;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const auto cannot = [&](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("token_file: ", path, ": ", what, ": ", std::strerror(errno)));
  };
  transport::FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return cannot("cannot open it");
  struct stat about {};
  if (fstat(file.get(), &about) != 0) return cannot("cannot look at it");
  if (!S_ISREG(about.st_mode) || about.st_size > kMostFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_file: ", path, ": expected a file of at most ", kMostFileBytes, " bytes"));
  }
  if ((about.st_mode & S_IWOTH) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("token_file: ", path, ": everybody may write it; expected mode 0640 or less"));
  }
  std::string text;
  char buffer[4096];
  while (static_cast<int64_t>(text.size()) <= kMostFileBytes) {
    const ssize_t count = read(file.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return cannot("cannot read it");
    if (count == 0) return text;
    text.append(buffer, static_cast<size_t>(count));
  }
  return absl::InvalidArgumentError(absl::StrCat("token_file: ", path, ": expected a file of at most ", kMostFileBytes, " bytes"));
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
  auto parsed = model_files::ParseStrictJson(text, "the token file");
  if (!parsed.ok()) return parsed.status();
  if (absl::Status status = CheckKeys(*parsed, "the object", {"tokens"}); !status.ok()) return status;
  const json* const tokens = model_files::FindMember(*parsed, "tokens", json::value_t::array);
  if (tokens == nullptr) return Wrong("tokens", "an array");
  TokenGrants grants;
  for (size_t i = 0; i < tokens->size(); ++i) {
    const std::string place = absl::StrCat("tokens[", i, "]");
    auto grant = ParseToken((*tokens)[i], place);
    if (!grant.ok()) return grant.status();
    for (const auto& earlier : grants) {
      if (earlier->name == grant->name) return Wrong(place + ".name", "one that no earlier token has");
      if (earlier->sha256 == grant->sha256) return Wrong(place + ".sha256", "one that no earlier token has");
    }
    grants.push_back(std::make_shared<const TokenGrant>(*std::move(grant)));
  }
  return grants;
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path, absl::Duration interval) {
  auto text = ReadFile(path);
  if (!text.ok()) return text.status();
  auto grants = ParseTokens(*text);
  if (!grants.ok()) return absl::InvalidArgumentError(absl::StrCat("token_file: ", path, ": ", grants.status().message()));
  return std::unique_ptr<TokenFile>(new TokenFile(path, interval, *std::move(text), *std::move(grants)));
}

TokenFile::TokenFile(std::string path, absl::Duration interval, std::string text, TokenGrants grants)
    : path_(std::move(path)),
      text_(std::move(text)),
      grants_(std::make_shared<const TokenGrants>(std::move(grants))),
      look_(interval, [this] { Reload(); }) {}

std::shared_ptr<const TokenGrant> TokenFile::Find(absl::string_view token) const {
  if (token.empty() || token.size() > kMostTokenBytes) return nullptr;
  std::array<uint8_t, 32> digest{};
  unsigned int size = 0;
  if (EVP_Digest(token.data(), token.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1 || size != digest.size()) {
    return nullptr;
  }
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
