// CheckpointStore: checkpoints of heads in a directory; each is complete or absent.
//
//   ROOT/{tenant}/{head}/{checkpoint}/manifest.json            written last, renamed in
//   ROOT/{tenant}/{head}/{checkpoint}/shard-00000-of-00002.safetensors
//   ROOT/{tenant}/{head}/.live                                 the head comes back when the server restarts
//
// `tenant`, `head` and `checkpoint` must match IsValidCheckpointName(), else kInvalidName; so `..` and hidden names cannot occur.
// Thread-safe.
//
// A shard file holds rows [vocab_start, vocab_end) of `weight`, `bias`, `master_weight`, `moment1_weight`, ... The manifest names
// format version, head spec, step, optimizer update count, and each file's size and XXH3-128. A checkpoint is written into a
// temporary directory beside its place, synced, and renamed. Open() removes leftovers of crashes, unless another process holds ROOT
// (ROOT/.lock) and may be writing them.
//
// Checkpoints of a name are numbered in the order in which they were begun. The checkpoints that one head saves are a run, which
// each names by the number of its first. Save() marks the head as live, with its run, just before the run's first checkpoint is
// published. So a new head never comes back from a former head's checkpoints under its name, and never removes them. Forget()
// removes the mark. Continue() sets it for a new head that was restored from a checkpoint and continues that run. A mark
// without a checkpoint of its run (the first Save() failed) is ignored.
//
// Checkpoints whose names differ only in the number at their end (step-100, step-200) are a series; a name without a number is its
// own series. The newest `keep` of each series in a live head's run stay. Save() removes the excess before it writes, so that a
// lower `keep` makes room on a full disk. Once the new checkpoint is durable, Save() removes those that it replaces.
#ifndef HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
#define HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/kernels/engine.h"
#include "server/checkpoint/file_system.h"

namespace headwater::checkpoint {

struct CheckpointInfo {
  std::string name;
  HeadSpec spec;
  int64_t step = 0;          // the open step when it was saved
  int64_t update_count = 0;  // optimizer updates so far
  int64_t total_bytes = 0;
  std::string numerics;        // the settings that fix the order of its sums; empty in checkpoints of older versions
  int64_t sequence = 0;        // rises with each checkpoint of a name: set by Save(); 0 in checkpoints of older versions
  int64_t first_sequence = 0;  // `sequence` of the first checkpoint of its run: set by Save(); 0 in checkpoints of older versions
  int64_t save_time_s = 0;     // seconds since 1970, set by Save(); 0 in checkpoints of older versions
};

struct Manifest;  // manifest.h

class CheckpointStore {
 public:
  // Creates `root` if it is missing. Removes temporary directories of earlier crashes; if another process has `root` open, logs
  // that and removes nothing. `files` must outlive the store. `keep`: checkpoints of a series that stay; 0: all.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& root, FileSystem& files = PosixFileSystem(),
                                                               int64_t keep = 0);

