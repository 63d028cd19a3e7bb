#include "server/service/access/access_table.h"

#include <array>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace headwater::service {
namespace {

using observability::RpcMethod;

// Compute is the work of a training run, or an evaluation, with a head that exists. Admin makes and removes heads, and moves their
// state in and out. Compute alone cannot take a head's weights, nor replace them except by training.
constexpr AccessRow kRows[] = {
    {"/headwater.v1.LossService/ComputeLoss", Permission::kCompute},
    {"/headwater.v1.LossService/TransferRows", Permission::kCompute},
    {"/headwater.v1.LossService/StreamTeacher", Permission::kCompute},
    {"/headwater.v1.LossService/CommitMicroBatch", Permission::kCompute},
    {"/headwater.v1.LossService/DiscardMicroBatch", Permission::kCompute},

    {"/headwater.v1.HeadService/GetHead", Permission::kRead},
    {"/headwater.v1.HeadService/ListHeads", Permission::kRead},
    {"/headwater.v1.HeadService/GetStep", Permission::kRead},
    {"/headwater.v1.HeadService/TakeHead", Permission::kCompute},
    {"/headwater.v1.HeadService/SealStep", Permission::kCompute},
    {"/headwater.v1.HeadService/ApplyOptimizerStep", Permission::kCompute},
    {"/headwater.v1.HeadService/DiscardGradient", Permission::kCompute},
    {"/headwater.v1.HeadService/DownloadGradient", Permission::kCompute},
    {"/headwater.v1.HeadService/GetGradientNorm", Permission::kCompute},
    {"/headwater.v1.HeadService/AddGradient", Permission::kCompute},
    {"/headwater.v1.HeadService/UploadWeights", Permission::kCompute},  // and kUploadOutsideStep
    {"/headwater.v1.HeadService/CreateHead", Permission::kAdmin},
    {"/headwater.v1.HeadService/DeleteHead", Permission::kAdmin},
    {"/headwater.v1.HeadService/LoadWeights", Permission::kAdmin},
    {"/headwater.v1.HeadService/DownloadWeights", Permission::kAdmin},
    {"/headwater.v1.HeadService/SaveCheckpoint", Permission::kAdmin},
    {"/headwater.v1.HeadService/ListCheckpoints", Permission::kAdmin},
    {"/headwater.v1.HeadService/RestoreCheckpoint", Permission::kAdmin},
    {"/headwater.v1.HeadService/DeleteCheckpoint", Permission::kAdmin},

    // A session is its secret id: a client that has the id may renew and close it.
    {"/headwater.v1.SessionService/GetServerInfo", Permission::kToken},
    {"/headwater.v1.SessionService/OpenSession", Permission::kToken},
    {"/headwater.v1.SessionService/KeepAlive", Permission::kToken},
    {"/headwater.v1.SessionService/CloseSession", Permission::kToken},
    {"/headwater.v1.SessionService/RegisterSharedMemory", Permission::kCompute},
    {"/headwater.v1.SessionService/UnregisterSharedMemory", Permission::kCompute},

    // A worker gets the rows and the weights of all heads.
    {"/headwater.v1.GroupService/Join", Permission::kAdmin},

    // Probes of an orchestrator have no token, and learn only whether the server serves.
    {"/grpc.health.v1.Health/Check", Permission::kNone},
    {"/grpc.health.v1.Health/Watch", Permission::kNone},
    // The second is what newer versions of gRPC serve beside the first.
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Permission::kToken},
    {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Permission::kToken},
};

}  // namespace

const char* PermissionName(Permission permission) {
  constexpr const char* kNames[] = {"none", "token", "read", "compute", "admin"};
  return kNames[static_cast<size_t>(permission)];
}

absl::Span<const AccessRow> AccessTable() { return kRows; }

const AccessRow* FindAccessRow(absl::string_view path) {
  for (const AccessRow& row : kRows) {
    if (path == row.path) return &row;
  }
  return nullptr;
}

const AccessRow* FindAccessRow(RpcMethod method) {
  constexpr size_t kMethodCount = static_cast<size_t>(RpcMethod::kCount);
  static const auto* const rows = [] {
    auto* const by_method = new std::array<const AccessRow*, kMethodCount>{};
    for (size_t i = 0; i < kMethodCount; ++i) {
      for (const char* service : {"Loss", "Head", "Session", "Group"}) {
        const char* const name = observability::RpcMethodName(static_cast<RpcMethod>(i));
        const AccessRow* const row = FindAccessRow(absl::StrCat("/headwater.v1.", service, "Service/", name));
        if (row != nullptr) (*by_method)[i] = row;
      }
    }
    return by_method;
  }();
  return (*rows)[static_cast<size_t>(method)];
}

}  // namespace headwater::service
