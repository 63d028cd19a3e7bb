#include "server/service/call/rpc_scope.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "headwater/v1/error.pb.h"
#include "proto/headwater/v1/error_metadata.h"
#include "server/guard/call_guard.h"
#include "server/observability/logging.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

using observability::LogField;
using observability::LogLevel;
using observability::MonotonicNow;
using observability::RpcMethod;

bool IsValidRequestId(const grpc::string_ref& id) {
  constexpr size_t kMostBytes = 128;
  return !id.empty() && id.size() <= kMostBytes && std::all_of(id.begin(), id.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || (c != '\0' && std::strchr("._:/-", c) != nullptr);
  });
}

// RPCs that come at every micro-batch, or only read: their successes are logged at level debug.
constexpr RpcMethod kFrequent[] = {RpcMethod::kComputeLoss,      RpcMethod::kTransferRows,      RpcMethod::kStreamTeacher,
                                   RpcMethod::kCommitMicroBatch, RpcMethod::kDiscardMicroBatch, RpcMethod::kGetHead,
                                   RpcMethod::kListHeads,        RpcMethod::kGetStep,           RpcMethod::kGetGradientNorm,
                                   RpcMethod::kGetServerInfo,    RpcMethod::kKeepAlive};
// The calls of micro-batches and steps; other calls are not traced.
constexpr RpcMethod kTraced[] = {RpcMethod::kComputeLoss,       RpcMethod::kStreamTeacher, RpcMethod::kCommitMicroBatch,
                                 RpcMethod::kDiscardMicroBatch, RpcMethod::kSealStep,      RpcMethod::kApplyOptimizerStep,
                                 RpcMethod::kAddGradient};

LogLevel LevelOf(RpcMethod method, const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return absl::c_linear_search(kFrequent, method) ? LogLevel::kDebug : LogLevel::kInfo;
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDataLoss:
      return LogLevel::kError;
    default:
      return LogLevel::kWarning;
  }
}

// gRPC gives a time of the wall clock: the time left counts from now on. The steady clock is read first, so that a thread that is
// held up in between finds the deadline early, and never late.
absl::Time DeadlineOf(const grpc::ServerContextBase& context) {
  const absl::Time now = MonotonicNow();
  const std::chrono::system_clock::time_point deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return now + (absl::FromChrono(deadline) - absl::Now());
}

constexpr size_t kMostMessageBytes = 1024;
constexpr size_t kMostMetadataBytes = 256;
constexpr char kTypeUrlPrefix[] = "type.googleapis.com/google.rpc.";

std::string Cut(const std::string& text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  size_t end = most_bytes - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // not within a UTF-8 sequence
  return text.substr(0, end) + "...";
}

// Packs a message under its google.rpc name, with which it is wire-compatible.
template <typename Message>
void AddDetail(const Message& message, const char* name, v1::RpcStatus* status) {
  google::protobuf::Any* const detail = status->add_details();
  detail->set_type_url(std::string(kTypeUrlPrefix) + name);
  message.SerializeToString(detail->mutable_value());
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const ErrorReason reason = GetErrorReason(status);
  const bool ours = status.code() == ErrorReasonCode(reason);
  const std::string message =
      ours ? Cut(std::string(status.message()), kMostMessageBytes) : "internal error; the server's log has the details";

  v1::RpcStatus details;
  details.set_code(static_cast<int32_t>(ours ? status.code() : absl::StatusCode::kInternal));
  details.set_message(message);
  v1::ErrorInfo info;
  info.set_reason(ErrorReasonName(ours ? reason : ErrorReason::kInternal));
  info.set_domain("headwater");
  int64_t retry_after_ms = -1;
  if (ours) {
    ErrorMetadata metadata = GetErrorMetadata(status);
    for (auto& [key, value] : metadata) {
      if (key == kRetryAfterMsKey && !absl::SimpleAtoi(value, &retry_after_ms)) retry_after_ms = -1;
      value = Cut(value, kMostMetadataBytes);
    }
    v1::SetErrorMetadata(metadata, info.mutable_metadata());
  }
  AddDetail(info, "ErrorInfo", &details);
  if (retry_after_ms >= 0) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(retry_after_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_after_ms % 1000) * 1000000);
    AddDetail(retry, "RetryInfo", &details);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(details.code()), message, details.SerializeAsString());
}

std::vector<absl::string_view> AuthorizationOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  std::vector<absl::string_view> values;
  const auto [begin, end] = metadata.equal_range(kAuthorizationKey);
  for (auto value = begin; value != end; ++value) values.emplace_back(value->second.data(), value->second.size());
  return values;
}

