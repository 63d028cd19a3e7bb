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

// InvalidArgument for an --engine that is none of "auto", "cpu" and "cuda".
absl::Status CheckEngineChoice(const std::string& choice);
// Why what --engine wants cannot be had: `error` with the flag before its sentence, and its reason.
absl::Status EngineChoiceError(const std::string& choice, const absl::Status& error);

// `choice`: "cpu"; "cuda", which fails with one clear sentence where it cannot be had; or "auto", which is "cuda" if its module is
// there and finds a usable GPU, else falls back to the CPU and says why in the note. What is wrong with the options
// (kMemoryBudgetExceeded, kInvalidField) is no reason to fall back. InvalidArgument for other words.
absl::StatusOr<ChosenEngine> ChooseEngine(const std::string& choice, const EngineOptions& options);

// Where the CUDA engine keeps its products' algorithms, from a flag: a path as it is; "auto": headwater/cublaslt.json in
// $XDG_CACHE_HOME, else in ~/.cache, or nowhere if neither is known; empty: nowhere.
std::string AlgorithmCachePath(const std::string& choice);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_
