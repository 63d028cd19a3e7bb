#include "server/checkpoint/xxh3.h"

#include <xxhash.h>

#include <new>

#include "absl/strings/escaping.h"

namespace headwater::checkpoint {

Xxh3Hasher::Xxh3Hasher() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(state_);
}

Xxh3Hasher::~Xxh3Hasher() { XXH3_freeState(state_); }

void Xxh3Hasher::Update(const void* data, int64_t byte_count) {
  XXH3_128bits_update(state_, data, static_cast<size_t>(byte_count));
}

std::string Xxh3Hasher::Digest() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

std::string Xxh3Hasher::HexDigest() const { return absl::BytesToHexString(Digest()); }

}  // namespace headwater::checkpoint
