// What a simulated trainer has of the real client: its rules of repetition and its replay log.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_CLIENT_RULES_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_CLIENT_RULES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "events.h"

namespace headwater::history {

// The repetitions of one call: client::internal::RetryState.
class RetryRules {
 public:
  // `safe`: a second execution does the same as one.
  explicit RetryRules(bool safe);
  ~RetryRules();
  // An attempt failed with this reason; empty: the connection broke. True if it is made again.
  bool RepeatsAfter(const std::string& reason);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

// What a client repeats after the server's restart: client::internal::ReplayLog, of one head.
class ClientLog {
 public:
  explicit ClientLog(int64_t max_bytes);
  ~ClientLog();
  // A call of the head's step has succeeded.
  void Add(const Event& event);
  void StepIsOpen(int64_t step);
  void Forget();
  // What of the open step is to be made again, oldest first.
  std::vector<Event> Entries() const;
  // Nothing of this step was dropped for want of room.
  bool IsComplete(int64_t step) const;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_CLIENT_RULES_H_
