// When a wait ends whose outcome tells more than that the caller's time is up.
#ifndef HEADWATER_SERVER_TRANSPORT_ANSWER_TIME_H_
#define HEADWATER_SERVER_TRANSPORT_ANSWER_TIME_H_

#include <algorithm>

#include "absl/time/time.h"

namespace headwater::transport {

inline constexpr absl::Duration kAnswerTime = absl::Milliseconds(50);

// The end of a wait that begins `now`, of a call that may last until `deadline`: kAnswerTime earlier, or a quarter of what is left,
// because an answer that names what is missing must arrive before the caller only learns that its time is up.
inline absl::Time WaitEnd(absl::Time now, absl::Time deadline) {
  return deadline - std::clamp((deadline - now) / 4, absl::ZeroDuration(), kAnswerTime);
}

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_ANSWER_TIME_H_
