// The error catalogue in its three places: error.proto, error.h and docs/errors.md; and how an error travels.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "headwater/kernels/error.h"
#include "headwater/v1/error.pb.h"
#include "server/observability/metrics.h"
#include "server/service/call/rpc_scope.h"

namespace headwater::service {
namespace {

struct Reason {
  ErrorReason reason;
  std::string name;
  absl::StatusCode code;
};

const std::vector<Reason>& Reasons() {
  static const std::vector<Reason> reasons = {
#define HEADWATER_REASON(enumerator, name, code) {ErrorReason::enumerator, #name, absl::StatusCode::code},
      HEADWATER_ERROR_REASONS(HEADWATER_REASON)
#undef HEADWATER_REASON
  };
  return reasons;
}

TEST(ErrorReasons, AreTheSameOnTheWire) {
  const auto* descriptor = v1::ErrorReason_descriptor();
  ASSERT_EQ(descriptor->value_count(), static_cast<int>(Reasons().size()) + 1);
  EXPECT_EQ(descriptor->value(0)->name(), "ERROR_REASON_UNSPECIFIED");
  for (int i = 1; i < descriptor->value_count(); ++i) {
    EXPECT_EQ(descriptor->value(i)->name(), "ERROR_REASON_" + Reasons()[static_cast<size_t>(i - 1)].name);
  }
}

TEST(ErrorReasons, AreAllInTheDocumentUnderTheirCode) {
  std::ifstream file(HEADWATER_DOCS "/errors.md");
  ASSERT_TRUE(file.is_open());
  std::string heading;
  std::map<std::string, std::string> headings;  // by reason
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("## ", 0) == 0) heading = line;
    if (line.rfind("| `", 0) != 0) continue;
    const std::string reason = line.substr(3, line.find('`', 3) - 3);
    EXPECT_EQ(headings.count(reason), 0U) << reason << " is there twice";
    headings[reason] = heading;
    EXPECT_EQ(std::count(line.begin(), line.end(), '|'), 4) << reason << " needs a cause and a remedy";
  }
  EXPECT_EQ(headings.size(), Reasons().size());
  for (const Reason& reason : Reasons()) {
    EXPECT_THAT(headings[reason.name], ::testing::HasSubstr(observability::CanonicalCodeName(reason.code))) << reason.name;
  }
}

v1::RpcStatus Details(const grpc::Status& status) {
  v1::RpcStatus details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

TEST(StatusMapping, CarriesReasonMetadataAndRetry) {
  for (const Reason& reason : Reasons()) {
    const grpc::Status status = ToGrpcStatus(MakeError(reason.reason, "what came", {{"field", "f"}, {"retryAfterMs", "1250"}}));
    EXPECT_EQ(static_cast<int>(status.error_code()), static_cast<int>(reason.code)) << reason.name;
    const v1::RpcStatus details = Details(status);
    EXPECT_EQ(details.code(), static_cast<int>(reason.code));
    EXPECT_EQ(details.message(), "what came");
    ASSERT_EQ(details.details_size(), 2);
    EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
    v1::ErrorInfo info;
    ASSERT_TRUE(info.ParseFromString(details.details(0).value()));
    EXPECT_EQ(info.reason(), reason.name);
    EXPECT_EQ(info.domain(), "headwater");
    EXPECT_EQ(info.metadata().at("field"), "f");
    v1::RetryInfo retry;
    EXPECT_EQ(details.details(1).type_url(), "type.googleapis.com/google.rpc.RetryInfo");
    ASSERT_TRUE(retry.ParseFromString(details.details(1).value()));
    EXPECT_EQ(retry.retry_delay().seconds(), 1);
    EXPECT_EQ(retry.retry_delay().nanos(), 250000000);
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(StatusMapping, HidesTheTextOfErrorsThatAreNotOurs) {
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError("/secret/path at 0x7f00"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), ::testing::Not(::testing::HasSubstr("secret")));
  EXPECT_THAT(status.error_details(), ::testing::Not(::testing::HasSubstr("secret")));
  EXPECT_THAT(status.error_details(), ::testing::HasSubstr("INTERNAL"));
}

TEST(StatusMapping, StaysBelowGrpcsLimitOfTrailers) {
  std::string umlauts;
  for (int i = 0; i < 5000; ++i) umlauts += "\xc3\xbc";
  const grpc::Status status =
      ToGrpcStatus(MakeError(ErrorReason::kInvalidField, umlauts, {{"field", umlauts}, {"actual", "x" + umlauts}}));
  // The message travels percent-encoded (3 bytes for each), the details in base64.
  EXPECT_LT(3 * status.error_message().size() + 4 * status.error_details().size() / 3, 8000U);
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(Details(status).details(0).value()));  // still valid UTF-8
}

}  // namespace
}  // namespace headwater::service
