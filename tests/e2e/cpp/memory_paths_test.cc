// The client's memory paths against the real headwaterd: what is placed where, what is said when it cannot be, and that a
// micro-batch is the same micro-batch whichever way its rows take.
#include "client/core/rows/memory/memory_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "client/core/link/channel.h"
#include "client/core/link/error.h"
#include "client/core/rows/memory/shared_region.h"
#include "headwater/client/client.h"
#include "headwater/client/error.h"
#include "headwater/v1/session_service.grpc.pb.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/child_process.h"
#include "tests/e2e/cpp/support/placed_call.h"
#include "tests/e2e/cpp/support/scripted_server.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kRows = 1000;
constexpr int64_t kHiddenSize = 24;
constexpr int64_t kVocabSize = 50;
constexpr int64_t kBytes = kRows * kHiddenSize * 4;

class MemoryPathsTest : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& flags = {}, bool shares_memory = true) {
    server_ = std::make_unique<ServerProcess>(flags, shares_memory);
    Connect();
  }
  void Connect(const MemoryPathsOptions& options = {}) {
    paths_.reset();
    channel_ = MakeChannel(server_->target(), {});
    paths_ = MemoryPaths::Create(server_->target(), channel_, {}, options);
    loss_ = v1::LossService::NewStub(channel_);
    sessions_ = v1::SessionService::NewStub(channel_);
  }
  static CallMemory HostRows(void* read, void* write = nullptr) {
    CallMemory rows = {.rows = FloatsAt(read, kBytes)};
    if (write != nullptr) rows.result = FloatsAt(write, kBytes);
    return rows;
  }
  absl::StatusOr<Placement> Place(const CallMemory& rows, Transport demand = Transport::kAuto, const std::string& session = "") {
    return paths_->Place(rows, session, demand, SoonEnough());
  }
  static const v1::SharedRows& Read(const Placement& placement) { return placement.reads()[0].shared; }
  std::string OpenSession() {
    v1::OpenSessionResponse session;
    grpc::ClientContext context;
    EXPECT_TRUE(sessions_->OpenSession(&context, {}, &session).ok());
    return session.session_id();
  }
  // As the server loses the region of a placement's rows.
  absl::Status Unregister(const Placement& placement) {
    grpc::ClientContext context;
    v1::UnregisterSharedMemoryRequest request;
    request.set_session_id(placement.session_id());
    request.set_region_id(Read(placement).region_id());
    v1::UnregisterSharedMemoryResponse response;
    return FromGrpcStatus(sessions_->UnregisterSharedMemory(&context, request, &response), "");
  }

  std::vector<float> host_ = std::vector<float>(static_cast<size_t>(kRows * kHiddenSize));
  std::unique_ptr<ServerProcess> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<MemoryPaths> paths_;
  std::unique_ptr<v1::LossService::Stub> loss_;
  std::unique_ptr<v1::SessionService::Stub> sessions_;
};

TEST_F(MemoryPathsTest, RowsOfTheSharedRegionStayWhereTheyAre) {
  Start();
  const RowMemory hidden = Value(paths_->AllocateRows(kBytes));
  const RowMemory grad = Value(paths_->AllocateRows(kBytes));
  const Placement first = Value(Place(HostRows(hidden.data, grad.data)));
  EXPECT_EQ(first.path(), Transport::kSharedMemory);
  EXPECT_EQ(first.why_not_better(), "");
  EXPECT_EQ(first.session_id().size(), 32u);
  ASSERT_TRUE(first.write().has_value());
  EXPECT_EQ(Read(first).region_id(), first.write()->shared.region_id());
  EXPECT_EQ(first.write()->shared.offset_bytes() - Read(first).offset_bytes(), grad.data - hidden.data);
  // A part of them, and without registering anything again.
  const Placement second = Value(Place({.rows = FloatsAt(hidden.data + 64, 128)}));
  EXPECT_EQ(Read(second).region_id(), Read(first).region_id());
  EXPECT_EQ(Read(second).offset_bytes(), Read(first).offset_bytes() + 64);
  EXPECT_FALSE(second.write().has_value());
}

TEST_F(MemoryPathsTest, RegionsAreRegisteredAgainAfterTheServersRestart) {
  Start();
  const RowMemory rows = Value(paths_->AllocateRows(kBytes));
  Placement placement = Value(Place(HostRows(rows.data, host_.data())));
  const std::string session = placement.session_id();
  const std::string region = Read(placement).region_id();
  const int64_t offset = Read(placement).offset_bytes();
  server_->KillAndStart();
  // What the call is answered now is SESSION_NOT_FOUND.
  absl::Status renewed;
  EXPECT_TRUE(Await([&] {
    renewed = placement.Renew("", SoonEnough());
    return renewed.code() != absl::StatusCode::kUnavailable;
  }));
  ASSERT_TRUE(renewed.ok()) << renewed;
  EXPECT_NE(placement.session_id(), session);
  EXPECT_NE(Read(placement).region_id(), region);
  EXPECT_EQ(Read(placement).offset_bytes(), offset);
  const Head head = CreateHead(server_->Connect(), "h", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .trainable = true});
  v1::MicroBatchHeader header = CrossEntropyHeader(head, RandomTargets(3, kRows, kVocabSize));
  SetPlacement(placement, &header);
  EXPECT_TRUE(headwater::testing::ComputeLoss(*loss_, header, "").status.ok());
  EXPECT_TRUE(Place(HostRows(rows.data)).ok());
}

