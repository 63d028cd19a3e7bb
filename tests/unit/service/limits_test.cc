// Limits: what a server may be started with.
#include "server/service/limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>
#include <cstdint>
#include <string>

#include "headwater/v1/session_service.pb.h"
#include "server/service/proto_encoding.h"

namespace headwater::service {
namespace {

using ::testing::HasSubstr;

std::string Refusal(const Limits& limits) { return std::string(ValidateLimits(limits).message()); }

TEST(Limits, TheDefaultsFitEachOther) { EXPECT_TRUE(ValidateLimits(Limits{}).ok()) << Refusal(Limits{}); }

TEST(Limits, AcceptsTheOutermostValuesAndNothingBeyond) {
  struct Row {
    const char* name;
    int64_t Limits::*field;
    int64_t least;
    int64_t most;
  };
  const Row rows[] = {
      {"max_stripes", &Limits::max_stripes, 1, INT32_MAX},
      {"ordered_window", &Limits::ordered_window, 1, INT64_MAX},
      {"max_session_regions", &Limits::max_session_regions, 0, INT64_MAX},
      {"max_region_bytes", &Limits::max_region_bytes, 0, INT64_MAX},
      {"max_join_bytes", &Limits::max_join_bytes, 0, INT64_MAX},
      {"max_connections", &Limits::max_connections, 1, INT32_MAX},
      {"max_connection_streams", &Limits::max_connection_streams, 1, INT32_MAX},
      {"max_metadata_bytes", &Limits::max_metadata_bytes, kLeastMetadataBytes, INT32_MAX},
      {"max_health_watches", &Limits::max_health_watches, 1, INT64_MAX},
  };
  for (const Row& row : rows) {
    for (const int64_t value : {row.least, row.most}) {
      Limits limits;
      limits.*row.field = value;
      EXPECT_TRUE(ValidateLimits(limits).ok()) << row.name << " " << value << ": " << Refusal(limits);
    }
    Limits below;
    below.*row.field = row.least - 1;
    EXPECT_THAT(Refusal(below), HasSubstr(std::string(row.name) + ": expected at least")) << row.name;
    if (row.most == INT64_MAX) continue;
    Limits above;
    above.*row.field = row.most + 1;
    EXPECT_THAT(Refusal(above), HasSubstr(std::string(row.name) + ": expected at most")) << row.name;
  }
}

TEST(Limits, DurationsArePositiveAndBounded) {
  const std::pair<const char*, absl::Duration Limits::*> rows[] = {{"max_stripe_wait", &Limits::max_stripe_wait},
                                                                   {"max_join_wait", &Limits::max_join_wait},
                                                                   {"max_stream_time", &Limits::max_stream_time}};
  for (const auto& [name, field] : rows) {
    Limits limits;
    limits.*field = absl::Nanoseconds(1);
    EXPECT_TRUE(ValidateLimits(limits).ok()) << name;
    limits.*field = absl::Hours(1000);
    EXPECT_TRUE(ValidateLimits(limits).ok()) << name;
    for (const absl::Duration wrong : {absl::ZeroDuration(), absl::Hours(1000) + absl::Nanoseconds(1), absl::InfiniteDuration()}) {
      limits.*field = wrong;
      EXPECT_THAT(Refusal(limits), HasSubstr(std::string(name) + ": expected a duration > 0")) << name;
    }
  }
}

TEST(Limits, DurationsOfConnectionsAreWhatGrpcCanCount) {
  const std::pair<const char*, absl::Duration Limits::*> rows[] = {{"max_handshake_time", &Limits::max_handshake_time},
                                                                   {"max_connection_idle", &Limits::max_connection_idle},
                                                                   {"min_ping_interval", &Limits::min_ping_interval}};
  for (const auto& [name, field] : rows) {
    Limits limits;
    for (const absl::Duration right : {absl::Milliseconds(1), absl::Hours(500)}) {
      limits.*field = right;
      EXPECT_TRUE(ValidateLimits(limits).ok()) << name;
    }
    for (const absl::Duration wrong :
         {absl::Microseconds(999), absl::Hours(500) + absl::Nanoseconds(1), absl::InfiniteDuration()}) {
      limits.*field = wrong;
      EXPECT_THAT(Refusal(limits), HasSubstr(std::string(name) + ": expected a duration from 1ms to 500h")) << name;
    }
  }
}

TEST(Limits, AreToldAsTheyAreWithSecondsRoundedUp) {
  Limits limits;
  limits.max_stripes = 3;
  limits.max_stripe_wait = absl::Milliseconds(1500);
  limits.max_session_regions = 5;
  limits.max_region_bytes = 7;
  limits.max_join_bytes = 11;
  limits.ordered_window = 17;
  limits.max_join_wait = absl::Seconds(13);
  limits.max_connections = 17;
  limits.max_connection_streams = 19;
  limits.max_metadata_bytes = 23;
  limits.max_stream_time = absl::Seconds(29);
  limits.max_handshake_time = absl::Milliseconds(30500);
  limits.max_connection_idle = absl::Seconds(37);
  limits.min_ping_interval = absl::Milliseconds(1);
  limits.max_health_watches = 41;
  v1::Limits told;
  EncodeLimits(limits, &told);
  EXPECT_EQ(told.max_stripes(), 3);
  EXPECT_EQ(told.max_stripe_wait_s(), 2);
  EXPECT_EQ(told.max_session_regions(), 5);
  EXPECT_EQ(told.max_region_bytes(), 7);
  EXPECT_EQ(told.max_join_bytes(), 11);
  EXPECT_EQ(told.ordered_window(), 17);
  EXPECT_EQ(told.max_join_wait_s(), 13);
  EXPECT_EQ(told.max_connections(), 17);
  EXPECT_EQ(told.max_connection_streams(), 19);
  EXPECT_EQ(told.max_metadata_bytes(), 23);
  EXPECT_EQ(told.max_stream_time_s(), 29);
  EXPECT_EQ(told.max_handshake_time_s(), 31);
  EXPECT_EQ(told.max_connection_idle_s(), 37);
  EXPECT_EQ(told.min_ping_interval_s(), 1);
  EXPECT_EQ(told.max_health_watches(), 41);
}

}  // namespace
}  // namespace headwater::service
