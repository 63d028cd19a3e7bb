// HistoryEngine: the fake engine, open to view. Its numbers say what a call saw, and how often it counted.
//
// It can be given one of some bugs, for the test of the test.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_ENGINE_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/unit/server/fake_engine.h"

namespace headwater::history {

// What a planted bug does.
enum class EngineBug {
  kNone,
  kDropsCommit,
  kAddsTwice,
  kLeaksSlot,
  kKeepsGradient,
  kAddsUndecided,
  kRepeatsOtherwise,  // a row that is computed again gets another gradient
  kAppliesByHalf,     // an update that a shard was not ready for is made by the others
  kSwapsByHalf        // of new weights the bias is forgotten
};

class HistoryEngine : public testing::FakeEngine {
 public:
  HistoryEngine(int32_t shard_count, EngineBug bug);

  absl::StatusOr<std::unique_ptr<EngineHead>> DoCreateHead(const HeadSpec& spec) override;
  absl::StatusOr<MicroBatchResult> DoCompute(const MicroBatch& micro_batch) override;

  std::function<void()> during_compute;         // called once, then empty
  std::vector<const testing::FakeHead*> heads;  // those that live, in the order of their creation

 private:
  class Head;
  class Staged;

  const EngineBug bug_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_ENGINE_H_
