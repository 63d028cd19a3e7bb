// WeightsReader: a head's weight and bias in a safetensors file or a Hugging Face model folder, in a type that the head takes.
//
//   auto reader = WeightsReader::Open(load_root, "meta/model", "", "", head->spec());
//   head->SetTensors(epoch, {{HeadTensor::kWeight, (*reader)->data_type(HeadTensor::kWeight), read_weight}});
//
// server/model_files/head_tensors.h has the rules by which tensors are chosen. Files are read in pieces and never mapped:
// truncating one meanwhile causes an error, not a signal.
#ifndef HEADWATER_SERVER_CHECKPOINT_WEIGHTS_READER_H_
#define HEADWATER_SERVER_CHECKPOINT_WEIGHTS_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "headwater/kernels/types.h"
#include "server/model_files/head_tensors.h"

namespace headwater::checkpoint {

class WeightsReader {
 public:
  // Opens and checks everything that can be checked without reading the rows. `path` is relative to `load_root`; absolute paths,
  // `..`, and symbolic links that leave the root are refused. `weight_tensor` and `bias_tensor` may be empty. Shapes must be
  // exactly [vocab_size, hidden_size] and [vocab_size]. Errors: those of model_files::FindHeadTensors().
  static absl::StatusOr<std::unique_ptr<WeightsReader>> Open(const std::string& load_root, const std::string& path,
                                                             const std::string& weight_tensor, const std::string& bias_tensor,
                                                             const HeadSpec& spec);

  // The type in which Read() returns a tensor (kWeight or kBias): the head's storage type if the file has it, else fp32.
  DataType data_type(HeadTensor tensor) const;
  // Copies elements [element_start, element_start + element_count) of kWeight or kBias, row-major. Thread-safe.
  absl::Status Read(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const;
  bool has_bias() const { return tensors_.bias.has_value(); }

 private:
  WeightsReader(model_files::HeadTensors tensors, DataType storage_type)
      : tensors_(std::move(tensors)), storage_type_(storage_type) {}
  const model_files::FileTensor& source(HeadTensor tensor) const {
    return tensor == HeadTensor::kBias ? *tensors_.bias : tensors_.weight;
  }

  const model_files::HeadTensors tensors_;
  const DataType storage_type_;
};

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_WEIGHTS_READER_H_
