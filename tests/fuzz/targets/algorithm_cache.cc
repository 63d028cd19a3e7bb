// The file that keeps what a search for algorithms found. Input: the file. One that is not as it should be counts as empty, as a
// whole; what is taken from one that is stays through the next Put().
#include "kernels/cuda/products/algorithm_cache.h"

#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/target.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::fuzz {
namespace {

using Entries = std::map<std::string, cuda::AlgorithmWords>;

// A number of 64 bits in hexadecimal, digit by digit.
std::optional<uint64_t> ReadWord(const std::string& text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  uint64_t word = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c);
    if (digit == std::string_view::npos || word >> 60 != 0) return std::nullopt;
    word = word << 4 | digit;
  }
  return text.empty() ? std::nullopt : std::optional(word);
}

// The entries as the header tells the format.
Entries Expected(const nlohmann::json& root) {
  if (!root.is_object() || !root.contains("format") || !root.contains("algorithms")) return {};
  if (root["format"] != "headwater-algorithms-1" || !root["algorithms"].is_object()) return {};
  Entries entries;
  for (const auto& [key, list] : root["algorithms"].items()) {
    cuda::AlgorithmWords words{};
    if (!list.is_array() || list.size() != words.size()) return {};
    for (size_t i = 0; i < words.size(); ++i) {
      const std::optional<uint64_t> word = list[i].is_string() ? ReadWord(list[i].get<std::string>()) : std::nullopt;
      if (!word.has_value()) return {};
      words[i] = *word;
    }
    entries[key] = words;
  }
  return entries;
}

// All that the file could be taken for, so that what must not be taken is asked for too.
void CheckKeys(const cuda::AlgorithmCache& cache, const nlohmann::json& root, const Entries& expected) {
  for (const auto& [key, words] : expected) FUZZ_CHECK(cache.Find(key) == words, key);
  if (!root.is_object() || !root.contains("algorithms") || !root["algorithms"].is_object()) return;
  for (const auto& [key, list] : root["algorithms"].items()) {
    FUZZ_CHECK(cache.Find(key).has_value() == (expected.count(key) == 1), key);
  }
}

}  // namespace

void CheckInput(InputReader input) {
  static const testing::TemporaryDirectory directory;
  static const std::string path = directory.path() + "/algorithms";
  const std::string text = input.Rest();
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  const nlohmann::json root = ParseLeniently(text);
  const Entries expected = Expected(root);
  cuda::AlgorithmCache cache(path);
  CheckKeys(cache, root, expected);
  if (expected.empty()) return;
  // Written again, with an entry more, it says the same.
  const cuda::AlgorithmWords words = {1, 2, 3, 4, 5, 6, 7, ~uint64_t{0}};
  FUZZ_CHECK(cache.Put("another", words).ok());
  const cuda::AlgorithmCache again(path);
  FUZZ_CHECK(again.Find("another") == words);
  for (const auto& [key, value] : expected) FUZZ_CHECK(key == "another" || again.Find(key) == value, key);
}

}  // namespace headwater::fuzz
