#include "server/model_files/xxh3.h"

#define XXH_STATIC_LINKING_ONLY  // the state's size
#include <xxhash.h>

#include "absl/strings/escaping.h"

namespace headwater::model_files {

Xxh3Hasher::Xxh3Hasher() : state_(std::make_unique<XXH3_state_t>()) { XXH3_128bits_reset(state_.get()); }

Xxh3Hasher::~Xxh3Hasher() = default;

void Xxh3Hasher::Update(const void* data, int64_t byte_count) {
  XXH3_128bits_update(state_.get(), data, static_cast<size_t>(byte_count));
}

std::string Xxh3Hasher::Digest() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

std::string Xxh3Hasher::HexDigest() const { return absl::BytesToHexString(Digest()); }

}  // namespace headwater::model_files
