// The table of limits: the ranges that a server checks at its start, and what it reports to clients.
#include "server/service/limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

#include "headwater/v1/session_service.pb.h"
#include "server/service/request/head_request.h"

namespace headwater::service {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(int64_t value) { return std::to_string(value); }
std::string Text(absl::Duration value) { return absl::FormatDuration(value); }

int64_t Step(int64_t) { return 1; }
absl::Duration Step(absl::Duration) { return absl::Nanoseconds(1); }

template <typename Value>
std::string Refusal(Value Limits::*field, Value value) {
  Limits limits;
  limits.*field = value;
  return std::string(ValidateLimits(limits).message());
}

template <typename Value>
void ExpectRange(const std::string& name, Value Limits::*field, Value minimum, Value maximum) {
  const std::string below = name + ": expected at least " + Text(minimum) + ", got ";
  const std::string above = name + ": expected at most " + Text(maximum) + ", got ";
  // A limit at an end of its range may contradict another one, which has a message of its own.
  EXPECT_THAT(Refusal(field, minimum), Not(HasSubstr(below)));
  EXPECT_THAT(Refusal(field, maximum), Not(HasSubstr(above)));
  EXPECT_EQ(Refusal(field, minimum - Step(minimum)), below + Text(minimum - Step(minimum)));
  if (Text(maximum) != Text(kNoMaximum)) {
    EXPECT_EQ(Refusal(field, maximum + Step(maximum)), above + Text(maximum + Step(maximum)));
  }
}

TEST(Limits, EachIsAcceptedAtTheEndsOfItsRangeAndRefusedBeyond) {
  EXPECT_TRUE(ValidateLimits({}).ok());
#define HEADWATER_EXPECT_RANGE(unit, name, default_value, minimum, maximum, help) \
  ExpectRange<unit##Limit::Value>(#name, &Limits::name, minimum, maximum);
  HEADWATER_LIMITS(HEADWATER_EXPECT_RANGE)
#undef HEADWATER_EXPECT_RANGE
}

TEST(Limits, ContradictionsAreRefused) {
  const Limits defaults;
  EXPECT_THAT(Refusal(&Limits::max_chunk_bytes, defaults.max_message_bytes),
              HasSubstr("max_message_bytes: expected at least 64 KiB more"));
  EXPECT_THAT(Refusal(&Limits::max_hidden_size, defaults.max_chunk_bytes),
              HasSubstr("max_chunk_bytes: expected room for one fp32"));
  EXPECT_THAT(Refusal(&Limits::max_micro_batch_rows, defaults.max_message_bytes),
              HasSubstr("max_message_bytes: expected room for"));
}

using Reported = std::map<std::string, int64_t>;

// Both give a limit a value of its own, and add what a client is to see.
void Fill(const std::string& name, int64_t* value, Reported* expected) {
  *value = 100 + static_cast<int64_t>(expected->size());
  (*expected)[name] = *value;
}
void Fill(const std::string& name, absl::Duration* value, Reported* expected) {
  int64_t seconds = 0;
  Fill(name + "_s", &seconds, expected);
  *value = absl::Seconds(seconds) - absl::Milliseconds(500);  // reported rounded up
}

TEST(Limits, EachIsReportedUnderItsName) {
  Limits limits;
  Reported expected;
#define HEADWATER_FILL(unit, name, ...) Fill(#name, &limits.name, &expected);
  HEADWATER_LIMITS(HEADWATER_FILL)
#undef HEADWATER_FILL
  v1::Limits encoded;
  EncodeLimits(limits, &encoded);
  Reported reported;
  for (int i = 0; i < v1::Limits::descriptor()->field_count(); ++i) {
    const auto* field = v1::Limits::descriptor()->field(i);
    reported[field->name()] = encoded.GetReflection()->GetInt64(encoded, field);
  }
  EXPECT_EQ(reported, expected);
}

}  // namespace
}  // namespace headwater::service
