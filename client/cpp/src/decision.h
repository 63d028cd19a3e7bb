// Commit and discard of undecided micro-batches.
#ifndef HEADWATER_CLIENT_SRC_DECISION_H_
#define HEADWATER_CLIENT_SRC_DECISION_H_

#include <memory>

#include "client/cpp/src/connection.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"

namespace headwater::client::internal {

struct ContributionKey {
  std::shared_ptr<Connection> connection;
  MicroBatchKey micro_batch;
};

Future<CommitResult> StartCommit(std::shared_ptr<Connection> connection, MicroBatchKey key, const CommitOptions& commit,
                                 const CallOptions& options);
Future<DiscardResult> StartDiscard(std::shared_ptr<Connection> connection, MicroBatchKey key, const CallOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_DECISION_H_
