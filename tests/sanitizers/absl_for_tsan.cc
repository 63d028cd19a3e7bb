// Lets ThreadSanitizer see Abseil's locks where Abseil comes as shared libraries that are not instrumented.
//
// The sanitizer sees pthread's locks by itself. But absl::Mutex is made of atomics and futexes inside the library. Everything that
// it guards would be reported as a race, in our code and between ours and gRPC's. The definitions below take the library's place in
// a program that they are linked into. The dynamic linker prefers the program's own symbols, also for calls out of libgrpc. Each
// informs the sanitizer and calls the library's function of the same name. Between pre_lock and post_lock (and the unlock pair) the
// sanitizer ignores memory accesses. That is right for absl::Conditions, because the library evaluates them in any thread that
// holds the lock. Only for builds with -fsanitize=thread; with static Abseil the whole file would clash and must be left out.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace {

// A function's name as a template's argument: mangled, except for Abseil's inline namespace.
template <size_t kSize>
struct Name {
  constexpr Name(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }  // NOLINT(google-explicit-constructor)
  char text[kSize];
};

// Calls the library's function, with pointers for references: both are passed alike.
template <Name kName, typename Result = void, typename... Arguments>
Result Real(Arguments... arguments) {
  static const auto function = [] {
    std::string symbol = "_ZN4absl";
#if ABSL_OPTION_USE_INLINE_NAMESPACE == 1
    const std::string inline_namespace = ABSL_INTERNAL_INLINE_NAMESPACE_STR;
    symbol += std::to_string(inline_namespace.size()) + inline_namespace;
#endif
    symbol += kName.text;
    void* const address = dlsym(RTLD_NEXT, symbol.c_str());
    if (address == nullptr) {
      std::fprintf(stderr, "absl_for_tsan: there is no %s\n", symbol.c_str());
      std::abort();
    }
    return reinterpret_cast<Result (*)(Arguments...)>(address);
  }();
  return function(arguments...);
}

constexpr unsigned kWrite = 0;
constexpr unsigned kRead = __tsan_mutex_read_lock;

// The library's waits call one another through these definitions: only the outermost one informs the sanitizer.
thread_local bool inside_library = false;

template <typename Work>
auto Lock(void* mutex, unsigned flags, const Work& work) {
  if (inside_library) return work();
  struct Acquisition {
    void* mutex;
    unsigned flags;
    ~Acquisition() {
      inside_library = false;
      __tsan_mutex_post_lock(mutex, flags, 0);
    }
  };
  __tsan_mutex_pre_lock(mutex, flags);
  inside_library = true;
  const Acquisition acquisition = {mutex, flags};
  return work();
}

template <typename Work>
bool TryLock(void* mutex, unsigned flags, const Work& work) {
  __tsan_mutex_pre_lock(mutex, flags | __tsan_mutex_try_lock);
  const bool locked = work();
  __tsan_mutex_post_lock(mutex, flags | __tsan_mutex_try_lock | (locked ? 0 : __tsan_mutex_try_lock_failed), 0);
  return locked;
}

template <typename Work>
void Unlock(void* mutex, unsigned flags, const Work& work) {
  __tsan_mutex_pre_unlock(mutex, flags);
  work();
  __tsan_mutex_post_unlock(mutex, flags);
}

// Gives the lock up, waits, and has it again.
template <typename Work>
auto Wait(void* mutex, const Work& work) {
  if (!inside_library) Unlock(mutex, kWrite, [] {});
  return Lock(mutex, kWrite, work);
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

Mutex::~Mutex() {
  __tsan_mutex_destroy(this, 0);
  Real<"5MutexD1Ev">(this);
}

void Mutex::Lock() {
  ::Lock(this, kWrite, [this] { Real<"5Mutex4LockEv">(this); });
}

void Mutex::Unlock() {
  ::Unlock(this, kWrite, [this] { Real<"5Mutex6UnlockEv">(this); });
}

bool Mutex::TryLock() {
  return ::TryLock(this, kWrite, [this] { return Real<"5Mutex7TryLockEv", bool>(this); });
}

void Mutex::ReaderLock() {
  ::Lock(this, kRead, [this] { Real<"5Mutex10ReaderLockEv">(this); });
}

void Mutex::ReaderUnlock() {
  ::Unlock(this, kRead, [this] { Real<"5Mutex12ReaderUnlockEv">(this); });
}

bool Mutex::ReaderTryLock() {
  return ::TryLock(this, kRead, [this] { return Real<"5Mutex13ReaderTryLockEv", bool>(this); });
}

void Mutex::LockWhen(const Condition& condition) {
  ::Lock(this, kWrite, [&] { Real<"5Mutex8LockWhenERKNS0_9ConditionE">(this, &condition); });
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  constexpr Name kName = "5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE";
  return ::Lock(this, kWrite, [&] { return Real<kName, bool>(this, &condition, deadline); });
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  constexpr Name kName = "5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE";
  return ::Lock(this, kWrite, [&] { return Real<kName, bool>(this, &condition, timeout); });
}

void Mutex::Await(const Condition& condition) {
  ::Wait(this, [&] { Real<"5Mutex5AwaitERKNS0_9ConditionE">(this, &condition); });
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  constexpr Name kName = "5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE";
  return ::Wait(this, [&] { return Real<kName, bool>(this, &condition, deadline); });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  constexpr Name kName = "5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE";
  return ::Wait(this, [&] { return Real<kName, bool>(this, &condition, timeout); });
}

void CondVar::Wait(Mutex* mutex) {
  ::Wait(mutex, [&] { Real<"7CondVar4WaitEPNS0_5MutexE">(this, mutex); });
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  return ::Wait(mutex, [&] { return Real<"7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE", bool>(this, mutex, timeout); });
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  return ::Wait(mutex, [&] { return Real<"7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE", bool>(this, mutex, deadline); });
}

// A notification that has been given is seen without the lock: the store to its flag must be instrumented, as the load is.
void Notification::Notify() {
  MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}

Notification::~Notification() { MutexLock lock(&mutex_); }

ABSL_NAMESPACE_END
}  // namespace absl
