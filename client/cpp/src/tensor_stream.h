// Whole tensors up and down.
#ifndef HEADWATER_CLIENT_SRC_TENSOR_STREAM_H_
#define HEADWATER_CLIENT_SRC_TENSOR_STREAM_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/src/connection.h"
#include "client/cpp/src/wait.h"
#include "headwater/client/tensor.h"
#include "headwater/v1/head_service.pb.h"

namespace headwater::client::internal {

// INVALID_ARGUMENT if reading the rows would leave the caller's memory.
absl::Status CheckRows(const std::string& field, const RowsView& rows);
// Likewise, of a whole tensor.
absl::Status CheckElements(const std::string& field, const TensorView& values);
// What a caller's view or option has wrong.
absl::Status InvalidView(v1::ErrorReason reason, const std::string& field, const std::string& expected, const std::string& actual);

std::vector<int64_t> ShapeOf(const HeadSpec& spec, HeadTensor tensor);

// A tensor on its way up. Blocks.
class Upload {
 public:
  Upload(std::shared_ptr<Connection> connection, HeadTensor tensor, TensorView values);

  // Sends what the server has not got yet, to the head of that name and epoch; closes the step, if one is given. No longer than
  // `wait`. After UNAVAILABLE the next Send() goes on where this one was cut.
  absl::StatusOr<v1::Head> Send(const std::string& name, const std::string& epoch, std::optional<int64_t> closes_step,
                                const Wait& wait);

 private:
  const std::shared_ptr<Connection> connection_;
  const TensorView values_;
  v1::UploadWeightsHeader header_;
};

// Reads a download to its end into `buffer`, whose shape is what the head's specification says: any other header is an error, so
// that no buffer is sized by what the other side claims. Blocks.
absl::Status ReadTensor(Connection& connection, grpc::ClientContext& context,
                        grpc::ClientReader<v1::DownloadTensorResponse>& reader, TensorBuffer& buffer);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_TENSOR_STREAM_H_
