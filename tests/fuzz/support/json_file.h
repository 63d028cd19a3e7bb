// JSON as the library reads it, to compare with the product's readers, and files around it. A source of its own, because the parser
// is slow to compile.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_JSON_FILE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_JSON_FILE_H_

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "server/model_files/file_source.h"
#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {

// A discarded value if the text is not JSON.
nlohmann::json ParseLeniently(const std::string& text);

// The length of `header`, which need not be one, the header, and bytes of `fill` up to the largest end that it claims, but no more
// than 64 KiB.
std::string SafetensorsFile(const std::string& header, char fill);

// A file that is a string. Reads that leave it are the product's to expect (kFileCorrupt); negative ones are a finding.
class MemoryFile final : public model_files::ReadableFile {
 public:
  explicit MemoryFile(std::string bytes) : bytes_(std::move(bytes)) {}

  int64_t size() const override { return static_cast<int64_t>(bytes_.size()); }
  absl::Status ReadAt(int64_t offset, int64_t byte_count, void* out) const override {
    FUZZ_CHECK(offset >= 0 && byte_count >= 0);
    if (offset > size() || byte_count > size() - offset) return MakeError(ErrorReason::kFileCorrupt, "the file ends before");
    std::copy_n(bytes_.data() + offset, byte_count, static_cast<char*>(out));
    return absl::OkStatus();
  }

 private:
  const std::string bytes_;
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_JSON_FILE_H_
