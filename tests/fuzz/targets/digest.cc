// The digest of a micro-batch: the same however its rows come. Input: how the rows are cut, the header, then the rows.
#include "headwater/kernels/digest.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {

void CheckInput(InputReader input) {
  const int64_t units = input.Byte();
  const int64_t row_bytes = 1 + units * (input.Byte() % 2 == 0 ? 1 : 64);  // also rows of more than one block
  const int64_t chunk_rows = 1 + input.Byte() % 8;
  const int32_t stream = input.Byte() % 3;
  const std::string header = input.Text();
  const std::string rest = input.Rest();
  const int64_t row_count = static_cast<int64_t>(rest.size()) / row_bytes;
  const std::vector<char> rows(rest.begin(), rest.begin() + row_count * row_bytes);  // of its own, so that a read beyond is seen

  DigestBuilder whole;
  whole.AddRows(stream, 0, row_count, row_bytes, rows.data());
  // In chunks, from the last to the first, half of them by another builder.
  DigestBuilder first;
  DigestBuilder second;
  for (int64_t start = (row_count - 1) / chunk_rows * chunk_rows; start >= 0 && row_count > 0; start -= chunk_rows) {
    DigestBuilder& builder = start / chunk_rows % 2 == 0 ? first : second;
    const std::vector<char> chunk(rows.begin() + start * row_bytes,
                                  rows.begin() + std::min(row_count, start + chunk_rows) * row_bytes);
    builder.AddRows(stream, start, static_cast<int64_t>(chunk.size()) / row_bytes, row_bytes, chunk.data());
  }
  first.Merge(second);
  FUZZ_CHECK(whole.Finish(header) == first.Finish(header));
  if (row_count == 0) return;
  // Another byte, another place or another header is another digest.
  std::vector<char> changed = rows;
  changed[changed.size() / 2] ^= 0x10;
  DigestBuilder other;
  other.AddRows(stream, 0, row_count, row_bytes, changed.data());
  FUZZ_CHECK(other.Finish(header) != whole.Finish(header));
  DigestBuilder moved;
  moved.AddRows(stream, 1, row_count, row_bytes, rows.data());
  FUZZ_CHECK(moved.Finish(header) != whole.Finish(header));
  FUZZ_CHECK(whole.Finish(header + "x") != whole.Finish(header));
}

}  // namespace headwater::fuzz
