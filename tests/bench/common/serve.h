// A benchmark's program answers the requests of the script that runs it (runs.py): a line of standard input, a line of output.
#ifndef HEADWATER_TESTS_BENCH_COMMON_SERVE_H_
#define HEADWATER_TESTS_BENCH_COMMON_SERVE_H_

#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace headwater::bench {

// `COMMAND NAME=VALUE...`. A program's arguments are a request without a command; their names may begin with dashes.
class Request {
 public:
  explicit Request(const std::string& line);
  Request(int argc, char** argv);

  const std::string& command() const { return command_; }
  // Takes the value of that name out of the request, or returns `standard`.
  template <typename T>
  T Take(const std::string& name, T standard) {
    const auto found = values_.find(name);
    if (found == values_.end()) return standard;
    std::istringstream text(found->second);
    if (!(text >> standard) || text.peek() != EOF) throw std::runtime_error("no value of " + name + ": " + found->second);
    values_.erase(found);
    return standard;
  }
  // Throws std::runtime_error unless all values were taken: with a misspelt name something else would be measured.
  void ExpectEmpty() const;

 private:
  void Add(const std::string& word);

  std::string command_;
  std::map<std::string, std::string> values_;
};

// The words of an answer.
std::string Words(const std::vector<double>& numbers);

// Throws std::runtime_error for an error.
void Require(const absl::Status& status);
template <typename T>
T Require(absl::StatusOr<T> result) {
  Require(result.status());
  return *std::move(result);
}

// Answers a request with words, or throws.
using Answer = std::function<std::string(Request& request)>;
// `open` takes the program's arguments. When it has returned, prints `ready`; then answers each line with `ok WORD...`, or with
// `error WHY`. Returns the exit status, at the end of the input, or 1 if `open` throws.
int Serve(int argc, char** argv, const std::function<Answer(Request& arguments)>& open);

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_SERVE_H_
