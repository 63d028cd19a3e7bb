#include "client/ctl/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/model_files/file_source.h"
#include "server/model_files/head_tensors.h"

namespace headwater::ctl {
namespace {

using nlohmann::json;

constexpr std::uintmax_t kMaxConfigBytes = 64 << 20;  // an index of a model's files names thousands of tensors

absl::StatusOr<json> ReadObject(const std::string& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(absl::StrCat(path, ": ", error.message()));
  if (bytes > kMaxConfigBytes) {
    return absl::DataLossError(absl::StrCat(path, ": expected at most ", kMaxConfigBytes, " bytes, got ", bytes));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  json object = json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return absl::DataLossError(absl::StrCat(path, ": expected a JSON object"));
  return object;
}

// A value that is there, and not null.
const json* Find(const json& config, const std::string& key) {
  const auto found = config.find(key);
  return found == config.end() || found->is_null() ? nullptr : &*found;
}

absl::Status Wrong(const std::string& key, const std::string& expected, const json& got) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": expected ", expected, ", got ",
                                                 got.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 100)));
}

// The first of `keys` that is there.
absl::StatusOr<int64_t> ReadSize(const json& config, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    const json* const value = Find(config, key);
    if (value == nullptr) continue;
    if (!value->is_number_integer() || value->get<int64_t>() < 1) return Wrong(key, "an integer >= 1", *value);
    return value->get<int64_t>();
  }
  return absl::InvalidArgumentError(absl::StrCat(keys.front(), ": expected the size of a language model, got no such key"));
}

absl::StatusOr<std::optional<double>> ReadFactor(const json& config, const std::string& key) {
  const json* const value = Find(config, key);
  if (value == nullptr) return std::optional<double>();
  if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() == 0) {
    return Wrong(key, "a finite number other than 0", *value);
  }
  return std::optional<double>(value->get<double>());
}

bool ReadFlag(const json& config, const std::string& key, bool otherwise) {
  const json* const value = Find(config, key);
  return value != nullptr && value->is_boolean() ? value->get<bool>() : otherwise;
}

std::optional<client::DataType> ReadDataType(const json& config) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    const json* const value = Find(config, key);
    if (value == nullptr || !value->is_string()) continue;
    const std::string name(absl::StripPrefix(value->get_ref<const std::string&>(), "torch."));
    for (const client::DataType type : {client::DataType::kFloat32, client::DataType::kBFloat16, client::DataType::kFloat16}) {
      if (name == client::DataTypeName(type)) return type;
    }
  }
  return std::nullopt;
}

// What the logits are multiplied by. Several of these are not in one config.
absl::StatusOr<double> ReadLogitScale(const json& config, const ModelHead& head) {
  const double width = static_cast<double>(head.hidden_size);
  double scale = 1.0;
  // MPT has a word for one.
  const json* const named = Find(config, "logit_scale");
  if (named != nullptr && named->is_string()) {
    if (*named != "inv_sqrt_d_model") return Wrong("logit_scale", "a number or \"inv_sqrt_d_model\"", *named);
    scale /= std::sqrt(width);
  }
  // Cohere, MPT; Falcon-H1; Grok-1.
  for (const char* key : {"logit_scale", "lm_head_multiplier", "output_multiplier_scale"}) {
    if (const json* const value = Find(config, key); value == nullptr || value->is_string()) continue;
    const absl::StatusOr<std::optional<double>> factor = ReadFactor(config, key);
    if (!factor.ok()) return factor.status();
    scale *= factor->value_or(1.0);
  }
  // Granite divides.
  const absl::StatusOr<std::optional<double>> divisor = ReadFactor(config, "logits_scaling");
  if (!divisor.ok()) return divisor.status();
  scale /= divisor->value_or(1.0);
  // MiniCPM divides its rows by hidden_size / dim_model_base.
  const absl::StatusOr<std::optional<double>> base = ReadFactor(config, "dim_model_base");
  if (!base.ok()) return base.status();
  if (base->has_value()) scale *= **base / width;
  // T5 and its kin multiply rows for an embedding that is the head, too.
  const bool is_t5 = head.model_type == "t5" || head.model_type == "longt5" || head.model_type == "switch_transformers";
  if ((is_t5 || head.model_type == "mt5") && ReadFlag(config, "tie_word_embeddings", is_t5)) scale /= std::sqrt(width);
  return scale;
}

