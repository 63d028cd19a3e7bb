// A server, and headwaterctl run on it.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_HEADWATERCTL_FIXTURE_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_HEADWATERCTL_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {

inline constexpr int64_t kVocabSize = 101;
inline constexpr int64_t kHiddenSize = 12;

// A safetensors file with one tensor of float32 elements, which it says are of `type`.
inline std::string SafetensorsBytes(const std::string& name, const std::vector<int64_t>& shape, const std::vector<float>& values,
                                    const std::string& type = "F32") {
  const nlohmann::json header = {{name, {{"dtype", type}, {"shape", shape}, {"data_offsets", {0, values.size() * 4}}}}};
  const std::string text = header.dump();
  std::string bytes(8 + text.size() + values.size() * 4, '\0');
  const uint64_t length = text.size();
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, text.data(), text.size());
  std::memcpy(bytes.data() + 8 + text.size(), values.data(), values.size() * 4);
  return bytes;
}

class Headwaterctl : public testing::Test {
 protected:
  ProgramResult Run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {HEADWATERCTL, "--server=" + server_.target()});
    return RunProgram(arguments);
  }

  nlohmann::json RunJson(std::vector<std::string> arguments, int exit_code = 0) const {
    arguments.push_back("--json");
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    nlohmann::json document = nlohmann::json::parse(result.out, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << result.out;
    return document;
  }

  // Runs a command: its exit code, and texts on standard error or output.
  void ExpectError(const std::vector<std::string>& arguments, int exit_code, const std::vector<std::string>& texts) const {
    Expect(arguments, exit_code, &ProgramResult::err, texts);
  }
  void ExpectOutput(const std::vector<std::string>& arguments, int exit_code, const std::vector<std::string>& texts) const {
    Expect(arguments, exit_code, &ProgramResult::out, texts);
  }
  void Expect(const std::vector<std::string>& arguments, int exit_code, std::string ProgramResult::*stream,
              const std::vector<std::string>& texts) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.out << result.err;
    for (const std::string& text : texts)
      EXPECT_NE((result.*stream).find(text), std::string::npos) << text << "\n" << result.*stream;
  }

  ServerProcess server_;
  const std::vector<float> weight_ = RandomFloats(1, kVocabSize* kHiddenSize, 0.5F);
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_HEADWATERCTL_FIXTURE_H_
