// Rows in device memory, from this process to a headwaterd of its own: in place by CUDA IPC, copied on the device where their
// memory cannot be exported, and through shared host memory; each bitwise the same micro-batch as by gRPC. Needs a GPU and the CUDA
// engine's module; skips with the reason otherwise. With several GPUs each of them is the client's once; the server is on the
// first.
//
//   ctest --test-dir build/release -R e2e_cuda_ipc_test --output-on-failure
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "client/core/link/channel.h"
#include "client/core/link/error.h"
#include "client/core/rows/memory/cuda_driver.h"
#include "client/core/rows/memory/memory_paths.h"
#include "headwater/client/client.h"
#include "headwater/client/error.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/e2e/cpp/support/placed_call.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;
using ::testing::HasSubstr;

constexpr int64_t kRows = 2048;
constexpr int64_t kHiddenSize = 128;
constexpr int64_t kVocabSize = 1000;
constexpr int64_t kBytes = kRows * kHiddenSize * 4;
constexpr char kChildTarget[] = "HEADWATER_CUDA_IPC_CHILD_TARGET";

// Further functions of the driver that only tests call.
template <typename Function>
Function DriverFunction(const char* name) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* const symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(symbol);
}

int DeviceCount() {
  int count = 0;
  return DriverFunction<CuResult (*)(int*)>("cuDeviceGetCount")(&count) == 0 ? count : 0;
}

// Device memory of `bytes` bytes on a device, freed at the end. `pooled`: of a memory pool, which cuIpcGetMemHandle() refuses.
class DeviceBuffer {
 public:
  DeviceBuffer(const CudaDriver& driver, int device, int64_t bytes, bool pooled = false) : driver_(driver) {
    Check(driver.DevicePrimaryCtxRetain(&context_, device));
    const CudaDriver::Scope scope(driver_, context_);
    if (pooled) {
      using AllocAsync = CuResult (*)(CuDevicePointer*, size_t, CuStream);
      Check(DriverFunction<AllocAsync>("cuMemAllocAsync")(&pointer_, static_cast<size_t>(bytes), nullptr));
      Check(driver.StreamSynchronize(nullptr));
    } else {
      Check(driver.MemAlloc(&pointer_, static_cast<size_t>(bytes)));
    }
  }
  ~DeviceBuffer() {
    const CudaDriver::Scope scope(driver_, context_);
    static_cast<void>(driver_.MemFree(pointer_));
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  char* data() const { return reinterpret_cast<char*>(static_cast<uintptr_t>(pointer_)); }
  CuContext context() const { return context_; }
  // As another process opens the memory.
  std::string handle() const {
    const CudaDriver::Scope scope(driver_, context_);
    CuIpcHandle handle;
    Check(driver_.IpcGetMemHandle(&handle, pointer_));
    return {handle.reserved, sizeof(handle.reserved)};
  }
  void Write(const void* from, int64_t bytes, int64_t offset = 0) { Copy(data() + offset, from, bytes); }
  std::string Read(int64_t bytes, int64_t offset = 0) const {
    std::string values(static_cast<size_t>(bytes), '\0');
    Copy(values.data(), data() + offset, bytes);
    return values;
  }

 private:
  static void Check(CuResult result) {
    if (result != 0) throw std::runtime_error("CUDA error " + std::to_string(result));
  }
  void Copy(void* to, const void* from, int64_t bytes) const {
    const CudaDriver::Scope scope(driver_, context_);
    Check(driver_.MemcpyAsync(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), static_cast<size_t>(bytes),
                              nullptr));
    Check(driver_.StreamSynchronize(nullptr));
  }

  const CudaDriver& driver_;
  CuContext context_ = nullptr;
  CuDevicePointer pointer_ = 0;
};

// Rows and their gradient, each an allocation of its own.
struct DeviceRows {
  DeviceRows(const CudaDriver& driver, const std::vector<float>& values, int device = 0, bool pooled = false)
      : hidden(driver, device, kBytes, pooled), grad(driver, device, kBytes, pooled) {
    hidden.Write(values.data(), kBytes);
  }
  DeviceBuffer hidden, grad;
};

class CudaIpc : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef HEADWATER_HAS_CUDA_MODULE
    GTEST_SKIP() << "this build has no CUDA engine (HEADWATER_CUDA=ON)";
