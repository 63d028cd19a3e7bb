// The end of a wait whose outcome says more than that the deadline has passed.
#ifndef HEADWATER_SERVER_TRANSPORT_ANSWER_TIME_H_
#define HEADWATER_SERVER_TRANSPORT_ANSWER_TIME_H_

#include <algorithm>

#include "absl/time/time.h"

namespace headwater::transport {

inline constexpr absl::Duration kAnswerTime = absl::Milliseconds(50);

// The end of a wait that begins at `now`, in a call with the given `deadline`: kAnswerTime earlier, or a quarter of the time left.
// The answer names what is missing and must arrive before the client's own deadline passes.
inline absl::Time WaitEnd(absl::Time now, absl::Time deadline) {
  return deadline - std::clamp((deadline - now) / 4, absl::ZeroDuration(), kAnswerTime);
}

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_ANSWER_TIME_H_
