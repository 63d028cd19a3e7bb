// Whole tensors up and down.
#ifndef HEADWATER_CLIENT_SRC_TENSOR_STREAM_H_
#define HEADWATER_CLIENT_SRC_TENSOR_STREAM_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/src/connection.h"
#include "headwater/client/tensor.h"
#include "headwater/v1/head_service.pb.h"

namespace headwater::client::internal {

// Uploads `values` under `header` (upload_id, checksum and total_bytes are filled in here). Resumes after UNAVAILABLE, with
// back-off, at most ClientOptions::max_upload_retries times and not beyond the deadline. Blocks.
absl::StatusOr<v1::Head> UploadTensor(const std::shared_ptr<Connection>& connection, v1::UploadWeightsHeader header,
                                      TensorView values, const CallOptions& options);

// Starts a download and reads it to its end. `shape` is what the head's specification says: any other header is an error, so
// that no buffer is sized by what the other side claims. Blocks.
using StartDownload = std::function<std::unique_ptr<grpc::ClientReader<v1::DownloadTensorResponse>>(grpc::ClientContext*)>;
absl::StatusOr<TensorBuffer> DownloadTensor(Connection& connection, const StartDownload& start, DataType data_type,
                                            const std::vector<int64_t>& shape, const CallOptions& options);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_TENSOR_STREAM_H_
