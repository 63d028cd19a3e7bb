// A file that keeps the results of a timed search, so that the next start need not search again.
//
// The file is JSON: {"format": "headwater-algorithms-1", "algorithms": {KEY: [8 words in hexadecimal], ...}}. Keys are whatever the
// caller makes of everything that an algorithm depends on (device, library version, shape); words are opaque. The reader of an
// entry checks whether it can be used, because the file may come from elsewhere.
//
// The file is an aid, never a condition. A file that is missing, cannot be read, or holds something else counts as empty, and the
// next Put() replaces it. Several processes may share it. It is replaced as a whole, and one of two simultaneous writers loses its
// entry, which costs a search later. One thread at a time on an object.
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_ALGORITHM_CACHE_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_ALGORITHM_CACHE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace headwater::cuda {

// cublasLtMatmulAlgo_t's content.
using AlgorithmWords = std::array<uint64_t, 8>;

class AlgorithmCache {
 public:
  // Above these limits a file counts as foreign, and the cache starts empty.
  static constexpr size_t kMaxEntries = 8192;
  static constexpr size_t kMaxFileBytes = size_t{8} << 20;

  // Reads the file. An empty path: entries live as long as the object.
  explicit AlgorithmCache(std::string path);

  std::optional<AlgorithmWords> Find(const std::string& key) const;

  // Stores `words` under `key`, replacing older ones, and writes the file: its present entries, with this object's own entries over
  // them. The entry counts for Find() even if the file cannot be written; kUnavailable then, which callers may ignore.
  absl::Status Put(const std::string& key, const AlgorithmWords& words);

 private:
  std::string path_;
  std::map<std::string, AlgorithmWords> entries_;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_ALGORITHM_CACHE_H_
