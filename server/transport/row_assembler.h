// RowAssembler: puts a tensor's rows together from chunks of any size in any order, each row exactly once.
//
// Memory follows the bytes that came: rows in order go into one growing buffer; a chunk that is ahead of a gap is kept as it is
// until the gap is filled. Not thread-safe.
#ifndef HEADWATER_SERVER_TRANSPORT_ROW_ASSEMBLER_H_
#define HEADWATER_SERVER_TRANSPORT_ROW_ASSEMBLER_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "server/transport/growing_buffer.h"

namespace headwater::transport {

class RowAssembler {
 public:
  // Of `row_count` (>= 0) rows of `column_count` (>= 1) elements. Their product in bytes must fit int64_t.
  RowAssembler(int64_t row_count, int64_t column_count, DataType data_type);

  // Whether Add() would take rows [row_start, row_start + chunk_rows) in `data_bytes` bytes: kChunkOutOfRange (outside the tensor,
  // no rows, or rows that are there already) or kDataLengthMismatch if not. `field` names the chunk in messages.
  absl::Status Check(int64_t row_start, int64_t chunk_rows, int64_t data_bytes, const std::string& field) const;

  // Takes the rows, or fails as Check() does and changes nothing. `data` is consumed only if the chunk waits for a gap.
  absl::Status Add(int64_t row_start, int64_t chunk_rows, std::string* data, const std::string& field);

  // kProtocolViolation, naming `tensor` and the first missing row, unless every row has come.
  absl::Status CheckComplete(const std::string& tensor) const;

  // The tensor; complete only after CheckComplete(). Valid until the next Add().
  RowsView view() const { return {buffer_.data(), row_count_, column_count_, data_type_}; }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t received_rows() const { return received_rows_; }

 private:
  struct Waiting {
    int64_t row_count;
    std::string data;
  };
  bool Append(const std::string& data);

  const int64_t row_count_;
  const int64_t column_count_;
  const DataType data_type_;
  const int64_t row_bytes_;
  GrowingBuffer buffer_;  // rows [0, next_row_)
  int64_t next_row_ = 0;
  int64_t received_rows_ = 0;
  std::map<int64_t, Waiting> waiting_;  // by first row; disjoint, all beyond next_row_
};

}  // namespace headwater::transport

#endif  // HEADWATER_SERVER_TRANSPORT_ROW_ASSEMBLER_H_
