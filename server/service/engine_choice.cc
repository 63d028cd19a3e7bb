#include "server/service/engine_choice.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"

namespace headwater::service {
namespace {

constexpr char kCudaModule[] = "libheadwater_cuda.so";

// The folder of the running program, with a slash at its end.
std::string ProgramFolder() {
  std::string path(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) return "./";
  path.resize(static_cast<size_t>(length));
  return path.substr(0, path.rfind('/') + 1);
}

// Why the CUDA engine cannot be had.
std::string WhyNoCuda() {
  const std::string module = ProgramFolder() + kCudaModule;
  if (access(module.c_str(), R_OK) != 0)
    return "the CUDA engine's module " + std::string(kCudaModule) + " is not beside the program";
  return "this version of the server has no interface to the CUDA engine's module " + std::string(kCudaModule);
}

}  // namespace

absl::StatusOr<ChosenEngine> ChooseEngine(const std::string& choice, const EngineOptions& options) {
  if (choice != "auto" && choice != "cpu" && choice != "cuda") {
    return absl::InvalidArgumentError("--engine: expected auto, cpu or cuda, got \"" + choice + "\"");
  }
  if (choice == "cuda") return absl::UnavailableError("--engine=cuda: " + WhyNoCuda());
  auto engine = CreateCpuEngine(options);
  if (!engine.ok()) return engine.status();
  const std::string note = choice == "auto" ? "running on the CPU: " + WhyNoCuda() : "running on the CPU, as --engine=cpu says";
  return ChosenEngine{*std::move(engine), note};
}

}  // namespace headwater::service
