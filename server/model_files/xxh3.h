// XXH3-128 of a stream of bytes, in its canonical (big-endian) form: the checksum of weights and checkpoint files.
#ifndef HEADWATER_SERVER_MODEL_FILES_XXH3_H_
#define HEADWATER_SERVER_MODEL_FILES_XXH3_H_

#define XXH_STATIC_LINKING_ONLY  // the state's size
#include <xxhash.h>

#include <cstdint>
#include <string>

#include "absl/strings/escaping.h"

namespace headwater::model_files {

// Not thread-safe.
class Xxh3Hasher {
 public:
  Xxh3Hasher() { XXH3_128bits_reset(&state_); }

  void Update(const void* data, int64_t byte_count) { XXH3_128bits_update(&state_, data, static_cast<size_t>(byte_count)); }
  // The checksum of all bytes so far: 16 bytes.
  std::string Digest() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_));
    return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
  }
  // Digest() in lower-case hexadecimal: 32 characters.
  std::string HexDigest() const { return absl::BytesToHexString(Digest()); }

 private:
  XXH3_state_t state_;
};

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_XXH3_H_
