// What a model's config.json says of its LM head.
//
// Keys are those of Hugging Face's transformers, the forms those of its models' forward passes: see ReadModelHead() in the .cc for
// which model calls the factor of its logits what.
#ifndef HEADWATER_CLIENT_CTL_MODEL_CONFIG_H_
#define HEADWATER_CLIENT_CTL_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// The head that a model computes its logits with: softcap * tanh(logit_scale * (weight hidden + bias) / softcap).
struct ModelHead {
  std::string model_type;                     // "llama"; empty if the file has none
  int64_t vocab_size = 0;                     // columns that get a probability
  int64_t hidden_size = 0;                    // of the rows that reach the head
  std::optional<client::DataType> data_type;  // the weights'; absent: not told, or one that heads do not have
  double logit_scale = 1.0;
  std::optional<double> softcap;          // absent: none
  std::optional<bool> has_bias;           // absent: the config does not say
  std::vector<std::string> unknown_keys;  // that may change logits, in a way that is not known here
};

// `path`: a config.json, or the folder of a model. With the folder its safetensors files, or their index, tell whether there is a
// bias. NOT_FOUND if there is no such file; DATA_LOSS if it is not a JSON object; INVALID_ARGUMENT, with the key, if it does not
// describe a language model, or a value is not as expected.
absl::StatusOr<ModelHead> ReadModelHead(const std::string& path);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_MODEL_CONFIG_H_
