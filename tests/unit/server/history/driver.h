// Driver: runs histories against the server's core and the model, finds the shortest part of one that fails, and reports.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_DRIVER_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_DRIVER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "events.h"
#include "world.h"

namespace headwater::history {

// How often each kind of event, and each kind with each answer, occurred.
struct Coverage {
  std::map<std::string, int64_t> kinds, answers;
  int64_t late_events = 0;
  void Add(const Coverage& other);
};

// Where server and model disagreed.
struct Failure {
  int event = 0;  // index in the history
  std::string what;
};

// The first `length` events of the history of `seed`; those of a shorter one are the first of a longer one.
std::vector<Event> MakeHistory(uint64_t seed, int length);
// Runs events one after the other, compares after each, and stops at the first difference.
std::optional<Failure> RunEvents(uint64_t seed, const std::vector<Event>& events, const WorldBugs& bugs);
// The same for a history that is chosen as it goes, which is quicker; `coverage` may be null.
std::optional<Failure> RunHistory(uint64_t seed, int length, const WorldBugs& bugs, Coverage* coverage);

// What to tell of a history that failed: the event, the difference, the command that runs it again, and the fewest of its events
// that were found to fail, with the command for those.
std::string Report(uint64_t seed, const Failure& failure, const WorldBugs& bugs);

struct Totals {
  int64_t histories = 0;
  Coverage coverage;
  std::vector<std::string> failures;  // reports; at most a few
};
// Runs the histories of seeds first_seed, first_seed + 1, ... on all cores; ends early after `max_failures`.
Totals RunHistories(uint64_t first_seed, int count, int length, const WorldBugs& bugs, size_t max_failures);

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_DRIVER_H_
