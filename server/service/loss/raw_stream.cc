#include "server/service/loss/raw_stream.h"

#include <utility>

namespace headwater::service {

RawReactor* RawStream::Own() {
  self_ = shared_from_this();
  watch_.emplace(&core_.watchdog, [this](const absl::Status& why) {
    if (!OnEnded(why)) guard::EndCall(context_, why);
  });
  return this;
}

bool RawStream::Enter() {
  absl::MutexLock lock(&mutex_);
  if (ending_) return false;
  ++starting_;
  return true;
}

void RawStream::Leave() {
  bool end = false;
  {
    absl::MutexLock lock(&mutex_);
    end = --starting_ == 0 && ending_;
  }
  if (end) FinishNow();
}

void RawStream::Read(bool watched) {
  if (!Enter()) return;
  read_watched_ = watched;
  if (watched) watch_->Begin();
  StartRead(&read_message_);
  Leave();
}

bool RawStream::Write(grpc::ByteBuffer message) {
  if (!Enter()) return false;
  written_message_.Swap(&message);
  watch_->Begin();
  StartWrite(&written_message_);
  Leave();
  return true;
}

void RawStream::Finish(grpc::Status status, std::optional<grpc::ByteBuffer> last_message) {
  bool now = false;
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    status_ = std::move(status);
    last_message_ = std::move(last_message);
    ending_ = true;
    now = starting_ == 0;
  }
  if (now) FinishNow();
}

void RawStream::FinishNow() {
  // Kept here: gRPC may be done with the call, and the object be gone, before the calls below return.
  const std::shared_ptr<RawStream> alive = shared_from_this();
  watch_->Begin();  // before: OnDone() takes the watch away
  if (last_message_.has_value()) {
    StartWriteAndFinish(&*last_message_, grpc::WriteOptions(), std::move(status_));
  } else {
    RawReactor::Finish(std::move(status_));
  }
}

void RawStream::OnReadDone(bool ok) noexcept {
  if (read_watched_) EndWatch();
  OnMessage(ok, &read_message_);
}

void RawStream::OnWriteDone(bool ok) noexcept {
  EndWatch();
  OnWritten(ok);
}

void RawStream::OnCancel() noexcept {
  gone_.store(true);
  OnGone();
}

void RawStream::OnDone() noexcept {
  watch_.reset();  // waits for one that is cancelling the call just now
  const std::shared_ptr<RawStream> share = std::move(self_);
}

}  // namespace headwater::service