#endif
    const auto driver = CudaDriver::Get();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    driver_ = *driver;
    const char* const target = std::getenv(kChildTarget);
    if (target != nullptr) {
      Connect(target);
      return;
    }
    server_ = std::make_unique<ServerProcess>(std::vector<std::string>{"--engine=cuda"}, /*shares_memory=*/true);
    Connect(server_->target());
    head_ = std::make_unique<Head>(
        CreateHead(server_->Connect(), "h", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true}));
    header_ = CrossEntropyHeader(*head_, RandomTargets(3, kRows, kVocabSize));
    by_grpc_ = headwater::testing::ComputeLoss(*loss_, header_, Bytes(hidden_), {.chunk_rows = 100});
    ASSERT_TRUE(by_grpc_.status.ok()) << by_grpc_.status.error_message() << server_->log();
  }
  void Connect(const std::string& target) {
    channel_ = MakeChannel(target, {});
    paths_ = MemoryPaths::Create(target, channel_, {}, {});
    loss_ = v1::LossService::NewStub(channel_);
  }
  static CallMemory MemoryAt(void* read, void* write, void* stream = nullptr) {
    CallMemory rows = {.rows = FloatsAt(read, kBytes, Memory::kCuda)};
    if (write != nullptr) rows.result = FloatsAt(write, kBytes, Memory::kCuda);
    rows.cuda_stream = stream;
    return rows;
  }
  absl::StatusOr<Placement> Place(const CallMemory& rows, Transport demand = Transport::kAuto) {
    return paths_->Place(rows, "", demand, SoonEnough());
  }
  Placement Place(DeviceRows& rows, Transport demand = Transport::kAuto) {
    return Value(Place(MemoryAt(rows.hidden.data(), rows.grad.data()), demand));
  }
  // The reason for which the server does not open memory.
  std::string RefusalOf(const std::string& handle, int64_t bytes) {
    const auto sessions = v1::SessionService::NewStub(channel_);
    v1::OpenSessionResponse session;
    grpc::ClientContext open, context;
    EXPECT_TRUE(sessions->OpenSession(&open, {}, &session).ok());
    v1::RegisterSharedMemoryRequest request;
    request.set_session_id(session.session_id());
    request.set_cuda_ipc_handle(handle);
    request.set_size_bytes(bytes);
    v1::RegisterSharedMemoryResponse response;
    return ErrorReason(client::internal::FromGrpcStatus(sessions->RegisterSharedMemory(&context, request, &response), ""));
  }
  // The micro-batch again, with rows placed; it must be known to the server by its digest. Its gradient comes to `grad`.
  void CallWith(Placement* placement, DeviceBuffer& grad, int64_t offset = 0, const char* transport = "cuda_ipc") {
    SetPlacement(*placement, &header_);
    header_.set_attempt(++attempt_);
    const headwater::testing::LossReply reply = headwater::testing::ComputeLoss(*loss_, header_, "");
    ASSERT_TRUE(reply.status.ok()) << reply.status.error_message() << server_->log();
    EXPECT_TRUE(reply.summary.replayed());
    EXPECT_EQ(reply.summary.digest(), by_grpc_.summary.digest());
    EXPECT_EQ(reply.summary.transport(), transport);
    EXPECT_EQ(reply.summary.terms(0).sums().loss_sum(), by_grpc_.summary.terms(0).sums().loss_sum());
    const absl::Status finished = placement->Finish();
    ASSERT_TRUE(finished.ok()) << finished;
    EXPECT_EQ(grad.Read(kBytes, offset), by_grpc_.grad_hidden);
  }

  const CudaDriver* driver_ = nullptr;
  std::unique_ptr<ServerProcess> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<MemoryPaths> paths_;
  std::unique_ptr<v1::LossService::Stub> loss_;
  std::unique_ptr<Head> head_;
  const std::vector<float> hidden_ = RandomFloats(2, kRows* kHiddenSize, 1);
  v1::MicroBatchHeader header_;
  headwater::testing::LossReply by_grpc_;
  int64_t attempt_ = 0;
};

TEST_F(CudaIpc, RowsAreReadAndWrittenWhereTheyLie) {
  for (int device = 0; device < DeviceCount(); ++device) {
    SCOPED_TRACE(device);
    DeviceRows rows(*driver_, hidden_, device);
    Placement placement = Place(rows, Transport::kCudaIpc);
    EXPECT_EQ(placement.path(), Transport::kCudaIpc);
    EXPECT_EQ(placement.why_not_better(), "");
    CallWith(&placement, rows.grad);
    EXPECT_EQ(rows.hidden.Read(kBytes), Bytes(hidden_));
    const Placement again = Place(rows);
    EXPECT_EQ(again.reads()[0].shared.region_id(), placement.reads()[0].shared.region_id());  // registered once
  }
}

