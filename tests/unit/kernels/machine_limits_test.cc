// A container's limits for this process, from control groups of the test's own, and its processors' rate while others use them.
#include "headwater/kernels/machine_limits.h"

#include <sched.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/product_rate.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Has this process run on its first processor alone.
class OneProcessor {
 public:
  OneProcessor() {
    EXPECT_EQ(sched_getaffinity(0, sizeof(before_), &before_), 0);
    int first = 0;
    while (!CPU_ISSET(first, &before_)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    EXPECT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  }
  ~OneProcessor() { sched_setaffinity(0, sizeof(before_), &before_); }

 private:
  cpu_set_t before_;
};

class MachineLimits : public ::testing::Test {
 protected:
  // The groups of a process whose /proc/self/cgroup has `membership`; `files` by path below the mount.
  ControlGroups Groups(const std::string& membership, const std::map<std::string, std::string>& files) {
    for (const auto& [path, text] : files) headwater::testing::WriteFile(root_ + "/mount/" + path, text + "\n");
    headwater::testing::WriteFile(root_ + "/membership", membership);
    return {root_ + "/mount", root_ + "/membership"};
  }

  const headwater::testing::TemporaryDirectory directory_;
  const std::string& root_ = directory_.path();
};

TEST_F(MachineLimits, TheSmallestQuotaOfAllGroupsAboveCounts) {
  struct Case {
    std::string membership;
    std::map<std::string, std::string> files;
    double processors;
  };
  for (const Case& of : std::vector<Case>{
           {"0::/pod/server\n", {{"pod/server/cpu.max", "50000 100000"}}, 0.5},
           {"0::/a/b\n", {{"cpu.max", "max 100000"}, {"a/cpu.max", "20000 100000"}, {"a/b/cpu.max", "70000 100000"}}, 0.2},
           // As within a container that has a namespace of control groups: its own group is the mount.
           {"0::/\n", {{"cpu.max", "25000 100000"}}, 0.25},
           // Version 1.
           {"12:memory:/pod\n4:cpu,cpuacct:/pod/server\n1:name=systemd:/x\n",
            {{"cpu/pod/server/cpu.cfs_quota_us", "50000"}, {"cpu/pod/server/cpu.cfs_period_us", "100000"}},
            0.5}}) {
    const ControlGroups groups = Groups(of.membership, of.files);
    EXPECT_EQ(ProcessorLimit(groups), of.processors) << of.membership;
    EXPECT_EQ(ComputeThreads(groups), 1);
  }
}

TEST_F(MachineLimits, WithoutAQuotaTheAffinityMaskCounts) {
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  const ControlGroups none =
      Groups("0::/pod\n4:cpu:/pod\n",
             {{"pod/cpu.max", "max 100000"}, {"cpu/pod/cpu.cfs_quota_us", "-1"}, {"cpu/pod/cpu.cfs_period_us", "100000"}});
  EXPECT_EQ(ComputeThreads(none), CPU_COUNT(&mask));
  const ControlGroups large = Groups("0::/pod\n", {{"pod/cpu.max", "6400000000 100000"}});
  EXPECT_EQ(ComputeThreads(large), CPU_COUNT(&mask));
  const OneProcessor one;
  EXPECT_EQ(ComputeThreads(none), 1);
  EXPECT_EQ(ComputeThreads(large), 1);
}

TEST_F(MachineLimits, MemoryIsThatOfTheSmallestGroup) {
  EXPECT_EQ(MemoryLimitBytes(Groups("0::/\n", {{"memory.max", "1048576"}})), kMiB);
  std::filesystem::remove_all(root_ + "/mount");
  EXPECT_EQ(MemoryLimitBytes(Groups("0::/a/b\n", {{"a/memory.max", "2097152"}, {"a/b/memory.max", "max"}})), 2 * kMiB);
  EXPECT_EQ(MemoryLimitBytes(Groups("9:memory:/a\n", {{"memory/a/memory.limit_in_bytes", "1048576"},
                                                      {"memory/memory.limit_in_bytes", "9223372036854771712"}})),
            kMiB);
  const ControlGroups none = {root_ + "/nowhere", root_ + "/nothing"};
  EXPECT_GT(MemoryLimitBytes(none), 64 * kMiB);
  EXPECT_GE(ComputeThreads(none), 1);
}

// The rate that a server measures as it starts on a busy machine is the machine's for all the server's life.
TEST(ProductRate, OtherProcessesDoNotLowerIt) {
  const int32_t threads = ComputeThreads();
  std::atomic<bool> is_over{false};
  std::vector<std::thread> others;
  const double alone = MeasureCpuProductRate(threads);
  for (int i = 0; i < 16 * threads; ++i) {
    others.emplace_back([&is_over] {
      while (!is_over) {
      }
    });
  }
  const double beside_others = MeasureCpuProductRate(threads);
  is_over = true;
  for (std::thread& other : others) other.join();
  EXPECT_GT(alone, 1e8);
  // Processors that are two threads of one core, and clocks, leave a factor; 16 others would leave a seventeenth.
  EXPECT_GT(beside_others, 0.4 * alone);
}

TEST(ProductRate, MoreThreadsThanProcessorsReachNoMore) {
  const OneProcessor one;
  EXPECT_LT(MeasureCpuProductRate(16), 4 * MeasureCpuProductRate(1));
}

}  // namespace
}  // namespace headwater
