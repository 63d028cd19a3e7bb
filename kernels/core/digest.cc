#include "headwater/kernels/digest.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace headwater {
namespace {

__extension__ using Uint128 = unsigned __int128;

constexpr int64_t kBlockBytes = 4096;
constexpr size_t kWordsPerBlock = kBlockBytes / 8;
// Bits of the row domain's second number that hold the block index; the stream stands above them.
constexpr int kBlockIndexBits = 40;

uint64_t SplitMix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

const std::array<uint64_t, kWordsPerBlock>& Keys() {
  static const std::array<uint64_t, kWordsPerBlock> keys = [] {
    std::array<uint64_t, kWordsPerBlock> made;
    for (size_t i = 0; i < made.size(); ++i) made[i] = SplitMix64(0x9E3779B97F4A7C15ULL * (i + 1));
    return made;
  }();
  return keys;
}

uint64_t Fmix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDULL;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ULL;
  return x ^ (x >> 33);
}

// Little-endian, whatever the machine.
uint64_t LoadWord(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

Uint128 NhOfBlock(const uint8_t* bytes, int64_t length) {
  const std::array<uint64_t, kWordsPerBlock>& keys = Keys();
  Uint128 sum = 0;
  const size_t pairs = static_cast<size_t>(length / 16);
  for (size_t p = 0; p < pairs; ++p) {
    const uint64_t a = LoadWord(bytes + 16 * p) + keys[2 * p];
    const uint64_t b = LoadWord(bytes + 16 * p + 8) + keys[2 * p + 1];
    sum += static_cast<Uint128>(a) * b;
  }
  const size_t rest = static_cast<size_t>(length % 16);
  if (rest > 0) {
    uint8_t padded[16] = {};
    std::memcpy(padded, bytes + 16 * pairs, rest);
    sum += static_cast<Uint128>(LoadWord(padded) + keys[2 * pairs]) * (LoadWord(padded + 8) + keys[2 * pairs + 1]);
  }
  return sum;
}

Uint128 Join(uint64_t high, uint64_t low) { return (static_cast<Uint128>(high) << 64) | low; }

Uint128 FinishHash(Uint128 h, uint64_t a, uint64_t b) {
  const uint64_t low = Fmix64(static_cast<uint64_t>(h) ^ Fmix64(a + 0x9E3779B97F4A7C15ULL));
  const uint64_t high = Fmix64(static_cast<uint64_t>(h >> 64) + low + Fmix64(b ^ 0xD1B54A32D192ED03ULL));
  return Join(high, Fmix64(low + high));
}

}  // namespace

void DigestBuilder::AddRows(int32_t stream, int64_t row_start, int64_t row_count, int64_t row_bytes, const void* data) {
  Uint128 sum = Join(high_, low_);
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t offset = 0, block = 0; offset < row_bytes; offset += kBlockBytes, ++block) {
      const uint64_t place = static_cast<uint64_t>(stream) << kBlockIndexBits | static_cast<uint64_t>(block);
      const int64_t length = std::min(kBlockBytes, row_bytes - offset);
      sum += FinishHash(NhOfBlock(bytes + row * row_bytes + offset, length), place, static_cast<uint64_t>(row_start + row));
    }
  }
  low_ = static_cast<uint64_t>(sum);
  high_ = static_cast<uint64_t>(sum >> 64);
}

void DigestBuilder::AddSum(uint64_t low, uint64_t high) {
  const Uint128 sum = Join(high_, low_) + Join(high, low);
  low_ = static_cast<uint64_t>(sum);
  high_ = static_cast<uint64_t>(sum >> 64);
}

void DigestBuilder::Merge(const DigestBuilder& other) { AddSum(other.low_, other.high_); }

Digest DigestBuilder::Finish(const std::string& canonical_header) const {
  const auto* bytes = reinterpret_cast<const uint8_t*>(canonical_header.data());
  const int64_t size = static_cast<int64_t>(canonical_header.size());
  Uint128 chain = 0;
  for (int64_t offset = 0; offset < size; offset += kBlockBytes) {
    chain = FinishHash(chain + NhOfBlock(bytes + offset, std::min(kBlockBytes, size - offset)), static_cast<uint64_t>(offset), 1);
  }
  const uint64_t length = static_cast<uint64_t>(size);
  const Uint128 result = FinishHash(Join(high_, low_) + FinishHash(chain, length, 2), length, 0);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(result >> (8 * i));
  return digest;
}

std::string DigestToHex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace headwater
