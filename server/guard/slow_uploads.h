// SlowUploads: the micro-batches whose rows still come. When there is no thread or no byte left for another client, one that stands
// still gives way, so that clients that only pretend to upload cannot keep everybody else out.
//
// A proxy does not know which upload has a thread and bytes. Holds no measured figure: tests/integration/limits_test.cc has the
// bounds (Overload).
#ifndef HEADWATER_SERVER_GUARD_SLOW_UPLOADS_H_
#define HEADWATER_SERVER_GUARD_SLOW_UPLOADS_H_

#include <functional>
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

  // Ends, with kQueueFull, the upload that has brought no row for longest, if that is more than 2 s, else the slowest of those that
  // came 5 s ago or earlier, if that brings less than 64 KiB/s. One that lacks nothing but rows of other processes, a joined
  // teacher's, is none of them. False if there is none such.
  bool GiveWay(absl::Time now);

 private:
  absl::Mutex mutex_;
  std::list<Upload> uploads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::guard

#endif  // HEADWATER_SERVER_GUARD_SLOW_UPLOADS_H_
