#include "server/transport/region_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/observability/monotonic_clock.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/server/fake_engine.h"
#include "tests/unit/server/temporary_directory.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::transport {
namespace {

using ::headwater::testing::kAllSeals;
using ::headwater::testing::MakeMemory;
using ::headwater::testing::OpenDescriptors;
using ::headwater::testing::ReasonOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kPage = 4096;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

RegionOwner Owner(uint8_t number) {
  RegionOwner owner{};
  owner.fill(number);
  return owner;
}

// Counts what is page-locked and opened, and fails on demand.
class LockingEngine : public ::headwater::testing::FakeEngine {
 public:
  struct Counted {
    explicit Counted(std::atomic<int64_t>& counter, int64_t by) : count(counter), amount(by) { count += amount; }
    ~Counted() { count -= amount; }
    std::atomic<int64_t>& count;
    const int64_t amount;
  };
  // Memory of the test's, as HostMemory or DeviceRegion; counts as `amount`.
  template <typename Base>
  class Memory final : public Base {
   public:
    Memory(void* data, int64_t bytes, std::atomic<int64_t>& count, int64_t amount)
        : data_(data), bytes_(bytes), counted_(count, amount) {}
    void* data() const override { return data_; }
    int64_t bytes() const override { return bytes_; }

   private:
    void* const data_;
    const int64_t bytes_;
    const Counted counted_;
  };
  class Event final : public DeviceEvent {
   public:
    explicit Event(std::atomic<int64_t>& count) : counted_(count, 1) {}

   private:
    const Counted counted_;
  };

