#include "kernels/comm/nccl_library.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "headwater/kernels/error.h"

namespace headwater {
namespace {

constexpr char kFile[] = "libnccl.so.2";
// The first release with nonblocking communicators and a limit on thread blocks.
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 1);

absl::Status NotThere(const std::string& why) {
  return MakeError(ErrorReason::kFeatureNotBuilt, "GPUs cannot work together here: " + why, {{"feature", "nccl"}});
}

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

absl::StatusOr<const NcclLibrary*> Load() {
  void* const handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* const text = dlerror();
    return NotThere(std::string(kFile) + " cannot be loaded: " + (text != nullptr ? text : "unknown error") +
                    "; pip install \"headwater[server,multi-gpu]\" brings it");
  }
  static NcclLibrary library;
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(handle, name));
    if (*function == nullptr && missing == nullptr) missing = name;
  };
  find("ncclGetVersion", &library.GetVersion);
  find("ncclGetUniqueId", &library.GetUniqueId);
  find("ncclCommInitRankConfig", &library.CommInitRankConfig);
  find("ncclCommGetAsyncError", &library.CommGetAsyncError);
  find("ncclCommFinalize", &library.CommFinalize);
  find("ncclCommDestroy", &library.CommDestroy);
  find("ncclCommAbort", &library.CommAbort);
  find("ncclGetErrorString", &library.GetErrorString);
  find("ncclGetLastError", &library.GetLastError);
  find("ncclAllReduce", &library.AllReduce);
  find("ncclReduce", &library.Reduce);
  find("ncclAllGather", &library.AllGather);
  find("ncclBroadcast", &library.Broadcast);
  find("ncclReduceScatter", &library.ReduceScatter);
  find("ncclGroupStart", &library.GroupStart);
  find("ncclGroupEnd", &library.GroupEnd);
  if (missing != nullptr) return NotThere(std::string(kFile) + " has no " + missing + ", and is too old");
  int version = 0;
  if (library.GetVersion(&version) != ncclSuccess || version < kOldestVersion) {
    return NotThere("NCCL is of version " + VersionText(version) + ", expected " + VersionText(kOldestVersion) + " or newer");
  }
  return &library;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> LoadNccl() {
  static const absl::StatusOr<const NcclLibrary*>* const library = new absl::StatusOr<const NcclLibrary*>(Load());
  return *library;
}

}  // namespace headwater
