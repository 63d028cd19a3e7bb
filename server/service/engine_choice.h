// Which engine a server runs on.
#ifndef HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_
#define HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::service {

struct ChosenEngine {
  std::unique_ptr<LossEngine> engine;
  std::string note;  // why it is not a faster one, and what its products run on; empty if it is
};

// InvalidArgument for an --engine other than "auto", "cpu" and "cuda".
absl::Status CheckEngineChoice(const std::string& choice);
// `error`, the reason why an engine is not available, with the flag --engine before its sentence.
absl::Status EngineChoiceError(const std::string& choice, const absl::Status& error);

// `choice`: "cpu"; "cuda", which fails with one clear sentence where it is not available; or "auto". With "auto" it is CUDA if its
// module is there and finds a usable GPU, else the CPU, and the note says why. Wrong options (kMemoryBudgetExceeded, kInvalidField)
// are no reason to fall back. InvalidArgument for other words.
absl::StatusOr<ChosenEngine> ChooseEngine(const std::string& choice, const EngineOptions& options);

// The file where the CUDA engine keeps its products' algorithms, from a flag: a path as it is, or none if empty. With "auto" it is
// headwater/cublaslt.json in $XDG_CACHE_HOME, else in ~/.cache, or none if neither is known.
std::string AlgorithmCachePath(const std::string& choice);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_