  absl::StatusOr<std::unique_ptr<HostMemory>> DoRegisterHostMemory(void* data, int64_t bytes) override {
    if (refuse_locking) return MakeError(ErrorReason::kMemoryBudgetExceeded, "no page-locked memory is left");
    return std::make_unique<Memory<HostMemory>>(data, bytes, locked_bytes, bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceRegion>> DoOpenDeviceMemory(const DeviceHandle& handle, int64_t) override {
    if (handle[0] == 0) return MakeError(ErrorReason::kInvalidField, "cuda_ipc_handle: the handle cannot be opened here");
    return std::make_unique<Memory<DeviceRegion>>(device_memory.data(), static_cast<int64_t>(device_memory.size()), open_devices,
                                                  1);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> DoOpenDeviceEvent(const DeviceHandle& handle) override {
    if (handle[0] == 0) return MakeError(ErrorReason::kInvalidField, "cuda_event_handle: the handle cannot be opened here");
    return std::make_unique<Event>(open_events);
  }

  bool refuse_locking = false;
  std::atomic<int64_t> locked_bytes{0};
  std::atomic<int64_t> open_devices{0};
  std::atomic<int64_t> open_events{0};
  std::vector<uint8_t> device_memory = std::vector<uint8_t>(1024);
};

class Regions : public ::testing::Test {
 protected:
  absl::StatusOr<std::string> Add(int memfd, int64_t offset, int64_t bytes, uint8_t owner = 1) {
    return regions_.AddDescriptor(Owner(owner), FileDescriptor(memfd), offset, bytes);
  }
  absl::StatusOr<RegionUse> Find(const std::string& id, int64_t offset, int64_t bytes, RegionAccess access = RegionAccess::kRead,
                                 uint8_t owner = 1, int64_t element_bytes = 2) {
    return regions_.Find(Owner(owner), id, offset, bytes, access, element_bytes, "header.hidden_rows");
  }
  absl::Status RemoveNow(const std::string& id, const scheduler::WaitLimits& limits) {
    auto end = regions_.Remove(Owner(1), id);
    return end.ok() ? (*end)->Await(limits) : end.status();
  }
  int64_t Count(RegionKind kind) const { return regions_.totals().regions[static_cast<size_t>(kind)]; }
  int64_t Bytes(RegionKind kind) const { return regions_.totals().bytes[static_cast<size_t>(kind)]; }

  LockingEngine engine_;
  RegionRegistry regions_{engine_, {3, 16 * kPage}};
};

TEST_F(Regions, MapsTheMemoryThatWasPassed) {
  const int memfd = MakeMemory(2 * kPage);
  void* const mine = mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  ASSERT_NE(mine, MAP_FAILED);
  std::memcpy(static_cast<char*>(mine) + kPage + 10, "rows", 4);
  ASSERT_OK_AND_ASSIGN(const auto id, Add(memfd, 64, 2 * kPage - 64));
  EXPECT_EQ(engine_.locked_bytes, 2 * kPage);
  EXPECT_EQ(Bytes(RegionKind::kShared), 2 * kPage - 64);
  ASSERT_OK_AND_ASSIGN(auto read, Find(id, kPage + 10 - 64, 4));
  EXPECT_EQ(read.memory(), MemorySpace::kHost);
  EXPECT_EQ(read.staged_bytes(), 0);
  ASSERT_TRUE(read.Prepare().ok());
  EXPECT_EQ(std::memcmp(read.data(), "rows", 4), 0);
  ASSERT_OK_AND_ASSIGN(auto write, Find(id, 2 * kPage - 64 - 4, 4, RegionAccess::kWrite));
  ASSERT_TRUE(write.Prepare().ok());
  std::memcpy(write.data(), "grad", 4);
  ASSERT_TRUE(write.Finish().ok());
  EXPECT_EQ(std::memcmp(static_cast<char*>(mine) + 2 * kPage - 4, "grad", 4), 0);
  munmap(mine, 2 * kPage);
}

TEST_F(Regions, ChecksEverySizeAndOffsetWithoutOverflow) {
  ASSERT_OK_AND_ASSIGN(const auto id, Add(MakeMemory(kPage), 0, kPage));
  using Range = std::pair<int64_t, int64_t>;
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  for (const auto& [offset, bytes] :
       {Range(0, kPage + 2), Range(2, kPage), Range(kPage, 2), Range(kPage + 2, 0), Range(-2, 4), Range(0, -2), Range(kMost - 1, 2),
        Range(kMost - 1, kMost), Range(2, kMost), Range(-kMost, kMost), Range(kLeast, 4), Range(1, 2), Range(4095, 0)}) {
    const auto use = Find(id, offset, bytes);
    EXPECT_EQ(ReasonOf(use.status()), "INVALID_FIELD") << offset << " " << bytes;
    EXPECT_EQ(GetErrorMetadata(use.status())["field"], "header.hidden_rows.offset_bytes");
  }
  for (const auto& [offset, bytes] : {Range(0, 0), Range(kPage, 0), Range(0, kPage), Range(kPage - 2, 2)}) {
    EXPECT_TRUE(Find(id, offset, bytes).ok()) << offset << " " << bytes;
  }
  const int before = OpenDescriptors();
  for (const auto& [offset, bytes] :
       {Range(0, 0), Range(0, -1), Range(-64, kPage), Range(0, kPage + 1), Range(64, kPage), Range(kPage, 1), Range(32, 64),
        Range(kMost - 63, 1), Range(kMost - 63, kPage), Range(64, kMost), Range(kMost - 63, kMost), Range(kLeast, 1)}) {
    EXPECT_EQ(ReasonOf(Add(MakeMemory(kPage), offset, bytes).status()), "INVALID_FIELD") << offset << " " << bytes;
  }
  EXPECT_EQ(ReasonOf(Add(MakeMemory(17 * kPage), 0, 17 * kPage).status()), "LIMIT_EXCEEDED");
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(Count(RegionKind::kShared), 1);
}

TEST_F(Regions, RefusesMemoryThatCouldGoAway) {
  const int before = OpenDescriptors();
  const int most = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  for (const int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
    const absl::Status status = Add(MakeMemory(kPage, most & ~missing), 0, kPage).status();
    EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
    EXPECT_THAT(std::string(status.message()), HasSubstr("memory without F_SEAL_"));
  }
  EXPECT_EQ(ReasonOf(Add(MakeMemory(kPage, 0, false, MFD_CLOEXEC), 0, kPage).status()), "INVALID_FIELD");
  EXPECT_THAT(std::string(Add(MakeMemory(kPage, most | F_SEAL_WRITE), 0, kPage).status().message()), HasSubstr("only be read"));
  EXPECT_THAT(std::string(Add(MakeMemory(4 * kPage, most, /*sparse=*/true), 0, kPage).status().message()), HasSubstr("in full"));
  EXPECT_EQ(ReasonOf(Add(MakeMemory(0, most), 0, kPage).status()), "INVALID_FIELD");
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  EXPECT_EQ(ReasonOf(Add(pipes[0], 0, kPage).status()), "INVALID_FIELD");
  close(pipes[1]);
  EXPECT_EQ(ReasonOf(Add(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), 0, kPage).status()), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(Add(-1, 0, kPage).status()), "INVALID_FIELD");
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(Count(RegionKind::kShared), 0);
  EXPECT_EQ(engine_.locked_bytes, 0);
}

TEST_F(Regions, BelongsToOneSession) {
  ASSERT_OK_AND_ASSIGN(const auto id, Add(MakeMemory(kPage), 0, kPage));
  const absl::Status foreign = Find(id, 0, 2, RegionAccess::kRead, 2).status();
  const absl::Status never = Find("0123456789abcdef0123456789abcdef", 0, 2).status();
  ASSERT_TRUE(regions_.Remove(Owner(1), id).ok());
  const absl::Status gone = Find(id, 0, 2).status();
  for (const absl::Status& status : {foreign, never, gone}) {
    EXPECT_EQ(ReasonOf(status), "REGION_NOT_FOUND");
    EXPECT_EQ(status, never);  // no difference tells one from the other
  }
  EXPECT_EQ(ReasonOf(regions_.Remove(Owner(1), id).status()), "REGION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(regions_.Remove(Owner(2), id).status()), "REGION_NOT_FOUND");
  ASSERT_OK_AND_ASSIGN(const auto another, Add(MakeMemory(kPage), 0, kPage));
  EXPECT_NE(another, id);
}

TEST_F(Regions, AreBoundedForEachSession) {
  std::vector<std::string> ids;
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(auto id, Add(MakeMemory(kPage), 0, kPage));
    ids.push_back(id);
  }
  const int before = OpenDescriptors();
  EXPECT_EQ(ReasonOf(Add(MakeMemory(kPage), 0, kPage).status()), "QUOTA_EXCEEDED");
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_TRUE(Add(MakeMemory(kPage), 0, kPage, 2).ok());
  ASSERT_TRUE(regions_.Remove(Owner(1), ids[1]).ok());
  EXPECT_TRUE(Add(MakeMemory(kPage), 0, kPage).ok());
}

TEST_F(Regions, GoWithTheirSessionAndStayForTheCallsThatUseThem) {
  const int before = OpenDescriptors();
  const auto first = Add(MakeMemory(kPage), 0, kPage);
  const auto second = Add(MakeMemory(kPage), 0, kPage);
  const auto foreign = Add(MakeMemory(kPage), 0, kPage, 2);
  ASSERT_TRUE(first.ok() && second.ok() && foreign.ok());
  std::optional<RegionUse> use = *Find(*first, 0, kPage, RegionAccess::kWrite);
  ASSERT_TRUE(use->Prepare().ok());
  EXPECT_EQ(regions_.DropOwner(Owner(1)), 2);
  EXPECT_EQ(regions_.DropOwner(Owner(1)), 0);
  EXPECT_EQ(ReasonOf(Find(*first, 0, 2).status()), "REGION_NOT_FOUND");
  std::memset(use->data(), 7, kPage);  // still mapped
  EXPECT_EQ(Count(RegionKind::kShared), 2);
  EXPECT_EQ(engine_.locked_bytes, 2 * kPage);
  use.reset();
  EXPECT_EQ(Count(RegionKind::kShared), 1);
  EXPECT_EQ(engine_.locked_bytes, kPage);
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(regions_.DropOwner(Owner(2)), 1);
  EXPECT_EQ(Bytes(RegionKind::kShared), 0);
}

TEST_F(Regions, RemoveWaitsForTheCallsThatUseThem) {
  ASSERT_OK_AND_ASSIGN(const auto id, Add(MakeMemory(kPage), 0, kPage));
  std::optional<RegionUse> use = *Find(id, 0, kPage);
  std::atomic<bool> removed{false};
  std::thread remover([&] {
    EXPECT_TRUE(RemoveNow(id, {observability::MonotonicNow() + absl::Seconds(30)}).ok());
    EXPECT_EQ(engine_.locked_bytes, 0);
    removed = true;
  });
  while (Find(id, 0, 2).ok()) std::this_thread::yield();
  EXPECT_FALSE(removed);
  use.reset();
  remover.join();
  EXPECT_TRUE(removed);
}

TEST_F(Regions, RemoveWaitsNoLongerThanItMay) {
  const auto first = Add(MakeMemory(kPage), 0, kPage);
  const auto second = Add(MakeMemory(kPage), 0, kPage);
  ASSERT_TRUE(first.ok() && second.ok());
  const RegionUse use = *Find(*first, 0, kPage);
  const RegionUse other = *Find(*second, 0, kPage);
  const absl::Time soon = observability::MonotonicNow() + absl::Milliseconds(30);
  scheduler::ThreadWaiter gone([] { return true; });
  EXPECT_EQ(ReasonOf(RemoveNow(*first, {soon})), "DEADLINE_EXCEEDED");
  EXPECT_EQ(ReasonOf(RemoveNow(*second, {absl::InfiniteFuture(), &gone})), "CANCELLED");
  EXPECT_EQ(ReasonOf(Find(*first, 0, 2).status()), "REGION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(Find(*second, 0, 2).status()), "REGION_NOT_FOUND");
}

TEST_F(Regions, GiveBackWhatCannotBePageLocked) {
  const int before = OpenDescriptors();
  engine_.refuse_locking = true;
  EXPECT_EQ(ReasonOf(Add(MakeMemory(kPage), 0, kPage).status()), "MEMORY_BUDGET_EXCEEDED");
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(Count(RegionKind::kShared), 0);
  engine_.refuse_locking = false;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Add(MakeMemory(kPage), 0, kPage).ok());  // the failed one is not counted
}

TEST_F(Regions, FindsOverlaps) {
  const auto id = Add(MakeMemory(kPage), 0, kPage);
  const auto other = Add(MakeMemory(kPage), 0, kPage);
  ASSERT_TRUE(id.ok() && other.ok());
  const auto overlap = [&](int64_t a, int64_t a_bytes, int64_t b, int64_t b_bytes) {
    const RegionUse first = *Find(*id, a, a_bytes);
    const RegionUse second = *Find(*id, b, b_bytes);
    EXPECT_EQ(RegionUse::Overlap(first, second), RegionUse::Overlap(second, first));
    return RegionUse::Overlap(first, second);
  };
  EXPECT_TRUE(overlap(0, 10, 8, 10));
  EXPECT_TRUE(overlap(0, kPage, 8, 2));
  EXPECT_FALSE(overlap(0, 8, 8, 8));
  EXPECT_FALSE(overlap(4, 0, 0, 8));
  EXPECT_FALSE(RegionUse::Overlap(*Find(*id, 0, 8), *Find(*other, 0, 8)));
}

TEST_F(Regions, OfDeviceMemoryCarryTheirEvent) {
  DeviceHandle handle{};
  handle[0] = 1;
  const DeviceHandle unknown{};
  const auto plain = regions_.AddDevice(Owner(1), handle, std::nullopt, 1024);
  const auto ordered = regions_.AddDevice(Owner(1), handle, handle, 512);
  ASSERT_TRUE(plain.ok() && ordered.ok());
  EXPECT_EQ(ReasonOf(regions_.AddDevice(Owner(1), unknown, std::nullopt, 1).status()), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(regions_.AddDevice(Owner(1), handle, unknown, 1).status()), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(regions_.AddDevice(Owner(1), handle, std::nullopt, 1025).status()), "INVALID_FIELD");
  EXPECT_EQ(engine_.open_devices, 2);
  ASSERT_OK_AND_ASSIGN(const auto also_ordered, regions_.AddDevice(Owner(1), handle, handle, 8));
  EXPECT_EQ(engine_.open_events, 1);  // of the same handle, shared
  EXPECT_EQ(Find(also_ordered, 0, 8)->after(), Find(*ordered, 0, 8)->after());
  ASSERT_TRUE(regions_.Remove(Owner(1), also_ordered).ok());
  EXPECT_EQ(engine_.open_events, 1);
  ASSERT_OK_AND_ASSIGN(auto use, Find(*ordered, 16, 496));
  EXPECT_EQ(ReasonOf(Find(*ordered, 16, 498).status()), "INVALID_FIELD");  // within the allocation, not within the region
  ASSERT_TRUE(use.Prepare().ok());
  EXPECT_EQ(use.memory(), MemorySpace::kDevice);
  EXPECT_EQ(use.data(), engine_.device_memory.data() + 16);
  EXPECT_NE(use.after(), nullptr);
  EXPECT_EQ(Find(*plain, 0, 2)->after(), nullptr);
  EXPECT_EQ(regions_.DropOwner(Owner(1)), 2);
  EXPECT_EQ(engine_.open_devices, 1);  // the one in use
}

// A folder in place of /dev/shm.
class NamedRegions : public Regions {
 protected:
  void Make(const std::string& name, const std::string& bytes) {
    const FileDescriptor file(open((folder_ + "/" + name).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    ASSERT_EQ(write(file.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  absl::StatusOr<std::string> AddNamed(const std::string& name, int64_t offset, int64_t bytes) {
    return regions_.AddNamed(Owner(1), name, offset, bytes, folder_);
  }
  const headwater::testing::TemporaryDirectory directory_;
  const std::string& folder_ = directory_.path();
};

TEST_F(NamedRegions, AreCopiedInAndOut) {
  Make("headwater-a", absl::StrCat(std::string(100, 'a'), "rows", std::string(24, 'b')));
  ASSERT_OK_AND_ASSIGN(const auto id, AddNamed("headwater-a", 64, 64));
  ASSERT_OK_AND_ASSIGN(auto read, Find(id, 36, 4));
  EXPECT_EQ(read.staged_bytes(), 4);
  ASSERT_TRUE(read.Prepare().ok());
  EXPECT_EQ(std::memcmp(read.data(), "rows", 4), 0);
  ASSERT_OK_AND_ASSIGN(auto write, Find(id, 60, 4, RegionAccess::kWrite));
  ASSERT_TRUE(write.Prepare().ok());
  std::memcpy(write.data(), "grad", 4);
  ASSERT_TRUE(write.Finish().ok());
  auto again = Find(id, 58, 6);
  ASSERT_TRUE(again->Prepare().ok());
  EXPECT_EQ(std::memcmp(again->data(), "bbgrad", 6), 0);
  EXPECT_EQ(Bytes(RegionKind::kNamed), 64);
}

TEST_F(NamedRegions, SurviveTruncation) {
  Make("headwater-a", std::string(8192, 'a'));
  ASSERT_OK_AND_ASSIGN(const auto id, AddNamed("headwater-a", 0, 8192));
  auto write = Find(id, 4096, 4096, RegionAccess::kWrite);
  ASSERT_TRUE(write->Prepare().ok());
  ASSERT_EQ(truncate((folder_ + "/headwater-a").c_str(), 5000), 0);
  ASSERT_OK_AND_ASSIGN(auto read, Find(id, 4096, 4096));
  EXPECT_EQ(ReasonOf(read.Prepare()), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(write->Finish()), "INVALID_FIELD");
  struct stat status {};
  ASSERT_EQ(stat((folder_ + "/headwater-a").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 5000);  // writing has not made it longer again
  auto rest = Find(id, 0, 4096);
  EXPECT_TRUE(rest->Prepare().ok());
}

TEST_F(NamedRegions, AreOnlyWhatTheClientNamed) {
  const int before = OpenDescriptors();
  Make("headwater-a", std::string(128, 'a'));
  Make("other", std::string(128, 'o'));
  for (const char* name : {"", "other", "headwater-", "headwater-/../other", "../headwater-a", "headwater-a/", "headwater-a\n",
                           "nccl-headwater-a", "Headwater-a"}) {
    EXPECT_EQ(ReasonOf(AddNamed(name, 0, 128).status()), "INVALID_NAME") << name;
  }
  EXPECT_EQ(ReasonOf(AddNamed("headwater-" + std::string(201, 'n'), 0, 128).status()), "INVALID_NAME");
  EXPECT_EQ(ReasonOf(AddNamed("headwater-" + std::string(200, 'n'), 0, 128).status()), "INVALID_FIELD");  // a name, but no file
  ASSERT_EQ(symlink((folder_ + "/other").c_str(), (folder_ + "/headwater-link").c_str()), 0);
  ASSERT_EQ(link((folder_ + "/other").c_str(), (folder_ + "/headwater-hard").c_str()), 0);
  ASSERT_EQ(mkfifo((folder_ + "/headwater-fifo").c_str(), 0600), 0);
  for (const char* name : {"headwater-link", "headwater-hard", "headwater-fifo", "headwater-none"}) {
    const absl::Status status = AddNamed(name, 0, 128).status();
    EXPECT_EQ(ReasonOf(status), "INVALID_FIELD") << name;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(folder_)));
  }
  for (const auto& [offset, bytes] : std::vector<std::pair<int64_t, int64_t>>{{0, 129}, {64, 65}, {128, 1}, {kMost - 63, 64}}) {
    EXPECT_EQ(ReasonOf(AddNamed("headwater-a", offset, bytes).status()), "INVALID_FIELD");
  }
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(Count(RegionKind::kNamed), 0);
}

}  // namespace
}  // namespace headwater::transport
