// One head's weights: WeightTensors has its tensors in the engine, WeightRecord the books about them.
#ifndef HEADWATER_SERVER_HEADS_WEIGHTS_WEIGHT_TENSORS_H_
#define HEADWATER_SERVER_HEADS_WEIGHTS_WEIGHT_TENSORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head_name.h"
#include "server/heads/steps/step_calls.h"

namespace headwater::checkpoint {
struct CheckpointInfo;
class CheckpointStore;
}  // namespace headwater::checkpoint

namespace headwater::heads {

// Brings elements [element_start, element_start + element_count) of a tensor. Called in ascending order, without gaps; may restart
// from element 0.
using TensorSource = std::function<absl::Status(int64_t element_start, int64_t element_count, void* out)>;

struct TensorUpdate {
  HeadTensor tensor = HeadTensor::kWeight;  // kWeight or kBias
  DataType data_type = DataType::kFloat32;  // of what `source` brings: the storage type or fp32
  TensorSource source;
  bool in_memory = false;  // `source` cannot fail: it need not be read through before
};

// An update whose whole tensor lies at `data`, which outlives it.
TensorUpdate UpdateFromMemory(HeadTensor tensor, DataType data_type, const void* data);

// Replaces an error by kEngineFailed if it promises an unchanged head (a shard not ready, a piece without memory), but `changed` is
// true. Returns any other error as it is.
absl::Status AfterTheBeginning(const absl::Status& status, bool changed);

// All that fixes the order in which an engine sums up a head's gradient: equal texts and inputs give equal bits.
// Engine and device model, shards of the vocabulary, what the chunk plan follows from, threads, and how algorithms are chosen:
// "engine=cpu; device=...; shards=0-13,13-25,25-37; workspace_bytes=...; ...". Stored in checkpoints.
std::string DescribeNumerics(const LossEngine& engine, const EngineHead& head);

// Checks, writes from sources, reads, sums up and saves one head's tensors. The Check...() methods and ReadThrough() may be called
// at any time. All others need an admission to the head.
class WeightTensors {
 public:
  // All references must outlive it.
  WeightTensors(const HeadName& name, const HeadSpec& spec, LossEngine& engine, EngineHead& engine_head)
      : name_(name), spec_(spec), engine_(engine), engine_head_(engine_head) {}

  // kMissingField, kInvalidField, kDataTypeMismatch.
  absl::Status CheckUpdates(const std::vector<TensorUpdate>& updates) const;
  // kDataLengthMismatch unless `byte_count` is the whole tensor's.
  absl::Status CheckBytes(HeadTensor tensor, DataType data_type, int64_t byte_count) const;
  // Reads the sources of what is not in memory to their ends.
  absl::Status ReadThrough(const std::vector<TensorUpdate>& updates) const;

  // `changed` becomes true with the first change, `source_failed` if the error is a source's. The gradient is 0 afterwards.
  absl::Status Write(const std::vector<TensorUpdate>& updates, bool& changed, bool& source_failed);
  // Copies elements of kWeight or kBias (storage type), kMasterWeight or kMasterBias (fp32); kInvalidField for any other tensor.
  absl::Status Read(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const;
  // Copies elements of the gradient: kGradWeight or kGradBias; kWeight and kBias mean the same two.
  absl::Status ReadGradient(HeadTensor tensor, int64_t element_start, int64_t element_count, float* out) const;
  // XXH3-128 (canonical) of the stored weight.
  absl::StatusOr<std::string> Checksum() const;

  // Writes a checkpoint and returns its bytes. `info`: name, step and update count; the rest is filled in.
  absl::StatusOr<int64_t> Save(checkpoint::CheckpointStore& store, checkpoint::CheckpointInfo info, bool overwrite);
  // A sentence if a checkpoint comes from where sums are made in another order, else nothing; with `must_agree` that is an error
  // (kCheckpointSpecMismatch).
  absl::StatusOr<std::string> CompareNumerics(const checkpoint::CheckpointStore& store, const std::string& checkpoint_name,
                                              bool must_agree) const;
  // The tensors are a checkpoint's now. Unless the head has a run of its own it continues the checkpoint's, which it must do if it
  // `comes_back` (CheckpointStore::Continue()).
  void ContinueRun(checkpoint::CheckpointStore& store, const checkpoint::CheckpointInfo& info, bool comes_back);

 private:
  // kChunkOutOfRange; kInvalidField if the head does not have the tensor.
  absl::Status CheckElements(HeadTensor tensor, int64_t element_start, int64_t element_count) const;

  const HeadName& name_;
  const HeadSpec& spec_;
  LossEngine& engine_;
  EngineHead& engine_head_;
  // The next checkpoint is of the same run: the head has been saved, has come back, or continues a restored checkpoint's run.
  bool has_run_ = false;
};

// The books about one head's weights: which tensors are there, their version, and the newest checkpoint. It also has the tensors
// that wait for the step's end to replace them. No engine, no locks. For turns.
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

#endif  // HEADWATER_SERVER_HEADS_WEIGHTS_WEIGHT_TENSORS_H_
