#include "server/group/ranks/rank.h"

#include <utility>

#include "headwater/kernels/communicator.h"
#include "server/observability/busy_clock.h"

namespace headwater::group {
namespace {

// For how long an engine has calls, and for how long they are in their callers' flows.
class RankClock final : public EngineObserver {
 public:
  uint64_t BeginCall(const char*) override {
    calls_.Begin();
    return 0;
  }
  void EndCall(uint64_t) override { calls_.End(); }
  void EnterFlow() override { flows_.Begin(); }
  void LeaveFlow() override { flows_.End(); }

  RankTimes times(const Communicator* communicator) const {
    RankTimes times;
    times.waiting = flows_.total();
    if (communicator != nullptr) {
      const CommunicatorTimes collectives = communicator->times();
      times.waiting += absl::FromChrono(collectives.waiting);
      times.communicating = absl::FromChrono(collectives.communicating);
    }
    // Read last, so that it is never less than its parts.
    times.computing = calls_.total() - times.waiting - times.communicating;
    return times;
  }

 private:
  observability::BusyClock calls_;
  observability::BusyClock flows_;
};

}  // namespace

Rank MakeLocalRank(std::unique_ptr<LossEngine> engine) {
  const auto clock = std::make_shared<RankClock>();
  engine->Observe(clock);
  const std::shared_ptr<Communicator> communicator = engine->options().group.communicator;
  Rank rank;
  rank.engine = std::move(engine);
  rank.abort = [communicator](const absl::Status& reason) {
    if (communicator != nullptr) communicator->Abort(reason);
  };
  rank.times = [communicator, clock] { return clock->times(communicator.get()); };
  return rank;
}

}  // namespace headwater::group