TEST_F(MemoryPathsTest, ARegionThatTheServerLostIsRegisteredAgain) {
  Start();
  const RowMemory rows = Value(paths_->AllocateRows(kBytes));
  Placement placement = Value(Place(HostRows(rows.data)));
  const std::string session = placement.session_id(), region = Read(placement).region_id();
  ASSERT_TRUE(Unregister(placement).ok());
  Placement another = Value(Place(HostRows(rows.data)));
  EXPECT_EQ(Read(another).region_id(), region);  // it does not know yet
  ASSERT_TRUE(placement.Renew("", SoonEnough()).ok());
  EXPECT_EQ(placement.session_id(), session);
  EXPECT_NE(Read(placement).region_id(), region);
  // Once, whoever finds out.
  ASSERT_TRUE(another.Renew(placement.session_id(), SoonEnough()).ok());
  EXPECT_EQ(Read(another).region_id(), Read(placement).region_id());
}

TEST_F(MemoryPathsTest, ACallersOwnSessionGetsItsOwnRegistrations) {
  Start();
  const RowMemory rows = Value(paths_->AllocateRows(kBytes));
  const Placement own = Value(Place(HostRows(rows.data)));
  const std::string session = OpenSession();
  const Placement theirs = Value(Place(HostRows(rows.data), Transport::kAuto, session));
  EXPECT_EQ(theirs.session_id(), session);
  EXPECT_NE(Read(theirs).region_id(), Read(own).region_id());
  EXPECT_EQ(Read(theirs).offset_bytes(), Read(own).offset_bytes());
  EXPECT_EQ(ErrorReason(Place(HostRows(rows.data), Transport::kAuto, std::string(32, 's')).status()), "SESSION_NOT_FOUND");
}

TEST_F(MemoryPathsTest, SlotsAreUsedAgainAndBounded) {
  Start();
  Connect({.max_shared_bytes = int64_t{8} << 20, .copy_threads = 2});
  std::string region;
  for (int i = 0; i < 200; ++i) {
    const Placement placement = Value(Place(HostRows(host_.data(), host_.data())));
    if (i == 0) region = Read(placement).region_id();
    EXPECT_EQ(Read(placement).region_id(), region);
  }
  std::vector<RowMemory> held;
  for (int i = 0; i < 8; ++i) held.push_back(Value(paths_->AllocateRows((int64_t{1} << 20) - 4096)));
  const absl::Status full = paths_->AllocateRows(int64_t{1} << 20).status();
  EXPECT_EQ(ErrorReason(full), "MEMORY_BUDGET_EXCEEDED");
  EXPECT_EQ(ErrorReason(paths_->AllocateRows(int64_t{9} << 20).status()), "MEMORY_BUDGET_EXCEEDED");
  EXPECT_EQ(ErrorReason(paths_->AllocateRows(0).status()), "MEMORY_BUDGET_EXCEEDED");
  const absl::Status no_slot = Place(HostRows(host_.data())).status();
  EXPECT_EQ(ErrorReason(no_slot), "TRANSPORT_UNAVAILABLE");
  EXPECT_THAT(std::string(no_slot.message()), HasSubstr("no shared memory is left"));
  held.pop_back();
  EXPECT_TRUE(Place(HostRows(host_.data())).ok());
}

TEST_F(MemoryPathsTest, WhatWasAbandonedIsNotUsedAgain) {
  Start();
  std::string slot_region;
  {
    Placement placement = Value(Place(HostRows(host_.data())));
    slot_region = Read(placement).region_id();
    placement.Abandon();
  }
  EXPECT_NE(Value(Place(HostRows(host_.data()))).reads()[0].shared.region_id(), slot_region);
  // Rows in place: the server has given the region back before the caller hears of it.
  const RowMemory rows = Value(paths_->AllocateRows(kBytes));
  Placement placement = Value(Place(HostRows(rows.data)));
  placement.Abandon();
  EXPECT_EQ(ErrorReason(Unregister(placement)), "REGION_NOT_FOUND");
  EXPECT_TRUE(Place(HostRows(rows.data)).ok());  // and registers it again when it is needed
}

