#include "server/transport/row_exchange.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

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

using observability::MonotonicNow;

RowExchange::RowExchange(int64_t row_count, std::vector<RowTensor> tensors)
    : row_count_(row_count), last_row_time_(MonotonicNow()) {
  for (RowTensor& tensor : tensors) {
    ExchangedTensor& input = inputs_.emplace_back();
    input.tensor = std::move(tensor);
    if (input.tensor.row_count == 0) continue;
    if (input.tensor.data == nullptr) {
      input.claimed.Add(0, input.tensor.row_count);
      input.delivered.Add(0, input.tensor.row_count);
      continue;
    }
    missing_rows_ += input.tensor.row_count;
    total_bytes_ += input.tensor.row_count * input.tensor.row_bytes;
  }
}

// ---- rows in ---------------------------------------------------------------------------------------------------------

absl::StatusOr<uint8_t*> RowExchange::Claim(size_t index, int64_t row_start, int64_t row_count, int64_t data_bytes,
                                            const std::string& field) {
  absl::MutexLock lock(&mutex_);
  if (!broken_.ok()) return broken_;
  ExchangedTensor& input = inputs_[index];
  const RowTensor& tensor = input.tensor;
  HEADWATER_RETURN_IF_ERROR(CheckRows(field, row_start, row_count, data_bytes, tensor.row_count, tensor.row_bytes, input.claimed));
  input.claimed.Add(row_start, row_count);
  return tensor.data + row_start * tensor.row_bytes;
}

void RowExchange::Deliver(size_t index, int64_t row_start, int64_t row_count) {
  absl::MutexLock lock(&mutex_);
  ExchangedTensor& input = inputs_[index];
  input.delivered.Add(row_start, row_count);
  missing_rows_ -= row_count;
  received_bytes_ += row_count * input.tensor.row_bytes;
  last_row_time_ = MonotonicNow();
  Changed();
}

int64_t RowExchange::ReadyRows() const {
  int64_t ready = row_count_;
  for (const ExchangedTensor& input : inputs_) {
    const int64_t prefix = input.delivered.prefix();
    if (prefix < input.tensor.row_count) ready = std::min(ready, input.tensor.row_start + prefix);
  }
  return ready;
}

absl::Status RowExchange::InputStatus() const {
  if (!broken_.ok()) return broken_;
  if (!input_closed_ || missing_rows_ == 0) return absl::OkStatus();
  const auto short_one = std::find_if(inputs_.begin(), inputs_.end(), [](const ExchangedTensor& input) {
    return input.tensor.by_input && input.delivered.row_count() < input.tensor.row_count;
  });
  if (short_one == inputs_.end()) return absl::OkStatus();
  const std::string rows = absl::StrCat(short_one->tensor.row_count);
  const std::string received = absl::StrCat(short_one->delivered.row_count());
  const std::string first_missing = absl::StrCat(short_one->delivered.prefix());
  return MakeError(
      ErrorReason::kProtocolViolation,
      absl::StrCat("the stream ended early: expected ", rows, " rows of ", short_one->tensor.name, ", got ", received,
                   "; the first missing one is ", first_missing),
      {{"field", short_one->tensor.name}, {"expected", rows}, {"actual", received}, {"firstMissingRow", first_missing}});
}

RowProgress RowExchange::Look() const {
  absl::MutexLock lock(&mutex_);
  const bool client_owes_rows = std::any_of(inputs_.begin(), inputs_.end(), [](const ExchangedTensor& input) {
    return input.tensor.by_input && input.delivered.row_count() < input.tensor.row_count;
  });
  return {IsComplete(), ReadyRows(), received_bytes_, last_row_time_, missing_rows_ > 0 && !client_owes_rows, InputStatus()};
}

// ---- gradient out ----------------------------------------------------------------------------------------------------

GradRows RowExchange::PeekGrad() const {
  if (!broken_.ok() || grad_taken_ >= grad_ready_) return {};
  // A short piece only at the very end: the rows behind it come soon.
  const int64_t count = std::min(grad_piece_rows_, grad_rows_ - grad_taken_);
  if (grad_taken_ + count > grad_ready_) return {};
  return {grad_taken_, count};
}

}  // namespace headwater::transport
