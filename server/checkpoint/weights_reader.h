// WeightsReader: finds a head's weight and bias in a safetensors file or a Hugging Face model folder.
//
//   auto reader = WeightsReader::Open(load_root, "meta/model", "", "", head->spec());
//   head->SetTensors(epoch, {{HeadTensor::kWeight, (*reader)->data_type(HeadTensor::kWeight), read_weight}});
//
// A path ending in `.safetensors` is a file; any other is a folder with `model.safetensors.index.json` (its `weight_map` names the
// file of each tensor) or `model.safetensors`. Files are read in pieces and never mapped: one that is cut short meanwhile gives an
// error, not a signal.
#ifndef HEADWATER_SERVER_CHECKPOINT_WEIGHTS_READER_H_
#define HEADWATER_SERVER_CHECKPOINT_WEIGHTS_READER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/types.h"
#include "server/checkpoint/file_system.h"
#include "server/checkpoint/safetensors.h"

namespace headwater::checkpoint {

class WeightsReader {
 public:
  // Opens and checks everything that can be checked without reading the rows. `path` is relative to `load_root`; absolute paths,
  // `..`, and symbolic links that leave the root are refused.
  //
  // Tensors: `weight_tensor`, or if empty the first of `lm_head.weight`, `model.embed_tokens.weight`, `transformer.wte.weight`,
  // `model.decoder.embed_tokens.weight` (tied embeddings) that is there, else a single tensor named `weight`. Of a file that is one
  // of several of its model (`-00001-of-00004` at the end of its name) no embedding is taken without being named: another file may
  // have `lm_head.weight`. For a spec with bias also `bias_tensor`, or if empty `lm_head.bias`, else `bias`. F32, BF16 and F16;
  // shapes exactly [vocab_size, hidden_size] and [vocab_size].
  //
  // kInvalidField (a path or a tensor name that is not allowed), kWeightsNotFound, kFileCorrupt, kCheckpointSpecMismatch (shape),
  // kDataTypeMismatch, kInvalidCombination (`bias_tensor` for a head without bias).
  static absl::StatusOr<std::unique_ptr<WeightsReader>> Open(const std::string& load_root, const std::string& path,
                                                             const std::string& weight_tensor, const std::string& bias_tensor,
                                                             const HeadSpec& spec);

  // The type in which Read() brings a tensor (kWeight or kBias): the head's storage type where the file has it, else fp32.
  DataType data_type(HeadTensor tensor) const;
  // Brings elements [element_start, element_start + element_count) of kWeight or kBias, row-major. Thread-safe.
  absl::Status Read(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const;
  bool has_bias() const { return bias_.has_value(); }

 private:
  struct Source {
    std::shared_ptr<ReadableFile> file;
    int64_t offset_bytes = 0;  // of element 0
    int64_t element_count = 0;
    DataType file_type = DataType::kFloat32;
    DataType read_type = DataType::kFloat32;
  };
  WeightsReader() = default;
  const Source& source(HeadTensor tensor) const { return tensor == HeadTensor::kBias ? *bias_ : weight_; }

  Source weight_;
  std::optional<Source> bias_;
};

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_WEIGHTS_READER_H_
