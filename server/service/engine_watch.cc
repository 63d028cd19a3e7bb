#include "server/service/engine_watch.h"

#include <utility>

#include "absl/time/time.h"

namespace headwater::service {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(50);

}  // namespace

EngineWatch::EngineWatch(const LossEngine& engine, std::function<void(const absl::Status&)> on_lost)
    : engine_(engine), on_lost_(std::move(on_lost)), check_(kInterval, [this] { Check(); }) {}

void EngineWatch::Check() {
  const absl::Status health = engine_.health();
  // A second caller waits here until the first one's `on_lost_` has run.
  if (!health.ok()) std::call_once(told_, on_lost_, health);
}

}  // namespace headwater::service
