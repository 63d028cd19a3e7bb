#include "kernels/cuda/products/algorithm_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

namespace headwater::cuda {
namespace {

using Json = nlohmann::json;
using Entries = std::map<std::string, AlgorithmWords>;

constexpr const char* kFormat = "headwater-algorithms-1";

// At most kMaxFileBytes of a file; empty if there is none, if it is larger, or not a plain file (a pipe would block).
std::string ReadSmallFile(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < 0 ||
      static_cast<size_t>(info.st_size) > AlgorithmCache::kMaxFileBytes) {
    return {};
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<size_t>(info.st_size), '\0');
  file.read(text.data(), info.st_size);
  // A file that shrank meanwhile is cut off, and then no JSON.
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

bool ParseWords(const Json& value, AlgorithmWords* words) {
  if (!value.is_array() || value.size() != words->size()) return false;
  for (size_t i = 0; i < words->size(); ++i) {
    if (!value[i].is_string()) return false;
    const std::string& text = value[i].get_ref<const std::string&>();
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, (*words)[i], 16);
    if (text.empty() || error != std::errc() || stop != end) return false;
  }
  return true;
}

// The file's entries; none if any part of it is not as it should be.
Entries ReadEntries(const std::string& path) {
  if (path.empty()) return {};
  const Json root = Json::parse(ReadSmallFile(path), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return {};
  const auto format = root.find("format"), algorithms = root.find("algorithms");
  if (format == root.end() || *format != kFormat || algorithms == root.end() || !algorithms->is_object() ||
      algorithms->size() > AlgorithmCache::kMaxEntries) {
    return {};
  }
  Entries entries;
  for (const auto& [key, value] : algorithms->items()) {
    AlgorithmWords words;
    if (!ParseWords(value, &words)) return {};
    entries.emplace(key, words);
  }
  return entries;
}

std::string Serialize(const Entries& entries) {
  Json algorithms = Json::object();
  for (const auto& [key, words] : entries) {
    Json list = Json::array();
    for (const uint64_t word : words) {
      char text[17];
      std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(word));
      list.push_back(text);
    }
    algorithms[key] = std::move(list);
  }
  const Json root = {{"format", kFormat}, {"algorithms", std::move(algorithms)}};
  // A key that is no UTF-8 must not throw; it is not found again.
  return root.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::Status WriteError(const char* what) {
  return absl::UnavailableError(std::string("the algorithm cache cannot be written: ") + what + ": " + std::strerror(errno));
}

bool WriteAll(int descriptor, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = write(descriptor, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

// A reader sees the old file or the new one.
absl::Status ReplaceFile(const std::string& path, const std::string& text) {
  std::string temporary = path + ".XXXXXX";
  const int descriptor = mkstemp(temporary.data());
  if (descriptor < 0) return WriteError("no temporary file beside it");
  // mkstemp() makes files that only their owner can read; other users' processes may share this one.
  const bool written = WriteAll(descriptor, text) && fchmod(descriptor, 0644) == 0;
  const bool closed = close(descriptor) == 0;
  if (written && closed && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status error = WriteError(written && closed ? "renaming" : "writing");
  unlink(temporary.c_str());
  return error;
}

}  // namespace

AlgorithmCache::AlgorithmCache(std::string path) : path_(std::move(path)), entries_(ReadEntries(path_)) {}

std::optional<AlgorithmWords> AlgorithmCache::Find(const std::string& key) const {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  return found->second;
}

absl::Status AlgorithmCache::Put(const std::string& key, const AlgorithmWords& words) {
  entries_[key] = words;
  // Entries that another process has added meanwhile are kept, and known here from now on.
  entries_.merge(ReadEntries(path_));
  if (entries_.size() > kMaxEntries) entries_ = {{key, words}};
  return path_.empty() ? absl::OkStatus() : ReplaceFile(path_, Serialize(entries_));
}

}  // namespace headwater::cuda
