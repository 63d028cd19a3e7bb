// What a server has acknowledged must be there: a record of acknowledged micro-batches against the sums that the server tells of a
// step.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_ACKNOWLEDGED_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_ACKNOWLEDGED_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::fuzz {

// Thread-safe. Requests are those that were sent, with everything filled in.
class Acknowledged {
 public:
  // Contributions of a step of a head in one of its lives.
  struct Contributions {
    std::map<int64_t, std::optional<int64_t>> committed;  // their valid tokens, if they are known
  };

  // Before a call that may add something.
  void Try(const v1::MicroBatchHeader& header);
  void Try(const v1::AddGradientHeader& header);
  // After one that was answered with OK.
  void Computed(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary);
  void Committed(const v1::CommitMicroBatchRequest& request);
  void Added(const v1::AddGradientHeader& header);

  // What was committed when a call that asks for it began.
  Contributions Before(const v1::HeadStep& step) const;
  // Finds an answer that lacks something of it, or has what nobody sent.
  void CheckTotals(const v1::HeadStep& step, const Contributions& before, const v1::StepTotals& totals) const;
  void CheckStep(const v1::HeadStep& head, const v1::Step& step, const Contributions& before) const;

 private:
  using Key = std::tuple<std::string, std::string, int64_t>;  // head, epoch, step
  static Key KeyOf(const v1::HeadStep& step) { return {step.head(), step.head_epoch(), step.step()}; }

  mutable std::mutex mutex_;
  std::map<Key, Contributions> steps_;
  std::map<std::string, std::set<int64_t>> tried_;  // ids, by head, whatever the epoch and step
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_ACKNOWLEDGED_H_
