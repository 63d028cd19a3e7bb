#include "headwater/client/teacher.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"

namespace headwater::client {
Teacher::Teacher(std::shared_ptr<internal::Core> core, std::string join_key, int64_t total_rows)
    : core_(std::move(core)), join_key_(std::move(join_key)), total_rows_(total_rows) {}

Future<StreamedRows> Teacher::Stream(RowsView rows, absl::Span<const int32_t> row_indices, const CallOptions& options) const {
  if (absl::Status status = internal::CheckRows("rows", rows); !status.ok()) return internal::Failed<StreamedRows>(status);
  v1::StreamTeacherHeader header;
  header.set_join_key(join_key_);
  header.set_total_row_count(total_rows_);
  if (!row_indices.empty()) *header.mutable_row_indices() = internal::ToProto(row_indices);
  header.set_data_type(internal::ToProto(rows.data_type));
  header.set_hidden_size(rows.hidden_size);
  header.set_tenant(absl::StrCat("tenants/", core_->options().tenant));
  const internal::CallMemory memory{.rows = rows, .teachers = {}, .result = {}, .cuda_stream = options.cuda_stream};
  return internal::Start<StreamedRows>(core_, std::move(header), options, memory, [](const internal::Answer& answer) {
    return internal::Read<StreamedRows>(static_cast<const v1::StreamTeacherResponse&>(*answer.message));
  });
}

}  // namespace headwater::client
