// Flags of the benchmarks' programs: --name=value, or --name alone for a switch.
#ifndef HEADWATER_TESTS_BENCH_COMMON_FLAGS_H_
#define HEADWATER_TESTS_BENCH_COMMON_FLAGS_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/bench/common/alternating_blocks.h"

namespace headwater::bench {

// A flag sets the variable that is declared for it, which has the default.
class Flags {
 public:
  void Text(const std::string& name, std::string* variable);
  // One of `values`.
  void Choice(const std::string& name, const std::vector<std::string>& values, std::string* variable);
  // Words with commas between them, each one of `known`; any if that is empty.
  void Names(const std::string& name, const std::vector<std::string>& known, std::vector<std::string>* variable);
  void Switch(const std::string& name, bool* variable);
  // --seconds, --warmup, --rounds and --idle.
  void Blocks(BlockOptions* blocks);
  template <typename T>
  void Number(const std::string& name, double low, double high, T* variable) {
    setters_[name] = [=](const std::string& value) {
      double number = 0;
      if (!ReadNumber(value, low, high, &number)) return false;
      *variable = static_cast<T>(number);
      return true;
    };
  }

  // Ends the program with 2, and says which flags there are, for one that is unknown or has another value.
  void Parse(int argc, char** argv) const;

 private:
  static bool ReadNumber(const std::string& value, double low, double high, double* number);

  std::map<std::string, std::function<bool(const std::string& value)>> setters_;  // false: the value is wrong
};

// Runs a program that may throw; its exit status. Without `reason` not to run it, which is printed.
int RunUnless(const std::string& reason, const std::function<int()>& program);

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_FLAGS_H_
