// A directory in memory where there is one, so that a campaign does not wear a disk; removed at the end.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SCRATCH_DIRECTORY_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SCRATCH_DIRECTORY_H_

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {

class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::error_code ignored;
    const std::filesystem::path memory = "/dev/shm";
    const bool in_memory = std::filesystem::is_directory(memory, ignored);
    path_ = ((in_memory ? memory : std::filesystem::temp_directory_path()) / "headwater-fuzz-XXXXXX").string();
    FUZZ_CHECK(mkdtemp(path_.data()) != nullptr);
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SCRATCH_DIRECTORY_H_
