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

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace {

// The library's function; `name` is mangled except for Abseil's inline namespace.
template <typename Function>
Function* Real(const char* name) {
  std::string symbol = "_ZN4absl";
#if ABSL_OPTION_USE_INLINE_NAMESPACE == 1
  const std::string inline_namespace = ABSL_INTERNAL_INLINE_NAMESPACE_STR;
  symbol += std::to_string(inline_namespace.size()) + inline_namespace;
#endif
  symbol += name;
  void* address = dlsym(RTLD_NEXT, symbol.c_str());
  if (address == nullptr) {
    std::fprintf(stderr, "absl_for_tsan: there is no %s\n", symbol.c_str());
    std::abort();
  }
  return reinterpret_cast<Function*>(address);
}

constexpr unsigned kWrite = 0;
constexpr unsigned kRead = __tsan_mutex_read_lock;

// The library's waits call one another through these definitions: only the outermost one informs the sanitizer.
thread_local bool inside_library = false;

template <typename Work>
void Lock(void* mutex, unsigned flags, const Work& work) {
  if (inside_library) return work();
  __tsan_mutex_pre_lock(mutex, flags);
  inside_library = true;
  work();
  inside_library = false;
  __tsan_mutex_post_lock(mutex, flags, 0);
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
  if (inside_library) return work();
  __tsan_mutex_pre_unlock(mutex, kWrite);
  __tsan_mutex_post_unlock(mutex, kWrite);
  __tsan_mutex_pre_lock(mutex, kWrite);
  inside_library = true;
  const auto result = work();
  inside_library = false;
  __tsan_mutex_post_lock(mutex, kWrite, 0);
  return result;
}

using Method = void(absl::Mutex*);
using TryMethod = bool(absl::Mutex*);

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

Mutex::~Mutex() {
  __tsan_mutex_destroy(this, 0);
  static Method* const real = Real<Method>("5MutexD1Ev");
  real(this);
}

void Mutex::Lock() {
  static Method* const real = Real<Method>("5Mutex4LockEv");
  ::Lock(this, kWrite, [this] { real(this); });
}

void Mutex::Unlock() {
  static Method* const real = Real<Method>("5Mutex6UnlockEv");
  ::Unlock(this, kWrite, [this] { real(this); });
}

bool Mutex::TryLock() {
  static TryMethod* const real = Real<TryMethod>("5Mutex7TryLockEv");
  return ::TryLock(this, kWrite, [this] { return real(this); });
}

void Mutex::ReaderLock() {
  static Method* const real = Real<Method>("5Mutex10ReaderLockEv");
  ::Lock(this, kRead, [this] { real(this); });
}

void Mutex::ReaderUnlock() {
  static Method* const real = Real<Method>("5Mutex12ReaderUnlockEv");
  ::Unlock(this, kRead, [this] { real(this); });
}

bool Mutex::ReaderTryLock() {
  static TryMethod* const real = Real<TryMethod>("5Mutex13ReaderTryLockEv");
  return ::TryLock(this, kRead, [this] { return real(this); });
}

void Mutex::LockWhen(const Condition& condition) {
  using Function = void(Mutex*, const Condition&);
  static Function* const real = Real<Function>("5Mutex8LockWhenERKNS0_9ConditionE");
  ::Lock(this, kWrite, [&] { real(this, condition); });
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  using Function = bool(Mutex*, const Condition&, Time);
  static Function* const real = Real<Function>("5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  bool met = false;
  ::Lock(this, kWrite, [&] { met = real(this, condition, deadline); });
  return met;
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  using Function = bool(Mutex*, const Condition&, Duration);
  static Function* const real = Real<Function>("5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  bool met = false;
  ::Lock(this, kWrite, [&] { met = real(this, condition, timeout); });
  return met;
}

void Mutex::Await(const Condition& condition) {
  using Function = void(Mutex*, const Condition&);
  static Function* const real = Real<Function>("5Mutex5AwaitERKNS0_9ConditionE");
  ::Wait(this, [&] {
    real(this, condition);
    return true;
  });
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  using Function = bool(Mutex*, const Condition&, Time);
  static Function* const real = Real<Function>("5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  return ::Wait(this, [&] { return real(this, condition, deadline); });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  using Function = bool(Mutex*, const Condition&, Duration);
  static Function* const real = Real<Function>("5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return ::Wait(this, [&] { return real(this, condition, timeout); });
}

void CondVar::Wait(Mutex* mutex) {
  using Function = void(CondVar*, Mutex*);
  static Function* const real = Real<Function>("7CondVar4WaitEPNS0_5MutexE");
  ::Wait(mutex, [&] {
    real(this, mutex);
    return true;
  });
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  using Function = bool(CondVar*, Mutex*, Duration);
  static Function* const real = Real<Function>("7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  return ::Wait(mutex, [&] { return real(this, mutex, timeout); });
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  using Function = bool(CondVar*, Mutex*, Time);
  static Function* const real = Real<Function>("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  return ::Wait(mutex, [&] { return real(this, mutex, deadline); });
}

// A notification that has been given is seen without the lock: the store to its flag must be instrumented, as the load is.
void Notification::Notify() {
  MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}

Notification::~Notification() { MutexLock lock(&mutex_); }

ABSL_NAMESPACE_END
}  // namespace absl
