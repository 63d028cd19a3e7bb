// The common base of every engine's head: tensors and ranges, their layout over shards, and the staging slots in use. The engine
// owns the memory and computes on it.
#ifndef HEADWATER_KERNELS_CORE_HEAD_BASE_H_
#define HEADWATER_KERNELS_CORE_HEAD_BASE_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "kernels/core/shard_layout.h"

namespace headwater {

// `factor` in fp32; kInvalidField if it is not finite there.
absl::Status ToFactor(double factor, float* out);

class HeadBase : public EngineHead {
 public:
  const HeadSpec& spec() const final { return spec_; }
  const MemoryPlan& plan() const final { return plan_; }
  absl::Span<const VocabShard> shards() const final { return vocab_shards_; }
  int64_t ElementCount(HeadTensor tensor) const final;
  DataType TensorDataType(HeadTensor tensor) const final;
  int32_t FreeStagingSlots() const final;

  // One for each of the engine's shards; may be empty.
  const std::vector<RowRange>& shard_rows() const { return shard_rows_; }
  // Where shards begin in a tensor with so many units (elements, bytes) for each row of the vocabulary, and where the last one
  // ends.
  std::vector<int64_t> ShardBounds(int64_t units_per_row) const;
  // Rows of a shard below valid_vocab_size: a prefix of it.
  int64_t ValidRows(int32_t rank) const;

  // Takes the first free staging slot from number `first` on and before `end`, or -1. Any thread, as FreeStagingSlot().
  int32_t TakeStagingSlot(int32_t first, int32_t end);
  int32_t TakeStagingSlot() { return TakeStagingSlot(0, slot_count()); }
  void FreeStagingSlot(int32_t slot);

 protected:
  // `device`: the name of the shards' device. `slot_count`: the spec's staging slots, or more, where each rank has its own.
  HeadBase(const HeadSpec& spec, MemoryPlan plan, std::vector<RowRange> shard_rows, const std::string& device, int32_t slot_count);
  HeadBase(const HeadSpec& spec, MemoryPlan plan, std::vector<RowRange> shard_rows, const std::string& device)
      : HeadBase(spec, std::move(plan), std::move(shard_rows), device, spec.staging_slots) {}
  int32_t slot_count() const { return slot_count_; }

  // The part of a range of elements that a shard holds. Elements are counted without any padding.
  struct Piece {
    int64_t first = 0;   // in the shard's tensor
    int64_t count = 0;   // 0: nothing
    int64_t offset = 0;  // in the caller's buffer
  };
  Piece PieceOf(int32_t rank, HeadTensor tensor, int64_t element_start, int64_t element_count) const;
  // Shards that hold a part of a range.
  int32_t ShardsWith(HeadTensor tensor, int64_t element_start, int64_t element_count) const;

  // kChunkOutOfRange for a range that the tensor does not have.
  absl::Status CheckRange(HeadTensor tensor, int64_t element_start, int64_t element_count) const;
  // The refusals of AddToGradient(); *alpha = factor in fp32.
  absl::Status CheckAddToGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, double factor,
                                  float* alpha) const;

 private:
  const HeadSpec spec_;
  const MemoryPlan plan_;
  const std::vector<RowRange> shard_rows_;
  std::vector<VocabShard> vocab_shards_;
  const int32_t slot_count_;
  mutable std::mutex slots_mutex_;
  std::vector<bool> slot_taken_;  // guarded by slots_mutex_
};

// A staging slot that is taken, and freed when this is destroyed. Must not outlive its head.
class StagingSlot {
 public:
  StagingSlot() = default;  // none
  // Takes a slot of `head` if one is free.
  explicit StagingSlot(HeadBase* head) : head_(head), index_(head->TakeStagingSlot()) {}
  // Slots [first, end).
  StagingSlot(HeadBase* head, int32_t first, int32_t end) : head_(head), index_(head->TakeStagingSlot(first, end)) {}
  StagingSlot(StagingSlot&& other) noexcept : head_(std::exchange(other.head_, nullptr)), index_(std::exchange(other.index_, -1)) {}
  StagingSlot& operator=(StagingSlot&& other) noexcept {
    std::swap(head_, other.head_);
    std::swap(index_, other.index_);
    return *this;
  }
  ~StagingSlot() {
    if (index_ >= 0) head_->FreeStagingSlot(index_);
  }

  bool taken() const { return index_ >= 0; }
  HeadBase* head() const { return head_; }
  int32_t index() const { return index_; }  // -1: none

 private:
  HeadBase* head_ = nullptr;
  int32_t index_ = -1;
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_HEAD_BASE_H_
