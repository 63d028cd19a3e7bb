// Commit and discard of undecided micro-batches.
#ifndef HEADWATER_CLIENT_SRC_DECISION_H_
#define HEADWATER_CLIENT_SRC_DECISION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "client/core/core.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"

namespace headwater::client::internal {

// What a decision about a micro-batch names.
struct ContributionKey {
  std::shared_ptr<Core> core;
  std::vector<v1::HeadStep> heads;  // the trainable ones
  int64_t micro_batch = 0;
  int64_t attempt = 0;  // 0: the one that was submitted last
};

Future<CommitResult> StartCommit(const ContributionKey& key, const CommitOptions& commit, const CallOptions& options);
Future<DiscardResult> StartDiscard(const ContributionKey& key, const CallOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_DECISION_H_
