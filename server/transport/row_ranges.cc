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

absl::Status CheckRows(const std::string& field, int64_t row_start, int64_t row_count, int64_t data_bytes, int64_t total_rows,
                       int64_t row_bytes, const RowRanges& come) {
  const auto out_of_range = [&](const std::string& expected) {
    return FieldError(ErrorReason::kChunkOutOfRange, field, expected,
                      absl::StrCat("row_start ", row_start, ", row_count ", row_count));
  };
  // Written so that no sum of two numbers that a client chose can wrap.
  if (row_start < 0 || row_count < 1 || row_start > total_rows || row_count > total_rows - row_start) {
    return out_of_range(absl::StrCat("at least one row within [0, ", total_rows, ")"));
  }
  if (const int64_t expected = row_count * row_bytes; data_bytes != expected) {
    return MakeError(ErrorReason::kDataLengthMismatch,
                     absl::StrCat(field, ".data: expected ", expected, " bytes (", row_count, " rows of ", row_bytes,
                                  " bytes), got ", data_bytes),
                     {{"field", field + ".data"}, {"expected", absl::StrCat(expected)}, {"actual", absl::StrCat(data_bytes)}});
  }
  return come.Overlaps(row_start, row_count) ? out_of_range("rows that no earlier chunk covered") : absl::OkStatus();
}

}  // namespace headwater::transport
