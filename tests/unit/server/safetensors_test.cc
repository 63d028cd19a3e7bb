#include "server/model_files/safetensors.h"

#include <gtest/gtest.h>

#include "server/checkpoint/file_system.h"
#include "temporary_directory.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::model_files {
namespace {

using headwater::testing::TemporaryDirectory;
using headwater::testing::WriteFile;

std::string LittleEndian(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  return bytes;
}

std::string FileWith(const std::string& header, size_t data_bytes) {
  return LittleEndian(header.size()) + header + std::string(data_bytes, 'x');
}

class SafetensorsTest : public ::testing::Test {
 protected:
  absl::StatusOr<SafetensorsHeader> Read(const std::string& bytes) {
    WriteFile(directory_.path() + "/file", bytes);
    absl::StatusOr<std::unique_ptr<ReadableFile>> file = checkpoint::PosixFileSystem().OpenFile(directory_.path() + "/file");
    EXPECT_OK(file);
    return ReadSafetensorsHeader(**file);
  }

  TemporaryDirectory directory_;
};

TEST_F(SafetensorsTest, ReadsWhatItWrites) {
  const std::string header = MakeSafetensorsHeader({{"b", "BF16", {2, 3}, 12}, {"a", "F32", {1}, 4}});
  EXPECT_EQ(header.size() % 8, 0u);
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader read, Read(header + std::string(16, 'x')));
  ASSERT_EQ(read.tensors.size(), 2u);
  const SafetensorsTensor& b = read.tensors.at("b");
  EXPECT_EQ(b.data_type, "BF16");
  EXPECT_EQ(b.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(b.begin, static_cast<int64_t>(header.size()));
  EXPECT_EQ(b.end, b.begin + 12);
  EXPECT_EQ(read.tensors.at("a").begin, b.end);
}

TEST_F(SafetensorsTest, AcceptsWhatOthersWrite) {
  // Metadata, a scalar, an empty tensor, types that heads do not have, blanks after the header.
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader read,
                       Read(FileWith(R"({"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                                     R"("e":{"dtype":"F16","shape":[0,7],"data_offsets":[8,8]},)"
                                     R"("q":{"dtype":"F4","shape":[4],"data_offsets":[8,10]}} )",
                                     10)));
  EXPECT_EQ(read.tensors.size(), 3u);
  EXPECT_OK(Read(FileWith(R"( {"__metadata__":null})", 0)));
}

// As the format's own library reads them.
TEST_F(SafetensorsTest, AcceptsWhatTheFormatsLibraryAccepts) {
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  EXPECT_OK(Read(FileWith(R"({"a":{)" + good + R"(,"x":{"shape":[{"a":[1.5,null]}]},"y":"z"}})", 8)));
  EXPECT_OK(Read(FileWith(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}})", 8)));
  EXPECT_OK(Read(FileWith(R"({"__metadata__":{"a":{"b":[1,{"c":2}]}},"a":{)" + good + "}}", 8)));
}

TEST_F(SafetensorsTest, TypesThatAreNotKnownAreReadWithTheirSize) {
  for (const std::string type : {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "C128", "I4", "any"}) {
    ASSERT_OK_AND_ASSIGN(const SafetensorsHeader read,
                         Read(FileWith(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":")" + type +
                                           R"(","shape":[3,5],"data_offsets":[8,19]}})",
                                       19)));
    EXPECT_EQ(read.tensors.at("b").data_type, type);
    EXPECT_EQ(read.tensors.at("b").end - read.tensors.at("b").begin, 11);
  }
  // Their place in the file is checked all the same.
  EXPECT_REASON(Read(FileWith(R"({"b":{"dtype":"I4","shape":[4],"data_offsets":[0,2]}})", 3)), kFileCorrupt);
  EXPECT_REASON(Read(FileWith(R"({"b":{"dtype":"I4","shape":[4],"data_offsets":[0,4]}})", 3)), kFileCorrupt);
}