// They may start at any element.
TEST_F(CudaIpc, RowsMayBePartsOfOneAllocation) {
  DeviceBuffer both(*driver_, 0, 3 * kBytes);
  for (const auto& [read, write] : {std::pair<int64_t, int64_t>{kBytes + 512, 256}, {kBytes + 20, 12}}) {
    SCOPED_TRACE(read);
    both.Write(hidden_.data(), kBytes, read);
    Placement placement = Value(Place(MemoryAt(both.data() + read, both.data() + write)));
    EXPECT_EQ(placement.reads()[0].shared.region_id(), placement.write()->shared.region_id());
    EXPECT_EQ(placement.reads()[0].shared.offset_bytes(), read);
    CallWith(&placement, both, write);
  }
  const absl::Status beyond = Place(MemoryAt(both.data() + 2 * kBytes + 4, nullptr)).status();
  EXPECT_EQ(beyond.code(), absl::StatusCode::kInvalidArgument) << beyond;
}

TEST_F(CudaIpc, MemoryOfAPoolIsCopiedOnTheDevice) {
  DeviceRows rows(*driver_, hidden_, /*device=*/0, /*pooled=*/true);
  for (int round = 0; round < 3; ++round) {
    Placement placement = Place(rows);
    EXPECT_EQ(placement.path(), Transport::kCudaIpc);
    EXPECT_THAT(placement.why_not_better(), HasSubstr("cannot be exported"));
    CallWith(&placement, rows.grad);
  }
}

TEST_F(CudaIpc, AbandonedMemoryIsTheCallersAlone) {
  DeviceBuffer hidden(*driver_, 0, kBytes);
  hidden.Write(hidden_.data(), kBytes);
  Placement placement = Value(Place(MemoryAt(hidden.data(), nullptr)));
  const std::string region = placement.reads()[0].shared.region_id();
  placement.Abandon();
  DeviceBuffer grad(*driver_, 0, kBytes);
  Placement another = Value(Place(MemoryAt(hidden.data(), grad.data())));
  EXPECT_NE(another.reads()[0].shared.region_id(), region);
  CallWith(&another, grad);
}

TEST_F(CudaIpc, HandlesThatCannotBeOpenedAreRefused) {
  DeviceRows rows(*driver_, hidden_);
  EXPECT_EQ(RefusalOf(std::string(64, '\7'), 4096), "INVALID_FIELD");
  EXPECT_EQ(RefusalOf(rows.hidden.handle(), 64 * kBytes), "INVALID_FIELD") << "more than the allocation has";
  Placement placement = Place(rows);
  CallWith(&placement, rows.grad);  // the device is well
}

// Run by the next test in a process of its own.
TEST_F(CudaIpc, DISABLED_ChildThatDies) {
  ASSERT_NE(std::getenv(kChildTarget), nullptr) << "runs only as a child of another test";
  DeviceBuffer hidden(*driver_, 0, kBytes);
  hidden.Write(hidden_.data(), kBytes);
  const Placement placement = Value(Place(MemoryAt(hidden.data(), nullptr), Transport::kCudaIpc));
  // Memory that the server has not opened; so much has no part in an allocation with other memory.
  const DeviceBuffer other(*driver_, 0, 8 * kBytes);
  std::fwrite(other.handle().data(), 1, sizeof(CuIpcHandle), stdout);
  std::fflush(stdout);
  kill(getpid(), SIGKILL);
}

TEST_F(CudaIpc, AClientThatDiesHarmsNobody) {
  ASSERT_EQ(setenv(kChildTarget, server_->target().c_str(), 1), 0);
  const ProgramResult child =
      RunProgram({"/proc/self/exe", "--gtest_filter=CudaIpc.DISABLED_ChildThatDies", "--gtest_also_run_disabled_tests"});
  unsetenv(kChildTarget);
  ASSERT_EQ(child.exit_code, -SIGKILL) << child.out << child.err;
  EXPECT_EQ(RefusalOf(child.out.substr(child.out.size() - sizeof(CuIpcHandle)), kBytes), "INVALID_FIELD");
  DeviceRows rows(*driver_, hidden_);
  Placement placement = Place(rows);
  CallWith(&placement, rows.grad);
}

}  // namespace
}  // namespace headwater::e2e
