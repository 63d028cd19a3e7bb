// CheckpointStore: checkpoints of heads in a directory; each is complete or not there.
//
//   ROOT/{tenant}/{head}/{checkpoint}/manifest.json            written last, renamed in
//   ROOT/{tenant}/{head}/{checkpoint}/shard-00000-of-00002.safetensors
//   ROOT/{tenant}/{head}/.live                                 the head is to come back when the server starts again
//
// `tenant`, `head` and `checkpoint` must match IsValidCheckpointName(), else kInvalidName; so `..` and hidden names cannot occur.
// Thread-safe.
//
// A shard file holds rows [vocab_start, vocab_end) of `weight`, `bias`, `master_weight`, `moment1_weight`, ... The manifest names
// format version, head spec, step, optimizer update count, and each file's size and XXH3-128. A checkpoint is written into a
// temporary directory beside its place, synced, and renamed; leftovers of crashes are removed at start, but not while another
// process holds ROOT (ROOT/.lock): what looks left over may be what it is writing.
//
// Checkpoints of a name are numbered in the order in which they were begun. What one head saves is a run, and each checkpoint of it
// tells the run by the number of the first one. That one marks the head as live, just before it is published, with the run: a head
// that is made under the name of a former one never comes back from what that left, and removes nothing of it. Forget() and
// BeginAnew() remove the mark; Continue() sets it for a new head that was restored from a checkpoint, and goes on with its run. A
// mark without any checkpoint of its run (the first Save() failed) means nothing.
//
// Checkpoints whose names differ only in the number at their end (step-100, step-200) are a series. Of each series in a live head's
// run the newest `keep` stay. What is beyond them goes before another one is written, so that a lower `keep` makes room on a full
// disk; and what the new one makes superfluous, once that is durable. A name without a number is a series of its own.
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
  std::string numerics;        // what fixes the order of its sums; empty in those of older versions
  int64_t sequence = 0;        // rises with each checkpoint of a name: set by Save(); 0 in those of older versions
  int64_t first_sequence = 0;  // that of the first one of its run: likewise
  int64_t save_time_s = 0;     // seconds since 1970, set by Save(); 0 in those of older versions
};

struct Manifest;  // manifest.h

