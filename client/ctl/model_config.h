// The LM head that a model's config.json describes, by the table client/model_config_keys.json.
#ifndef HEADWATER_CLIENT_CTL_MODEL_CONFIG_H_
#define HEADWATER_CLIENT_CTL_MODEL_CONFIG_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// The head that a model computes its logits with: softcap * tanh(logit_scale * (weight hidden + bias) / softcap).
struct ModelHead {
  // A key that may change the logits in a way that is not known here.
  struct UnclearKey {
    std::string key;
    nlohmann::json value;
  };
  std::string model_type;                     // "llama", of the top level; empty if the file has none
  int64_t vocab_size = 0;                     // rows of the weight
  int64_t valid_vocab_size = 0;               // columns that get a probability
  int64_t hidden_size = 0;                    // of the rows that reach the head
  std::optional<client::DataType> data_type;  // the weights'; absent: not stated, or one that heads do not have
  double logit_scale = 1.0;
  std::optional<double> softcap;  // absent: none
  bool has_bias = false;
  std::optional<bool> tied;  // the weight is the embedding's; absent: the config does not say
  std::vector<UnclearKey> unclear;
};

// `path`: a config.json, or the folder of a model. In a folder, the safetensors files or their index show whether there is a bias.
// NOT_FOUND if there is no such file; DATA_LOSS if it is not a JSON object. INVALID_ARGUMENT, with the key, if it does not describe
// a language model, or a value is not as expected.
absl::StatusOr<ModelHead> ReadModelHead(const std::string& path);

// "logit_temper, mup_base": the names of unclear keys.
std::string NamesOf(const std::vector<ModelHead::UnclearKey>& keys);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_MODEL_CONFIG_H_
