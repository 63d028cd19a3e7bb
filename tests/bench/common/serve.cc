#include "tests/bench/common/serve.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>

namespace headwater::bench {

Request::Request(const std::string& line) {
  std::istringstream words(line);
  words >> command_;
  for (std::string word; words >> word;) Add(word);
}

Request::Request(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) Add(argv[i]);
}

void Request::Add(const std::string& word) {
  const size_t name = std::min(word.find_first_not_of('-'), word.size()), end = word.find('=');
  if (end == std::string::npos || end <= name) throw std::runtime_error("expected NAME=VALUE: " + word);
  values_[word.substr(name, end - name)] = word.substr(end + 1);
}

void Request::ExpectEmpty() const {
  if (!values_.empty()) throw std::runtime_error("unknown name: " + values_.begin()->first);
}

std::string Words(const std::vector<double>& numbers) {
  std::ostringstream words;
  words.precision(17);
  for (const double number : numbers) words << number << " ";
  return words.str();
}

void Require(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

int Serve(int argc, char** argv, const std::function<Answer(Request& arguments)>& open) {
  // Libraries print to standard output, too, as NCCL does where it is asked to. Theirs goes to standard error.
  const int answers = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  const auto say = [answers](const std::string& line) { dprintf(answers, "%s\n", line.c_str()); };
  Answer answer;
  try {
    Request arguments(argc, argv);
    answer = open(arguments);
    arguments.ExpectEmpty();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  say("ready");
  for (std::string line; std::getline(std::cin, line);) {
    std::string words;
    try {
      Request request(line);
      words = "ok " + answer(request);
      request.ExpectEmpty();
    } catch (const std::exception& error) {
      words = std::string("error ") + error.what();
    }
    std::replace(words.begin(), words.end(), '\n', ' ');
    say(words);
  }
  return 0;
}

}  // namespace headwater::bench
