// Follower: a RankFlow as the engine of a rank sees it, which is not the caller's own.
#ifndef HEADWATER_SERVER_GROUP_RANK_FOLLOWER_H_
#define HEADWATER_SERVER_GROUP_RANK_FOLLOWER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/group/rank.h"

namespace headwater::group {

class Follower final : public RowFlow {
 public:
  explicit Follower(RankFlow& flow) : flow_(flow) {}
  absl::Status AwaitRows(int64_t row_end) override {
    while (here_ < row_end) {
      absl::StatusOr<int64_t> here = flow_.AwaitMore(here_);
      if (!here.ok()) return here.status();
      here_ = *here;
    }
    return absl::OkStatus();
  }
  absl::Status Decide(const DigestBuilder*) override { return flow_.AwaitDecision(); }
  void GradHiddenReady(int64_t) override {}

 private:
  RankFlow& flow_;
  int64_t here_ = 0;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANK_FOLLOWER_H_
