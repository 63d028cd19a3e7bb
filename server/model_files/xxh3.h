// XXH3-128 of a stream of bytes, in its canonical (big-endian) form: the checksum of weights and checkpoint files.
#ifndef HEADWATER_SERVER_MODEL_FILES_XXH3_H_
#define HEADWATER_SERVER_MODEL_FILES_XXH3_H_

#include <cstdint>
#include <memory>
#include <string>

struct XXH3_state_s;

namespace headwater::model_files {

// Not thread-safe.
class Xxh3Hasher {
 public:
  Xxh3Hasher();
  ~Xxh3Hasher();

  void Update(const void* data, int64_t byte_count);
  // The checksum of all bytes so far: 16 bytes.
  std::string Digest() const;
  // Digest() in lower-case hexadecimal: 32 characters.
  std::string HexDigest() const;

 private:
  const std::unique_ptr<XXH3_state_s> state_;
};

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_XXH3_H_
