// Arena: blocks within a few large pieces of memory, which grow in number, are used again, and are bounded in all.
#ifndef HEADWATER_CLIENT_CORE_ROWS_MEMORY_ARENA_H_
#define HEADWATER_CLIENT_CORE_ROWS_MEMORY_ARENA_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace headwater::client::internal {

// A piece of memory that can be registered with the server. Constant.
class Backing {
 public:
  Backing() : key_(next_key_.fetch_add(1)) {}
  virtual ~Backing() = default;
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  virtual uint8_t* data() const = 0;
  virtual int64_t bytes() const = 0;
  // Never the same for two backings of this process, whatever became of their addresses.
  uint64_t key() const { return key_; }

 private:
  static inline std::atomic<uint64_t> next_key_{1};
  const uint64_t key_;
};

using Backings = absl::Span<const std::shared_ptr<const Backing>>;

// Thread-safe. Blocks keep their arena's state, so that it may go before them.
class Arena {
 public:
  using Make = std::function<absl::StatusOr<std::shared_ptr<const Backing>>(int64_t bytes)>;
  using Drop = std::function<void(Backings backings)>;

  // `make` makes a backing of at least so many bytes. `drop` is called with backings before they go, without a lock held. At most
  // `max_bytes` of backings at any time. The first has `first_bytes`, later ones as much as there is already, or the size of the
  // block.
  Arena(int64_t max_bytes, int64_t first_bytes, Make make, Drop drop);
  // Drops the backings without blocks; the others go with their last block, without `drop`.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Bytes [offset, offset + bytes) of a backing, given back when it goes.
  class Block;
  // RESOURCE_EXHAUSTED without a reason if there is no room, or the error of `make`.
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t bytes);

  // The backing in whose blocks [data, data + bytes) lies, or null.
  std::shared_ptr<const Backing> Find(const void* data, int64_t bytes) const;
  // No block is made in this backing any more; it goes with its last one. For memory that another process may still write to.
  void Retire(const Backing& backing);

  int64_t backing_bytes() const;

  static constexpr int64_t kAlignment = 4096;

 private:
  struct Piece;
  struct State;
  const std::shared_ptr<State> state_;
};

class Arena::Block {
 public:
  Block(std::shared_ptr<State> state, std::shared_ptr<const Backing> backing, int64_t offset, int64_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const std::shared_ptr<const Backing>& backing() const { return backing_; }
  int64_t offset() const { return offset_; }
  int64_t bytes() const { return bytes_; }
  uint8_t* data() const { return backing_->data() + offset_; }

 private:
  const std::shared_ptr<State> state_;
  const std::shared_ptr<const Backing> backing_;
  const int64_t offset_;
  const int64_t bytes_;  // rounded up
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_MEMORY_ARENA_H_
