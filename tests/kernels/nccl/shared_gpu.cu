// A libnccl.so.2 for ranks that share one GPU, which NCCL refuses: the functions that kernels/comm/nccl_library.h looks for,
// between threads of one process. So a machine with one GPU runs the tests of groups. Not for timing: every rank copies all of a
// result.
//
// It checks a rule that NCCL leaves to chance: all ranks make the same calls in the same order.
//
// Like NCCL's, calls of a communicator do not block, and are finished by the caller who asks about them. A rank's call has three
// stages. When all ranks have made it, the rank computes its result from all ranks' inputs, apart from them. When all have done so,
// it writes the result, which may be over an input. Between the stages each rank's stream waits for the events of all others.
// Awaited work has been enqueued before, so that streams that share a queue of the device do not block each other forever.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kMostRanks = 16;

enum class Kind { kAllReduce, kReduce, kAllGather, kBroadcast, kReduceScatter };

struct Call {
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  int root;
  bool Matches(const Call& other) const {
    return kind == other.kind && count == other.count && type == other.type && root == other.root;
  }
};

// A joint operation of all ranks: one call, or those between ncclGroupStart() and ncclGroupEnd().
struct Meeting {
  std::vector<std::vector<Call>> calls;  // by rank; empty until it has come
  std::vector<cudaEvent_t> ready, computed;
  int come = 0, done = 0, gone = 0;

  explicit Meeting(int ranks) : calls(static_cast<size_t>(ranks)), ready(calls.size()), computed(calls.size()) {}
  ~Meeting() {
    for (const auto* events : {&ready, &computed}) {
      for (const cudaEvent_t event : *events) {
        if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
      }
    }
  }
};

struct Group {
  explicit Group(int of_ranks) : ranks(of_ranks) {}
  const int ranks;
  std::mutex mutex;
  int joined = 0;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;  // by their number
};

std::mutex registry_mutex;
std::map<std::string, std::shared_ptr<Group>> registry;  // of groups that are not complete, by id
uint64_t next_id = 0;

template <typename T>
struct Inputs {
  const T* of[kMostRanks];
};

// In rank order, so that all ranks have the same bits.
template <typename T>
__global__ void SumKernel(Inputs<T> inputs, int ranks, size_t count, T* out) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    T sum = inputs.of[0][i];
    for (int rank = 1; rank < ranks; ++rank) sum += inputs.of[rank][i];
    out[i] = sum;
  }
}

size_t BytesOf(ncclDataType_t type) { return type == ncclFloat64 ? 8 : type == ncclFloat32 ? 4 : 1; }

ncclResult_t Result(cudaError_t error) { return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

}  // namespace

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank = 0;
  uint64_t next = 0;  // number of the next meeting

  std::shared_ptr<Meeting> meeting;  // that the rank is in the middle of; null: none
  uint64_t number = 0;               // its
  bool has_computed = false;
  cudaStream_t stream = nullptr;
  std::vector<void*> results;  // of the meeting's calls, apart; null: the rank has none
};

