// Whole tensors up and down, and gradients of the caller's own.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TENSOR_EXCHANGES_H_
#define HEADWATER_CLIENT_CORE_ROWS_TENSOR_EXCHANGES_H_

#include <memory>
#include <string>

#include "client/core/call/exchange.h"
#include "headwater/client/tensor.h"
#include "headwater/v1/error.pb.h"
#include "headwater/v1/head_service.pb.h"

namespace headwater::client::internal {

// INVALID_ARGUMENT if reading the rows would leave the caller's memory.
absl::Status CheckRows(const std::string& field, const RowsView& rows);
// The error of a caller's view or option.
absl::Status InvalidView(v1::ErrorReason reason, const std::string& field, const std::string& expected, const std::string& actual);

// Fills in the description of an upload's bytes: their number and checksum, and an id, so that no client continues another's
// upload.
void Describe(const RowsView& tensor, v1::UploadWeightsHeader* header);

// After UNAVAILABLE the next attempt continues where this one was cut.
std::unique_ptr<Exchange> MakeUploadExchange(Core& core, const RowsView& tensor);
std::unique_ptr<Exchange> MakeGradientExchange(Core& core, const RowsView& rows);
// A tensor of another shape or type than `result` is an error, so that no result leaves the caller's memory. Without data `result`
// is the library's memory, of the size that the server reports.
std::unique_ptr<Exchange> MakeDownloadExchange(Core& core, const google::protobuf::Message& request, const RowsView& result);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TENSOR_EXCHANGES_H_
