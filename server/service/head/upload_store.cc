#include "server/service/head/upload_store.h"

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/model_files/xxh3.h"
#include "server/service/call/stream_io.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

// Uploads take seconds, and a shadow gives way after a minute.
constexpr char kRetryAfterMs[] = "1000";

}  // namespace

struct UploadStore::Upload {
  Upload(const std::shared_ptr<heads::Head>& head_of_upload, const UploadRequest& first_request)
      : head(head_of_upload), request(first_request), buffer(first_request.total_bytes) {}

  const std::weak_ptr<heads::Head> head;
  const UploadRequest request;
  transport::ByteBudget::Reservation reservation;  // set before the upload is shared

  mutable absl::Mutex mutex;
  transport::GrowingBuffer buffer ABSL_GUARDED_BY(mutex);
  int64_t generation ABSL_GUARDED_BY(mutex) = 0;  // of the stream that works on it
  bool busy ABSL_GUARDED_BY(mutex) = false;
  absl::Time drop_time ABSL_GUARDED_BY(mutex) = absl::InfiniteFuture();  // when it left the store; its bytes may be held since then
};

UploadStore::Lease::Lease(UploadStore* store, std::shared_ptr<Upload> upload) : store_(store), upload_(std::move(upload)) {
  absl::MutexLock lock(&upload_->mutex);
  upload_->busy = true;
  generation_ = ++upload_->generation;
}

UploadStore::Lease::~Lease() {
  if (upload_ == nullptr) return;
  absl::MutexLock lock(&upload_->mutex);
  if (upload_->generation == generation_) upload_->busy = false;
}

int64_t UploadStore::Lease::received_bytes() const {
  absl::MutexLock lock(&upload_->mutex);
  return upload_->buffer.size();
}

absl::Status UploadStore::Lease::Append(int64_t offset, const std::string& data) {
  absl::MutexLock lock(&upload_->mutex);
  if (upload_->generation != generation_) {
    return MakeError(ErrorReason::kCancelled, "another stream has taken this upload over");
  }
  return AppendBytes(upload_->buffer, offset, data, upload_->request.total_bytes, "the upload");
}

absl::StatusOr<std::shared_ptr<const uint8_t>> UploadStore::Lease::Complete() {
  std::shared_ptr<const uint8_t> bytes;
  {
    absl::MutexLock lock(&upload_->mutex);
    if (upload_->generation != generation_) {
      return MakeError(ErrorReason::kCancelled, "another stream has taken this upload over");
    }
    HEADWATER_RETURN_IF_ERROR(CheckAllBytes(upload_->buffer, upload_->request.total_bytes));
    bytes = std::shared_ptr<const uint8_t>(upload_, upload_->buffer.data());
  }
  const std::string& expected = upload_->request.checksum;
  if (expected.empty()) return bytes;
  model_files::Xxh3Hasher hasher;
  hasher.Update(bytes.get(), upload_->request.total_bytes);
  const std::string actual = hasher.Digest();
  if (actual == expected) return bytes;
  Drop();
  return FieldError(ErrorReason::kChecksumMismatch, "header.checksum", absl::BytesToHexString(expected),
                    absl::BytesToHexString(actual));
}

void UploadStore::Lease::Drop() {
  {
    absl::MutexLock upload_lock(&upload_->mutex);
    upload_->drop_time = store_->clock_();
  }
  absl::MutexLock lock(&store_->mutex_);
  store_->uploads_.remove(upload_);
}

void UploadStore::DropDead() {
  absl::MutexLock lock(&mutex_);
  uploads_.remove_if([](const std::shared_ptr<Upload>& upload) { return upload->head.expired(); });
  closing_.remove_if([](const std::weak_ptr<Upload>& upload) { return upload.expired(); });
}

bool UploadStore::DropOldestLocked(const heads::Head* head) {
  for (auto it = uploads_.begin(); it != uploads_.end(); ++it) {
    const std::shared_ptr<heads::Head> owner = (*it)->head.lock();
    absl::ReleasableMutexLock lock(&(*it)->mutex);
    if ((*it)->busy || (head != nullptr && owner.get() != head)) continue;
    (*it)->drop_time = clock_();  // the bytes of one that may be repeated are perhaps in the head's shadow
    lock.Release();
    uploads_.erase(it);
    return true;
  }
  return false;
}

