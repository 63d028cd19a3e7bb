// The symbols that libheadwater_cuda.so exports; see kernels/core/engine_module.h.
#include <memory>
#include <string>
#include <type_traits>

#include "kernels/comm/device_communicator.h"
#include "kernels/core/engine_module.h"
#include "kernels/cuda/cuda_engine.h"

#define HEADWATER_MODULE_EXPORT __attribute__((visibility("default")))

extern "C" {

HEADWATER_MODULE_EXPORT const char* headwater_cuda_module_version() { return headwater::EngineModuleVersion().c_str(); }

HEADWATER_MODULE_EXPORT headwater::LossEngine* headwater_cuda_create_engine(const headwater::EngineOptions* options,
                                                                            absl::Status* status) {
  absl::StatusOr<std::unique_ptr<headwater::LossEngine>> engine = headwater::cuda::CreateEngine(*options);
  if (engine.ok()) return engine->release();
  *status = engine.status();
  return nullptr;
}

HEADWATER_MODULE_EXPORT void headwater_cuda_make_group_id(std::string* id, absl::Status* status) {
  absl::StatusOr<std::string> made = headwater::MakeDeviceGroupId();
  *status = made.status();
  if (made.ok()) *id = *std::move(made);
}

}  // extern "C"

// The exported symbols have the types that the program looks for.
static_assert(std::is_same_v<decltype(headwater_cuda_module_version), headwater::EngineModuleVersionFunction>);
static_assert(std::is_same_v<decltype(headwater_cuda_create_engine), headwater::EngineModuleCreateFunction>);
static_assert(std::is_same_v<decltype(headwater_cuda_make_group_id), headwater::EngineModuleMakeGroupIdFunction>);
