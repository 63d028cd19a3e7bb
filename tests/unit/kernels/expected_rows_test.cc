#include "kernels/cuda/computation/expected_rows.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>

namespace headwater::cuda {
namespace {

constexpr int64_t kMost = 8192;
constexpr auto kPatience = std::chrono::seconds(60);

// How often Await() asks before it returns, if the device has something to do for the first `busy` questions.
int Questions(ExpectedRows& rows, int busy) {
  int asked = 0;
  rows.Await([&] { return ++asked <= busy; });
  return asked;
}

TEST(ExpectedRows, AFirstCallWaitsForNobody) {
  ExpectedRows rows(kMost);
  rows.Come(256);
  EXPECT_EQ(Questions(rows, 1000), 0);
}

TEST(ExpectedRows, ACallerAloneWaitsForNobody) {
  ExpectedRows rows(kMost);
  rows.Come(1000);
  rows.Go(1, 1000);
  rows.Come(600);
  EXPECT_EQ(Questions(rows, 1000), 0);
}

TEST(ExpectedRows, AsManyAsTheLastTimeAreWaitedFor) {
  ExpectedRows rows(kMost);
  rows.Come(256);
  rows.Come(512);
  rows.Go(2, 768);
  rows.Come(256);
  EXPECT_EQ(Questions(rows, 3), 4);
  rows.Come(511);
  EXPECT_EQ(Questions(rows, 3), 4);
  rows.Come(1);
  EXPECT_EQ(Questions(rows, 3), 0);
}

TEST(ExpectedRows, WhoeverWaitsMeanwhileIsExpectedToo) {
  ExpectedRows rows(kMost);
  rows.Come(256);
  rows.Come(256);
  rows.Come(256);
  rows.Go(2, 512);  // the third came too late for those
  EXPECT_EQ(Questions(rows, 2), 3);
  rows.Come(512);
  EXPECT_EQ(Questions(rows, 2), 0);
}

TEST(ExpectedRows, CallersThatStayAwayAreForgotten) {
  ExpectedRows rows(kMost);
  rows.Come(256);
  rows.Come(256);
  rows.Go(2, 512);
  rows.Come(256);
  EXPECT_EQ(Questions(rows, 2), 3);  // the device has nothing left to do
  rows.Go(1, 256);
  rows.Come(128);
  EXPECT_EQ(Questions(rows, 2), 0);
}

TEST(ExpectedRows, NoMoreThanAreComputedTogether) {
  ExpectedRows rows(512);
  rows.Come(512);
  rows.Come(256);
  rows.Go(1, 512);
  EXPECT_EQ(Questions(rows, 2), 3);
  rows.Come(256);
  EXPECT_EQ(Questions(rows, 2), 0);
}

TEST(ExpectedRows, ACallThatComesEndsTheWait) {
  ExpectedRows rows(kMost);
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
  EXPECT_EQ(waited.wait_for(kPatience), std::future_status::ready);
}

}  // namespace
}  // namespace headwater::cuda