namespace {

template <typename T>
ncclResult_t Sum(const Meeting& meeting, size_t index, size_t offset, size_t count, void* out, cudaStream_t stream) {
  Inputs<T> inputs{};
  const int ranks = static_cast<int>(meeting.calls.size());
  for (int rank = 0; rank < ranks; ++rank) {
    inputs.of[rank] = static_cast<const T*>(meeting.calls[static_cast<size_t>(rank)][index].in) + offset;
  }
  const int blocks = static_cast<int>(std::min<size_t>((count + 255) / 256, 1024));
  SumKernel<<<blocks, 256, 0, stream>>>(inputs, ranks, count, static_cast<T*>(out));
  return Result(cudaGetLastError());
}

// Bytes of the rank's result; 0: it has none.
size_t ResultBytes(const Call& call, const ncclComm& comm) {
  const size_t bytes = call.count * BytesOf(call.type);
  if (call.kind == Kind::kAllGather) return bytes * static_cast<size_t>(comm.group->ranks);
  return call.kind == Kind::kReduce && call.root != comm.rank ? 0 : bytes;
}

ncclResult_t Compute(const ncclComm& comm, size_t index, void* result) {
  const Meeting& meeting = *comm.meeting;
  const Call& call = meeting.calls[static_cast<size_t>(comm.rank)][index];
  const size_t bytes = call.count * BytesOf(call.type);
  switch (call.kind) {
    case Kind::kAllGather:
      for (int rank = 0; rank < comm.group->ranks; ++rank) {
        const cudaError_t error =
            cudaMemcpyAsync(static_cast<char*>(result) + static_cast<size_t>(rank) * bytes,
                            meeting.calls[static_cast<size_t>(rank)][index].in, bytes, cudaMemcpyDeviceToDevice, comm.stream);
        if (error != cudaSuccess) return ncclUnhandledCudaError;
      }
      return ncclSuccess;
    case Kind::kBroadcast:
      return Result(cudaMemcpyAsync(result, meeting.calls[static_cast<size_t>(call.root)][index].in, bytes,
                                    cudaMemcpyDeviceToDevice, comm.stream));
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kReduceScatter:
      break;
  }
  const size_t offset = call.kind == Kind::kReduceScatter ? static_cast<size_t>(comm.rank) * call.count : 0;
  return call.type == ncclFloat64 ? Sum<double>(meeting, index, offset, call.count, result, comm.stream)
                                  : Sum<float>(meeting, index, offset, call.count, result, comm.stream);
}

// The second and third stage, each once all ranks have come so far. For the holder of the group's mutex.
ncclResult_t Advance(ncclComm* comm) {
  Meeting& meeting = *comm->meeting;
  const int ranks = comm->group->ranks;
  const size_t own = static_cast<size_t>(comm->rank);
  const std::vector<Call>& calls = meeting.calls[own];
  const auto wait_for_all = [&](const std::vector<cudaEvent_t>& events) {
    for (const cudaEvent_t event : events) {
      if (cudaStreamWaitEvent(comm->stream, event, 0) != cudaSuccess) return ncclUnhandledCudaError;
    }
    return ncclSuccess;
  };
  if (!comm->has_computed) {
    if (meeting.come < ranks) return ncclInProgress;
    for (const std::vector<Call>& others : meeting.calls) {
      if (!std::equal(calls.begin(), calls.end(), others.begin(), others.end(),
                      [](const Call& a, const Call& b) { return a.Matches(b); })) {
        return ncclInvalidUsage;
      }
    }
    if (wait_for_all(meeting.ready) != ncclSuccess) return ncclUnhandledCudaError;
    for (size_t i = 0; i < calls.size(); ++i) {
      void* result = nullptr;
      if (const size_t bytes = ResultBytes(calls[i], *comm); bytes > 0) {
        if (cudaMallocAsync(&result, bytes, comm->stream) != cudaSuccess) return ncclUnhandledCudaError;
        comm->results.push_back(result);
        if (Compute(*comm, i, result) != ncclSuccess) return ncclUnhandledCudaError;
      } else {
        comm->results.push_back(nullptr);
      }
    }
    if (cudaEventRecord(meeting.computed[own], comm->stream) != cudaSuccess) return ncclUnhandledCudaError;
    comm->has_computed = true;
    ++meeting.done;
  }
  if (meeting.done < ranks) return ncclInProgress;
  if (wait_for_all(meeting.computed) != ncclSuccess) return ncclUnhandledCudaError;
  for (size_t i = 0; i < calls.size(); ++i) {
    void* const result = comm->results[i];
    if (result == nullptr) continue;
    const cudaError_t copied =
        cudaMemcpyAsync(calls[i].out, result, ResultBytes(calls[i], *comm), cudaMemcpyDeviceToDevice, comm->stream);
    if (copied != cudaSuccess || cudaFreeAsync(result, comm->stream) != cudaSuccess) return ncclUnhandledCudaError;
  }
  comm->results.clear();
  comm->has_computed = false;
  if (++meeting.gone == ranks) comm->group->meetings.erase(comm->number);
  comm->meeting = nullptr;
  return ncclSuccess;
}

ncclResult_t Enqueue(ncclComm* comm, std::vector<Call> calls, cudaStream_t stream) {
  if (calls.empty()) return ncclSuccess;
  Group& group = *comm->group;
  const std::lock_guard<std::mutex> lock(group.mutex);
  if (group.joined < group.ranks || comm->meeting != nullptr) return ncclInvalidUsage;
  std::shared_ptr<Meeting>& meeting = group.meetings[comm->next];
  if (meeting == nullptr) meeting = std::make_shared<Meeting>(group.ranks);
  const size_t own = static_cast<size_t>(comm->rank);
  for (cudaEvent_t* const event : {&meeting->ready[own], &meeting->computed[own]}) {
    if (cudaEventCreateWithFlags(event, cudaEventDisableTiming) != cudaSuccess) return ncclUnhandledCudaError;
  }
  if (cudaEventRecord(meeting->ready[own], stream) != cudaSuccess) return ncclUnhandledCudaError;
  meeting->calls[own] = std::move(calls);
  ++meeting->come;
  comm->meeting = meeting;
  comm->number = comm->next++;
  comm->stream = stream;
  return ncclInProgress;
}

// Calls between ncclGroupStart() and ncclGroupEnd(), all of one communicator and stream.
struct OpenGroup {
  int depth = 0;
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Call> calls;
};
thread_local OpenGroup open_group;

ncclResult_t Begin(ncclComm* comm, const Call& call, cudaStream_t stream) {
  if (open_group.depth == 0) return Enqueue(comm, {call}, stream);
  if (open_group.comm != nullptr && (open_group.comm != comm || open_group.stream != stream)) return ncclInvalidUsage;
  open_group.comm = comm;
  open_group.stream = stream;
  open_group.calls.push_back(call);
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "ranks that share a GPU made different calls" : "a call for ranks that share a GPU failed";
}

const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const std::string text = "ranks that share a GPU, " + std::to_string(next_id++);
  std::memset(id->internal, 0, sizeof(id->internal));
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  const std::string key(id.internal, sizeof(id.internal));
  const std::lock_guard<std::mutex> lock(registry_mutex);
  std::shared_ptr<Group>& group = registry[key];
  if (group == nullptr) group = std::make_shared<Group>(ranks);
  *comm = new ncclComm;
  (*comm)->group = group;
  (*comm)->rank = rank;
  const std::lock_guard<std::mutex> group_lock(group->mutex);
  if (++group->joined < ranks) return ncclInProgress;
  registry.erase(key);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard<std::mutex> lock(comm->group->mutex);
  *state = comm->group->joined < comm->group->ranks ? ncclInProgress : comm->meeting == nullptr ? ncclSuccess : Advance(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++open_group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (open_group.depth == 0) return ncclInvalidUsage;
  if (--open_group.depth > 0) return ncclSuccess;
  const OpenGroup ended = std::exchange(open_group, OpenGroup());
  return Enqueue(ended.comm, ended.calls, ended.stream);
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                           cudaStream_t stream) {
  return Begin(comm, {Kind::kAllReduce, in, out, count, type, 0}, stream);
}

ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return Begin(comm, {Kind::kReduce, in, out, count, type, root}, stream);
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream) {
  return Begin(comm, {Kind::kReduceScatter, in, out, count, type, 0}, stream);
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return Begin(comm, {Kind::kAllGather, in, out, count, type, 0}, stream);
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return Begin(comm, {Kind::kBroadcast, in, out, count, type, root}, stream);
}

}  // extern "C"
