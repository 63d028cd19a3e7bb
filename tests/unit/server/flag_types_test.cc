#include "server/flags/flag_types.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/flags/marshalling.h"
#include "absl/time/time.h"

namespace headwater {
namespace {

std::optional<absl::Duration> ParseDurationFlag(const std::string& text) {
  DurationFlag flag;
  std::string error;
  if (!absl::ParseFlag(text, &flag, &error)) return std::nullopt;
  return flag;
}

std::optional<int64_t> ParseBytesFlag(const std::string& text) {
  BytesFlag flag;
  std::string error;
  if (absl::ParseFlag(text, &flag, &error)) return flag.value;
  EXPECT_NE(error.find("16GiB"), std::string::npos) << error;
  return std::nullopt;
}

TEST(FlagTypes, ADurationWithoutUnitIsSeconds) {
  EXPECT_EQ(ParseDurationFlag("5"), absl::Seconds(5));
  EXPECT_EQ(ParseDurationFlag("0.25"), absl::Milliseconds(250));
  EXPECT_EQ(ParseDurationFlag("5s"), absl::Seconds(5));
  EXPECT_EQ(ParseDurationFlag("1m30s"), absl::Seconds(90));
  EXPECT_EQ(ParseDurationFlag("-1s"), absl::Seconds(-1));
  EXPECT_EQ(ParseDurationFlag("0"), absl::ZeroDuration());
  for (const char* text : {"", "soon", "5 minutes", "nan", "5x"}) EXPECT_EQ(ParseDurationFlag(text), std::nullopt) << text;
  EXPECT_EQ(absl::UnparseFlag(DurationFlag(absl::Seconds(90))), "1m30s");
}

TEST(FlagTypes, SizesHaveUnitsOf1024And1000) {
  constexpr int64_t kGibi = int64_t{1} << 30;
  EXPECT_EQ(ParseBytesFlag("17179869184"), 16 * kGibi);
  for (const char* text : {"16GiB", "16G", "16Gi", "16g", "16 GiB"}) EXPECT_EQ(ParseBytesFlag(text), 16 * kGibi) << text;
  EXPECT_EQ(ParseBytesFlag("16GB"), 16'000'000'000);
  EXPECT_EQ(ParseBytesFlag("1.5GiB"), kGibi * 3 / 2);
  EXPECT_EQ(ParseBytesFlag("512K"), 512 * 1024);
  EXPECT_EQ(ParseBytesFlag("64MiB"), 64 << 20);
  EXPECT_EQ(ParseBytesFlag("2T"), 2048 * kGibi);
  EXPECT_EQ(ParseBytesFlag("-1"), -1);
  EXPECT_EQ(ParseBytesFlag("0"), 0);
  for (const char* text : {"", "GiB", "16XB", "16GiBs", "1.5", "99999999999G", "1e30G", "sixteen"}) {
    EXPECT_EQ(ParseBytesFlag(text), std::nullopt) << text;
  }
  EXPECT_EQ(absl::UnparseFlag(BytesFlag(16 * kGibi)), "17179869184");
}

}  // namespace
}  // namespace headwater
