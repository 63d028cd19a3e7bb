// CheckpointStore: checkpoints of heads in a directory; each is complete or not there.
//
//   ROOT/{tenant}/{head}/{checkpoint}/manifest.json            written last, renamed in
//   ROOT/{tenant}/{head}/{checkpoint}/shard-00000-of-00002.safetensors
//
// A shard file holds rows [vocab_start, vocab_end) of `weight`, `bias`, `master_weight`, `moment1_weight`, ... The manifest names
// format version, head spec, step, optimizer update count, and each file's size and XXH3-128. A checkpoint is written into a
// temporary directory beside its place, synced, and renamed; leftovers of crashes are removed at start.
#ifndef HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
#define HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"

namespace headwater::checkpoint {

// What a checkpoint says beside its tensors.
struct CheckpointInfo {
  std::string name;
  HeadSpec spec;
  int64_t step = 0;          // the open step when it was saved
  int64_t update_count = 0;  // optimizer updates so far
  int64_t total_bytes = 0;
};

class CheckpointStore {
 public:
  // `root` is made if it is not there. Removes temporary directories of earlier crashes.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& root);

  // Writes all tensors that `head` has (stored weights only where there is no separate master). kCheckpointAlreadyExists unless
  // `overwrite`; kDiskFull; kInvalidName. Returns the bytes written. The head must not change meanwhile.
  absl::StatusOr<int64_t> Save(const std::string& tenant, const std::string& head_id, const CheckpointInfo& info,
                               const EngineHead& head, bool overwrite);
  // kCheckpointNotFound, kFileCorrupt.
  absl::StatusOr<CheckpointInfo> Read(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;
  // Verifies every checksum first, then writes the tensors into `head`, whatever its number of shards. Before the verification has
  // passed nothing is written. kChecksumMismatch, kFileCorrupt, kCheckpointSpecMismatch.
  absl::Status Load(const std::string& tenant, const std::string& head_id, const std::string& checkpoint, EngineHead& head) const;
  // Complete checkpoints of a head by name.
  absl::StatusOr<std::vector<CheckpointInfo>> List(const std::string& tenant, const std::string& head_id) const;

 private:
  explicit CheckpointStore(std::string root) : root_(std::move(root)) {}
  const std::string root_;
};

// Matches [A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?.
bool IsValidCheckpointName(const std::string& name);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
