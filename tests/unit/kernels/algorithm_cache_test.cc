// The file of searched algorithms: kept over a restart, shared, and never in the way when it is damaged.
#include "kernels/cuda/products/algorithm_cache.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::Optional;

constexpr AlgorithmWords kFirst = {0, 1, 0xFFFFFFFFFFFFFFFF, 0x8000000000000000, 0x123456789ABCDEF0, 5, 6, 7};
constexpr AlgorithmWords kSecond = {8, 9, 10, 11, 12, 13, 14, 15};

class AlgorithmCacheTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) const { headwater::testing::WriteFile(path_, text); }
  // A valid file with one entry, `key`, whose words are this JSON.
  static std::string FileWith(const std::string& key, const std::string& words) {
    return R"({"format": "headwater-algorithms-1", "algorithms": {")" + key + R"(": )" + words + "}}";
  }
  static std::string EightWords() { return R"(["1","2","3","4","5","6","7","8"])"; }
  // A file with entries "0", "1", ...
  static std::string FileOf(size_t count) {
    std::string entries = "0\": " + EightWords();
    for (size_t i = 1; i < count; ++i) entries += ",\"" + std::to_string(i) + "\": " + EightWords();
    return R"({"format": "headwater-algorithms-1", "algorithms": {")" + entries + "}}";
  }

  const headwater::testing::TemporaryDirectory directory_;
  const std::filesystem::path folder_ = directory_.path();
  const std::filesystem::path path_ = folder_ / "algorithms.json";
};

TEST_F(AlgorithmCacheTest, KeepsEntriesFromStartToStart) {
  {
    AlgorithmCache cache(path_);
    EXPECT_EQ(cache.Find("first"), std::nullopt);
    ASSERT_TRUE(cache.Put("first", kFirst).ok());
    ASSERT_TRUE(cache.Put("a key with \"quotes\" and \\", kSecond).ok());
    EXPECT_THAT(cache.Find("first"), Optional(Eq(kFirst)));
  }
  AlgorithmCache cache(path_);
  EXPECT_THAT(cache.Find("first"), Optional(Eq(kFirst)));
  EXPECT_THAT(cache.Find("a key with \"quotes\" and \\"), Optional(Eq(kSecond)));
  EXPECT_EQ(cache.Find("First"), std::nullopt);
  ASSERT_TRUE(cache.Put("first", kSecond).ok());
  EXPECT_THAT(AlgorithmCache(path_).Find("first"), Optional(Eq(kSecond)));
}

TEST_F(AlgorithmCacheTest, WithoutAPathEntriesLiveAsLongAsTheObject) {
  AlgorithmCache cache("");
  ASSERT_TRUE(cache.Put("first", kFirst).ok());
  EXPECT_THAT(cache.Find("first"), Optional(Eq(kFirst)));
  EXPECT_EQ(AlgorithmCache("").Find("first"), std::nullopt);
}

TEST_F(AlgorithmCacheTest, TwoProcessesShareAFile) {
  AlgorithmCache one(path_), other(path_);
  ASSERT_TRUE(one.Put("both", kFirst).ok());
  ASSERT_TRUE(one.Put("one", kFirst).ok());
  ASSERT_TRUE(other.Put("other", kSecond).ok());
  // Its own word counts, not the other's earlier one.
  ASSERT_TRUE(other.Put("both", kSecond).ok());
  const AlgorithmCache cache(path_);
  EXPECT_THAT(cache.Find("one"), Optional(Eq(kFirst)));
  EXPECT_THAT(cache.Find("other"), Optional(Eq(kSecond)));
  EXPECT_THAT(cache.Find("both"), Optional(Eq(kSecond)));
  EXPECT_THAT(other.Find("one"), Optional(Eq(kFirst)));
}

