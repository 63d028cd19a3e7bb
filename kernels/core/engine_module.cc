#include "kernels/core/engine_module.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/config.h"
#include "headwater/kernels/device_group_id.h"
#include "headwater/kernels/error.h"

namespace headwater {
namespace {

absl::Status NotBuilt(const std::string& why) {
  return MakeError(ErrorReason::kFeatureNotBuilt, "the CUDA engine cannot be had: " + why, {{"feature", "cuda_engine"}});
}

// The folder of this program, without a slash at its end; empty if it cannot be found.
std::string OwnFolder() {
  char resolved[PATH_MAX];
  if (realpath("/proc/self/exe", resolved) == nullptr) return "";
  const std::string path = resolved;
  return path.substr(0, path.rfind('/'));
}

// Where the module may be: beside the program; in its own wheel, from headwater_server/bin/; from a build's other folders, in bin/.
std::vector<std::string> Places() {
  const std::string folder = OwnFolder();
  if (folder.empty()) return {};
  std::vector<std::string> places;
  for (const char* way : {"/", "/../../headwater_cuda13/", "/../bin/"}) places.push_back(folder + way + kCudaModuleFile);
  return places;
}

struct Module {
  EngineModuleCreateFunction* create = nullptr;
  EngineModuleMakeGroupIdFunction* make_group_id = nullptr;
};

// The loader's last message, with the module's path cut to its name: the reason travels to clients.
std::string LoaderError(const std::string& path) {
  const char* const text = dlerror();
  std::string message = text != nullptr ? text : "unknown error";
  for (size_t at = message.find(path); at != std::string::npos; at = message.find(path)) {
    message.replace(at, path.size(), path.substr(path.rfind('/') + 1));
  }
  return message;
}

absl::StatusOr<Module> Load(const std::string& path) {
  // Loading the same file again only counts references; nothing is ever closed, because the CUDA runtime inside does not survive
  // that.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return NotBuilt("its module cannot be loaded: " + LoaderError(path));
  auto* const version = reinterpret_cast<EngineModuleVersionFunction*>(dlsym(handle, kCudaModuleVersionSymbol));
  if (version == nullptr) return NotBuilt("the file is no module of it: " + LoaderError(path));
  const char* const found = version();
  if (EngineModuleVersion() != found) {
    return NotBuilt("its module belongs to another build: expected \"" + EngineModuleVersion() + "\", got \"" + found + "\"");
  }
  Module module;
  module.create = reinterpret_cast<EngineModuleCreateFunction*>(dlsym(handle, kCudaCreateEngineSymbol));
  module.make_group_id = reinterpret_cast<EngineModuleMakeGroupIdFunction*>(dlsym(handle, kCudaMakeGroupIdSymbol));
  if (module.create == nullptr || module.make_group_id == nullptr)
    return NotBuilt("the file is no module of it: " + LoaderError(path));
  return module;
}

absl::StatusOr<Module> FindAndLoad() {
  const char* const named = std::getenv(kCudaModuleVariable);
  if (named != nullptr && named[0] != '\0') {
    if (access(named, R_OK) != 0) {
      return NotBuilt(std::string("there is no file where ") + kCudaModuleVariable + " says that its module is");
    }
    return Load(named);
  }
  for (const std::string& path : Places()) {
    if (access(path.c_str(), R_OK) == 0) return Load(path);
  }
  return NotBuilt(std::string("its module ") + kCudaModuleFile +
                  " is not beside the program, nor installed by pip install \"headwater[server,cuda13]\"");
}

}  // namespace

const std::string& EngineModuleVersion() {
  static const std::string* const version =
      new std::string(std::string(HEADWATER_VERSION) + ", interface " + std::to_string(kEngineInterfaceNumber) + " (" +
                      std::to_string(sizeof(EngineOptions)) + ", " + std::to_string(sizeof(MicroBatch)) + ", " +
                      std::to_string(sizeof(LossTerm)) + ", " + std::to_string(sizeof(HeadSpec)) + ", " +
                      std::to_string(sizeof(MemoryPlan)) + "), C++ ABI " + std::to_string(__GXX_ABI_VERSION) + "." +
                      std::to_string(_GLIBCXX_USE_CXX11_ABI) + ", Abseil " + std::to_string(ABSL_LTS_RELEASE_VERSION));
  return *version;
}

absl::StatusOr<std::unique_ptr<LossEngine>> CreateCudaEngine(const EngineOptions& options) {
  const absl::StatusOr<Module> module = FindAndLoad();
  if (!module.ok()) return module.status();
  absl::Status status;
  std::unique_ptr<LossEngine> engine(module->create(&options, &status));
  if (engine != nullptr) return engine;
  if (status.ok()) return MakeError(ErrorReason::kInternal, "the CUDA engine's module made no engine and did not say why");
  return status;
}

absl::StatusOr<std::string> MakeCudaGroupId() {
  const absl::StatusOr<Module> module = FindAndLoad();
  if (!module.ok()) return module.status();
  std::string id;
  absl::Status status;
  module->make_group_id(&id, &status);
  if (!status.ok()) return status;
  return id;
}

}  // namespace headwater