RpcScope::RpcScope(const Entrance& entrance, grpc::ServerContextBase& context, RpcMethod method, scheduler::Waiter* waiter)
    : entrance_(entrance),
      context_(context),
      method_(method),
      start_time_(MonotonicNow()),
      deadline_(DeadlineOf(context)),
      thread_([this] { return Cancelled() || !core().lost().ok(); }, &core().waiting),
      waiter_(waiter != nullptr ? waiter : &thread_) {
  const auto& metadata = context_.client_metadata();
  const auto found = metadata.find(kRequestIdKey);
  request_id_ = found != metadata.end() && IsValidRequestId(found->second) ? std::string(found->second.data(), found->second.size())
                                                                           : heads::EpochToHex(heads::NewEpoch());
  context_.AddInitialMetadata(kRequestIdKey, request_id_);
  // Several count as none, as the standard has it.
  if (metadata.count(observability::kTraceparentKey) != 1) return;
  const grpc::string_ref& traceparent = metadata.find(observability::kTraceparentKey)->second;
  trace_context_ = observability::ParseTraceparent({traceparent.data(), traceparent.size()});
  if (!trace_context_.has_value()) return;
  span_id_ = observability::NewSpanId();
  if (!trace_context_->sampled || core().traces == nullptr || !absl::c_linear_search(kTraced, method)) return;
  trace_ = std::make_shared<observability::CallTrace>(*trace_context_, span_id_, request_id_, observability::RpcMethodName(method));
}

absl::Status RpcScope::Begin() {
  HEADWATER_ASSIGN_OR_RETURN(
      caller_, core().access->Authorize(FindAccessRow(method_), entrance_.role, AuthorizationOf(context_.client_metadata())));
  auto admission = core().Admit();
  if (!admission.ok()) {
    const bool always = method_ == RpcMethod::kGetServerInfo || method_ == RpcMethod::kJoin;
    return always ? absl::OkStatus() : admission.status();
  }
  admission_ = *std::move(admission);
  return absl::OkStatus();
}

RpcScope::Label RpcScope::CurrentLabel() {
  if (current_ == nullptr) return {};
  return {observability::RpcMethodName(current_->method_), current_->request_id_, current_->head_};
}

std::function<absl::Status()> RpcScope::AllowedStill() const {
  return [access = core().access.get(), caller = caller_] { return access->Recheck(caller); };
}

std::string RpcScope::client() const {
  const std::optional<int64_t> connection = guard::ConnectionOf(context_.c_call());
  return connection.has_value() ? absl::StrCat(context_.peer(), " connection ", *connection) : context_.peer();
}

bool RpcScope::Cancelled() {
  // gRPC's own check plucks from the call's completion queue; one thread at a time, and not again once it is known.
  absl::MutexLock lock(&cancelled_mutex_);
  cancelled_ = cancelled_ || context_.IsCancelled();
  return cancelled_;
}

absl::Status RpcScope::CancelledError(absl::string_view outcome) const {
  if (MonotonicNow() >= deadline_) {
    return MakeError(ErrorReason::kDeadlineExceeded, absl::StrCat("the call's deadline passed", outcome));
  }
  return MakeError(ErrorReason::kCancelled, absl::StrCat("the client cancelled the call, or went away", outcome));
}

grpc::Status RpcScope::Finish(absl::Status status) {
  const absl::Cleanup is_over = [this] { admission_.reset(); };
  // A caller without permission does not learn the server's state either.
  const bool refused = HasReason(status, ErrorReason::kUnauthenticated) || HasReason(status, ErrorReason::kPermissionDenied);
  if (!status.ok() && !refused) {
    if (HasReason(status, ErrorReason::kEngineFailed)) core().CheckEngine();
    if (absl::Status lost = core().lost(); !lost.ok() && !Cancelled()) status = std::move(lost);
  }
  const absl::Duration duration = MonotonicNow() - start_time_;
  core().metrics.CountRequest(method_, status, duration);
  if (HasReason(status, ErrorReason::kCancelled)) core().CountCancelled(context_.peer());
  if (trace_ != nullptr && !refused) {
    if (!head_.empty()) trace_->SetAttribute("head", head_);
    trace_->SetAttribute("code", observability::CanonicalCodeName(status.code()));
    if (!status.ok()) trace_->SetAttribute("reason", ErrorReasonName(GetErrorReason(status)));
    trace_->SetAttribute("engine", core().engine->name());
    trace_->AddSpan("call", observability::RpcMethodName(method_), start_time_, start_time_ + duration);
    core().traces->Write(trace_);
  }
  const LogLevel level = LevelOf(method_, status);
  std::optional<int64_t> left_out = 0;
  if (level == LogLevel::kWarning) left_out = guard::FailedCallLines().Take();
  if (!left_out.has_value()) return ToGrpcStatus(status);
  std::vector<LogField> fields = {{"request_id", request_id_}, {"method", observability::RpcMethodName(method_)}};
  if (trace_context_.has_value()) {
    fields.emplace_back("trace_id", trace_context_->trace_id);
    fields.emplace_back("span_id", span_id_);
    fields.emplace_back("parent_span_id", trace_context_->parent_id);
  }
  if (!caller_.token_name().empty()) fields.emplace_back("token", caller_.token_name());
  if (!head_.empty()) fields.emplace_back("head", head_);
  fields.emplace_back("code", observability::CanonicalCodeName(status.code()));
  if (!status.ok()) {
    fields.emplace_back("reason", ErrorReasonName(GetErrorReason(status)));
    fields.emplace_back("message", std::string(status.message()));
  }
  fields.emplace_back("duration_ms", absl::ToDoubleMilliseconds(duration));
  fields.emplace_back("peer", context_.peer());
  if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
  observability::Log(level, "rpc", fields);
  return ToGrpcStatus(status);
}

}  // namespace headwater::service
