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

// A head that is deleted while calls use it (HeadUse) counts until the last use has ended: it keeps its memory until then.
struct RegistryLimits {
  int64_t max_heads = 64;
  int64_t max_heads_per_tenant = 64;
  int64_t max_tenant_memory_bytes = 0;  // sum of the plans of a tenant's heads; 0: no limit
};

// kHeadNotFound: the answer for a head that does not exist for the caller.
absl::Status HeadNotFound(const HeadName& name);

enum class IfExists { kFail, kAttachIfSameSpec };

class HeadRegistry {
 public:
  // `engine` must outlive the registry. `clock` is for tests; only differences of its times matter.
  HeadRegistry(LossEngine& engine, const RegistryLimits& limits, const HeadLimits& head_limits,
               std::function<absl::Time()> clock = observability::MonotonicNow)
      : engine_(engine), limits_(limits), head_limits_(head_limits), clock_(std::move(clock)) {}

  struct Created {
    std::shared_ptr<Head> head;
    bool created = false;  // false: it existed
  };
  // kHeadAlreadyExists, kHeadSpecMismatch (with the first field that differs, `initial_step` apart), kQuotaExceeded, and errors of
  // the engine. The name is taken at once, but not found until the head is allocated, which does not hold up other calls. Attaching
  // waits for the allocation, and creates the head itself if that fails. Every creation waits for a head of that name that is being
  // deleted. Both wait as long as `limits` allow: then the error is Wait()'s, and no head is made. Attaching counts as a use of the
  // head. A head that is made is new to `store` (null: none), even if a former one was saved, not brought back and never deleted.
  // If CheckpointStore::Forget() fails, its error is returned and no head is made.
  absl::StatusOr<Created> Create(const HeadName& name, const HeadSpec& spec, IfExists if_exists = IfExists::kFail,
                                 checkpoint::CheckpointStore* store = nullptr, const WaitLimits& limits = AsLongAsItTakes());
  // kHeadNotFound. Counts as a use of the head.
  absl::StatusOr<std::shared_ptr<Head>> Find(const HeadName& name) const;
  // Heads of a tenant by name, after `after` (exclusive; empty: from the beginning), at most `count`.
  std::vector<std::shared_ptr<Head>> List(const std::string& tenant, const std::string& after, int64_t count) const;
  std::vector<std::shared_ptr<Head>> ListAll() const;
  // kHeadNotFound, kHeadInUse unless `force`, kEpochFenced. Decided at once; then waits for the call that computes on the head. The
  // last call that uses the head frees its memory. The head does not come back at the next start: `store` (may be null) forgets it;
  // its checkpoints stay. If the store fails to forget, its error is returned, and the head is gone nevertheless. The call repeated
  // without `epoch` tries the store again, also for a head that RestoreAll() could not bring back.
  absl::Status Delete(const HeadName& name, const std::optional<Epoch>& epoch, bool force, checkpoint::CheckpointStore* store);

  // Drops, in every head, what a session that has ended left undecided. Returns how many micro-batches.
  int64_t DropSession(const SessionId& session);

  // Deletes the heads that no call has named for `timeout`, whatever their open step holds. A call counts when it finds the head:
  // `timeout` must be longer than any call, or long ones must find it again now and then. With `save_first` (needs `store`) a READY
  // head is saved before, as `idle-{step}`, replacing an older one of that name. If the save fails the head stays. (A LOADING or
  // LOST head has nothing to save, a RESTORED one equals its checkpoint.) A head that the store fails to forget is deleted, and
  // comes back at the next start. Returns the names of the deleted ones.
  std::vector<HeadName> ExpireIdle(absl::Duration timeout, checkpoint::CheckpointStore* store, bool save_first);

  // Brings back every head that the store remembers, from its newest checkpoint that is whole: trainable ones are RESTORED, frozen
  // ones READY. A head that cannot be brought back (no whole checkpoint, no memory, a quota, an invalid name) is left out and
  // reported. A store that cannot be listed is reported without a name. No further head is begun once `cancelled`, asked before
  // each, has returned true.
  struct Comeback {
    HeadName name;
    std::string checkpoint;  // that was taken; empty if none could be
    std::string note;        // the problems on the way; empty: none
    // Checkpoints that are damaged, with what is wrong with them. Their ages are known only where their manifests are whole.
    std::vector<std::pair<std::string, std::string>> skipped;
  };
  std::vector<Comeback> RestoreAll(
      checkpoint::CheckpointStore& store, const std::function<bool()>& cancelled = [] { return false; });

  // Saves every READY head that has changed since its last save, as `checkpoint_name`, replacing an older one of that name. Heads
  // whose weights are being written come last, each as soon as it is free, and hold up no others. No save is begun after
  // `deadline`, a time of observability::MonotonicNow(). Returns the name and the outcome of each head that was saved, or could not
  // be.
  std::vector<std::pair<HeadName, absl::Status>> SaveChanged(checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                                             absl::Time deadline);

  // Heads being created and deleted included.
  int64_t size() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(heads_.size());
  }
  LossEngine& engine() const { return engine_; }

 private:
  // A head that has been deleted, and counts as long as calls use it.
  struct Departed {
    std::string tenant_prefix;
    int64_t planned_bytes = 0;
    std::weak_ptr<Head> head;
  };
  struct Entry {
    std::shared_ptr<Head> head;        // null while it is being created or deleted
    bool leaving = false;              // being deleted
    int64_t planned_bytes = 0;         // 0 without max_tenant_memory_bytes
    std::optional<Departed> departed;  // the head that leaves; it counts by this entry until its name is free
  };
  using Entries = std::map<std::string, Entry>;

  // The entry of a head that is there, or the map's end.
  Entries::iterator FindEntry(const std::string& full_name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The bytes that a head would take out of its tenant's memory.
  absl::StatusOr<int64_t> PlannedBytes(const HeadSpec& spec) const;
  // Takes a name that is free. kQuotaExceeded if the tenant, or the server, may have no further head; the error of PlannedBytes().
  absl::Status Reserve(const HeadName& name, const absl::StatusOr<int64_t>& planned_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends what Reserve() or Retire() began: `head` null frees the name.
  void Settle(const std::string& full_name, std::shared_ptr<Head> head);
  // Drops a retired head that has been taken out of its entry, makes the store forget it, and frees the name. Without the lock.
  // `head` null: the head is not here, but the store may remember it.
  absl::Status Remove(const HeadName& name, std::shared_ptr<Head> head, checkpoint::CheckpointStore* store);
  // Takes a retired head out of its entry, where the head still counts.
  static std::shared_ptr<Head> TakeOut(Entry& entry);
  // True if the head could be saved, or has nothing to be saved, and has not been used meanwhile; then it is retired.
  bool TryExpire(const std::shared_ptr<Head>& head, absl::Duration timeout, checkpoint::CheckpointStore* store, bool save_first);
  // Brings one head back from its newest whole checkpoint. The error is the last of the problems on the way; those before it are
  // in `comeback`.
  absl::Status BringBack(checkpoint::CheckpointStore& store, Comeback& comeback);

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
