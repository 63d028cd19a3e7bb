// StartOrder: which of the micro-batches whose rows still come may begin first.
//
// A client that has several in flight takes their results in order. If a later one, of which enough has come as well, began before
// an earlier one, the client would get both at once, send the next two together, and the engine would stand still while they come.
#ifndef HEADWATER_SERVER_SCHEDULER_START_ORDER_H_
#define HEADWATER_SERVER_SCHEDULER_START_ORDER_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace headwater::scheduler {

// Thread-safe.
class StartOrder {
 public:
  // For so long others let one that came before them begin first: nobody waits for a slow uploader.
  static constexpr absl::Duration kPrecedence = absl::Milliseconds(20);

  // One that has not begun; until it is destroyed or released. Must not outlive the order.
  class Place {
   public:
    Place() = default;
    Place(Place&& other) noexcept;
    Place& operator=(Place&& other) noexcept;
    ~Place() { Release(); }
    void Release();

   private:
    friend class StartOrder;
    Place(StartOrder* order, int64_t number) : order_(order), number_(number) {}
    StartOrder* order_ = nullptr;
    int64_t number_ = 0;
  };
  // The last place. `now`, here and in IsFirst(), is of any clock that does not go back.
  Place Join(absl::Time now);
  // Whether nobody who came before `place`, up to kPrecedence before `now`, still has to begin.
  bool IsFirst(const Place& place, absl::Time now) const;

 private:
  mutable absl::Mutex mutex_;
  int64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, absl::Time> places_ ABSL_GUARDED_BY(mutex_);  // when they were taken, by number
};

}  // namespace headwater::scheduler

#endif  // HEADWATER_SERVER_SCHEDULER_START_ORDER_H_
