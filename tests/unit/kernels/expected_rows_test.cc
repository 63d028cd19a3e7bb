#include "kernels/cuda/computation/expected_rows.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <variant>
#include <vector>

namespace headwater::cuda {
namespace {

struct Come {
  int64_t rows;
};
struct Go {
  int32_t calls;
  int64_t rows;
};
// How often Await() asks before it returns, if the device has something to do for the first `busy` questions.
struct Await {
  int busy;
  int questions;
};

struct ExpectedRowsCase {
  std::string name;
  int64_t most = 0;
  std::vector<std::variant<Come, Go, Await>> steps;
};

class ExpectedRowsTest : public ::testing::TestWithParam<ExpectedRowsCase> {};

TEST_P(ExpectedRowsTest, WaitsForTheCallersOfTheLastTime) {
  ExpectedRows rows(GetParam().most);
  for (size_t i = 0; i < GetParam().steps.size(); ++i) {
    const auto& step = GetParam().steps[i];
    if (const auto* come = std::get_if<Come>(&step)) {
      rows.Come(come->rows);
    } else if (const auto* go = std::get_if<Go>(&step)) {
      rows.Go(go->calls, go->rows);
    } else {
      const Await& await = std::get<Await>(step);
      int asked = 0;
      rows.Await([&] { return ++asked <= await.busy; });
      EXPECT_EQ(asked, await.questions) << "step " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ExpectedRowsTest,
    ::testing::Values(
        ExpectedRowsCase{"FirstCall", 8192, {Come{256}, Await{1000, 0}}},
        ExpectedRowsCase{"CallerAlone", 8192, {Come{1000}, Go{1, 1000}, Come{600}, Await{1000, 0}}},
        ExpectedRowsCase{"AsManyAsTheLastTime",
                         8192,
                         {Come{256}, Come{512}, Go{2, 768}, Come{256}, Await{3, 4}, Come{511}, Await{3, 4}, Come{1}, Await{3, 0}}},
        // The third came too late for those that went.
        ExpectedRowsCase{
            "CallersThatWaitMeanwhile", 8192, {Come{256}, Come{256}, Come{256}, Go{2, 512}, Await{2, 3}, Come{512}, Await{2, 0}}},
        // The device has nothing left to do.
        ExpectedRowsCase{"CallersThatStayAway",
                         8192,
                         {Come{256}, Come{256}, Go{2, 512}, Come{256}, Await{2, 3}, Go{1, 256}, Come{128}, Await{2, 0}}},
        ExpectedRowsCase{
            "NoMoreThanAreComputedTogether", 512, {Come{512}, Come{256}, Go{1, 512}, Await{2, 3}, Come{256}, Await{2, 0}}}),
    [](const auto& test) { return test.param.name; });

TEST(ExpectedRows, ACallThatComesEndsTheWait) {
  ExpectedRows rows(8192);
  rows.Come(256);
  rows.Come(256);
  rows.Go(2, 512);
  rows.Come(256);
  std::promise<void> asked;
  std::future<void> waited = std::async(std::launch::async, [&] {
    bool first = true;
    rows.Await([&] {
      if (first) asked.set_value();
      first = false;
      return true;
    });
  });
  asked.get_future().wait();
  EXPECT_EQ(waited.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  rows.Come(256);
  EXPECT_EQ(waited.wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

}  // namespace
}  // namespace headwater::cuda
