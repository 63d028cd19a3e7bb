// Gives a fuzz target each file of its corpus, and each input of a finding that was mended. A target that finds something ends the
// process.
#include <errno.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/support/target.h"

namespace {

// Of fuzz_TARGET_test, the program that this is in.
std::string Target() {
  const std::string program = program_invocation_short_name;
  const size_t begin = program.find('_') + 1;
  return program.substr(begin, program.rfind('_') - begin);
}

std::vector<std::filesystem::path> Files(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  const std::filesystem::path directory = std::filesystem::path(HEADWATER_FUZZ_DIRECTORY) / folder / Target();
  if (!std::filesystem::is_directory(directory)) return files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

void GiveAll(const std::vector<std::filesystem::path>& files) {
  for (const std::filesystem::path& file : files) {
    SCOPED_TRACE(file.filename().string());
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    std::cerr << file.filename().string() << std::endl;  // the last line of one that ends the process
    headwater::fuzz::CheckInput({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  }
}

TEST(Corpus, FindsNothing) {
  const std::vector<std::filesystem::path> files = Files("corpus");
  ASSERT_FALSE(files.empty());
  GiveAll(files);
}

TEST(Regressions, StayMended) { GiveAll(Files("regressions")); }

}  // namespace
