// Entry and FileCall: how calls get into a head past those that take as long as files do.
//
// A call that saves a head, or sets it from files, has it for as long as the disk takes. Who waited for the compute lock behind it
// could not be called back, and would keep a thread that other heads' calls need. So calls wait here first, where their deadline
// and their client end the wait, and in a bounded number of places (WaitLimits::places). No file call begins while an Entry lives:
// what waits for the compute lock after that waits for computations alone.
//
// In turns: when a file call ends, calls that have waited for it go before the next file call, so that neither kind keeps the other
// out for ever. Submissions have no Entry; Head::AwaitFiles() is for them.
//
// One at a time: a call that has entered a head and enters it again waits for a file call that waits for it.
#ifndef HEADWATER_SERVER_HEADS_HEAD_ENTRY_H_
#define HEADWATER_SERVER_HEADS_HEAD_ENTRY_H_

#include <functional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "server/heads/head.h"

namespace headwater::heads {

// A call on one head or several, from before it waits for their compute locks until it has let go of them.
class Head::Entry {
 public:
  // Waits as the limits allow. Unless status() is OK the call may not go on.
  Entry(const Head& head, const WaitLimits& limits) { Enter(head, limits); }
  // In ascending address, as the locks are taken: nobody waits in a circle.
  Entry(const std::set<Head*, std::less<>>& heads, const WaitLimits& limits) {
    for (const Head* head : heads) {
      if (status_.ok()) Enter(*head, limits);
    }
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() {
    for (const Head* head : entered_) head->LeaveCall();
  }

  const absl::Status& status() const { return status_; }

 private:
  void Enter(const Head& head, const WaitLimits& limits) {
    status_ = head.EnterCall(limits);
    if (status_.ok()) entered_.push_back(&head);
  }

  std::vector<const Head*> entered_;
  absl::Status status_;
};

// A call that takes as long as files do, from before it waits for the compute lock until it has let go of it.
class Head::FileCall {
 public:
  // Waits for its turn as the limits allow. Unless status() is OK the call may not go on.
  FileCall(Head& head, const WaitLimits& limits) : head_(head), status_(head.EnterFiles(limits)) {}
  FileCall(const FileCall&) = delete;
  FileCall& operator=(const FileCall&) = delete;
  ~FileCall() {
    if (status_.ok()) head_.LeaveFiles();
  }

  const absl::Status& status() const { return status_; }

 private:
  Head& head_;
  const absl::Status status_;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_ENTRY_H_