  // Writes all tensors that `head` has (stored weights only without a separate master). kCheckpointAlreadyExists unless
  // `overwrite`; kDiskFull; kInvalidName. Returns the bytes written. The head must not change meanwhile. Removes excess checkpoints
  // of the series, before and after; a failed removal is logged and retried by the next Save().
  absl::StatusOr<int64_t> Save(const std::string& tenant, const std::string& head_id, const CheckpointInfo& info,
                               const EngineHead& head, bool overwrite);
  // kCheckpointNotFound, kFileCorrupt.
  absl::StatusOr<CheckpointInfo> Read(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;
  // Verifies every checksum first, then writes the tensors into `head`, whatever its number of shards, and returns the checkpoint's
  // info. Errors before anything is written: kCheckpointNotFound, kChecksumMismatch, kFileCorrupt, kCheckpointSpecMismatch. After
  // the verification only kEngineFailed or kInternal: part of `head` has been overwritten then.
  absl::StatusOr<CheckpointInfo> Load(const std::string& tenant, const std::string& head_id, const std::string& checkpoint,
                                      EngineHead& head) const;
  // Removes a checkpoint, complete or damaged; false if it is absent. kInvalidName.
  absl::StatusOr<bool> Remove(const std::string& tenant, const std::string& head_id, const std::string& checkpoint);
  // The checkpoints that a trainer may restore, newest first: "step-20=20,step-10=10", names with the steps that they begin. At
  // most 512 bytes. Empty without checkpoints, or if they cannot be read.
  std::string Steps(const std::string& tenant, const std::string& head_id) const;
  // Complete checkpoints of a head, newest first; then the damaged ones, by name.
  struct Catalogue {
    std::vector<CheckpointInfo> newest_first;
    std::vector<std::string> damaged;  // names of those whose manifest cannot be read
    bool empty() const { return newest_first.empty() && damaged.empty(); }
  };
  absl::StatusOr<Catalogue> ListNewestFirst(const std::string& tenant, const std::string& head_id) const;

  // The checkpoints that a live head can come back from; the age of damaged ones is unknown. Empty for a head that is not live.
  absl::StatusOr<Catalogue> FindComebacks(const std::string& tenant, const std::string& head_id) const;
  // Heads to bring back at a server's start, as {tenant, head}, sorted: saved, not forgotten since, and with FindComebacks() that
  // is not empty, or fails.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> LiveHeads() const;
  // The head of this name must not come back: it has been deleted, or a new head has been made. The first Save() of a new head
  // begins a run. Checkpoints stay. OK for an unknown head. Not during its Save().
  absl::Status Forget(const std::string& tenant, const std::string& head_id);
  // A new head has been restored from `restored`, a checkpoint of its name, before its first Save(). It continues this checkpoint's
  // run and comes back from the run's newest checkpoint. False, and the head begins a run, if the checkpoint (of an older
  // version) names no run, or if the mark cannot be written (logged). Not during its Save().
  bool Continue(const std::string& tenant, const std::string& head_id, const CheckpointInfo& restored);

 private:
  CheckpointStore(std::string root, FileSystem& files, int64_t keep) : root_(std::move(root)), files_(files), keep_(keep) {}
  // {tenant, head} of every directory that can be a head's, sorted.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> AllHeads() const;
  // Finishes or undoes the leftovers of a crash in one head's directory.
  absl::Status CleanHeadDirectory(const std::string& directory);
  // Makes ROOT/{tenant}/{head}, durably.
  absl::Status MakeHeadDirectory(const std::string& tenant, const std::string& head_id);
  // Gives the complete directory `temporary` its name; replaces an older one if `overwrite`.
  absl::Status Publish(const std::string& head_directory, const std::string& temporary, const std::string& checkpoint,
                       bool overwrite);

  // Removes the excess over `keep_` in the series of `checkpoint` in a run.
  void Prune(const std::string& tenant, const std::string& head_id, const std::string& checkpoint, int64_t first_sequence);
  // Removes an existing checkpoint; after a crash it is whole or gone.
  absl::Status RemoveCheckpoint(const std::string& head_directory, const std::string& checkpoint);

  // Numbers of one head's checkpoints, in this process.
  struct Sequences {
    int64_t first = 1;  // of the run
    int64_t last = 0;   // the last number given out
  };
  absl::StatusOr<Sequences> NextSequence(const std::string& tenant, const std::string& head_id);
  // The number in the mark of a live head (0 if the mark is damaged); nullopt without a mark.
  std::optional<int64_t> ReadLiveMark(const std::string& head_directory) const;
  absl::Status MarkLive(const std::string& head_directory, int64_t first_sequence);

  std::string HeadDirectory(const std::string& tenant, const std::string& head_id) const;
  absl::StatusOr<Manifest> OpenManifest(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;

  const std::string root_;
  FileSystem& files_;
  const int64_t keep_;
  std::shared_ptr<void> hold_;  // of `root_`; null where it cannot be held
  absl::Mutex publish_mutex_;   // one rename sequence at a time
  absl::Mutex sequence_mutex_;
  std::map<std::string, Sequences> sequences_ ABSL_GUARDED_BY(sequence_mutex_);  // by head directory, since the first Save()
};

// Matches [A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?.
bool IsValidCheckpointName(const std::string& name);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
