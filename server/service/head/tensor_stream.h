// TensorStream: a tensor on its way to a client, chunk by chunk.
#ifndef HEADWATER_SERVER_SERVICE_HEAD_TENSOR_STREAM_H_
#define HEADWATER_SERVER_SERVICE_HEAD_TENSOR_STREAM_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/v1/head_service.pb.h"
#include "server/heads/head.h"
#include "server/scheduler/waiting.h"
#include "server/service/request/head_request.h"

namespace headwater::service {

// One download: what its header says, and where the elements come from.
struct TensorStream {
  DataType data_type = DataType::kFloat32;
  std::vector<int64_t> shape;
  int64_t total_bytes = 0;
  int64_t weight_version = 0;
  int64_t offset_bytes = 0;  // where to begin
  // Writes elements [element_start, element_start + element_count) to `out`.
  std::function<absl::Status(int64_t element_start, int64_t element_count, void* out)> read;
};

// Errors of Head's methods; kInvalidField, kDataTypeMismatch or kInvalidCombination if the head has no such tensor of that type, or
// the offset is within an element. The streams keep the head alive; `limits` bound each of their reads.
absl::StatusOr<TensorStream> OpenWeights(std::shared_ptr<heads::Head> head, const DownloadWeightsRequest& request,
                                         const scheduler::WaitLimits& limits);
absl::StatusOr<TensorStream> OpenGradient(std::shared_ptr<heads::Head> head, const DownloadGradientRequest& request,
                                          const scheduler::WaitLimits& limits);

// Sends the header, then chunks in order of at most `max_chunk_bytes`. `send` returns false when the client is gone: kCancelled.
absl::Status SendTensor(const TensorStream& stream, int64_t max_chunk_bytes,
                        const std::function<bool(const v1::DownloadTensorResponse&)>& send);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_HEAD_TENSOR_STREAM_H_
