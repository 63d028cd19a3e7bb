// The boundary between a program and the module library that holds the CUDA engine (libheadwater_cuda.so): three C symbols, and
// a version that must be the same on both sides, because C++ objects cross it.
//
// The module is loaded with RTLD_NOW | RTLD_LOCAL and never unloaded. Why it is no ordinary library: docs/adr/0010-cuda-module.md.
#ifndef HEADWATER_KERNELS_CORE_ENGINE_MODULE_H_
#define HEADWATER_KERNELS_CORE_ENGINE_MODULE_H_

#include <string>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"

namespace headwater {

// Rises when engine.h, types.h or a symbol below changes in a way that code compiled against the former text would misread.
inline constexpr int kEngineInterfaceNumber = 7;

// What both sides must have been compiled with: version, interface number, sizes of what crosses the boundary, and the ABIs of
// compiler, standard library and Abseil.
const std::string& EngineModuleVersion();

inline constexpr char kCudaModuleFile[] = "libheadwater_cuda.so";
// Environment variable: the module's path, instead of the places beside the program.
inline constexpr char kCudaModuleVariable[] = "HEADWATER_CUDA_MODULE";

// EngineModuleVersion() of the module; lives as long as the process.
inline constexpr char kCudaModuleVersionSymbol[] = "headwater_cuda_module_version";
using EngineModuleVersionFunction = const char*();
// A new engine, or null with the reason in `*status`.
inline constexpr char kCudaCreateEngineSymbol[] = "headwater_cuda_create_engine";
using EngineModuleCreateFunction = LossEngine*(const EngineOptions* options, absl::Status* status);
// Sets `*id` to a new EngineGroup::device_group_id, or `*status`, which was OK, to why there is none.
inline constexpr char kCudaMakeGroupIdSymbol[] = "headwater_cuda_make_group_id";
using EngineModuleMakeGroupIdFunction = void(std::string* id, absl::Status* status);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_ENGINE_MODULE_H_