class CheckpointStore {
 public:
  // `root` is made if it is not there. Removes temporary directories of earlier crashes. If another process has it open, nothing is
  // removed and the log says so.
  // `files` must outlive the store. `keep`: checkpoints of a series that stay; 0: all.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& root, FileSystem& files = PosixFileSystem(),
                                                               int64_t keep = 0);

  // Writes all tensors that `head` has (stored weights only where there is no separate master). kCheckpointAlreadyExists unless
  // `overwrite`; kDiskFull; kInvalidName. Returns the bytes written. The head must not change meanwhile. Older checkpoints of the
  // series that do not stay are removed, before and after; one that cannot be is told in the log, and the next Save() tries again.
  absl::StatusOr<int64_t> Save(const std::string& tenant, const std::string& head_id, const CheckpointInfo& info,
                               const EngineHead& head, bool overwrite);
  // kCheckpointNotFound, kFileCorrupt.
  absl::StatusOr<CheckpointInfo> Read(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;
  // Verifies every checksum first, then writes the tensors into `head`, whatever its number of shards, and returns what the
  // checkpoint says. Before the verification has passed nothing is written: kCheckpointNotFound, kChecksumMismatch, kFileCorrupt,
  // kCheckpointSpecMismatch. After it, only kEngineFailed or kInternal: part of `head` has been overwritten then.
  absl::StatusOr<CheckpointInfo> Load(const std::string& tenant, const std::string& head_id, const std::string& checkpoint,
                                      EngineHead& head) const;
  // Removes a checkpoint, complete or damaged; false if there is none. kInvalidName.
  absl::StatusOr<bool> Remove(const std::string& tenant, const std::string& head_id, const std::string& checkpoint);
  // What a trainer may restore, newest first: "step-20=20,step-10=10", names with the steps that they begin, as many as 512 bytes
  // hold. Empty if there is nothing, or it cannot be read.
  std::string Steps(const std::string& tenant, const std::string& head_id) const;
  // Complete checkpoints of a head, newest first; then the damaged ones, by name.
  struct Catalogue {
    std::vector<CheckpointInfo> newest_first;
    std::vector<std::string> damaged;  // names of those whose manifest cannot be read
    bool empty() const { return newest_first.empty() && damaged.empty(); }
  };
  absl::StatusOr<Catalogue> ListNewestFirst(const std::string& tenant, const std::string& head_id) const;
  // Complete checkpoints of a head by name; damaged ones are left out, and their names added to `damaged` (may be null).
  absl::StatusOr<std::vector<CheckpointInfo>> List(const std::string& tenant, const std::string& head_id,
                                                   std::vector<std::string>* damaged = nullptr) const;

  // What a live head can come back from; how old the damaged ones are is not known. Empty for a head that is not live.
  absl::StatusOr<Catalogue> FindComebacks(const std::string& tenant, const std::string& head_id) const;
  // Heads that have been saved and not been forgotten since, as {tenant, head}, sorted: what a server that starts brings back.
  // Those for which FindComebacks() is not empty, or fails.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> LiveHeads() const;
  // The head has been deleted: it is not to come back. Its checkpoints stay. OK if it was not known. Not while it is being saved.
  absl::Status Forget(const std::string& tenant, const std::string& head_id);
  // A new head has been made under this name, where a former one may never have been forgotten. It is not to come back as that one,
  // not even if it ends before its first Save(), which begins a run. Likewise.
  absl::Status BeginAnew(const std::string& tenant, const std::string& head_id);
  // Such a head has been restored from `restored`, a checkpoint of its name, before its first Save(): it goes on with the run of
  // this checkpoint, and comes back from the newest one of that. False, and it begins a run, if the checkpoint, which is of an
  // older version, tells none, or if that cannot be written down, which is told in the log. Likewise.
  bool Continue(const std::string& tenant, const std::string& head_id, const CheckpointInfo& restored);

 private:
  CheckpointStore(std::string root, FileSystem& files, int64_t keep) : root_(std::move(root)), files_(files), keep_(keep) {}
  // {tenant, head} of every directory that can be a head's, sorted.
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> AllHeads() const;
  // Finishes or undoes what a crash left in one head's directory.
  absl::Status CleanHeadDirectory(const std::string& directory);
  // Makes ROOT/{tenant}/{head} so that it survives a crash.
  absl::Status MakeHeadDirectory(const std::string& tenant, const std::string& head_id);
  // Gives the complete directory `temporary` its name; replaces an older one if `overwrite`.
  absl::Status Publish(const std::string& head_directory, const std::string& temporary, const std::string& checkpoint,
                       bool overwrite);

  // Removes what is beyond `keep_` in the series of `checkpoint` in a run. `is_saved`: it is there, and counts as the newest; else
  // those that are there stay, as many as `keep_`, whether it is one of them or not.
  void Prune(const std::string& tenant, const std::string& head_id, const std::string& checkpoint, bool is_saved,
             int64_t first_sequence);
  // Removes a checkpoint that is there; after a crash it is whole or gone.
  absl::Status RemoveCheckpoint(const std::string& head_directory, const std::string& checkpoint);

  // Numbers of one head's checkpoints, in this process.
  struct Sequences {
    int64_t first = 1;  // of the run
    int64_t last = 0;   // that was given out
  };
  // Gives out the next number.
  absl::StatusOr<Sequences> NextSequence(const std::string& tenant, const std::string& head_id);
  // The next number is found out from the files again.
  void ForgetSequences(const std::string& head_directory);
  // The number in the mark of a live head (0 if the mark is damaged), or nothing.
  std::optional<int64_t> ReadLiveMark(const std::string& head_directory) const;
  // Marks a head as live, unless it is.
  absl::Status MarkLive(const std::string& head_directory, int64_t first_sequence);

  std::string HeadDirectory(const std::string& tenant, const std::string& head_id) const;
  std::string Directory(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;
  absl::StatusOr<Manifest> OpenManifest(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const;

  const std::string root_;
  FileSystem& files_;
  const int64_t keep_;
  std::unique_ptr<DirectoryHold> hold_;  // of `root_`; null where it cannot be held
  absl::Mutex publish_mutex_;            // one rename sequence at a time
  absl::Mutex sequence_mutex_;
  std::map<std::string, Sequences> sequences_ ABSL_GUARDED_BY(sequence_mutex_);  // by head directory, since the first Save()
};

// Matches [A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?.
bool IsValidCheckpointName(const std::string& name);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
