// UploadStore: bytes of weight uploads that are not complete yet, so that a cut one can continue where it stopped.
//
// Thread-safe. An upload is known by head and upload id, and is dropped when it completes or its head goes away. A new upload drops
// the oldest ones if it needs their room in the budget, or if its head has kMaxUploadsPerHead. An upload that a stream is working
// on stays.
//
// A complete upload may still take its room: one of several tensors that close a step waits in its head's shadow for the others.
// Its trainer may have died, and all heads share the room. After kShadowTime it therefore gives way to another head's upload,
// unless a stream brings its head another tensor.
#ifndef HEADWATER_SERVER_SERVICE_HEAD_UPLOAD_STORE_H_
#define HEADWATER_SERVER_SERVICE_HEAD_UPLOAD_STORE_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/heads/head.h"
#include "server/observability/monotonic_clock.h"
#include "server/service/request/head_request.h"
#include "server/transport/byte_budget.h"

namespace headwater::service {

class UploadStore {
  struct Upload;

 public:
  static constexpr int kMaxUploadsPerHead = 4;
  // How long a tensor waits for the others that close a step with it, where another upload needs its room.
  static constexpr absl::Duration kShadowTime = absl::Minutes(1);

  // `capacity_bytes`: host memory of all unfinished uploads together (Limits.max_upload_bytes). `clock` is for tests; only
  // differences of its times matter.
  explicit UploadStore(int64_t capacity_bytes, std::function<absl::Time()> clock = observability::MonotonicNow)
      : budget_(capacity_bytes), clock_(std::move(clock)) {}

  // A stream's hold on an upload. A later stream for the same upload takes it over; this one's calls fail with kCancelled then.
  class Lease {
   public:
    Lease(Lease&&) = default;
    ~Lease();
    int64_t received_bytes() const;
    // Takes bytes that begin at `offset`, which must be received_bytes(): kChunkOutOfRange otherwise, or beyond the total.
    absl::Status Append(int64_t offset, const std::string& data);
    // All bytes, checked against the checksum if there is one: kProtocolViolation if some are missing, kChecksumMismatch (the
    // upload is dropped: its bytes are wrong). The pointer keeps them, and their place in the budget.
    absl::StatusOr<std::shared_ptr<const uint8_t>> Complete();
    // Forgets the upload: its bytes have been used, or never will be.
    void Drop();

   private:
    friend class UploadStore;
    Lease(UploadStore* store, std::shared_ptr<Upload> upload);
    UploadStore* store_;
    std::shared_ptr<Upload> upload_;
    int64_t generation_;
  };

  // Begins an upload or takes it up again. kInvalidCombination if the same id was begun with another tensor, type, size, checksum
  // or closes_step. kMemoryBudgetExceeded if it is larger than the budget; kInFlightBytesExceeded, with `retryAfterMs`, if others
  // have the room for now. kQuotaExceeded (`limit`: uploads_per_head) if streams work on kMaxUploadsPerHead others of the head.
  // `request.total_bytes` must be right for the head.
  absl::StatusOr<Lease> Open(const std::shared_ptr<heads::Head>& head, const UploadRequest& request);

  // Drops the uploads whose head is gone, and gives their memory back.
  void DropDead();

  int64_t reserved_bytes() const { return budget_.reserved_bytes(); }

 private:
  // Drops the oldest upload that no stream works on, of `head` or (null) of any; false if there is none.
  bool DropOldestLocked(const heads::Head* head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops the oldest one that waits in the shadow of a head, and may give way to one of `asking`; false if there is none.
  bool DropOldestShadowLocked(const heads::Head& asking) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  transport::ByteBudget budget_;
  const std::function<absl::Time()> clock_;
  absl::Mutex mutex_;
  std::list<std::shared_ptr<Upload>> uploads_ ABSL_GUARDED_BY(mutex_);  // oldest first
  // Uploads that are to close a step, from their begin until their bytes are released. Oldest first.
  std::list<std::weak_ptr<Upload>> closing_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_HEAD_UPLOAD_STORE_H_
