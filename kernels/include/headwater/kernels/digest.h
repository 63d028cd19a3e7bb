// The 128-bit digest of micro-batches: one function, the same on every path, engine and language.
//
// It distinguishes an honest repeat from a different payload; it is not a cryptographic hash. Rows are hashed independently of
// chunking and order of arrival, so that they can be hashed as they arrive (and on a GPU in parallel). Specification with test
// vectors: docs/math.md, "Digest".
//
//   Key schedule  k[i] = splitmix64(0x9E3779B97F4A7C15 * (i + 1)), i in [0, 512), mod 2^64; splitmix64(x) first adds
//                 0x9E3779B97F4A7C15 to x, as Steele et al. define it.
//   Block         up to 4096 bytes of one row, read as little-endian 64-bit words (w0, w1), (w2, w3), ...; the last partial pair
//                 is filled with zero bytes.
//   NH(block)     sum over pairs p of (w[2p] + k[2p] mod 2^64) * (w[2p+1] + k[2p+1] mod 2^64), mod 2^128: the NH universal hash of
//                 UMAC (Black et al., CRYPTO '99) with 64-bit words.
//   Finish(h, a, b)  with F = murmur3's fmix64 and h = (high, low):
//                 l = F(low ^ F(a + 0x9E3779B97F4A7C15)); u = F(high + l + F(b ^ 0xD1B54A32D192ED03)); the result is (u, F(l + u)).
//   Rows          sum mod 2^128 over rows r and blocks j of Finish(NH(block j of row r), stream << 40 | j, r).
//   Header        c = 0; for each block of the header bytes at offset o: c = Finish(c + NH(block), o, 1).
//   Digest        Finish(rows + Finish(c, header length, 2), header length, 0), little-endian.
#ifndef HEADWATER_KERNELS_DIGEST_H_
#define HEADWATER_KERNELS_DIGEST_H_

#include <cstdint>
#include <string>

#include "headwater/kernels/engine.h"

namespace headwater {

// Adds up a micro-batch's digest. Not thread-safe; independent builders over disjoint rows can be merged.
class DigestBuilder {
 public:
  // Hashes `row_count` rows of `row_bytes` bytes each that begin at row `row_start` of stream `stream` (0: hidden states,
  // 1 + term: a term's teacher rows). Every row must be added exactly once, in any order.
  void AddRows(int32_t stream, int64_t row_start, int64_t row_count, int64_t row_bytes, const void* data);
  // Adds rows that were hashed elsewhere: the 128-bit sum of their blocks.
  void AddSum(uint64_t low, uint64_t high);
  // Adds another builder's rows.
  void Merge(const DigestBuilder& other);
  // The digest of the rows added and of `canonical_header`.
  Digest Finish(const std::string& canonical_header) const;

 private:
  uint64_t low_ = 0;
  uint64_t high_ = 0;
};

// Lower-case hexadecimal, 32 characters.
std::string DigestToHex(const Digest& digest);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_DIGEST_H_
