// SlowUploads: the micro-batches whose rows still come. When threads or bytes run out for other clients, a stalled upload gives
// way. So clients that only pretend to upload cannot keep others out.
//
// A proxy does not know which upload has a thread and bytes. Holds no measured figure: tests/integration/limits_test.cc has the
// bounds (Overload).
#ifndef HEADWATER_SERVER_GUARD_SLOW_UPLOADS_H_
#define HEADWATER_SERVER_GUARD_SLOW_UPLOADS_H_

#include <list>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/transport/row_exchange.h"

namespace headwater::guard {

// Thread-safe.
class SlowUploads {
  struct Upload {
    std::shared_ptr<transport::RowExchange> rows;
    absl::Time begin;
  };

 public:
  // While it lives, the upload may have to give way. `now`, here and below, is observability::MonotonicNow().
  class Place {
   public:
    Place(SlowUploads& uploads, std::shared_ptr<transport::RowExchange> rows, absl::Time now);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    SlowUploads& uploads_;
    std::list<Upload>::iterator upload_;
  };

  // Ends one upload with kQueueFull: the longest without a row, if that is more than 2 s. Else the slowest of those older than 5 s,
  // if it brings less than 64 KiB/s. Uploads that lack only other processes' rows, a joined teacher's, are exempt. False if no
  // upload qualifies.
  bool GiveWay(absl::Time now);

 private:
  absl::Mutex mutex_;
  std::list<Upload> uploads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_SLOW_UPLOADS_H_