absl::StatusOr<std::optional<double>> ReadSoftcap(const json& config) {
  for (const char* key : {"final_logit_softcapping", "logits_soft_cap"}) {  // Gemma 2; RecurrentGemma
    const absl::StatusOr<std::optional<double>> softcap = ReadFactor(config, key);
    if (!softcap.ok()) return softcap.status();
    if (softcap->has_value() && **softcap < 0) return Wrong(key, "a number > 0", config[key]);
    if (softcap->has_value()) return softcap;
  }
  return std::optional<double>();
}

std::vector<std::string> FindUnknownKeys(const json& config) {
  constexpr const char* kKnown[] = {"logit_scale", "logits_scaling", "final_logit_softcapping", "logits_soft_cap"};
  std::vector<std::string> unknown;
  for (const auto& [key, value] : config.items()) {
    const bool is_meant =
        absl::StrContains(key, "logit") || absl::StrContains(key, "lm_head") || absl::StrContains(key, "output_mult");
    const bool is_elsewhere =
        absl::StrContains(key, "attn") || absl::StrContains(key, "attention") || absl::StrContains(key, "router");
    const bool is_known = std::find(std::begin(kKnown), std::end(kKnown), key) != std::end(kKnown) || key == "lm_head_multiplier" ||
                          key == "output_multiplier_scale" || key == "lm_head_bias";
    if (is_meant && !is_elsewhere && !is_known && value.is_number()) unknown.push_back(key);
  }
  return unknown;
}

absl::Status FillIn(const json& config, ModelHead* head) {
  if (const json* const type = Find(config, "model_type"); type != nullptr && type->is_string()) head->model_type = *type;
  absl::StatusOr<int64_t> size = ReadSize(config, {"vocab_size"});
  if (!size.ok()) return size.status();
  head->vocab_size = *size;
  // OPT's head may be narrower than its layers.
  size = ReadSize(config, {"hidden_size", "n_embd", "d_model"});
  if (size.ok() && Find(config, "word_embed_proj_dim") != nullptr) size = ReadSize(config, {"word_embed_proj_dim"});
  if (!size.ok()) return size.status();
  head->hidden_size = *size;
  head->data_type = ReadDataType(config);
  const absl::StatusOr<double> scale = ReadLogitScale(config, *head);
  if (!scale.ok()) return scale.status();
  head->logit_scale = *scale;
  const absl::StatusOr<std::optional<double>> softcap = ReadSoftcap(config);
  if (!softcap.ok()) return softcap.status();
  head->softcap = *softcap;
  if (const json* const bias = Find(config, "lm_head_bias"); bias != nullptr && bias->is_boolean())
    head->has_bias = bias->get<bool>();
  for (const char* type : {"phi", "gptj", "codegen"}) {  // always, without a key
    if (head->model_type == type) head->has_bias = true;
  }
  head->unknown_keys = FindUnknownKeys(config);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelHead> ReadModelHead(const std::string& path) {
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  const std::string config_path = is_folder ? path + "/config.json" : path;
  absl::StatusOr<json> config = ReadObject(config_path);
  if (!config.ok()) return config.status();
  // Models that see or hear, too, keep the language model's apart.
  if (const json* const text = Find(*config, "text_config"); text != nullptr && text->is_object() && Find(*text, "vocab_size")) {
    json inner = *text;
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (!inner.contains(key) && config->contains(key)) inner[key] = (*config)[key];
    }
    *config = std::move(inner);
  }
  ModelHead head;
  if (absl::Status status = FillIn(*config, &head); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(config_path, ": ", status.message()));
  }
  if (is_folder) {
    const absl::StatusOr<std::optional<bool>> has_bias = model_files::HasHeadBias(*model_files::LocalFiles(), path);
    if (!has_bias.ok()) return has_bias.status();
    if (has_bias->has_value()) head.has_bias = *has_bias;
  }
  return head;
}

}  // namespace headwater::ctl
