#include "server/checkpoint/weights_reader.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/file_source.h"

namespace headwater::checkpoint {
namespace {

constexpr int64_t kPieceElements = int64_t{1} << 20;

float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Converts by hand: not every compiler has a float16 type.
float FromFloat16(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 0x1F, mantissa = bits & 0x3FF;
  // Exponent 0 has zero and the subnormal numbers. Exponent 31 (infinities and NaNs) becomes the largest exponent.
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24F
                                        : std::bit_cast<float>((exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace

absl::StatusOr<std::unique_ptr<WeightsReader>> WeightsReader::Open(const std::string& load_root, const std::string& path,
                                                                   const std::string& weight_tensor, const std::string& bias_tensor,
                                                                   const HeadSpec& spec) {
  const std::unique_ptr<model_files::FileSource> files = model_files::FilesUnder(load_root);
  HEADWATER_ASSIGN_OR_RETURN(
      model_files::HeadTensors tensors,
      model_files::FindHeadTensors(*files, path, {weight_tensor, bias_tensor, spec.vocab_size, spec.hidden_size, spec.has_bias}));
  return std::unique_ptr<WeightsReader>(new WeightsReader(std::move(tensors), spec.data_type));
}

DataType WeightsReader::data_type(HeadTensor tensor) const {
  return source(tensor).data_type == storage_type_ ? storage_type_ : DataType::kFloat32;
}

absl::Status WeightsReader::Read(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  const model_files::FileTensor& from = source(tensor);
  const int64_t whole = from.rows * from.columns;
  if (element_start < 0 || element_count < 0 || element_count > whole || element_start > whole - element_count) {
    return MakeError(ErrorReason::kChunkOutOfRange,
                     absl::StrCat(element_count, " elements from ", element_start, " on do not lie in a tensor of ", whole),
                     {{"expected", absl::StrCat(whole)}});
  }
  const int64_t element_bytes = ElementBytes(from.data_type);
  const int64_t offset = from.offset_bytes + element_start * element_bytes;
  if (from.data_type == data_type(tensor)) return from.file->ReadAt(offset, element_count * element_bytes, out);
  // 16-bit values that the head does not store become fp32, exactly.
  float* next = static_cast<float*>(out);
  std::vector<uint16_t> piece(static_cast<size_t>(std::min(element_count, kPieceElements)));
  for (int64_t done = 0; done < element_count; done += kPieceElements) {
    const int64_t count = std::min(kPieceElements, element_count - done);
    HEADWATER_RETURN_IF_ERROR(from.file->ReadAt(offset + done * element_bytes, count * element_bytes, piece.data()));
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = piece[static_cast<size_t>(i)];
      *next++ = from.data_type == DataType::kBFloat16 ? FromBFloat16(bits) : FromFloat16(bits);
    }
  }
  return absl::OkStatus();
}

}  // namespace headwater::checkpoint
