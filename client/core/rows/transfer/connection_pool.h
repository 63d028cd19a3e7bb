// ConnectionPool: the connections that rows are spread over.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CONNECTION_POOL_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CONNECTION_POOL_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/core/rows/transfer/data_connection.h"

namespace headwater::client::internal {

// A connection that a call uses, which counts the call until the last copy of this has gone.
using ConnectionLease = std::shared_ptr<DataConnection>;
inline ConnectionLease Lease(const std::shared_ptr<DataConnection>& connection) {
  ++connection->calls;
  return {connection.get(), [connection](DataConnection* used) { --used->calls; }};
}

// At most ClientOptions::stripes connections to one server at a time; they stay open. Thread-safe.
class ConnectionPool {
 public:
  explicit ConnectionPool(const ClientOptions& options) : options_(options) {}

  // `count` different connections to `peer`, in [1, options.stripes], the least busy ones. Connections to other peers and broken
  // ones are given up. A call that finds no idle one opens another, up to the maximum. Blocks while they are made; errors are those
  // of DataConnection::Open().
  absl::StatusOr<std::vector<ConnectionLease>> Acquire(const std::string& peer, int count, const Wait& wait);
  // Takes existing connections without blocking; empty if connections would have to be made.
  std::vector<ConnectionLease> TryAcquire(const std::string& peer, int count);

 private:
  // Both under the lock.
  void DropUnusable(const std::string& peer);
  int Missing(int count) const;
  std::vector<ConnectionLease> Choose(int count);

  const ClientOptions options_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<DataConnection>> connections_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_CONNECTION_POOL_H_
