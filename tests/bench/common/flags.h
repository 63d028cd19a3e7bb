// Flags of the benchmarks' programs: --name=value.
#ifndef HEADWATER_TESTS_BENCH_COMMON_FLAGS_H_
#define HEADWATER_TESTS_BENCH_COMMON_FLAGS_H_

#include <string>

#include "tests/bench/common/alternating_blocks.h"

namespace headwater::bench {

class Flag {
 public:
  // `usage` says how the program is used, and ends it; it is called with `text` when the value is wrong.
  using Usage = void (*)(const std::string& text);
  Flag(const std::string& text, Usage usage);

  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }    // with its dashes
  const std::string& value() const { return value_; }  // empty without `=`

  double Number(double low, double high) const;
  // Whether it is --seconds, --warmup, --rounds or --idle, of which `blocks` has the value then.
  bool SetsBlocks(BlockOptions* blocks) const;

 private:
  const std::string text_, name_, value_;
  const Usage usage_;
};

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_FLAGS_H_
