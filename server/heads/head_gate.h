// HeadGate: the turns of one head's calls with those that take as long as files do.
//
// A file call saves the head, or sets it from files, and has it for as long as the disk takes. A call that waited for the compute
// lock behind it could not be cancelled, and would keep a thread that other heads' calls need. So calls wait at the gate first,
// where their deadline and their client end the wait. No file call begins
// while an Entry lives: after that a call waits for computations alone.
//
// In turns: when a file call ends, the calls that have waited for it go before the next file call, so that neither kind keeps the
// other out forever. Submissions have no Entry; AwaitFiles() is for them.
//
// One entry at a time: a call that has entered a head and enters it again waits for a file call that waits for it.
#ifndef HEADWATER_SERVER_HEADS_HEAD_GATE_H_
#define HEADWATER_SERVER_HEADS_HEAD_GATE_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/heads/head_name.h"
#include "server/scheduler/waiting.h"

namespace headwater::heads {

// kHeadNotFound for a call that still holds a head that has been deleted.
absl::Status HeadDeleted(const HeadName& name);

// Whether the limits have ended the call. To be asked with the compute lock, before any change.
absl::Status CheckInTime(const scheduler::WaitLimits& limits);

// Thread-safe.
class HeadGate {
 public:
  class Entry;
  class FileCall;

  explicit HeadGate(const HeadName& name) : name_(name) {}

  // Whether a file call has the head, or is the next to have it. False once the gate is closed.
  bool IsTakenByFiles() const;
  // Waits while IsTakenByFiles().
  absl::Status AwaitFiles(const scheduler::WaitLimits& limits) const;
  // Ends every wait: the head has been deleted. A call behind a running file call, and every file call, gets HeadDeleted().
  void Close();

 private:
  absl::Status EnterCall(const scheduler::WaitLimits& limits);
  void LeaveCall();
  absl::Status EnterFiles(const scheduler::WaitLimits& limits);
  bool TryEnterFiles();
  void LeaveFiles();
  bool IsTaken() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return file_calls_ > 0 && !closed_; }
  bool MayFilesBegin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !file_runs_ && entries_ == 0 && due_entries_ == 0; }
  // One turn of a wait, of this thread. Not OK when the limits end the wait.
  absl::Status WaitForTurn(const scheduler::WaitLimits& limits) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const HeadName name_;
  mutable absl::Mutex mutex_;
  mutable scheduler::WaitList changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t file_calls_ ABSL_GUARDED_BY(mutex_) = 0;       // file calls that wait or run
  bool file_runs_ ABSL_GUARDED_BY(mutex_) = false;       // one of them has its turn
  int64_t file_turn_ ABSL_GUARDED_BY(mutex_) = 0;        // file calls that have had their turn
  int64_t entries_ ABSL_GUARDED_BY(mutex_) = 0;          // calls that are in
  int64_t waiting_entries_ ABSL_GUARDED_BY(mutex_) = 0;  // calls that wait
  int64_t due_entries_ ABSL_GUARDED_BY(mutex_) = 0;      // those of them that come before the next file call
};

// A call on one head or several, from before it waits for their compute locks until it has released them.
class HeadGate::Entry {
 public:
  // Waits as the limits allow. Unless status() is OK the call may not continue.
  Entry(HeadGate& gate, const scheduler::WaitLimits& limits) { Enter(gate, limits); }
  // `gates` in ascending address, as the locks are taken: no two calls wait for each other.
  Entry(const std::vector<HeadGate*>& gates, const scheduler::WaitLimits& limits) {
    for (HeadGate* gate : gates) {
      if (status_.ok()) Enter(*gate, limits);
    }
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() {
    for (HeadGate* gate : entered_) gate->LeaveCall();
  }

  const absl::Status& status() const { return status_; }

 private:
  void Enter(HeadGate& gate, const scheduler::WaitLimits& limits) {
    status_ = gate.EnterCall(limits);
    if (status_.ok()) entered_.push_back(&gate);
  }

  std::vector<HeadGate*> entered_;
  absl::Status status_;
};

// A call that takes as long as files do, from before it waits for the compute lock until it has released it.
class HeadGate::FileCall {
 public:
  // Waits for its turn as the limits allow. Unless status() is OK the call may not continue.
  FileCall(HeadGate& gate, const scheduler::WaitLimits& limits) : gate_(gate), status_(gate.EnterFiles(limits)) {}
  // Does not wait: status() is kCancelled if it would have to, or the gate is closed.
  explicit FileCall(HeadGate& gate) : gate_(gate), status_(gate.TryEnterFiles() ? absl::OkStatus() : absl::CancelledError()) {}
  FileCall(const FileCall&) = delete;
  FileCall& operator=(const FileCall&) = delete;
  ~FileCall() {
    if (status_.ok()) gate_.LeaveFiles();
  }

  const absl::Status& status() const { return status_; }

 private:
  HeadGate& gate_;
  const absl::Status status_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_GATE_H_