TEST_F(SafetensorsTest, HostileFilesAreRefused) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  ASSERT_OK(Read(FileWith(good, 8)));
  const auto tensor = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  const std::string deep = R"({"a":)" + std::string(100000, '[') + std::string(100000, ']') + "}";
  std::string values;
  for (int i = 0; i < 1 << 20; ++i) values += "0,";
  const std::pair<const char*, std::string> files[] = {
      {"empty", ""},
      {"shorter than the length", "1234567"},
      {"a length of 2^63", LittleEndian(uint64_t{1} << 63) + good + std::string(8, 'x')},
      {"a length of 2^64 - 1", LittleEndian(~uint64_t{0}) + good + std::string(8, 'x')},
      {"a length past the end", LittleEndian(good.size() + 9) + good + std::string(8, 'x')},
      {"a header that is cut", LittleEndian(good.size() - 1) + good + std::string(8, 'x')},
      {"no JSON", FileWith("hello", 0)},
      {"an empty header", LittleEndian(0)},
      {"an array", FileWith("[]", 0)},
      {"deep nesting", FileWith(deep, 0)},
      {"millions of values", FileWith("{\"a\":[" + values + "0]}", 0)},
      {"invalid UTF-8", FileWith("{\"\xff\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8)},
      {"a repeated tensor of other bytes", FileWith(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                                    R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                                                    16)},
      {"a repeated tensor", FileWith(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                     R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                                     8)},
      {"a repeated field", FileWith(tensor(R"("dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8])"), 8)},
      {"a missing field", FileWith(tensor(R"("dtype":"F32","data_offsets":[0,8])"), 8)},
      {"a tensor that is no object", FileWith(R"({"a":7})", 0)},
      {"a type that is no string", FileWith(tensor(R"("dtype":32,"shape":[2],"data_offsets":[0,8])"), 8)},
      {"a shape within a shape", FileWith(tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"), 8)},
      {"a shape that is an object", FileWith(tensor(R"("dtype":"F32","shape":{"a":2},"data_offsets":[0,8])"), 8)},
      {"a shape that is a number", FileWith(tensor(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), 8)},
      {"a tensor that is an array", FileWith(R"({"a":[2]})", 0)},
      {"a negative dimension", FileWith(tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8)},
      {"a fractional dimension", FileWith(tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8)},
      {"a dimension of 2^63", FileWith(tensor(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])"), 8)},
      {"a dimension of 1e400", FileWith(tensor(R"("dtype":"F32","shape":[1e400],"data_offsets":[0,8])"), 8)},
      {"a product that wraps", FileWith(tensor(R"("dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8])"), 8)},
      {"a product that wraps to the right size",
       FileWith(tensor(R"("dtype":"U8","shape":[2305843009213693952,16],"data_offsets":[0,0])"), 0)},
      {"half a byte", FileWith(tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])"), 1)},
      {"reversed offsets", FileWith(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8)},
      {"negative offsets", FileWith(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"), 8)},
      {"one offset", FileWith(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8])"), 8)},
      {"an end past the file", FileWith(tensor(R"("dtype":"F32","shape":[4],"data_offsets":[0,16])"), 8)},
      {"an end of 2^63 - 1",
       FileWith(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[9223372036854775799,9223372036854775807])"), 8)},
      {"a size that is not the shape's", FileWith(tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8)},
      {"overlapping tensors", FileWith(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                                       12)},
      {"the same bytes twice", FileWith(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                                        8)},
      {"a gap", FileWith(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8)},
      {"bytes behind the last tensor", FileWith(good, 9)},
  };
  for (const auto& [what, bytes] : files) EXPECT_REASON(Read(bytes), kFileCorrupt) << what;
}

TEST_F(SafetensorsTest, ALargeHeaderIsALimitAndNoDamage) {
  std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  header.resize(static_cast<size_t>(kMaxSafetensorsHeaderBytes), ' ');
  EXPECT_OK(Read(FileWith(header, 8)));
  header.push_back(' ');
  const absl::Status status = Read(FileWith(header, 8)).status();
  EXPECT_REASON(status, kLimitExceeded);
  EXPECT_EQ(GetErrorMetadata(status)["limit"], "safetensors_header_bytes");
}

TEST_F(SafetensorsTest, HeadersOfManyTensorsAreRead) {
  constexpr int kCount = 220'000;
  std::string header = "{";
  for (int i = 0; i < kCount; ++i) {
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader read, Read(FileWith(header + "}", 0)));
  EXPECT_EQ(read.tensors.size(), static_cast<size_t>(kCount));
}

TEST_F(SafetensorsTest, EveryCutAndEveryFlippedBitOfTheHeaderIsSurvived) {
  const std::string whole = FileWith(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  for (size_t length = 0; length < whole.size(); ++length) EXPECT_REASON(Read(whole.substr(0, length)), kFileCorrupt) << length;
  for (size_t byte = 0; byte + 8 < whole.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << bit));
      const absl::StatusOr<SafetensorsHeader> read = Read(flipped);
      // A name may change; what is accepted lies inside the file all the same.
      if (!read.ok()) {
        EXPECT_REASON(read, kFileCorrupt);
      } else {
        for (const auto& [name, tensor] : read->tensors) EXPECT_LE(tensor.end, static_cast<int64_t>(whole.size()));
      }
    }
  }
}

}  // namespace
}  // namespace headwater::model_files
