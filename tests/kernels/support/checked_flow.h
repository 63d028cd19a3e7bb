// A RowFlow that checks the engine's calls, and ends a computation where a test says so.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_CHECKED_FLOW_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_CHECKED_FLOW_H_

#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/engine.h"

namespace headwater::testing {

// For one computation, on the thread that made the flow.
class CheckedFlow : public RowFlow {
 public:
  explicit CheckedFlow(const MicroBatch& micro_batch) : rows_(micro_batch.hidden.row_count), out_(micro_batch.grad_hidden) {}

  // The given call of AwaitRows() (0: none), or Decide(), fails.
  void FailAtAwait(int call) { failing_await_ = call; }
  void FailAtDecide() { fails_decide_ = true; }

  absl::Status AwaitRows(int64_t row_end) override {
    EXPECT_EQ(std::this_thread::get_id(), thread_);
    EXPECT_GE(row_end, awaited_);
    EXPECT_LE(row_end, rows_);
    EXPECT_EQ(decided_, 0);
    if (++awaits_ == failing_await_) return absl::CancelledError("the rows stay away");
    const int64_t row_start = awaited_;
    awaited_ = row_end;
    return Arrive(row_start, row_end);
  }
  absl::Status Decide(const DigestBuilder* rows) override {
    EXPECT_EQ(std::this_thread::get_id(), thread_);
    EXPECT_GE(awaits_, 1);
    EXPECT_EQ(awaited_, rows_) << "decided before all rows were there";
    EXPECT_EQ(++decided_, 1);
    if (rows != nullptr) digest_ = rows->Finish("header");
    return fails_decide_ ? absl::AbortedError("decided otherwise") : absl::OkStatus();
  }
  // May be called on a thread of CUDA's, which must not call CUDA. Reads grad_hidden, which is in memory of the host then.
  void GradHiddenReady(int64_t row_end) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSERT_NE(out_.data, nullptr);
    ASSERT_GT(row_end, ready_);
    ASSERT_LE(row_end, out_.row_count);
    const int64_t row_bytes = out_.column_count * ElementBytes(out_.data_type);
    const auto* bytes = static_cast<const uint8_t*>(out_.data);
    seen_.insert(seen_.end(), bytes + ready_ * row_bytes, bytes + row_end * row_bytes);
    ready_ = row_end;
    ++notes_;
  }

  // After a computation that succeeded.
  void ExpectComplete() const {
    EXPECT_EQ(decided_, 1);
    if (out_.data == nullptr) return;
    EXPECT_EQ(ready_, out_.row_count);
    const int64_t bytes = out_.row_count * out_.column_count * ElementBytes(out_.data_type);
    ASSERT_EQ(static_cast<int64_t>(seen_.size()), bytes);
    EXPECT_TRUE(bytes == 0 || std::memcmp(seen_.data(), out_.data, seen_.size()) == 0) << "rows changed after they were final";
  }
  int awaits() const { return awaits_; }
  int decided() const { return decided_; }
  int notes() const { return notes_; }
  const std::optional<Digest>& digest() const { return digest_; }

 protected:
  // Returns when rows [row_start, row_end), which have not been awaited before, are there.
  virtual absl::Status Arrive(int64_t row_start, int64_t row_end) {
    static_cast<void>(row_start);
    static_cast<void>(row_end);
    return absl::OkStatus();
  }

 private:
  const int64_t rows_;
  const MutableRowsView out_;
  const std::thread::id thread_ = std::this_thread::get_id();
  int failing_await_ = 0;
  bool fails_decide_ = false;
  int64_t awaited_ = 0;
  int awaits_ = 0;
  int decided_ = 0;
  std::optional<Digest> digest_;
  std::mutex mutex_;  // of what GradHiddenReady() writes
  int64_t ready_ = 0;
  int notes_ = 0;
  std::vector<uint8_t> seen_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_CHECKED_FLOW_H_
