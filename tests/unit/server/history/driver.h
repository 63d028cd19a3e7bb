// Driver: runs histories against the server's core and the model, finds the shortest part of one that fails, and reports.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_DRIVER_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_DRIVER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "events.h"
#include "faults.h"
#include "world.h"

namespace headwater::history {

// How often each kind of event, and each kind with each answer, occurred.
struct Coverage {
  std::map<std::string, int64_t> kinds;
  std::map<std::pair<const char*, std::string>, int64_t> answers;
  int64_t late_events = 0;
  int64_t events = 0;
  FaultTable faults;
  void Add(const Coverage& other);
};

// Where server and model disagreed.
struct Failure {
  int event = 0;  // index in the history
  std::string what;
  bool by_client = false;  // an answer was wrong to one who knows nothing of the model
};

// A history of an odd seed is random calls, one of an even one a simulation of trainers.
//
// The first `length` events of the history of `seed`; those of a shorter one are the first of a longer one.
std::vector<Event> MakeHistory(uint64_t seed, int length, const WorldBugs& bugs);
// Runs events one after the other, compares after each, and stops at the first difference.
std::optional<Failure> RunEvents(uint64_t seed, const std::vector<Event>& events, const WorldBugs& bugs);
// The same for the history of `seed`, which is chosen as it goes. `coverage` and `events`, which gets its events, may be null.
std::optional<Failure> RunHistory(uint64_t seed, int length, const WorldBugs& bugs, Coverage* coverage, std::vector<Event>* events);

// What to tell of a history that failed: the event, the difference, the command that runs it again, and the fewest of its events
// that were found to fail, with the command for those.
std::string Report(uint64_t seed, const Failure& failure, const WorldBugs& bugs);

struct Totals {
  int64_t histories = 0;
  Coverage coverage;
  std::vector<std::string> failures;  // reports; at most a few
};
// How histories are run.
struct RunOptions {
  int threads = 0;            // 0: one for each core
  size_t max_failures = 1;    // then it ends early
  bool cuts_failures = true;  // reports the fewest events that fail, which takes a while
};
// Runs the histories of seeds first_seed, first_seed + 1, ...
Totals RunHistories(uint64_t first_seed, int64_t count, int length, const WorldBugs& bugs, const RunOptions& options);

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_DRIVER_H_
