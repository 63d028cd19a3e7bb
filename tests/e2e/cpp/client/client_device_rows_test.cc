// Rows of device memory that are copied on their way, with a driver whose copies are made when somebody waits for them: what is
// sent, or shared, is what the tensors hold, and nothing is copied into memory that others may use by then.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "client/core/link/channel.h"
#include "client/core/rows/memory/memory_paths.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/fake_cuda_driver.h"
#include "tests/e2e/cpp/support/placed_call.h"
#include "tests/e2e/cpp/support/scripted_server.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;

constexpr int64_t kHiddenSize = 4;

// Memory of the fake device, for as long as the process lives.
float* DeviceFloats(const std::vector<float>& values, bool exportable = false) {
  auto* const data = new std::vector<float>(values);
  FakeCudaAddMemory(data->data(), data->size() * sizeof(float), exportable);
  return data->data();
}

TEST(ClientDeviceRows, TensorsThatBeginAtOneAddressAreSentEachInFull) {
  constexpr int64_t kRows = 3000;
  ScriptedServer server;
  ClientOptions options = {.transport = Transport::kGrpc};
  Client client = Value(Client::Connect(server.target(), options));
  Head head = Value(client.OpenHead("h"));
  Head teacher = Value(client.OpenHead("teacher"));
  const std::vector<float> values = RandomFloats(1, kRows * kHiddenSize, 1.0F);
  const std::vector<float> hidden(values.size(), 0.5F);
  const float* const on_device = DeviceFloats(values);
  std::vector<LossTerm> terms;
  for (const int64_t rows : {int64_t{1}, kRows, kRows / 2}) {
    LossTerm& term = terms.emplace_back();
    term.loss = JsdOptions{};
    term.row_count = rows;
    term.teacher = teacher;
    term.teacher_hidden = {on_device, DataType::kFloat32, rows, kHiddenSize, Memory::kCuda};
  }
  MicroBatchOptions micro_batch = {.step = 0, .micro_batch = 0, .return_grad_hidden = false};
  Value(head.Multi(RowsView::Float32(hidden, kHiddenSize), terms, micro_batch).Get());
  auto sent = server.last().rows;
  for (int i = 0; i < 3; ++i) {
    const size_t bytes = static_cast<size_t>(*terms[static_cast<size_t>(i)].row_count * kHiddenSize) * sizeof(float);
    // Not by EXPECT_EQ, which would print them.
    EXPECT_TRUE((sent[{v1::CHUNK_ROLE_TEACHER_HIDDEN, i}]) == std::string(reinterpret_cast<const char*>(values.data()), bytes))
        << i;
  }
  EXPECT_EQ(FakeCudaCopiesUnderWay(), 0);
}

TEST(ClientDeviceRows, NoCopyIsUnderWayIntoRowsThatCouldNotBePlaced) {
  const ServerProcess server(std::vector<std::string>{}, /*shares_memory=*/true);
  const auto paths = MemoryPaths::Create(server.target(), MakeChannel(server.target(), {}), {}, {});
  const std::vector<float> values = RandomFloats(2, 1000 * kHiddenSize, 1.0F);
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  CallMemory rows = {.rows = FloatsAt(DeviceFloats(values), bytes, Memory::kCuda)};
  for (int i = 0; i < 2; ++i) rows.teachers.push_back(FloatsAt(DeviceFloats(values), bytes, Memory::kCuda));
  const auto place = [&] { return paths->Place(rows, "", Transport::kSharedMemory, SoonEnough()); };
  FakeCudaFailCopyAfter(2);
  EXPECT_EQ(place().status().message(), "cuMemcpyAsync failed: CUDA_ERROR_LAUNCH_FAILED");
  EXPECT_EQ(FakeCudaCopiesUnderWay(), 0);
  FakeCudaFailCopyAfter(-1);
  EXPECT_EQ(Value(place()).path(), Transport::kSharedMemory);
  EXPECT_EQ(FakeCudaCopiesUnderWay(), 0);
}

