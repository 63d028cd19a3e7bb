// The functions of NCCL, out of libnccl.so.2, which is loaded when a group is made: an engine that is alone does without.
#ifndef HEADWATER_KERNELS_COMM_NCCL_LIBRARY_H_
#define HEADWATER_KERNELS_COMM_NCCL_LIBRARY_H_

#include <nccl.h>

#include "absl/status/statusor.h"

namespace headwater {

struct NcclLibrary {
  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclCommFinalize) CommFinalize;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
  decltype(&ncclAllReduce) AllReduce;
  decltype(&ncclReduce) Reduce;
  decltype(&ncclAllGather) AllGather;
  decltype(&ncclBroadcast) Broadcast;
  decltype(&ncclReduceScatter) ReduceScatter;
  decltype(&ncclGroupStart) GroupStart;
  decltype(&ncclGroupEnd) GroupEnd;
};

// Loads it at the first call, and never unloads it. kFeatureNotBuilt, saying why, if it is not there or too old. Any thread.
absl::StatusOr<const NcclLibrary*> LoadNccl();

}  // namespace headwater

#endif  // HEADWATER_KERNELS_COMM_NCCL_LIBRARY_H_
