// FlowingRows: the rows of an event's call that come while it is computed, as the event says.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_FLOWING_ROWS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_FLOWING_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "await_points.h"
#include "events.h"
#include "headwater/kernels/error.h"
#include "server/heads/head.h"

namespace headwater::history {

class FlowingRows : public heads::IncomingRows {
 public:
  // `cancelled` becomes true at the decision, if the event says so.
  FlowingRows(const Event& event, int64_t row_count, const Digest& digest, AwaitPoints& await_points, bool* cancelled)
      : event_(event), row_count_(row_count), await_points_(await_points), cancelled_(cancelled), digest_(digest) {}

  absl::Status AwaitRows(int64_t row_end) override {
    await_points_.Pass();
    if (row_end < row_count_) return absl::OkStatus();
    if (event_.flow == Flow::kStalls) {
      stalled_ = true;
      return MakeError(ErrorReason::kCancelled, "the rows stay away");
    }
    return event_.flow == Flow::kBreaks ? Error() : absl::OkStatus();
  }
  bool stalled() const override { return stalled_; }
  absl::StatusOr<Digest> Finish(const DigestBuilder*) override {
    await_points_.Pass();
    if (event_.flow == Flow::kRefused) return Error();
    if (event_.cancel == Cancel::kAtDecision) *cancelled_ = true;
    return digest_;
  }
  void GradHiddenReady(int64_t) override {}

  // What becomes of the call when it waits for all of its rows.
  absl::Status Error() const {
    if (event_.flow == Flow::kBreaks) return MakeError(ErrorReason::kStripeLost, "by order of the history");
    if (event_.flow == Flow::kRefused) return MakeError(ErrorReason::kProtocolViolation, "by order of the history");
    return absl::OkStatus();
  }

 private:
  const Event& event_;
  const int64_t row_count_;
  AwaitPoints& await_points_;
  bool* const cancelled_;
  const Digest digest_;
  bool stalled_ = false;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_FLOWING_ROWS_H_
