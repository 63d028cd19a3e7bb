// Calls that are given up while a server stands still: before it has said what it takes, opened a session, taken a descriptor or
// registered a region, behind others that wait for that, and while it may still write. Whatever step a call had come to, it ends at
// once, and the next call finds everything as if nothing had happened.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <future>
#include <memory>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "client/core/link/channel.h"
#include "client/core/rows/memory/memory_paths.h"
#include "headwater/client/error.h"
#include "tests/e2e/cpp/support/placed_call.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;
using std::chrono::minutes;
using std::chrono::seconds;
using std::chrono::steady_clock;

// What is tested ends at once, or at a deadline that nobody lives to see: any bound between them tells the two apart.
constexpr seconds kSoon{60};
constexpr minutes kNever{10};
// The first region has 8 MiB: rows that do not fit need another.
constexpr int64_t kFewBytes = int64_t{1} << 20;
constexpr int64_t kManyBytes = int64_t{9} << 20;

Wait Until(std::chrono::nanoseconds timeout, const std::stop_source& cancel = std::stop_source()) {
  return {std::chrono::system_clock::now() + std::chrono::duration_cast<std::chrono::system_clock::duration>(timeout),
          cancel.get_token()};
}

// Stops a server, until it goes.
class Frozen {
 public:
  explicit Frozen(ServerProcess& server) : server_(server) { server_.process().Signal(SIGSTOP); }
  Frozen(const Frozen&) = delete;
  Frozen& operator=(const Frozen&) = delete;
  ~Frozen() { server_.process().Signal(SIGCONT); }

 private:
  ServerProcess& server_;
};

template <typename T>
bool EndsSoon(const std::future<T>& task) {
  return task.wait_for(kSoon) == std::future_status::ready;
}

template <typename T>
bool UnderWay(const std::future<T>& task) {
  return task.wait_for(seconds(0)) != std::future_status::ready;
}

CallMemory Rows(void* data, int64_t bytes) { return {.rows = FloatsAt(data, bytes)}; }

class PlacementCancel : public ::testing::Test {
 protected:
  // The only session that there may be is the one that a call which gave up had begun to open.
  void Start(bool by_name) {
    std::vector<std::string> flags = {"--max_sessions=1"};
    if (by_name) flags.push_back("--named_regions");
    paths_.reset();
    server_ = std::make_unique<ServerProcess>(flags, /*shares_memory=*/!by_name);
    paths_ = MemoryPaths::Create(server_->target(), MakeChannel(server_->target(), {}), {}, {});
  }

  absl::StatusOr<Placement> Place(const CallMemory& rows, const Wait& wait) {
    return paths_->Place(rows, "", Transport::kAuto, wait);
  }
  // Regions that the server has open: it maps what was passed, and reads and writes what has a name through its descriptor.
  int64_t OpenRegions() {
    const std::string process = "/proc/" + std::to_string(server_->process().pid());
    const std::string maps = ReadFile(process + "/maps");
    int64_t count = 0;
    const std::string passed = "/memfd:headwater";
    for (size_t at = maps.find(passed); at != std::string::npos; at = maps.find(passed, at + 1)) ++count;
    for (const auto& descriptor : std::filesystem::directory_iterator(process + "/fd")) {
      std::error_code gone;
      count += std::filesystem::read_symlink(descriptor.path(), gone).string().rfind("/dev/shm/headwater-", 0) == 0 ? 1 : 0;
    }
    return count;
  }

  std::unique_ptr<ServerProcess> server_;
  std::shared_ptr<MemoryPaths> paths_;
};

// The second parameter: by its deadline, and not by being cancelled.
enum class Step { kAsking, kOpeningASession, kPassingADescriptor, kRegistering };

class PlacementGivenUp : public PlacementCancel, public ::testing::WithParamInterface<std::tuple<Step, bool>> {};

