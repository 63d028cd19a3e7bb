#include "server/transport/row_ranges.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::transport {

bool RowRanges::Overlaps(int64_t start, int64_t count) const {
  const auto after = ends_.lower_bound(start);
  if (after != ends_.end() && after->first < start + count) return true;
  return after != ends_.begin() && std::prev(after)->second > start;
}

void RowRanges::Add(int64_t start, int64_t count) {
  row_count_ += count;
  int64_t end = start + count;
  auto after = ends_.lower_bound(start);
  if (after != ends_.end() && after->first == end) {
    end = after->second;
    after = ends_.erase(after);
  }
  if (after != ends_.begin() && std::prev(after)->second == start) {
    std::prev(after)->second = end;
  } else {
    ends_.emplace_hint(after, start, end);
  }
}

int64_t RowRanges::prefix() const { return !ends_.empty() && ends_.begin()->first == 0 ? ends_.begin()->second : 0; }

absl::Status RowsOutOfRange(const std::string& field, const std::string& expected, int64_t row_start, int64_t row_count) {
  const std::string actual = absl::StrCat("row_start ", row_start, ", row_count ", row_count);
  return MakeError(ErrorReason::kChunkOutOfRange, absl::StrCat(field, ": expected ", expected, ", got ", actual),
                   {{"field", field}, {"expected", expected}, {"actual", actual}});
}

}  // namespace headwater::transport
