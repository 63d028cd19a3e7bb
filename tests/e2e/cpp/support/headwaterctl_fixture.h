// A server, and headwaterctl run on it.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_HEADWATERCTL_FIXTURE_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_HEADWATERCTL_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {

inline constexpr int64_t kVocabSize = 101;
inline constexpr int64_t kHiddenSize = 12;

// A safetensors file with one tensor of float32 elements.
inline std::string SafetensorsBytes(const std::string& name, const std::vector<int64_t>& shape, const std::vector<float>& values) {
  const nlohmann::json header = {{name, {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {0, values.size() * 4}}}}};
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return absl::StrCat(std::string(reinterpret_cast<const char*>(&length), 8), text,
                      std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4));
}

using Arguments = std::vector<std::string>;

inline Arguments Joined(Arguments arguments, const Arguments& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

inline ProgramResult RunOn(const ServerProcess& server, const Arguments& arguments) {
  return RunProgram(Joined({HEADWATERCTL, "--server=" + server.target()}, arguments));
}

// Fails unless the program ends with `exit_code`, and `stream`, `err` or `out`, has the texts.
inline void Expect(const ProgramResult& result, int exit_code, std::string ProgramResult::*stream, const Arguments& texts) {
  EXPECT_EQ(result.exit_code, exit_code) << result.out << result.err;
  for (const std::string& text : texts) EXPECT_THAT(result.*stream, testing::HasSubstr(text));
}

// Whether a document has what is wanted: members of objects, elements of arrays of one length, and values. A wanted text that
// begins with ~ is a part of the document's.
inline bool Has(const nlohmann::json& document, const nlohmann::json& wanted) {
  if (wanted.is_object()) {
    for (const auto& [key, value] : wanted.items()) {
      if (!document.is_object() || !document.contains(key) || !Has(document[key], value)) return false;
    }
    return true;
  }
  if (wanted.is_array()) {
    return document.is_array() && std::equal(document.begin(), document.end(), wanted.begin(), wanted.end(), Has);
  }
  if (!wanted.is_string() || wanted.get<std::string>().rfind('~', 0) != 0) return document == wanted;
  return document.is_string() && absl::StrContains(document.get<std::string>(), wanted.get<std::string>().substr(1));
}

// What a command that ends with `exit_code` prints, which must be JSON and have what is wanted.
inline nlohmann::json ExpectJson(const ProgramResult& result, const nlohmann::json& wanted = nlohmann::json::object(),
                                 int exit_code = 0) {
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  nlohmann::json document = nlohmann::json::parse(result.out, nullptr, false);
  EXPECT_FALSE(document.is_discarded()) << result.out;
  EXPECT_TRUE(Has(document, wanted)) << document << "\ninstead of " << wanted;
  return document;
}
inline nlohmann::json ErrorOf(const std::string& reason) { return {{"error", {{"reason", reason}}}}; }

class Headwaterctl : public testing::Test {
 protected:
  ProgramResult Run(const Arguments& arguments) const { return RunOn(server_, arguments); }

  nlohmann::json ExpectJson(const Arguments& arguments, const nlohmann::json& wanted = nlohmann::json::object(),
                            int exit_code = 0) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    return e2e::ExpectJson(Run(Joined(arguments, {"--json"})), wanted, exit_code);
  }
  // All that a command prints.
  std::string OutputOf(const Arguments& arguments, int exit_code = 0) const {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    return result.out;
  }
  // Runs a command: its exit code, and texts on standard error or output.
  void ExpectError(const Arguments& arguments, int exit_code, const std::vector<std::string>& texts) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    Expect(Run(arguments), exit_code, &ProgramResult::err, texts);
  }
  void ExpectOutput(const Arguments& arguments, int exit_code, const std::vector<std::string>& texts) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    Expect(Run(arguments), exit_code, &ProgramResult::out, texts);
  }
  // Makes a head that has `weight_`.
  client::Head MakeHead(client::Client& client, const std::string& name, const client::HeadSpec& spec) const {
    return CreateHead(client, name, spec, weight_);
  }
  void ExpectWeight(client::Head head) const { EXPECT_EQ(Weight(head), weight_); }

  // A file for the test's own.
  std::string Path(const std::string& name) const { return directory_.path() + "/" + name; }

  const TemporaryDirectory directory_;
  const std::string config_ = Path("config.json");  // of a model; not there yet
  ServerProcess server_;
  const Arguments sizes_ = {absl::StrCat("--vocab_size=", kVocabSize), absl::StrCat("--hidden_size=", kHiddenSize)};
  const client::HeadSpec trained_ = {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true};
  const std::vector<float> weight_ = RandomFloats(1, kVocabSize* kHiddenSize, 0.5F);
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_HEADWATERCTL_FIXTURE_H_
