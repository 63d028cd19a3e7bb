// Source: where the events of a history come from, one after the other.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_SOURCE_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_SOURCE_H_

#include <string>

#include "events.h"

namespace headwater::history {

class Source {
 public:
  virtual ~Source() = default;
  virtual Event Next() = 0;
  // What the server answered to the event that came last. Says what is wrong with it, empty if nothing is.
  virtual std::string Answered(const Event& event, const Reply& reply) = 0;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_SOURCE_H_