TEST_P(PlacementGivenUp, EndsAtOnceAndSpoilsNothing) {
  const auto [step, by_deadline] = GetParam();
  Start(step == Step::kRegistering);
  std::vector<char> memory(kManyBytes, 1);
  if (step == Step::kOpeningASession) {
    const absl::StatusOr<Placement> nobodys =
        paths_->Place(Rows(memory.data(), kFewBytes), std::string(32, 's'), Transport::kAuto, Until(kNever));
    ASSERT_EQ(ErrorReason(nobodys.status()), "SESSION_NOT_FOUND");  // but what the server takes is known now
  } else if (step != Step::kAsking) {
    ASSERT_TRUE(Place(Rows(memory.data(), kFewBytes), Until(kNever)).ok());
  }
  const CallMemory rows = Rows(memory.data(), kManyBytes);
  std::future<absl::Status> placed;
  {
    const Frozen frozen(*server_);
    for (int round = 0; round < 3; ++round) {
      std::stop_source cancel;
      const Wait wait = by_deadline ? Until(std::chrono::milliseconds(300)) : Until(kNever, cancel);
      placed = std::async(std::launch::async, [this, &rows, wait] { return Place(rows, wait).status(); });
      // Mostly in the middle of the step, but at any time it is the same.
      if (!by_deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        EXPECT_TRUE(UnderWay(placed));
        cancel.request_stop();
      }
      ASSERT_TRUE(EndsSoon(placed));
      EXPECT_EQ(ErrorReason(placed.get()), by_deadline ? "DEADLINE_EXCEEDED" : "CANCELLED");
    }
  }
  absl::StatusOr<Placement> placement = Place(rows, Until(kNever));
  ASSERT_TRUE(placement.ok()) << placement.status();
  // Nothing was registered twice.
  EXPECT_EQ(OpenRegions(), step == Step::kPassingADescriptor || step == Step::kRegistering ? 2 : 1);
}

INSTANTIATE_TEST_SUITE_P(Steps, PlacementGivenUp,
                         ::testing::Combine(::testing::Values(Step::kAsking, Step::kOpeningASession, Step::kPassingADescriptor,
                                                              Step::kRegistering),
                                            ::testing::Bool()));

// Whichever of them it is that talks to the server.
TEST_F(PlacementCancel, OneOfTwoThatWaitForTheSameRegionGoesAlone) {
  for (const bool by_name : {false, true}) {
    for (const size_t leaver : {0, 1}) {
      Start(by_name);
      std::vector<char> memory(kFewBytes, 1);
      ASSERT_TRUE(Place(Rows(memory.data(), kFewBytes), Until(kNever)).ok());
      // In one region, which the server does not know yet.
      const RowMemory buffer = Value(paths_->AllocateRows(kManyBytes));
      const auto half = [&buffer](size_t i) { return Rows(buffer.data + i * static_cast<size_t>(kManyBytes / 2), kManyBytes / 2); };
      std::stop_source cancels[2];
      std::future<absl::StatusOr<Placement>> placed[2];
      {
        const Frozen frozen(*server_);
        for (size_t i = 0; i < 2; ++i) {
          placed[i] = std::async(std::launch::async, [&, i] { return Place(half(i), Until(kNever, cancels[i])); });
          std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that mostly the first one is the first
        }
        cancels[leaver].request_stop();
        const bool ended = EndsSoon(placed[leaver]);
        EXPECT_TRUE(ended);
        if (ended) {
          EXPECT_EQ(ErrorReason(placed[leaver].get().status()), "CANCELLED");
        }
        EXPECT_TRUE(UnderWay(placed[1 - leaver]));
      }
      const Placement other = Value(placed[1 - leaver].get());
      const Placement again = Value(Place(half(leaver), Until(kNever)));
      EXPECT_EQ(again.reads()[0].shared.region_id(), other.reads()[0].shared.region_id());
    }
  }
}

// Both calls' gradients lie in the region: until the server has answered for it neither caller may have its memory back, whichever
// of them it was that asked.
TEST_F(PlacementCancel, TwoThatShareARegionAreAbandonedTogether) {
  Start(/*by_name=*/false);
  const RowMemory first = Value(paths_->AllocateRows(kFewBytes));
  const RowMemory second = Value(paths_->AllocateRows(kFewBytes));
  std::vector<Placement> placements;
  for (const RowMemory* buffer : {&first, &second}) {
    placements.push_back(Value(Place(Rows(buffer->data, kFewBytes), Until(kNever))));
  }
  std::vector<std::future<void>> abandoned;
  {
    const Frozen frozen(*server_);
    const auto start = steady_clock::now();
    for (Placement& placement : placements) {
      abandoned.push_back(std::async(std::launch::async, [&placement] { placement.Abandon(); }));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const bool all_under_way = std::all_of(abandoned.begin(), abandoned.end(), [](const auto& task) { return UnderWay(task); });
    // A server that says nothing is waited for that long, and no longer.
    if (steady_clock::now() - start < seconds(9)) {
      EXPECT_TRUE(all_under_way);
    }
  }
  for (std::future<void>& task : abandoned) EXPECT_TRUE(EndsSoon(task));
  EXPECT_TRUE(Place(Rows(first.data, kFewBytes), Until(kNever)).ok());
}

}  // namespace
}  // namespace headwater::e2e
