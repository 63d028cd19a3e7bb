#include "client/cpp/src/decision.h"

#include <utility>

#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client {
namespace internal {
namespace {

template <typename Response, typename Result, typename Message, typename Convert>
Future<Result> Decide(const ContributionKey& key, const char* path, Message message, const CallOptions& options, Convert convert) {
  message.mutable_heads()->Assign(key.heads.begin(), key.heads.end());
  message.set_micro_batch(key.micro_batch);
  message.set_attempt(key.attempt);
  return Start<Result>(
      key.core, path, std::move(message), DeadlineOf(*key.core, options), {},
      [convert](const Answer& answer) -> absl::StatusOr<Result> { return convert(static_cast<const Response&>(*answer.message)); });
}

}  // namespace

Future<CommitResult> StartCommit(const ContributionKey& key, const CommitOptions& commit, const CallOptions& options) {
  v1::CommitMicroBatchRequest request;
  request.set_factor(commit.factor);
  if (!commit.token_factors.empty()) *request.mutable_token_factors() = ToProto(commit.token_factors);
  return Decide<v1::CommitMicroBatchResponse, CommitResult>(
      key, HEADWATER_LOSS "CommitMicroBatch", std::move(request), options,
      [](const v1::CommitMicroBatchResponse& response) { return CommitResult{response.replayed()}; });
}

Future<DiscardResult> StartDiscard(const ContributionKey& key, const CallOptions& options) {
  return Decide<v1::DiscardMicroBatchResponse, DiscardResult>(
      key, kDiscardMicroBatch, v1::DiscardMicroBatchRequest(), options,
      [](const v1::DiscardMicroBatchResponse& response) { return DiscardResult{response.dropped()}; });
}

}  // namespace internal

Future<CommitResult> Contribution::Commit(const CommitOptions& commit, const CallOptions& options) const {
  return internal::StartCommit(*key_, commit, options);
}

Future<DiscardResult> Contribution::Discard(const CallOptions& options) const { return internal::StartDiscard(*key_, options); }

}  // namespace headwater::client