TEST_F(AlgorithmCacheTest, ReadsTheFormatThatItDocuments) {
  Write(FileWith("key", R"(["0","ff","00000000000000FF","ffffffffffffffff","4","5","6","7"])"));
  const auto words = AlgorithmCache(path_).Find("key");
  ASSERT_TRUE(words.has_value());
  EXPECT_THAT(*words, ElementsAre(0, 255, 255, ~uint64_t{0}, 4, 5, 6, 7));
}

// The fuzzer fuzz_algorithm_cache_test compares what is read of any text with another parser.
TEST_F(AlgorithmCacheTest, WhatIsNoCacheCountsAsEmptyAndIsReplaced) {
  const std::string good = FileWith("key", EightWords());
  ASSERT_TRUE((Write(good), AlgorithmCache(path_).Find("key").has_value()));
  for (const std::string& text : {
           std::string(), good.substr(0, good.size() - 1), FileWith("key", R"(["1","2","3","4","5","6","7"])"),
           FileWith("key", R"(["1","2","3","4","5","6","7","10000000000000000"])"),  // 65 bits
           FileOf(AlgorithmCache::kMaxEntries + 1), std::string(AlgorithmCache::kMaxFileBytes, ' ') + good,
           std::string(1 << 20, '['),  // as deep as it is long
       }) {
    SCOPED_TRACE(text.substr(0, 120));
    Write(text);
    AlgorithmCache cache(path_);
    EXPECT_EQ(cache.Find("key"), std::nullopt);
    EXPECT_EQ(cache.Find("0"), std::nullopt);
    ASSERT_TRUE(cache.Put("new", kFirst).ok());
    EXPECT_THAT(AlgorithmCache(path_).Find("new"), Optional(Eq(kFirst)));
  }
}

TEST_F(AlgorithmCacheTest, TooManyEntriesBeginAnew) {
  Write(FileOf(AlgorithmCache::kMaxEntries));
  AlgorithmCache cache(path_);
  ASSERT_TRUE(cache.Find("0").has_value());
  ASSERT_TRUE(cache.Put("0", kFirst).ok());
  EXPECT_TRUE(cache.Find("1").has_value());
  ASSERT_TRUE(cache.Put("one more", kSecond).ok());
  EXPECT_EQ(cache.Find("1"), std::nullopt);
  const AlgorithmCache again(path_);
  EXPECT_THAT(again.Find("one more"), Optional(Eq(kSecond)));
  EXPECT_EQ(again.Find("1"), std::nullopt);
}

TEST_F(AlgorithmCacheTest, AFolderThatCannotBeWrittenCostsOnlyTheFile) {
  AlgorithmCache cache(folder_ / "missing" / "algorithms.json");
  const absl::Status status = cache.Put("first", kFirst);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("No such file or directory"));
  EXPECT_THAT(cache.Find("first"), Optional(Eq(kFirst)));
}

TEST_F(AlgorithmCacheTest, AFolderInThePlaceOfTheFileIsLeftAlone) {
  std::filesystem::create_directory(path_);
  AlgorithmCache cache(path_);
  EXPECT_EQ(cache.Put("first", kFirst).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(std::filesystem::is_directory(path_));
  // No temporary file is left behind.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator()), 1);
}

TEST_F(AlgorithmCacheTest, APipeDoesNotBlock) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  AlgorithmCache cache(path_);
  EXPECT_EQ(cache.Find("first"), std::nullopt);
  ASSERT_TRUE(cache.Put("first", kFirst).ok());
  EXPECT_THAT(AlgorithmCache(path_).Find("first"), Optional(Eq(kFirst)));
}

TEST_F(AlgorithmCacheTest, OthersCanReadTheFileAndNothingElseIsLeft) {
  AlgorithmCache cache(path_);
  ASSERT_TRUE(cache.Put("first", kFirst).ok());
  struct stat info = {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0644u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator()), 1);
  EXPECT_THAT(headwater::testing::ReadFile(path_), HasSubstr("123456789abcdef0"));
}

}  // namespace
}  // namespace headwater::cuda
