// A file system in memory: checkpoints of tests that must be fast, or must outlive the "process" that wrote them.
//
// Behaves as PosixFileSystem() does, errors included (memory_file_system_test.cc runs both through the same operations). What was
// not synced is lost only where a test lets the power fail. Parents of relative paths and of `/x` always exist. Links do not.
// Thread-safe; files that are open stay readable after they have been removed, and must not outlive the file system.
#ifndef HEADWATER_TESTS_UNIT_SERVER_MEMORY_FILE_SYSTEM_H_
#define HEADWATER_TESTS_UNIT_SERVER_MEMORY_FILE_SYSTEM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/checkpoint/file_system.h"

namespace headwater::testing {

class MemoryFileSystem : public checkpoint::FileSystem {
 public:
  absl::Status CreateDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) const override;
  bool IsDirectory(const std::string& path) const override;
  absl::StatusOr<std::unique_ptr<checkpoint::WritableFile>> CreateFile(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<checkpoint::ReadableFile>> OpenFile(const std::string& path) const override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Exchange(const std::string& a, const std::string& b) override;
  absl::Status RemoveTree(const std::string& path) override;

  // For tests that damage what is stored: all bytes of a file, which must be there.
  std::string Contents(const std::string& path) const;
  // Creates or replaces a file.
  void SetContents(const std::string& path, const std::string& bytes);
  // Bytes of all files together may be at most this; an Append() beyond it is kDiskFull. INT64_MAX at first.
  void set_capacity_bytes(int64_t capacity_bytes);
  int64_t stored_bytes() const;

  // From now on it is noted what has not reached the disk: bytes of files that were not synced, and changes to directories that
  // were not synced, which reach the disk in the order in which they were made, as in a journal. `false` forgets all that.
  void WatchSyncs(bool watch);
  // The power fails: of the changes to directories a beginning stays, of the bytes that were written to each file too; `choice`
  // says how much of either. No file may be open, and the watch ends.
  void LosePower(uint64_t choice);

 private:
  class Writer;
  class Reader;
  // Bytes of a file; null stands for a directory.
  using Node = std::shared_ptr<std::string>;
  // A change to a directory that is not synced yet, with all entries as they were before it.
  struct Change {
    std::string directory;
    std::map<std::string, Node> before;
  };

  // To be called before `path` appears, goes, or changes its place.
  void Note(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckParent(const std::string& path) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes `path` and what is below it out of `nodes_`, by the rest of the path.
  std::map<std::string, Node> TakeTree(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PutTree(const std::string& path, std::map<std::string, Node> tree) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t StoredBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::map<std::string, Node> nodes_ ABSL_GUARDED_BY(mutex_);  // by path
  int64_t capacity_bytes_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;
  bool watches_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Change> changes_ ABSL_GUARDED_BY(mutex_);  // since the last sync that covered them, oldest first
  std::vector<Node> unsynced_ ABSL_GUARDED_BY(mutex_);   // files that were written and not synced
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_SERVER_MEMORY_FILE_SYSTEM_H_
