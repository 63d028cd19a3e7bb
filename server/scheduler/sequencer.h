// Sequencer: the turns in which everything about the heads of one engine is decided, and the queue for the use of heads.
//
// A turn (Turn) holds the one mutex: it never computes, waits, reads files or calls back. Each head has a record (Record) with the
// resources that operations use. Acquire() grants an operation's needs of all its heads in one turn, or waits and holds none. An
// operation computes its needs again whenever it is tried. docs/adr/0033-one-sequencer.md has the reasons.
#ifndef HEADWATER_SERVER_SCHEDULER_SEQUENCER_H_
#define HEADWATER_SERVER_SCHEDULER_SEQUENCER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/scheduler/waiting.h"

namespace headwater::scheduler {

// How an operation uses a resource. Exclusive use excludes every other use but kNone.
enum class Use : uint8_t { kNone, kShared, kExclusive };

class Record;
class Sequencer;

struct Uses {
  Use weights = Use::kNone;
  Use accumulator = Use::kNone;
  Use checkpoints = Use::kNone;
  bool operator==(const Uses&) const = default;
};

// One head, and how an operation uses it.
struct Need {
  std::shared_ptr<Record> record;
  Uses uses;
  bool operator==(const Need&) const = default;
};
using Needs = std::vector<Need>;  // each record once

// One turn, as a scoped lock. A turn within a turn of the same thread is part of it.
class Turn {
 public:
  explicit Turn(Sequencer& sequencer);
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn();

  // Destroys `memory` when the calling thread's turn is over, or at once without a turn: freeing may take long, or take a turn.
  static void Free(std::shared_ptr<const void> memory);

 private:
  Sequencer* const sequencer_;  // null: part of another turn
  Turn* const outer_;           // the thread's current turn before this one
  std::vector<std::shared_ptr<const void>> freed_;
};

// The needs that an operation has been granted; the destructor gives all of them back in one turn.
class Admission {
 public:
  Admission(Admission&& other) noexcept : sequencer_(std::exchange(other.sequencer_, nullptr)), needs_(std::move(other.needs_)) {}
  ~Admission() { Release(); }
  // May be called in a turn, and is part of it then.
  void Release();

 private:
  friend class Sequencer;
  Admission(Sequencer* sequencer, Needs needs) : sequencer_(sequencer), needs_(std::move(needs)) {}

  Sequencer* sequencer_;  // null: moved from, or released
  Needs needs_;
};

// Thread-safe.
class Sequencer {
 public:
  Sequencer();
  ~Sequencer();

  // Held during each turn; for Wait() in a turn.
  absl::Mutex& mutex() { return mutex_; }

  // Calls `needs` in a turn: at the start, and whenever the operation may be admitted. An error of `needs` ends the wait and is
  // returned. Otherwise returns when the needs are granted, or with the error of Wait(), which takes `what`. A parked operation
  // keeps its place in the queue until it is tried again. The caller holds no other Admission, and is not in a turn.
  absl::StatusOr<Admission> Acquire(const std::function<absl::StatusOr<Needs>()>& needs, const WaitLimits& limits,
                                    absl::string_view what);
  // The following are for a turn.
  // A parked operation gives its place in the queue up: it waits for something else from now on.
  void GiveUpPlace(Waiter* waiter);
  // Makes every operation in the record's queue compute its needs again: some may be refused from now on.
  static void Reconsider(const Record& record);
  // Whether an operation that only reads the weights would wait: another one writes them, or is to write them first.
  static bool IsWritten(const Record& record);

 private:
  friend class Admission;
  friend class Record;
  friend class Turn;
  struct Entry;

  // Whether an operation of this age may enter: its needs conflict with no use, and with no earlier operation that waits.
  static bool MayEnter(const Needs& needs, int64_t age);
  // Puts the entry in the queues of `needs`, at its age, instead of those where it is.
  static void Queue(Entry& entry, Needs needs);
  // Wakes the operations in the queue that may enter now.
  static void WakeNext(const Record& record);

  absl::Mutex mutex_;
  int64_t last_age_ ABSL_GUARDED_BY(mutex_) = 0;
  // The entries of parked operations, until they are tried again or over.
  std::map<Waiter*, std::unique_ptr<Entry>> parked_ ABSL_GUARDED_BY(mutex_);
};

// The admission record of one head: its users, and the operations that wait for it. Read and changed by the sequencer, in turns.
class Record {
 public:
  Record() = default;
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

 private:
  friend class Admission;
  friend class Sequencer;

  std::vector<Uses> users_;                                        // granted
  std::map<int64_t, std::pair<Sequencer::Entry*, Uses>> waiting_;  // by age
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_SEQUENCER_H_
