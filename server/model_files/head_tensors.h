// Finds the weight and the bias of a language model's head in the model's files.
//
// The weight is, in this order:
//   1. the tensor that is asked for by name;
//   2. `lm_head.weight`;
//   3. the one tensor of the head's shape with another name of a head. Under any prefix: `lm_head`, `embed_out`, `codec_head`,
//      `cls.predictions.decoder` and the like. At the top or under a language model's prefix (`model.`, `language_model.`,
//      `thinker.` ...): `output`, `head`, `proj_out`, `output_layer`, `ff_out` and the like; or `weight` alone;
//   4. the one embedding of the head's shape (`embed_tokens`, `wte`, `word_embeddings`, `shared` and the like), if the config.json
//      beside it ties the head. `tie_word_embeddings` is true at the top or, without one there, in every
//      nested config that has it. Without any, the model type (or its text_config's) ties by default. An encoder's embedding
//      counts only if no other one fits.
// Anything else is refused, and the error lists the tensors of the head's shape. Several matches of one rule are refused, too.
//
// Names with a number (`model.layers.61.embed_tokens`), and names of extra prediction heads (`mtp`), match only rule 1. A part of a
// model (`model-00001-of-00004.safetensors`) has no rule 4: another part may have the head.
//
// The bias is the requested tensor, or `P.bias` for the weight `P.weight`. Else it is the one tensor [vocab_size] with the name of
// a head's bias (`lm_head.bias`, `cls.predictions.bias` ...). `final_logits_bias` counts unless all its values are zero. A bias is
// refused for a head without bias.
#ifndef HEADWATER_SERVER_MODEL_FILES_HEAD_TENSORS_H_
#define HEADWATER_SERVER_MODEL_FILES_HEAD_TENSORS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "headwater/kernels/types.h"
#include "server/model_files/file_source.h"

namespace headwater::model_files {

struct HeadTensorQuery {
  std::string weight_tensor{};         // empty: by the rules above
  std::string bias_tensor{};           // empty: by the rules above
  std::optional<int64_t> vocab_size;   // rows of the weight; nullopt: any
  std::optional<int64_t> hidden_size;  // columns of the weight; nullopt: any
  std::optional<bool> has_bias;        // nullopt: as the files have it
};

// One tensor, row-major, within an open file.
struct FileTensor {
  std::string name;
  std::shared_ptr<ReadableFile> file;
  int64_t offset_bytes = 0;  // of element 0
  int64_t rows = 0;
  int64_t columns = 0;  // 1 for a bias
  DataType data_type = DataType::kFloat32;
};

struct HeadTensors {
  FileTensor weight;
  std::optional<FileTensor> bias;
};

// `path` is a safetensors file, or a folder in the form of Hugging Face's transformers. As in transformers, a folder's
// `model.safetensors` comes first; without it `model.safetensors.index.json` says which file has which tensor.
//
// Errors: kWeightsNotFound (no such file or tensor, or no choice by the rules), kCheckpointSpecMismatch (a shape, or a bias that
// the head has no place for), kDataTypeMismatch (not F32, BF16 or F16), kInvalidCombination (`bias_tensor` for a head without
// bias), kFileCorrupt, kLimitExceeded, kInvalidField and kMissingField (the path). Messages name the file and the tensor.
absl::StatusOr<HeadTensors> FindHeadTensors(const FileSource& files, const std::string& path, const HeadTensorQuery& query);

// Whether the head of a model has a bias, according to its files. nullopt if `path` has no safetensors files.
absl::StatusOr<std::optional<bool>> HasHeadBias(const FileSource& files, const std::string& path);

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_HEAD_TENSORS_H_
