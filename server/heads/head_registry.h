// HeadRegistry: the heads of a server, by name. Thread-safe.
#ifndef HEADWATER_SERVER_HEADS_HEAD_REGISTRY_H_
#define HEADWATER_SERVER_HEADS_HEAD_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::checkpoint {
struct CheckpointInfo;
}

namespace headwater::heads {

// A head that is deleted while calls still use it (HeadUse) counts until the last of them has ended: it has its memory so long.
struct RegistryLimits {
  int64_t max_heads = 64;
  int64_t max_heads_per_tenant = 64;
  int64_t max_tenant_memory_bytes = 0;  // sum of the plans of a tenant's heads; 0: no limit
};

// kHeadNotFound: what everybody is told of a head that is not there for them.
absl::Status HeadNotFound(const HeadName& name);

// What creating a head that exists does.
enum class IfExists { kFail, kAttachIfSameSpec };

class HeadRegistry {
 public:
  // `engine` must outlive the registry. `clock` is for tests; only differences of its times matter.
  HeadRegistry(LossEngine& engine, const RegistryLimits& limits, const HeadLimits& head_limits,
               std::function<absl::Time()> clock = observability::MonotonicNow);

  struct Created {
    std::shared_ptr<Head> head;
    bool created = false;  // false: it existed
  };
  // kHeadAlreadyExists, kHeadSpecMismatch (with the first field that differs, `initial_step` apart), kQuotaExceeded, and what the
  // engine says. The name is taken at once; until the head is allocated, which does not hold up other calls, it is not found.
  // Attaching waits for that, and creates the head itself if it comes to nothing; every creation waits for a head of that name that
  // is being deleted. Both wait as long as `limits` allow: then the error is
  // Wait()'s, and no head is made. Attaching counts as a use of the head. A head that is made is a new one to `store` (null: none),
  // even where a former one of its name was saved and never deleted, because it was not brought back:
  // CheckpointStore::BeginAnew(), whose error comes back if that fails, and no head is made.
  absl::StatusOr<Created> Create(const HeadName& name, const HeadSpec& spec, IfExists if_exists = IfExists::kFail,
                                 checkpoint::CheckpointStore* store = nullptr, const WaitLimits& limits = AsLongAsItTakes());
  // kHeadNotFound. Counts as a use of the head.
  absl::StatusOr<std::shared_ptr<Head>> Find(const HeadName& name) const;
  // Heads of a tenant by name, after `after` (exclusive; empty: from the beginning), at most `count`.
  std::vector<std::shared_ptr<Head>> List(const std::string& tenant, const std::string& after, int64_t count) const;
  // Heads of all tenants.
  std::vector<std::shared_ptr<Head>> ListAll() const;
  // kHeadNotFound, kHeadInUse unless `force`, kEpochFenced. The head does not come back at the next start: `store` (may be null)
  // forgets it; its checkpoints stay. Decided at once; then waits for the call that computes on the head. Its memory goes with the
  // last call that uses it. If the store fails to forget (its error comes back) the head is gone nevertheless, and the same call
  // again, without `epoch`, tries the store once more: as it does for a head that RestoreAll() could not bring back.
  absl::Status Delete(const HeadName& name, const std::optional<Epoch>& epoch, bool force, checkpoint::CheckpointStore* store);

  // Drops, in every head, what a session that has ended left undecided. Returns how many micro-batches.
  int64_t DropSession(const SessionId& session);

  // Deletes the heads that no call has named for `timeout`, whatever their open step holds. A call counts when it finds the head:
  // `timeout` must be longer than any call, or long ones must find it again now and then. With `save_first` (which needs
  // `store`) a READY head is saved before, as `idle-{step}`, replacing an older one of that name; if it cannot be saved it stays.
  // (One that is LOADING or LOST has nothing to save, one that is RESTORED is what its checkpoint is.) A head that the store fails
  // to forget is deleted, and comes back at the next start. Returns the names of the deleted ones.
  std::vector<HeadName> ExpireIdle(absl::Duration timeout, checkpoint::CheckpointStore* store, bool save_first);

