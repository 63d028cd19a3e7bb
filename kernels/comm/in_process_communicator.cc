// Communicators for the threads of one process.
//
// A collective publishes every rank's buffer and meets at a barrier. Then rank r computes the r-th part of the elements for all
// ranks: parts are disjoint and need no lock. After a second barrier all parts are done, and the buffers belong to their callers
// again. Waiting ranks sleep.
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "kernels/comm/collective_clock.h"
#include "kernels/core/shard_layout.h"

namespace headwater {
namespace {

class Meeting {
 public:
  explicit Meeting(int32_t world_size) : world_size_(world_size), posts_(static_cast<size_t>(world_size)) {}

  // A rank's contribution to a collective.
  struct Post {
    void* data = nullptr;
    int64_t count = 0;
    const char* operation = "";
  };

  int32_t world_size() const { return world_size_; }
  const Post& post(int32_t rank) const { return posts_[static_cast<size_t>(rank)]; }

  // Publishes `post` and waits for all ranks. Fails on all of them if they did not make the same call.
  absl::Status Publish(int32_t rank, const Post& post) {
    std::unique_lock<std::mutex> lock(mutex_);
    posts_[static_cast<size_t>(rank)] = post;
    HEADWATER_RETURN_IF_ERROR(Wait(lock));
    for (const Post& other : posts_) {
      if (other.count == post.count && other.operation == post.operation) continue;
      reason_ =
          MakeError(ErrorReason::kInternal, std::string("ranks disagree: ") + post.operation + " of " + std::to_string(post.count) +
                                                " elements meets " + other.operation + " of " + std::to_string(other.count));
      changed_.notify_all();
      return reason_;
    }
    return absl::OkStatus();
  }

  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    return Wait(lock);
  }

  void Abort(const absl::Status& reason) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (reason_.ok()) reason_ = reason;
    changed_.notify_all();
  }

  absl::Status status() const {
    std::unique_lock<std::mutex> lock(mutex_);
    return reason_;
  }

 private:
  absl::Status Wait(std::unique_lock<std::mutex>& lock) {
    if (!reason_.ok()) return reason_;
    const uint64_t generation = generation_;
    if (++arrived_ == world_size_) {
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
      return absl::OkStatus();
    }
    changed_.wait(lock, [&] { return generation_ != generation || !reason_.ok(); });
    return generation_ != generation ? absl::OkStatus() : reason_;
  }

  const int32_t world_size_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int32_t arrived_ = 0;
  uint64_t generation_ = 0;
  absl::Status reason_;
  std::vector<Post> posts_;
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<Meeting> meeting, int32_t rank) : meeting_(std::move(meeting)), rank_(rank) {}

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return meeting_->world_size(); }

  absl::Status AllReduceSum(float* data, int64_t count) override { return Reduce(data, count, "sum of float", std::plus<float>()); }
  absl::Status AllReduceSum(double* data, int64_t count) override {
    return Reduce(data, count, "sum of double", std::plus<double>());
  }
  absl::Status AllReduceMax(double* data, int64_t count) override { return Reduce(data, count, "max of double", Max); }

  absl::Status AllGather(const double* data, int64_t count, double* out) override {
    return Together({const_cast<double*>(data), count, "gather of double"}, [&] {
      for (int32_t rank = 0; rank < world_size(); ++rank) std::copy_n(Of<double>(rank), count, out + rank * count);
    });
  }

  absl::Status ReduceScatterSum(float* data, absl::Span<const int64_t> bounds) override {
    return Together({data, bounds.back(), "scattered sum of float"}, [&] {
      const size_t own = static_cast<size_t>(rank_);
      for (int64_t i = bounds[own]; i < bounds[own + 1]; ++i) data[i] = Combined<float>(i, std::plus<float>());
    });
  }

  absl::Status AllGatherParts(void* data, absl::Span<const int64_t> bounds) override {
    return Together({data, bounds.back(), "gather of parts"}, [&] {
      for (int32_t rank = 0; rank < world_size(); ++rank) {
        if (rank == rank_) continue;
        const int64_t start = bounds[static_cast<size_t>(rank)];
        std::copy_n(Of<char>(rank) + start, bounds[static_cast<size_t>(rank) + 1] - start, static_cast<char*>(data) + start);
      }
    });
  }

  void Abort(const absl::Status& reason) override { meeting_->Abort(reason); }
  absl::Status status() const override { return meeting_->status(); }
  CommunicatorTimes times() const override { return clock_.times(); }

 private:
  // Elements of a part: large enough that ranks do not share cache lines.
  static constexpr int64_t kGrain = 64;

  static double Max(double a, double b) {
    if (a != a) return a;
    if (b != b) return b;
    return a > b ? a : b;
  }

  // A collective: act() reads and writes the ranks' buffers, once all ranks have published theirs.
  template <typename Act>
  absl::Status Together(const Meeting::Post& post, const Act& act) {
    comm::CollectiveClock::Collective collective(clock_);
    HEADWATER_RETURN_IF_ERROR(meeting_->Publish(rank_, post));
    collective.EveryRankIsHere();
    act();
    return meeting_->Wait();
  }

  template <typename T>
  T* Of(int32_t rank) const {
    return static_cast<T*>(meeting_->post(rank).data);
  }

  // The ranks' i-th elements, in rank order.
  template <typename T, typename Combine>
  T Combined(int64_t i, const Combine& combine) const {
    T value = Of<T>(0)[i];
    for (int32_t rank = 1; rank < world_size(); ++rank) value = combine(value, Of<T>(rank)[i]);
    return value;
  }

  template <typename T, typename Combine>
  absl::Status Reduce(T* data, int64_t count, const char* operation, const Combine& combine) {
    if (world_size() == 1) return status();
    return Together({data, count, operation}, [&] {
      const RowRange part = SplitEvenly({0, count}, rank_, world_size(), kGrain);
      for (int64_t i = part.start; i < part.end; ++i) {
        const T value = Combined<T>(i, combine);
        for (int32_t rank = 0; rank < world_size(); ++rank) Of<T>(rank)[i] = value;
      }
    });
  }

  const std::shared_ptr<Meeting> meeting_;
  const int32_t rank_;
  comm::CollectiveClock clock_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int32_t world_size) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  const auto meeting = std::make_shared<Meeting>(world_size);
  for (int32_t rank = 0; rank < world_size; ++rank) {
    communicators.push_back(std::make_unique<InProcessCommunicator>(meeting, rank));
  }
  return communicators;
}

}  // namespace headwater
