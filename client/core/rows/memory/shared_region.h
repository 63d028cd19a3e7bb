// SharedRegion: host memory of this process that a server of the same host can map.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_SHARED_REGION_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_SHARED_REGION_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "client/core/link/wait.h"
#include "client/core/rows/memory/arena.h"

namespace headwater::client::internal {

class SharedRegion final : public Backing {
 public:
  // Zeroed, allocated in full. `named`: a file under /dev/shm, `headwater-` and random digits, which is removed with this object
  // (and stays if the process is killed). Otherwise a memfd, sealed against shrinking, growing and further seals.
  static absl::StatusOr<std::shared_ptr<const SharedRegion>> Make(int64_t bytes, bool named);
  ~SharedRegion() override;

  uint8_t* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }
  int fd() const { return fd_; }
  // Under /dev/shm; empty for a memfd.
  const std::string& name() const { return name_; }

  // Calls `lock` the first time only. It page-locks the region for CUDA and returns the function that undoes that, or null if it
  // cannot. Whether the region is page-locked. That function is called before the region is unmapped.
  bool LockOnce(const std::function<std::function<void()>()>& lock) const;

 private:
  SharedRegion(int fd, std::string name, uint8_t* data, int64_t bytes)
      : fd_(fd), name_(std::move(name)), data_(data), bytes_(bytes) {}

  const int fd_;
  const std::string name_;
  uint8_t* const data_;
  const int64_t bytes_;
  mutable std::mutex mutex_;
  mutable bool lock_tried_ = false;
  mutable std::function<void()> unlock_;
};

// Passes a memfd to the server's descriptor socket, by the protocol of docs/api.md; the token. An error names the failed operation
// in one sentence. `incarnation`: of the server that is meant (GetServerInfo). Blocks as long as `wait` says, and for 10 s at most.
// A server drops a memfd whose sender has gone.
absl::StatusOr<std::string> PassDescriptor(const std::string& socket_path, int memfd, int64_t bytes, const std::string& incarnation,
                                           const Wait& wait);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_SHARED_REGION_H_
