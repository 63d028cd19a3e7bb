// Files of a test.
#ifndef HEADWATER_TESTS_UNIT_SERVER_TEMPORARY_DIRECTORY_H_
#define HEADWATER_TESTS_UNIT_SERVER_TEMPORARY_DIRECTORY_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace headwater::testing {

// A directory that goes away with the object. In memory where that can be had: checkpoints sync every file.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = "/dev/shm/headwater-test-XXXXXX";
    const char* made = mkdtemp(pattern.data());
    if (made == nullptr) {
      pattern = ::testing::TempDir() + "headwater-test-XXXXXX";
      made = mkdtemp(pattern.data());
    }
    EXPECT_NE(made, nullptr);
    path_ = made != nullptr ? made : "";
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_SERVER_TEMPORARY_DIRECTORY_H_
