#include "client/core/rows/memory/arena.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client::internal {
namespace {

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

// A backing, and which parts of it are free.
struct Arena::Piece {
  std::shared_ptr<const Backing> backing;
  std::map<int64_t, int64_t> free;  // offset to bytes; neighbours are merged
  int64_t blocks = 0;
  bool retired = false;

  // First fit; -1 if there is none.
  int64_t Take(int64_t bytes) {
    for (auto span = free.begin(); span != free.end(); ++span) {
      if (span->second < bytes) continue;
      const auto [offset, available] = *span;
      free.erase(span);
      if (available > bytes) free.emplace(offset + bytes, available - bytes);
      ++blocks;
      return offset;
    }
    return -1;
  }
  void Give(int64_t offset, int64_t bytes) {
    --blocks;
    auto next = free.lower_bound(offset);
    if (next != free.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = free.erase(next);
    }
    if (next != free.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += bytes;
        return;
      }
    }
    free.emplace(offset, bytes);
  }
};

struct Arena::State {
  int64_t max_bytes = 0;
  int64_t first_bytes = 0;
  Make make;

  std::mutex making;  // one backing at a time is made; taken before mutex
  mutable std::mutex mutex;
  std::vector<Piece> pieces;
  int64_t bytes = 0;  // of all pieces
  Drop drop;          // empty once the arena has gone

  // Takes out those pieces without blocks for which goes(piece) holds. The caller drops them, without the lock.
  template <typename Goes>
  std::vector<std::shared_ptr<const Backing>> TakeIdle(Goes goes) {
    std::vector<std::shared_ptr<const Backing>> taken;
    std::erase_if(pieces, [&](Piece& piece) {
      if (piece.blocks > 0 || !goes(piece)) return false;
      bytes -= piece.backing->bytes();
      taken.push_back(std::move(piece.backing));
      return true;
    });
    return taken;
  }
  // Calls edit(piece) for all pieces, and drops those that are retired and have no blocks any more.
  template <typename Edit>
  void Change(Edit edit) {
    std::vector<std::shared_ptr<const Backing>> dropped;
    Drop told;
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (Piece& piece : pieces) edit(piece);
      dropped = TakeIdle([](const Piece& piece) { return piece.retired; });
      told = drop;
    }
    if (told && !dropped.empty()) told(dropped);
  }
};

Arena::Arena(int64_t max_bytes, int64_t first_bytes, Make make, Drop drop) : state_(std::make_shared<State>()) {
  state_->max_bytes = max_bytes;
  state_->first_bytes = first_bytes;
  state_->make = std::move(make);
  state_->drop = std::move(drop);
}

Arena::~Arena() {
  state_->Change([](Piece& piece) { piece.retired = true; });
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->drop = nullptr;
}

absl::StatusOr<std::shared_ptr<Arena::Block>> Arena::Allocate(int64_t bytes) {
  if (bytes < 1 || bytes > state_->max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes are asked for, the bound is ", state_->max_bytes));
  }
  bytes = RoundUp(bytes, kAlignment);
  const auto take = [&]() -> std::shared_ptr<Block> {
    std::lock_guard<std::mutex> lock(state_->mutex);
    for (Piece& piece : state_->pieces) {
      if (piece.retired) continue;
      const int64_t offset = piece.Take(bytes);
      if (offset >= 0) return std::make_shared<Block>(state_, piece.backing, offset, bytes);
    }
    return nullptr;
  };
  if (auto block = take(); block != nullptr) return block;
  std::lock_guard<std::mutex> one_at_a_time(state_->making);
  if (auto block = take(); block != nullptr) return block;  // another thread has made room

  std::vector<std::shared_ptr<const Backing>> dropped;
  int64_t size = 0;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    size = RoundUp(std::max({bytes, state_->first_bytes, state_->bytes}), int64_t{2} << 20);
    dropped = state_->TakeIdle([&](const Piece&) { return bytes > state_->max_bytes - state_->bytes; });
    size = std::min(size, (state_->max_bytes - state_->bytes) / kAlignment * kAlignment);
  }
  if (state_->drop && !dropped.empty()) state_->drop(dropped);
  dropped.clear();
  if (size < bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(bytes, " bytes are asked for, and all of the ", state_->max_bytes, " that there may be are in use"));
  }
  HEADWATER_ASSIGN_OR_RETURN(auto backing, state_->make(size));
  std::lock_guard<std::mutex> lock(state_->mutex);
  Piece piece;
  piece.backing = std::move(backing);
  piece.free.emplace(0, piece.backing->bytes() / kAlignment * kAlignment);
  state_->bytes += piece.backing->bytes();
  const int64_t offset = piece.Take(bytes);
  if (offset < 0) return absl::InternalError("the memory that was made is smaller than it was to be");
  state_->pieces.push_back(std::move(piece));
  return std::make_shared<Block>(state_, state_->pieces.back().backing, offset, bytes);
}

std::shared_ptr<const Backing> Arena::Find(const void* data, int64_t bytes) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(state_->mutex);
  for (const Piece& piece : state_->pieces) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(piece.backing->data());
    const int64_t size = piece.backing->bytes();
    if (begin >= base && bytes <= size && begin - base <= static_cast<uintptr_t>(size - bytes)) return piece.backing;
  }
  return nullptr;
}

void Arena::Retire(const Backing& backing) {
  state_->Change([&backing](Piece& piece) { piece.retired |= piece.backing.get() == &backing; });
}

int64_t Arena::backing_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->bytes;
}

Arena::Block::Block(std::shared_ptr<State> state, std::shared_ptr<const Backing> backing, int64_t offset, int64_t bytes)
    : state_(std::move(state)), backing_(std::move(backing)), offset_(offset), bytes_(bytes) {}

Arena::Block::~Block() {
  state_->Change([this](Piece& piece) {
    if (piece.backing == backing_) piece.Give(offset_, bytes_);
  });
}

}  // namespace headwater::client::internal
