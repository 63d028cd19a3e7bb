// RowRanges: the rows that have come, or are gone, as few ranges; and the check of a chunk of rows.
#ifndef HEADWATER_SERVER_TRANSPORT_ROW_RANGES_H_
#define HEADWATER_SERVER_TRANSPORT_ROW_RANGES_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"

namespace headwater::transport {

// Disjoint ranges of rows; ranges that touch become one.
class RowRanges {
 public:
  // Whether any of rows [start, start + count) is in it.
  bool Overlaps(int64_t start, int64_t count) const;
  // Adds rows that are not in it.
  void Add(int64_t start, int64_t count);
  // How many rows from 0 on are in it without a gap.
  int64_t prefix() const { return !ends_.empty() && ends_.begin()->first == 0 ? ends_.begin()->second : 0; }
  int64_t row_count() const { return row_count_; }

 private:
  std::map<int64_t, int64_t> ends_;  // by first row
  int64_t row_count_ = 0;
};

// Checks a chunk of `data_bytes` with rows [row_start, row_start + row_count). The tensor has `total_rows` rows of `row_bytes`
// bytes; `come` holds the rows that have come. kChunkOutOfRange (outside the tensor, no rows, or rows that have come),
// kDataLengthMismatch. `field` names the chunk in messages.
absl::Status CheckRows(const std::string& field, int64_t row_start, int64_t row_count, int64_t data_bytes, int64_t total_rows,
                       int64_t row_bytes, const RowRanges& come);

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_ROW_RANGES_H_
