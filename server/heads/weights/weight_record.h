// WeightRecord: the bookkeeping of one head's weights. It knows the tensors that are there, their version, the newest checkpoint,
// and the tensors that wait for the step's end to replace them.
//
// Pure bookkeeping: no engine, no locks. For turns.
#ifndef HEADWATER_SERVER_HEADS_WEIGHTS_WEIGHT_RECORD_H_
#define HEADWATER_SERVER_HEADS_WEIGHTS_WEIGHT_RECORD_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/heads/steps/step_calls.h"

namespace headwater::heads {

class WeightRecord {
 public:
  explicit WeightRecord(bool has_bias) : needs_bias_(has_bias) {}

  bool HasAllTensors() const { return has_weight_ && (has_bias_ || !needs_bias_); }
  bool has_weight() const { return has_weight_; }
  // The tensor has been set, or part of it has been overwritten. kWeight or kBias.
  void MarkSet(HeadTensor tensor) { PresenceOf(tensor) = true; }
  void MarkUnset(HeadTensor tensor);
  // Nothing is known of the tensors any more: the head is lost.
  void Forget();

  // The version of the weights; the next one is counted after every change.
  int64_t version() const { return version_; }
  int64_t NextVersion();
  // Updates by the optimizer since its state was 0.
  int64_t update_count() const { return update_count_; }
  void SetUpdateCount(int64_t count) { update_count_ = count; }
  // HeadInfo::weight_checksum.
  const std::string& checksum() const { return checksum_; }
  void SetChecksum(std::string checksum) { checksum_ = std::move(checksum); }

  // Whether the newest checkpoint has this version of the weights, and `step` open.
  bool IsSaved(int64_t step) const { return saved_ == std::make_pair(version_, step); }
  // A checkpoint has this version of the weights, and this step open.
  void MarkSaved(int64_t version, int64_t step);
  // No checkpoint has the current weights.
  void ForgetSaved() { saved_.reset(); }
  // HeadInfo::unsaved_since.
  const std::optional<absl::Time>& unsaved_since() const { return unsaved_since_; }

  // A tensor that is to close the sealed step, with its checksum.
  struct Shadow {
    ShadowTensor tensor;
    std::string checksum;
  };
  using Shadows = std::map<HeadTensor, Shadow>;
  const Shadows& shadows() const { return shadows_; }
  // Replaces an earlier one of that tensor. True if all tensors of the head are there.
  bool AddShadow(const ShadowTensor& tensor, std::string checksum);
  // Drops the one at `data`; false if there is none.
  bool DropShadow(const void* data);
  // The step has ended: drops the shadows. Keeps their checksums if they have `replaced` the weights, else none.
  void EndStep(bool replaced);
  // Whether a tensor with this checksum closed the last closed step.
  bool WasReplacedBy(HeadTensor tensor, const std::string& checksum) const;

 private:
  bool& PresenceOf(HeadTensor tensor) { return tensor == HeadTensor::kBias ? has_bias_ : has_weight_; }

  const bool needs_bias_;
  bool has_weight_ = false;
  bool has_bias_ = false;
  int64_t version_ = 0;
  int64_t update_count_ = 0;
  std::string checksum_;
  std::optional<std::pair<int64_t, int64_t>> saved_;  // version and open step in the newest checkpoint
  std::optional<absl::Time> unsaved_since_;
  Shadows shadows_;
  std::map<HeadTensor, std::string> replaced_;  // checksums of the tensors that closed the last closed step
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_WEIGHTS_WEIGHT_RECORD_H_
