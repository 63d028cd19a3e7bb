#include "tests/bench/common/flags.h"

#include <cstdlib>

namespace headwater::bench {

Flag::Flag(const std::string& text, Usage usage)
    : text_(text),
      name_(text.substr(0, text.find('='))),
      value_(name_.size() == text.size() ? "" : text.substr(name_.size() + 1)),
      usage_(usage) {}

double Flag::Number(double low, double high) const {
  char* end = nullptr;
  const double number = std::strtod(value_.c_str(), &end);
  if (value_.empty() || *end != 0 || !(number >= low && number <= high)) usage_(text_);
  return number;
}

bool Flag::SetsBlocks(BlockOptions* blocks) const {
  if (name_ == "--seconds") {
    blocks->block_seconds = Number(0.01, 60);
  } else if (name_ == "--warmup") {
    blocks->warmup_seconds = Number(0, 60);
  } else if (name_ == "--rounds") {
    blocks->rounds = static_cast<int>(Number(1, 100));
  } else if (name_ == "--idle") {
    blocks->idle_seconds = Number(0, 60);
  } else {
    return false;
  }
  return true;
}

}  // namespace headwater::bench