// A server that stands still delays a call that is given up by one time-out, and not by one for each of its tensors.
TEST_F(MemoryPathsTest, RegionsAreGivenBackAllAtOnce) {
  ScriptedServer server;
  server.WithState([](ScriptedServer::State& state) { state.named_regions = true; });
  constexpr int kRegions = 3;
  std::mutex mutex;
  std::condition_variable begun;
  int under_way = 0, most = 0;
  server.unregister_memory = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    most = std::max(most, ++under_way);
    begun.notify_all();
    // Short enough for all of them one after the other to be answered, if they come so.
    begun.wait_for(lock, std::chrono::seconds(2), [&] { return most == kRegions; });
    --under_way;
  };
  channel_ = MakeChannel(server.target(), {});
  paths_ = MemoryPaths::Create(server.target(), channel_, {}, {});
  EXPECT_TRUE(Place(HostRows(host_.data())).ok());  // which tells that regions are named
  std::vector<RowMemory> buffers;
  CallMemory rows;
  for (int i = 0; i < kRegions; ++i) {
    constexpr int64_t kWholeRegion = int64_t{9} << 20;  // of the size that the next one is made in
    buffers.push_back(Value(paths_->AllocateRows(kWholeRegion << i)));
    (i == 0 ? rows.rows : rows.teachers.emplace_back()) = FloatsAt(buffers.back().data, kBytes);
  }
  Placement placement = Value(Place(rows));
  std::set<std::string> regions;
  for (const auto& placed : placement.reads()) regions.insert(placed.shared.region_id());
  ASSERT_EQ(regions.size(), size_t{kRegions});
  placement.Abandon();
  EXPECT_EQ(most, kRegions);
  EXPECT_EQ(server.PeersOf("UnregisterSharedMemory").size(), size_t{kRegions});
  paths_.reset();  // before the server
}

TEST_F(MemoryPathsTest, ClosingSendsNothingThatTheServerRefuses) {
  Start({"--log_level=info"});
  const std::string other = OpenSession();
  {
    const RowMemory rows = Value(paths_->AllocateRows(kBytes));
    EXPECT_NE(Value(Place(HostRows(rows.data))).session_id(), other);
    Value(Place(HostRows(rows.data), Transport::kAuto, other));
  }
  paths_.reset();
  grpc::ClientContext closes;
  v1::CloseSessionRequest request;
  request.set_session_id(other);
  v1::CloseSessionResponse response;
  EXPECT_TRUE(sessions_->CloseSession(&closes, request, &response).ok());
  server_->process().Signal(SIGTERM);
  EXPECT_EQ(server_->process().Wait(), 0);  // the log is complete
  EXPECT_THAT(server_->log(), HasSubstr("event=drained"));
  EXPECT_THAT(server_->log(), Not(HasSubstr("level=warning")));
}

TEST_F(MemoryPathsTest, SaysWhyAPathIsNotThere) {
  Start({"--log_level=error"}, /*shares_memory=*/false);
  const absl::Status none = Place(HostRows(host_.data())).status();
  EXPECT_EQ(ErrorReason(none), "TRANSPORT_UNAVAILABLE");
  EXPECT_THAT(std::string(none.message()), HasSubstr("started without --descriptor_socket"));
  EXPECT_EQ(none, Place(HostRows(host_.data()), Transport::kSharedMemory).status());
  const absl::Status host = Place(HostRows(host_.data()), Transport::kCudaIpc).status();
  EXPECT_THAT(std::string(host.message()), HasSubstr("host memory"));
  CallMemory device = HostRows(host_.data(), nullptr);
  device.rows.memory = Memory::kCuda;
  const absl::Status no_device = Place(device, Transport::kCudaIpc).status();
  EXPECT_FALSE(no_device.ok());
  EXPECT_FALSE(paths_->ContextOf(host_.data()).ok());

  // A socket that is not there any more: another mount namespace looks the same.
  Start();
  ASSERT_EQ(unlink(server_->descriptor_socket().c_str()), 0);
  const absl::Status gone = Place(HostRows(host_.data())).status();
  EXPECT_EQ(ErrorReason(gone), "TRANSPORT_UNAVAILABLE");
  EXPECT_THAT(std::string(gone.message()), HasSubstr("cannot be reached from here: No such file"));
  const RowMemory rows = Value(paths_->AllocateRows(kBytes));  // still memory
  std::memset(rows.data, 1, kBytes);
}

TEST_F(MemoryPathsTest, ASocketOfAnotherServerIsNotedBeforeAnythingIsRegistered) {
  Start();
  const auto region = Value(SharedRegion::Make(4096, false));
  const absl::Status other =
      PassDescriptor(server_->descriptor_socket(), region->fd(), 4096, std::string(16, 'x'), SoonEnough()).status();
  EXPECT_THAT(std::string(other.message()), HasSubstr("belongs to another server"));
}

}  // namespace
}  // namespace headwater::e2e
