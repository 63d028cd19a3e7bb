#include "server/heads/weights/weight_record.h"

#include "server/observability/monotonic_clock.h"
#include "server/scheduler/sequencer.h"

namespace headwater::heads {

void WeightRecord::MarkUnset(HeadTensor tensor) {
  PresenceOf(tensor) = false;
  if (tensor == HeadTensor::kWeight) checksum_.clear();
}

void WeightRecord::Forget() {
  MarkUnset(HeadTensor::kWeight);
  MarkUnset(HeadTensor::kBias);
  EndStep(/*replaced=*/false);
}

int64_t WeightRecord::NextVersion() {
  if (!unsaved_since_.has_value()) unsaved_since_ = observability::MonotonicNow();
  return ++version_;
}

void WeightRecord::MarkSaved(int64_t version, int64_t step) {
  saved_ = {version, step};
  if (version == version_) unsaved_since_.reset();
}

bool WeightRecord::AddShadow(const ShadowTensor& tensor, std::string checksum) {
  shadows_[tensor.tensor] = {tensor, std::move(checksum)};
  return shadows_.size() == (needs_bias_ ? 2U : 1U);
}

bool WeightRecord::DropShadow(const void* data) {
  return std::erase_if(shadows_, [data](auto& entry) {
           if (entry.second.tensor.data.get() != data) return false;
           scheduler::Turn::Free(std::move(entry.second.tensor.data));
           return true;
         }) > 0;
}

void WeightRecord::EndStep(bool replaced) {
  replaced_.clear();
  for (auto& [tensor, entry] : shadows_) {
    if (replaced) replaced_[tensor] = std::move(entry.checksum);
    scheduler::Turn::Free(std::move(entry.tensor.data));
  }
  shadows_.clear();
}

bool WeightRecord::WasReplacedBy(HeadTensor tensor, const std::string& checksum) const {
  const auto found = replaced_.find(tensor);
  return found != replaced_.end() && found->second == checksum;
}

}  // namespace headwater::heads
