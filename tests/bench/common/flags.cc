#include "tests/bench/common/flags.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>

namespace headwater::bench {

void Flags::Text(const std::string& name, std::string* variable) {
  setters_[name] = [=](const std::string& value) {
    *variable = value;
    return true;
  };
}

void Flags::Choice(const std::string& name, const std::vector<std::string>& values, std::string* variable) {
  setters_[name] = [=](const std::string& value) {
    *variable = value;
    return std::count(values.begin(), values.end(), value) == 1;
  };
}

void Flags::Names(const std::string& name, const std::vector<std::string>& known, std::vector<std::string>* variable) {
  setters_[name] = [=](const std::string& value) {
    std::istringstream words(value);
    for (std::string word; std::getline(words, word, ',');) {
      if (!known.empty() && std::count(known.begin(), known.end(), word) == 0) return false;
      variable->push_back(word);
    }
    return !variable->empty();
  };
}

void Flags::Switch(const std::string& name, bool* variable) {
  setters_[name] = [=](const std::string& value) { return *variable = value.empty(); };
}

void Flags::Blocks(BlockOptions* blocks) {
  Number("--seconds", 0.01, 60, &blocks->block_seconds);
  Number("--warmup", 0, 60, &blocks->warmup_seconds);
  Number("--rounds", 1, 100, &blocks->rounds);
  Number("--idle", 0, 60, &blocks->idle_seconds);
}

void Flags::Parse(int argc, char** argv) const {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i], name = text.substr(0, text.find('='));
    const auto setter = setters_.find(name);
    if (setter != setters_.end() && setter->second(name.size() == text.size() ? "" : text.substr(name.size() + 1))) continue;
    std::fprintf(stderr, "unknown flag or value: %s; there are", text.c_str());
    for (const auto& [known, set] : setters_) std::fprintf(stderr, " %s", known.c_str());
    std::fprintf(stderr, "\n");
    std::exit(2);
  }
}

bool Flags::ReadNumber(const std::string& value, double low, double high, double* number) {
  char* end = nullptr;
  *number = std::strtod(value.c_str(), &end);
  return !value.empty() && *end == 0 && *number >= low && *number <= high;
}

int RunUnless(const std::string& reason, const std::function<int()>& program) {
  std::string failure = reason;
  try {
    if (failure.empty()) return program();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  std::fprintf(stderr, "%s\n", failure.c_str());
  return 1;
}

}  // namespace headwater::bench
