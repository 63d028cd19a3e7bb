#include "server/transport/row_assembler.h"

#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::transport {
namespace {

absl::Status OutOfRange(const std::string& field, const std::string& expected, int64_t row_start, int64_t chunk_rows) {
  const std::string actual = absl::StrCat("row_start ", row_start, ", row_count ", chunk_rows);
  return MakeError(ErrorReason::kChunkOutOfRange, absl::StrCat(field, ": expected ", expected, ", got ", actual),
                   {{"field", field}, {"expected", expected}, {"actual", actual}});
}

}  // namespace

RowAssembler::RowAssembler(int64_t row_count, int64_t column_count, DataType data_type)
    : row_count_(row_count),
      column_count_(column_count),
      data_type_(data_type),
      row_bytes_(column_count * ElementBytes(data_type)),
      buffer_(row_count * row_bytes_) {}

absl::Status RowAssembler::Check(int64_t row_start, int64_t chunk_rows, int64_t data_bytes, const std::string& field) const {
  // Written so that no sum of two numbers that a client chose can wrap.
  if (row_start < 0 || chunk_rows < 1 || row_start > row_count_ || chunk_rows > row_count_ - row_start) {
    return OutOfRange(field, absl::StrCat("at least one row within [0, ", row_count_, ")"), row_start, chunk_rows);
  }
  const int64_t expected_bytes = chunk_rows * row_bytes_;
  if (data_bytes != expected_bytes) {
    return MakeError(
        ErrorReason::kDataLengthMismatch,
        absl::StrCat(field, ".data: expected ", expected_bytes, " bytes (", chunk_rows, " rows of ", row_bytes_, " bytes), got ",
                     data_bytes),
        {{"field", field + ".data"}, {"expected", absl::StrCat(expected_bytes)}, {"actual", absl::StrCat(data_bytes)}});
  }
  const auto after = waiting_.lower_bound(row_start);
  const bool overlaps_next = after != waiting_.end() && row_start + chunk_rows > after->first;
  const bool overlaps_previous =
      after != waiting_.begin() && std::prev(after)->first + std::prev(after)->second.row_count > row_start;
  if (row_start < next_row_ || overlaps_next || overlaps_previous) {
    return OutOfRange(field, "rows that no earlier chunk covered", row_start, chunk_rows);
  }
  return absl::OkStatus();
}

absl::Status RowAssembler::Add(int64_t row_start, int64_t chunk_rows, std::string* data, const std::string& field) {
  const int64_t data_bytes = static_cast<int64_t>(data->size());
  if (absl::Status status = Check(row_start, chunk_rows, data_bytes, field); !status.ok()) return status;
  if (row_start > next_row_) {
    waiting_.emplace(row_start, Waiting{chunk_rows, std::move(*data)});
    received_rows_ += chunk_rows;
    return absl::OkStatus();
  }
  if (!Append(*data)) {
    return MakeError(ErrorReason::kInternal, absl::StrCat(field, ": no memory for ", data_bytes, " bytes of rows"));
  }
  received_rows_ += chunk_rows;
  next_row_ += chunk_rows;
  while (!waiting_.empty() && waiting_.begin()->first == next_row_) {
    if (!Append(waiting_.begin()->second.data)) {
      return MakeError(ErrorReason::kInternal, absl::StrCat(field, ": no memory for rows that were waiting"));
    }
    next_row_ += waiting_.begin()->second.row_count;
    waiting_.erase(waiting_.begin());
  }
  return absl::OkStatus();
}

bool RowAssembler::Append(const std::string& data) { return buffer_.Append(data.data(), static_cast<int64_t>(data.size())); }

absl::Status RowAssembler::CheckComplete(const std::string& tensor) const {
  if (next_row_ == row_count_) return absl::OkStatus();
  return MakeError(ErrorReason::kProtocolViolation,
                   absl::StrCat("the stream ended early: expected ", row_count_, " rows of ", tensor, ", got ", received_rows_,
                                "; the first missing one is ", next_row_),
                   {{"field", tensor},
                    {"expected", absl::StrCat(row_count_)},
                    {"actual", absl::StrCat(received_rows_)},
                    {"firstMissingRow", absl::StrCat(next_row_)}});
}

}  // namespace headwater::transport