// As of calls that fail to begin once their rows are placed, or that the server refuses before it has looked at them.
TEST(ClientDeviceRows, WhatACallLeavesUncopiedDoesNotComeOverTheRowsOfTheNextOne) {
  ScriptedServer server;
  server.WithState([](ScriptedServer::State& state) { state.features = {"cuda_ipc"}; });
  const auto paths = MemoryPaths::Create(server.target(), MakeChannel(server.target(), {}), {}, {});
  constexpr int64_t kFloats = 1000 * kHiddenSize;
  const auto place = [&](const float* data, void* stream) {
    CallMemory rows = {.rows = FloatsAt(data, kFloats * int64_t{sizeof(float)}, Memory::kCuda), .cuda_stream = stream};
    return Value(paths->Place(rows, "", Transport::kCudaIpc, SoonEnough()));
  };
  int streams[2];  // whose addresses name them
  std::optional<Placement> given_up = place(DeviceFloats(std::vector<float>(kFloats, 0.5F)), &streams[0]);
  const v1::SharedRows left = given_up->reads()[0].shared;
  given_up.reset();
  EXPECT_EQ(FakeCudaCopiesUnderWay(), 1);

  const std::vector<float> values = RandomFloats(3, kFloats, 1.0F);
  const Placement placement = place(DeviceFloats(values), &streams[1]);
  const v1::SharedRows& placed = placement.reads()[0].shared;
  ASSERT_EQ(placed.region_id(), left.region_id());
  ASSERT_EQ(placed.offset_bytes(), left.offset_bytes());
  FakeCudaRun(&streams[1]);
  FakeCudaRun(&streams[0]);
  EXPECT_EQ(FakeCudaCopiesUnderWay(), 0);
  const std::string handle =
      server.WithState([&](ScriptedServer::State& state) { return state.device_regions.at(placed.region_id()); });
  const auto* const shared = static_cast<const char*>(FakeCudaOpen(handle.data())) + placed.offset_bytes();
  EXPECT_TRUE(std::memcmp(shared, values.data(), values.size() * sizeof(float)) == 0);
}

TEST(ClientDeviceRows, PrivateMemoryIsCopiedAndNeverExported) {
  ScriptedServer server;
  server.WithState([](ScriptedServer::State& state) { state.features = {"cuda_ipc"}; });
  const auto paths = MemoryPaths::Create(server.target(), MakeChannel(server.target(), {}), {}, {});
  const std::vector<float> values = RandomFloats(4, 1000 * kHiddenSize, 1.0F);
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  for (const Memory memory : {Memory::kCuda, Memory::kCudaPrivate}) {
    float* const hidden = DeviceFloats(values, /*exportable=*/true);
    float* const grad = DeviceFloats(values, /*exportable=*/true);
    CallMemory rows = {.rows = FloatsAt(hidden, bytes, memory), .result = FloatsAt(grad, bytes, memory)};
    Placement placement = Value(paths->Place(rows, "", Transport::kAuto, SoonEnough()));
    EXPECT_EQ(placement.path(), Transport::kCudaIpc);
    EXPECT_EQ(placement.why_not_better(), "");
    const auto shared = [&](const v1::SharedRows& placed) {
      const std::string handle =
          server.WithState([&](ScriptedServer::State& state) { return state.device_regions.at(placed.region_id()); });
      return static_cast<float*>(const_cast<void*>(FakeCudaOpen(handle.data()))) + placed.offset_bytes() / sizeof(float);
    };
    FakeCudaRun(nullptr);  // the legacy default stream
    float* const shared_hidden = shared(placement.reads()[0].shared);
    float* const shared_grad = shared(placement.write()->shared);
    EXPECT_EQ(shared_hidden == hidden, memory == Memory::kCuda);
    EXPECT_EQ(shared_grad == grad, memory == Memory::kCuda);
    EXPECT_TRUE(std::memcmp(shared_hidden, values.data(), values.size() * sizeof(float)) == 0);
    shared_grad[0] = 7;  // as the server does
    ASSERT_TRUE(placement.Finish().ok());
    EXPECT_EQ(grad[0], 7);
  }
}

}  // namespace
}  // namespace headwater::e2e
