// Which engine a server runs on.
#ifndef HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_
#define HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::service {

struct ChosenEngine {
  std::unique_ptr<LossEngine> engine;
  std::string note;  // one sentence: why it is not a faster one; empty if it is
};

// `choice`: "cpu"; "cuda", which fails with one clear sentence where it cannot be had; or "auto", which falls back to the CPU and
// says why in the note. InvalidArgument for other words.
//
// The CUDA engine is a module library, libheadwater_cuda.so, beside the program or where the loader looks. It is never linked: a
// server without it starts on any machine.
absl::StatusOr<ChosenEngine> ChooseEngine(const std::string& choice, const EngineOptions& options);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_ENGINE_CHOICE_H_
