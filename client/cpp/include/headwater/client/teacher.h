// Teacher: the side of a divergence that computes hidden states in a process of its own.
//
//   Teacher teacher = client.OpenTeacher("batch-17", total_rows);
//   teacher.Stream(RowsView::BFloat16(hidden, hidden_size)).Get();
//
// while the trainer calls Head::Jsd(hidden, teacher_head, {.join_key = "batch-17", .total_rows = total_rows}, ...), before or
// after.
#ifndef HEADWATER_CLIENT_TEACHER_H_
#define HEADWATER_CLIENT_TEACHER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"
#include "headwater/client/future.h"
#include "headwater/client/types.h"

namespace headwater::client {
namespace internal {
class Core;
}  // namespace internal

// One joined set: a tenant, a key, and the number of its rows. Cheap to copy; thread-safe.
class Teacher {
 public:
  // Sends rows of the set, `[row_count, hidden_size of the teacher's head]`; read until the future is ready or destroyed.
  // `row_indices` [row_count]: the index of each in [0, total_rows), each once in the set; empty: these are all rows, in order.
  // Copied by the call. Several calls, also of several processes, may bring disjoint rows.
  //
  // The result comes when the server keeps the rows. It drops them when the micro-batches that used them are decided, or when no
  // micro-batch has asked for them for max_join_wait. Repeated only if the server says that nothing was done (no room yet). After a
  // cut connection some rows may be there; sending them again is CHUNK_OUT_OF_RANGE.
  Future<StreamedRows> Stream(RowsView rows, absl::Span<const int32_t> row_indices = {}, const CallOptions& options = {}) const;

  const std::string& join_key() const { return join_key_; }
  int64_t total_rows() const { return total_rows_; }

 private:
  friend class Client;
  Teacher(std::shared_ptr<internal::Core> connection, std::string join_key, int64_t total_rows);

  std::shared_ptr<internal::Core> core_;
  std::string join_key_;
  int64_t total_rows_;
};

}  // namespace headwater::client

#endif  // HEADWATER_CLIENT_TEACHER_H_