bool UploadStore::DropOldestShadowLocked(const heads::Head& asking) {
  const absl::Time now = clock_();
  const auto has_upload = [this](const heads::Head* head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return absl::c_any_of(uploads_, [head](const std::shared_ptr<Upload>& upload) { return upload->head.lock().get() == head; });
  };
  for (const std::weak_ptr<Upload>& entry : closing_) {
    const std::shared_ptr<Upload> upload = entry.lock();
    const std::shared_ptr<heads::Head> head = upload != nullptr ? upload->head.lock() : nullptr;
    if (head == nullptr || head.get() == &asking || has_upload(head.get())) continue;
    const uint8_t* bytes = nullptr;
    {
      absl::MutexLock upload_lock(&upload->mutex);
      if (upload->drop_time + kShadowTime > now) continue;
      bytes = upload->buffer.data();
    }
    if (head->DropShadow(bytes)) return true;
  }
  return false;
}

absl::StatusOr<UploadStore::Lease> UploadStore::Open(const std::shared_ptr<heads::Head>& head, const UploadRequest& request) {
  DropDead();
  absl::MutexLock lock(&mutex_);
  int uploads_of_head = 0;
  for (const std::shared_ptr<Upload>& upload : uploads_) {
    if (upload->head.lock() != head) continue;
    ++uploads_of_head;
    const UploadRequest& first = upload->request;
    if (first.upload_id != request.upload_id) continue;
    if (first.tensor != request.tensor || first.data_type != request.data_type || first.total_bytes != request.total_bytes ||
        first.checksum != request.checksum || first.closes_step != request.closes_step) {
      return FieldError(ErrorReason::kInvalidCombination, "header.upload_id",
                        "tensor, data_type, total_bytes, checksum and closes_step of the upload that this id began", "others");
    }
    return Lease(this, upload);
  }
  if (uploads_of_head >= kMaxUploadsPerHead && !DropOldestLocked(head.get())) {
    return LimitError(ErrorReason::kQuotaExceeded, "header.upload_id",
                      absl::StrCat("at most ", kMaxUploadsPerHead, " uploads of a head"), uploads_of_head + 1, "uploads_per_head",
                      kMaxUploadsPerHead);
  }
  auto upload = std::make_shared<Upload>(head, request);
  const bool can_fit = request.total_bytes <= budget_.capacity_bytes();
  while (!budget_.TryReserve(request.total_bytes, &upload->reservation)) {
    if (can_fit && (DropOldestLocked(nullptr) || DropOldestShadowLocked(*head))) continue;
    const int64_t available_bytes = budget_.available_bytes();
    ErrorMetadata metadata = {{"field", "header.total_bytes"},
                              {"limit", "max_upload_bytes"},
                              {"maximum", absl::StrCat(budget_.capacity_bytes())},
                              {"requestedBytes", absl::StrCat(request.total_bytes)},
                              {"availableBytes", absl::StrCat(available_bytes)},
                              {"expected", absl::StrCat("at most ", available_bytes)},
                              {"actual", absl::StrCat(request.total_bytes)}};
    if (can_fit) metadata[kRetryAfterMsKey] = kRetryAfterMs;
    return MakeError(can_fit ? ErrorReason::kInFlightBytesExceeded : ErrorReason::kMemoryBudgetExceeded,
                     absl::StrCat("header.total_bytes: expected at most ", available_bytes, " of ", budget_.capacity_bytes(),
                                  " bytes (max_upload_bytes) that are free for uploads, got ", request.total_bytes,
                                  can_fit ? "; try again" : ""),
                     std::move(metadata));
  }
  if (request.closes_step.has_value()) closing_.push_back(upload);
  uploads_.push_back(upload);
  return Lease(this, std::move(upload));
}

}  // namespace headwater::service
