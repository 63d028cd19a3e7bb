// The state that copies of a Head share.
#ifndef HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_
#define HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "client/core/core.h"
#include "client/cpp/src/convert.h"
#include "headwater/client/head.h"

namespace headwater::client::internal {

// Thread-safe.
class HeadHandle {
 public:
  HeadHandle(std::shared_ptr<Core> core_of_head, const v1::Head& head, bool was_created)
      : core(std::move(core_of_head)),
        name(head.name()),
        spec(FromProto(head.spec())),
        created(was_created),
        epoch_(head.epoch()) {}

  static const std::shared_ptr<HeadHandle>& Of(const Head& head) { return head.handle_; }

  const std::shared_ptr<Core> core;
  const std::string name;
  const HeadSpec spec;
  const bool created;

  // The epoch given by the last call of this handle, or the one that recoveries have led to.
  std::string epoch() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return core->CurrentEpoch(name, epoch_);
  }
  // Takes over the epoch of a call that this handle made.
  HeadInfo Adopt(const v1::Head& head) {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_ = head.epoch();
    return FromProto(head);
  }
  v1::HeadStep At(std::optional<int64_t> step) const {
    v1::HeadStep head;
    head.set_head(name);
    head.set_head_epoch(epoch());
    if (step.has_value()) head.set_step(*step);
    return head;
  }

  // Whether the caller should be warned that a micro-batch was HELD for want of a slot: once. `unasked`: it might have been STAGED.
  // Where nothing ever is, no slot is missing: deterministic mode holds everything.
  bool ShouldWarnOfHeld(ContributionForm form, bool unasked) {
    if (form == ContributionForm::kStaged) has_staged_ = true;
    return form == ContributionForm::kHeld && unasked && has_staged_ && !warned_of_held_.exchange(true);
  }

  // The step that Seal() has closed without micro-batches; -1: none.
  int64_t empty_step() const { return empty_step_; }
  void SetEmptyStep(int64_t step) { empty_step_ = step; }

 private:
  std::atomic<int64_t> empty_step_ = -1;
  std::atomic<bool> has_staged_ = false;
  std::atomic<bool> warned_of_held_ = false;
  mutable std::mutex mutex_;
  std::string epoch_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_
