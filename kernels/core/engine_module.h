// The boundary between a program and the module library that holds the CUDA engine (libheadwater_cuda.so). It consists of three C
// symbols, and of a version that must be the same on both sides, because C++ objects cross it.
//
// The module is loaded with RTLD_NOW | RTLD_LOCAL and never unloaded. docs/adr/0010-cuda-module.md says why it is no ordinary
// library.
#ifndef HEADWATER_KERNELS_CORE_ENGINE_MODULE_H_
#define HEADWATER_KERNELS_CORE_ENGINE_MODULE_H_

#include <string>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"

namespace headwater {

// Rises when engine.h, types.h or a symbol below changes in a way that code compiled against the former text would misread.
inline constexpr int kEngineInterfaceNumber = 7;

// The build of a side: version, interface number, sizes of the types that cross the boundary, ABIs of compiler, standard library
// and Abseil.
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
// Sets `*id` to a new EngineGroup::device_group_id, or `*status`, which was OK, to the reason why it cannot be made.
inline constexpr char kCudaMakeGroupIdSymbol[] = "headwater_cuda_make_group_id";
using EngineModuleMakeGroupIdFunction = void(std::string* id, absl::Status* status);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_ENGINE_MODULE_H_