  // Brings back every head that the store remembers, from its newest checkpoint that is whole: trainable ones are RESTORED, frozen
  // ones READY. One that cannot be brought back (no whole checkpoint, no memory, a quota, a name that is not a head's) is left out
  // and told of; if the store cannot be listed that is told without a name. No further head is begun once `cancelled`, asked before
  // each, has returned true.
  struct Comeback {
    HeadName name;
    std::string checkpoint;  // that was taken; empty if none could be
    std::string note;        // what went wrong on the way; empty if nothing
    // Checkpoints that are damaged, with what is wrong with them. Their ages are known only where their manifests are whole.
    std::vector<std::pair<std::string, std::string>> skipped;
  };
  std::vector<Comeback> RestoreAll(
      checkpoint::CheckpointStore& store, const std::function<bool()>& cancelled = [] { return false; });

  // Saves every READY head that has changed since it was last saved, as `checkpoint_name`, replacing an older one of that name.
  // Those whose weights are being written come last, as soon as they are free: they keep no other waiting. None is begun after
  // `deadline`, which observability::MonotonicNow() tells.
  // For each that was saved, or could not be: its name, and how that went.
  std::vector<std::pair<HeadName, absl::Status>> SaveChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                                             absl::Time deadline);

  int64_t size() const;  // heads being created and deleted included
  LossEngine& engine() const { return engine_; }

 private:
  // A head that has been deleted, and counts as long as calls use it.
  struct Departed {
    std::string tenant_prefix;
    int64_t planned_bytes = 0;
    std::weak_ptr<Head> head;
  };
  // A name that is taken.
  struct Entry {
    std::shared_ptr<Head> head;        // null while it is being created or deleted
    bool leaving = false;              // being deleted
    int64_t planned_bytes = 0;         // 0 without max_tenant_memory_bytes
    std::optional<Departed> departed;  // the head that leaves; it counts by this entry until its name is given free
  };
  using Entries = std::map<std::string, Entry>;

  // The entry of a head that is there, or the map's end.
  Entries::iterator FindEntry(const std::string& full_name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What a head would take out of its tenant's memory.
  absl::StatusOr<int64_t> PlannedBytes(const HeadSpec& spec) const;
  // Takes a name that is free. kQuotaExceeded if the tenant, or the server, may have no further head; the error of PlannedBytes().
  absl::Status Reserve(const HeadName& name, const absl::StatusOr<int64_t>& planned_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends what Reserve() or Retire() began: `head` null gives the name free.
  void Settle(const std::string& full_name, std::shared_ptr<Head> head);
  // Lets a retired head go that has been taken out of its entry, without the lock; its name is to be settled after that.
  absl::Status Remove(const HeadName& name, std::shared_ptr<Head> head, checkpoint::CheckpointStore* store);
  // Deletes what the store remembers of a head that is not here. Likewise.
  absl::Status DeleteAbsent(const HeadName& name, checkpoint::CheckpointStore& store);
  // Takes a retired head out of its entry, where the head still counts.
  static std::shared_ptr<Head> TakeOut(Entry& entry);
  // True if the head could be saved, or has nothing to be saved, and has not been used meanwhile; then it is retired.
  bool TryExpire(const std::shared_ptr<Head>& head, absl::Duration timeout, checkpoint::CheckpointStore* store, bool save_first);
  // The head at its newest whole checkpoint, or null. The name has been reserved.
  std::shared_ptr<Head> BringBack(const std::vector<checkpoint::CheckpointInfo>& newest_first, checkpoint::CheckpointStore& store,
                                  Comeback& comeback);

  const std::shared_ptr<scheduler::Sequencer> sequencer_ = std::make_shared<scheduler::Sequencer>();
  LossEngine& engine_;
  const RegistryLimits limits_;
  const HeadLimits head_limits_;
  const std::function<absl::Time()> clock_;
  mutable absl::Mutex mutex_;
  scheduler::WaitList settled_;            // a head that was being created or deleted is there, or is not
  Entries heads_ ABSL_GUARDED_BY(mutex_);  // by full name
  std::vector<Departed> departed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_REGISTRY_H_
