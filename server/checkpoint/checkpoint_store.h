// CheckpointStore: checkpoints of heads in a directory; each is complete or not there.
//
//   ROOT/{tenant}/{head}/{checkpoint}/manifest.json            written last, renamed in
//   ROOT/{tenant}/{head}/{checkpoint}/shard-00000-of-00002.safetensors
//
// `tenant`, `head` and `checkpoint` must match IsValidCheckpointName(), else kInvalidName; so `..` and hidden names cannot occur.
// Thread-safe.
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
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"
#include "server/checkpoint/file_system.h"

namespace headwater::checkpoint {

// What a checkpoint says beside its tensors.
struct CheckpointInfo {
  std::string name;
  HeadSpec spec;
  int64_t step = 0;          // the open step when it was saved
  int64_t update_count = 0;  // optimizer updates so far
  int64_t total_bytes = 0;
};

struct Manifest;  // manifest.h

class CheckpointStore {
 public:
  // `root` is made if it is not there. Removes temporary directories of earlier crashes.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& root) { return Open(root, PosixFileSystem()); }
  // The same on another file system, which must outlive the store.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& root, FileSystem& files);

  // Writes all tensors that `head` has (stored weights only where there is no separate master). kCheckpointAlreadyExists unless
  // `overwrite`; kDiskFull; kInvalidName. Returns the bytes written. The head must not change meanwhile.
  absl::StatusOr<int64_t> Save(const std::string& tenant, const std::string& head_id, const CheckpointInfo& info,
                               const EngineHead& head, bool overwrite);
  // kCheckpointNotFound, kFileCorrupt.
  absl::StatusOr<CheckpointInfo> Read(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;
  // Verifies every checksum first, then writes the tensors into `head`, whatever its number of shards, and returns what the
  // checkpoint says. Before the verification has passed nothing is written: kCheckpointNotFound, kChecksumMismatch, kFileCorrupt,
  // kCheckpointSpecMismatch. After it, only kEngineFailed or kInternal: part of `head` has been overwritten then.
  absl::StatusOr<CheckpointInfo> Load(const std::string& tenant, const std::string& head_id, const std::string& checkpoint,
                                      EngineHead& head) const;
  // Complete checkpoints of a head by name; damaged ones are left out.
  absl::StatusOr<std::vector<CheckpointInfo>> List(const std::string& tenant, const std::string& head_id) const;

 private:
  CheckpointStore(std::string root, FileSystem& files) : root_(std::move(root)), files_(files) {}
  // Finishes or undoes what a crash left in one head's directory.
  absl::Status CleanHeadDirectory(const std::string& directory);
  // Makes ROOT/{tenant}/{head} so that it survives a crash.
  absl::Status MakeHeadDirectory(const std::string& tenant, const std::string& head_id);
  // Writes the shard files and the manifest into `directory`, synced. Returns the bytes written.
  absl::StatusOr<int64_t> WriteFiles(const std::string& directory, const CheckpointInfo& info, const EngineHead& head);
  // Gives the complete directory `temporary` its name; replaces an older one if `overwrite`.
  absl::Status Publish(const std::string& head_directory, const std::string& temporary, const std::string& checkpoint,
                       bool overwrite);

  std::string Directory(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;
  absl::StatusOr<Manifest> OpenManifest(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;

  const std::string root_;
  FileSystem& files_;
  absl::Mutex publish_mutex_;  // one rename sequence at a time
};

// Matches [A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?.
bool IsValidCheckpointName(const std::string& name);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
