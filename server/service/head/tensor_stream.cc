#include "server/service/head/tensor_stream.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/service/request/field_check.h"

namespace headwater::service {
namespace {

// Shape and offset, for a tensor of `head` in `data_type`.
absl::Status Describe(const heads::Head& head, bool bias, int64_t offset_bytes, TensorStream* stream) {
  const HeadSpec& spec = head.spec();
  if (bias && !spec.has_bias) {
    return FieldError(ErrorReason::kInvalidCombination, "tensor", "WEIGHT, because the head has no bias", "BIAS");
  }
  stream->shape = {spec.vocab_size};
  if (!bias) stream->shape.push_back(spec.hidden_size);
  const int64_t element_bytes = ElementBytes(stream->data_type);
  stream->total_bytes = spec.vocab_size * (bias ? 1 : spec.hidden_size) * element_bytes;
  stream->offset_bytes = offset_bytes;
  HEADWATER_RETURN_IF_ERROR(CheckRange("offset_bytes", offset_bytes, 0, stream->total_bytes));
  if (offset_bytes % element_bytes == 0) return absl::OkStatus();
  return FieldError(ErrorReason::kInvalidField, "offset_bytes", absl::StrCat("a multiple of ", element_bytes),
                    absl::StrCat(offset_bytes));
}

}  // namespace

absl::StatusOr<TensorStream> OpenWeights(std::shared_ptr<heads::Head> head, const DownloadWeightsRequest& request,
                                         const scheduler::WaitLimits& limits) {
  const HeadSpec& spec = head->spec();
  TensorStream stream;
  stream.data_type = request.data_type.value_or(spec.data_type);
  if (stream.data_type != spec.data_type && stream.data_type != DataType::kFloat32) {
    return FieldError(ErrorReason::kDataTypeMismatch, "data_type",
                      absl::StrCat("float32 or the storage type ", DataTypeName(spec.data_type)), DataTypeName(stream.data_type));
  }
  const bool bias = request.tensor == HeadTensor::kBias;
  HEADWATER_RETURN_IF_ERROR(Describe(*head, bias, request.offset_bytes, &stream));
  const heads::HeadInfo info = head->Describe();
  if (info.state == heads::HeadState::kLoading) {
    return MakeError(ErrorReason::kWeightsNotLoaded, absl::StrCat(info.name.ToString(), ": expected weights, got none yet"),
                     {{"head", info.name.ToString()}});
  }
  stream.weight_version = info.weight_version;
  HeadTensor tensor = request.tensor;
  if (stream.data_type != spec.data_type) tensor = bias ? HeadTensor::kMasterBias : HeadTensor::kMasterWeight;
  // The first chunk checks the version and the epoch that the client expects; all of them that the weights do not change on the
  // way.
  const int64_t version = request.expected_weight_version.value_or(info.weight_version);
  stream.read = [head = std::move(head), tensor, version, epoch = request.epoch, limits](int64_t element_start,
                                                                                         int64_t element_count, void* out) {
    return head->ReadWeights(tensor, element_start, element_count, out, version, epoch, limits);
  };
  return stream;
}

absl::StatusOr<TensorStream> OpenGradient(std::shared_ptr<heads::Head> head, const DownloadGradientRequest& request,
                                          const scheduler::WaitLimits& limits) {
  TensorStream stream;
  HEADWATER_RETURN_IF_ERROR(head->CheckEpoch(request.key.epoch));
  HEADWATER_RETURN_IF_ERROR(Describe(*head, request.tensor == HeadTensor::kGradBias, request.offset_bytes, &stream));
  stream.weight_version = head->Describe().weight_version;
  stream.read = [head = std::move(head), request, limits](int64_t element_start, int64_t element_count, void* out) {
    float* const values = static_cast<float*>(out);
    HEADWATER_RETURN_IF_ERROR(head->ReadGradient(request.key, request.tensor, element_start, element_count, values, limits));
    if (request.factor != 1) {
      // In fp64 and rounded once: what the optimizer would see.
      for (int64_t i = 0; i < element_count; ++i) values[i] = static_cast<float>(request.factor * static_cast<double>(values[i]));
    }
    return absl::OkStatus();
  };
  return stream;
}

absl::Status SendTensor(const TensorStream& stream, int64_t max_chunk_bytes,
                        const std::function<bool(const v1::DownloadTensorResponse&)>& send) {
  constexpr int64_t kChunkBytes = 1 << 20;
  const absl::Status gone = MakeError(ErrorReason::kCancelled, "the client cancelled the download, or went away");
  const int64_t element_bytes = ElementBytes(stream.data_type);
  const int64_t chunk_elements = std::max<int64_t>(1, std::min(kChunkBytes, max_chunk_bytes) / element_bytes);
  const int64_t element_count = stream.total_bytes / element_bytes;
  v1::DownloadTensorResponse response;
  bool header_sent = false;
  int64_t element = stream.offset_bytes / element_bytes;
  do {
    // The first read comes before the header, so that an error is not preceded by anything.
    const int64_t count = std::min(chunk_elements, element_count - element);
    std::string data(static_cast<size_t>(count * element_bytes), '\0');
    HEADWATER_RETURN_IF_ERROR(stream.read(element, count, data.data()));
    if (!header_sent) {
      v1::DownloadTensorHeader* const header = response.mutable_header();
      header->set_data_type(static_cast<v1::DataType>(stream.data_type));
      for (const int64_t size : stream.shape) header->add_shape(size);
      header->set_total_bytes(stream.total_bytes);
      header->set_weight_version(stream.weight_version);
      if (!send(response)) return gone;
      header_sent = true;
    }
    if (count == 0) break;
    response.mutable_chunk()->set_offset_bytes(element * element_bytes);
    response.mutable_chunk()->set_data(std::move(data));
    if (!send(response)) return gone;
    element += count;
  } while (element < element_count);
  return absl::OkStatus();
}

}  // namespace headwater::service
