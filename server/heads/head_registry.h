// HeadRegistry: the heads of a server, by name. Thread-safe.
#ifndef HEADWATER_SERVER_HEADS_HEAD_REGISTRY_H_
#define HEADWATER_SERVER_HEADS_HEAD_REGISTRY_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head.h"

namespace headwater::heads {

class HeadRegistry {
 public:
  // `engine` must outlive the registry.
  HeadRegistry(LossEngine& engine, int64_t max_heads, const HeadLimits& limits);

  // kHeadAlreadyExists, kQuotaExceeded, and what the engine says. The name is taken at once; until the head is allocated, which
  // does not hold up other calls, it is not found.
  absl::StatusOr<std::shared_ptr<Head>> Create(const HeadName& name, const HeadSpec& spec);
  // kHeadNotFound.
  absl::StatusOr<std::shared_ptr<Head>> Find(const HeadName& name) const;
  // Heads of a tenant by name, after `after` (exclusive; empty: from the beginning), at most `count`.
  std::vector<std::shared_ptr<Head>> List(const std::string& tenant, const std::string& after, int64_t count) const;
  // kHeadNotFound, kHeadInUse unless `force`, kEpochFenced.
  absl::Status Delete(const HeadName& name, const std::optional<Epoch>& epoch, bool force);
  int64_t size() const;  // heads being created included
  LossEngine& engine() const { return engine_; }

 private:
  LossEngine& engine_;
  const int64_t max_heads_;
  const HeadLimits limits_;
  mutable absl::Mutex mutex_;
  // By full name; null while the head is being created.
  std::map<std::string, std::shared_ptr<Head>> heads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_REGISTRY_H_
