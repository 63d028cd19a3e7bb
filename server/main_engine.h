// The engine of a headwaterd, with those of other processes and of several GPUs.
#ifndef HEADWATER_SERVER_MAIN_ENGINE_H_
#define HEADWATER_SERVER_MAIN_ENGINE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/service/server_options.h"

namespace headwater {

struct ChosenEngine {
  std::unique_ptr<LossEngine> engine;
  std::string note;  // why it is not a faster one, and what its products run on; empty if it is
};

// The engine that the flags select. With --workers it is a group's, which goes into `options`; the server waits for its workers.
// InvalidArgument for flags that conflict. With --engine=auto it is CUDA if its module is there and finds a usable GPU, else the
// CPU, and the note says why.
absl::StatusOr<ChosenEngine> MakeEngine(const EngineOptions& engine, service::ServerOptions* options);

// InvalidArgument for an --engine other than "auto", "cpu" and "cuda".
absl::Status CheckEngineChoice(const std::string& choice);

// The file where the CUDA engine keeps its products' algorithms, from a flag: a path as it is, or none if empty. With "auto" it is
// headwater/cublaslt.json in $XDG_CACHE_HOME, else in ~/.cache, or none if neither is known.
std::string AlgorithmCachePath(const std::string& choice);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_ENGINE_H_
