#include "server/service/engine_choice.h"

#include <cstdlib>
#include <string>
#include <utility>

#include "headwater/kernels/error.h"
#include "headwater/kernels/product_rate.h"

namespace headwater::service {
namespace {

// The value of an environment variable that must be an absolute path to count; empty without one.
std::string AbsolutePath(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && value[0] == '/' ? value : "";
}

}  // namespace

absl::Status CheckEngineChoice(const std::string& choice) {
  if (choice == "auto" || choice == "cpu" || choice == "cuda") return absl::OkStatus();
  return absl::InvalidArgumentError("--engine: expected auto, cpu or cuda, got \"" + choice + "\"");
}

absl::Status EngineChoiceError(const std::string& choice, const absl::Status& error) {
  return MakeError(GetErrorReason(error), "--engine=" + choice + ": " + std::string(error.message()), GetErrorMetadata(error));
}

absl::StatusOr<ChosenEngine> ChooseEngine(const std::string& choice, const EngineOptions& options) {
  if (absl::Status status = CheckEngineChoice(choice); !status.ok()) return status;
  std::string note = "running on the CPU, as --engine=cpu says";
  if (choice != "cpu") {
    auto engine = CreateCudaEngine(options);
    if (engine.ok()) return ChosenEngine{*std::move(engine), ""};
    if (choice == "cuda" || !HasReason(engine.status(), ErrorReason::kFeatureNotBuilt)) {
      return EngineChoiceError(choice, engine.status());
    }
    note = "running on the CPU: " + std::string(engine.status().message());
  }
  auto engine = CreateCpuEngine(options);
  if (!engine.ok()) return engine.status();
  note += "; " + DescribeCpuProducts((*engine)->options().bfloat16_products, options.bfloat16_products);
  return ChosenEngine{*std::move(engine), note};
}

std::string AlgorithmCachePath(const std::string& choice) {
  if (choice != "auto") return choice;
  constexpr char kFile[] = "/headwater/cublaslt.json";
  if (const std::string cache = AbsolutePath("XDG_CACHE_HOME"); !cache.empty()) return cache + kFile;
  if (const std::string home = AbsolutePath("HOME"); !home.empty()) return home + "/.cache" + kFile;
  return "";
}

}  // namespace headwater::service
