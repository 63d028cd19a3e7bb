// SlowUploads: which upload gives way when others wait, and which one does not.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "headwater/kernels/error.h"
#include "server/guard/stream_watchdog.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {
namespace {

using transport::RowExchange;

constexpr int64_t kRowCount = 2;
constexpr int64_t kRowBytes = 8;

// Hidden states that the client sends, and teacher rows that another process sends.
struct Upload {
  void Bring(size_t tensor, int64_t row_count) {
    ASSERT_TRUE(rows->Claim(tensor, 0, row_count, row_count * kRowBytes, "chunk").ok());
    rows->Deliver(tensor, 0, row_count);
  }

  std::vector<uint8_t> hidden = std::vector<uint8_t>(kRowCount * kRowBytes);
  std::vector<uint8_t> teacher = std::vector<uint8_t>(kRowCount * kRowBytes);
  std::shared_ptr<RowExchange> rows = std::make_shared<RowExchange>(
      kRowCount,
      std::vector<transport::RowTensor>{{"hidden", 0, kRowCount, kRowBytes, hidden.data()},
                                        {"teacher_hidden", 0, kRowCount, kRowBytes, teacher.data(), /*by_input=*/false}});
};

TEST(SlowUploads, OneThatStandsStillGivesWay) {
  SlowUploads uploads;
  const absl::Time now = observability::MonotonicNow();
  Upload upload;
  const SlowUploads::Place place(uploads, upload.rows, now);
  upload.Bring(0, 1);
  EXPECT_FALSE(uploads.GiveWay(now + absl::Seconds(1)));
  EXPECT_TRUE(uploads.GiveWay(now + absl::Seconds(10)));
  EXPECT_TRUE(HasReason(upload.rows->status(), ErrorReason::kQueueFull));
}

TEST(SlowUploads, OneThatWaitsForAJoinedTeacherAloneDoesNot) {
  SlowUploads uploads;
  const absl::Time now = observability::MonotonicNow();
  Upload joined;
  const SlowUploads::Place place(uploads, joined.rows, now);
  joined.Bring(0, kRowCount);
  EXPECT_FALSE(uploads.GiveWay(now + absl::Seconds(10)));
  joined.Bring(1, 1);
  EXPECT_FALSE(uploads.GiveWay(now + absl::Seconds(10)));
  EXPECT_TRUE(joined.rows->status().ok());
  // Another one, whose client could send more, does, though it has brought rows later.
  Upload upload;
  const SlowUploads::Place later(uploads, upload.rows, now);
  upload.Bring(1, kRowCount);
  EXPECT_TRUE(uploads.GiveWay(now + absl::Seconds(10)));
  EXPECT_TRUE(joined.rows->status().ok());
  EXPECT_TRUE(HasReason(upload.rows->status(), ErrorReason::kQueueFull));
}

}  // namespace
}  // namespace headwater::guard
