// RowRanges: which rows have come, or are gone, as few ranges.
#ifndef HEADWATER_SERVER_TRANSPORT_ROW_RANGES_H_
#define HEADWATER_SERVER_TRANSPORT_ROW_RANGES_H_

#include <cstdint>
#include <map>

namespace headwater::transport {

// Disjoint ranges of rows; ranges that touch become one.
class RowRanges {
 public:
  // Whether any of rows [start, start + count) is in it.
  bool Overlaps(int64_t start, int64_t count) const;
  // Adds rows that are not in it.
  void Add(int64_t start, int64_t count);
  // How many rows from 0 on are in it without a gap.
  int64_t prefix() const;
  int64_t row_count() const { return row_count_; }

 private:
  std::map<int64_t, int64_t> ends_;  // by first row
  int64_t row_count_ = 0;
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_ROW_RANGES_H_
