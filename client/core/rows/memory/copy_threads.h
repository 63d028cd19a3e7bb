// CopyThreads: copies large pieces of host memory with several threads: one alone moves about 10 GB/s.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_COPY_THREADS_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_COPY_THREADS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace headwater::client::internal {

// Thread-safe: copies of several callers share the threads.
class CopyThreads {
 public:
  // `threads` >= 1, the caller of Copy() included. They are started with the first copy that is worth it.
  explicit CopyThreads(int threads) : thread_count_(threads) {}
  ~CopyThreads();
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;

  // Like memcpy(). Returns when all is copied.
  void Copy(void* to, const void* from, int64_t bytes);

 private:
  struct Job {
    std::mutex mutex;
    std::condition_variable done;
    int left = 0;
  };
  struct Piece {
    void* to;
    const void* from;
    int64_t bytes;
    Job* job;
  };
  void Run();
  static void Do(const Piece& piece);

  const int thread_count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> pieces_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_COPY_THREADS_H_
