// Makes the engine of a headwaterd, with those of other processes and of several GPUs.
#ifndef HEADWATER_SERVER_MAIN_LEADER_H_
#define HEADWATER_SERVER_MAIN_LEADER_H_

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/service/engine_choice.h"
#include "server/service/server_options.h"

namespace headwater {

// The engine that the flags select. With --workers it is a group's, which goes into `options`; the server waits for its workers.
// InvalidArgument for flags that conflict.
absl::StatusOr<service::ChosenEngine> MakeEngine(const EngineOptions& engine, service::ServerOptions* options);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_LEADER_H_
