#include "client/ctl/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/model_config_keys.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/file_source.h"
#include "server/model_files/head_tensors.h"
#include "server/model_files/strict_json.h"

namespace headwater::ctl {
namespace {

using nlohmann::json;

absl::StatusOr<json> ReadObject(const std::string& path) {
  const absl::StatusOr<std::shared_ptr<model_files::ReadableFile>> file = model_files::LocalFiles()->Open(path);
  if (absl::IsNotFound(file.status())) return absl::NotFoundError(absl::StrCat(path, " is not there"));
  if (!file.ok()) return file.status();
  return model_files::ReadLenientJson(**file, path);
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

bool HasValue(const json& values, const json& value) { return std::find(values.begin(), values.end(), value) != values.end(); }

bool ContainsPartOf(const json& parts, const std::string& name) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const json& part) { return absl::StrContains(name, part.get_ref<const std::string&>()); });
}

const json& KeyTable() {
  static const json* const table = new json(json::parse(kModelConfigKeys));
  return *table;
}

// A config and the ones that it nests, innermost first.
class ConfigLevels {
 public:
  explicit ConfigLevels(const json& config) {
    for (const json* level = &config; level != nullptr; level = NestedIn(*level, kMaxDepth)) levels_.insert(levels_.begin(), level);
  }

  // The key's value at the innermost level that has it; with `nested`, whether that is not the top one.
  const json* Find(const std::string& key, bool* nested = nullptr) const {
    for (const json* level : levels_) {
      const json* const value = ctl::Find(*level, key);
      if (value == nullptr) continue;
      if (nested != nullptr) *nested = level != levels_.back();
      return value;
    }
    return nullptr;
  }
  // The value at the outermost level that has it.
  const json* FindFromTop(const std::string& key) const {
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      if (const json* const value = ctl::Find(**level, key); value != nullptr) return value;
    }
    return nullptr;
  }

  // The model types, innermost first.
  std::vector<std::string> model_types() const {
    std::vector<std::string> types;
    for (const json* level : levels_) {
      const json* const type = ctl::Find(*level, "model_type");
      if (type != nullptr && type->is_string()) types.push_back(type->get<std::string>());
    }
    return types;
  }
  const std::vector<const json*>& all() const { return levels_; }

 private:
  static constexpr int kMaxDepth = 8;

  static bool HasVocabulary(const json& config, int depth) {
    for (const json& entry : KeyTable()["vocab_size"]) {
      if (ctl::Find(config, entry["key"]) != nullptr) return true;
    }
    return NestedIn(config, depth) != nullptr;
  }
  static const json* NestedIn(const json& config, int depth) {
    if (depth == 0) return nullptr;
    for (const json& name : KeyTable()["nested"]) {
      const json* const inner = ctl::Find(config, name);
      if (inner != nullptr && inner->is_object() && HasVocabulary(*inner, depth - 1)) return inner;
    }
    return nullptr;
  }

  std::vector<const json*> levels_;
};

// Applies the table to one config.
class ConfigReader {
 public:
  explicit ConfigReader(const json& config) : levels_(config), types_(levels_.model_types()) {}

  absl::StatusOr<ModelHead> Read() {
    if (const json* const type = levels_.FindFromTop("model_type"); type != nullptr && type->is_string())
      head_.model_type = type->get<std::string>();
    for (const auto& [name, size] : {std::pair("vocab_size", &head_.vocab_size), std::pair("hidden_size", &head_.hidden_size)}) {
      HEADWATER_RETURN_IF_ERROR(ReadSize(name, size));
    }
    head_.valid_vocab_size = head_.vocab_size;
    head_.data_type = ReadDataType();
    head_.has_bias = HasType(KeyTable()["bias_always"]);
    const json* const tied = levels_.FindFromTop(KeyTable()["tied"]["key"]);
    if (tied != nullptr && tied->is_boolean()) head_.tied = tied->get<bool>();
    for (const json& entry : KeyTable()["keys"]) {
      HEADWATER_RETURN_IF_ERROR(ReadKey(entry));
    }
    for (const auto& [type, reason] : KeyTable()["report_models"].items()) {
      if (HasType(json::array({type}))) head_.unclear.push_back({"model_type", type + ": " + reason.get<std::string>()});
    }
    FindUnknownKeys();
    return std::move(head_);
  }

 private:
  bool HasType(const json& types) const {
    return std::any_of(types_.begin(), types_.end(), [&](const std::string& type) { return HasValue(types, type); });
  }
  bool Applies(const json& entry) const {
    return (!entry.contains("only") || HasType(entry["only"])) &&
           (!entry.contains("unless") || levels_.Find(entry["unless"]) == nullptr);
  }
  // The entry of `by_type` for the innermost model type that it knows.
  const json* ByType(const json& entry, const char* by_type) const {
    if (!entry.contains(by_type)) return nullptr;
    for (const std::string& type : types_) {
      if (const json* const value = Find(entry[by_type], type); value != nullptr) return value;
    }
    return nullptr;
  }

  absl::Status ReadSize(const std::string& name, int64_t* size) const {
    for (const json& entry : KeyTable()[name]) {
      const std::string key = entry["key"];
      const json* const value = Applies(entry) ? levels_.Find(key) : nullptr;
      if (value == nullptr) continue;
      if (!value->is_number_integer() || value->get<int64_t>() < 1) return Wrong(key, "an integer >= 1", *value);
      *size = value->get<int64_t>();
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(name, ": expected the size of a language model, got no such key"));
  }

  std::optional<client::DataType> ReadDataType() const {
    for (const json& entry : KeyTable()["data_type"]) {
      const json* const value = levels_.Find(entry["key"]);
      if (value == nullptr || !value->is_string()) continue;
      const auto type = DataTypeNamed(absl::StripPrefix(value->get_ref<const std::string&>(), "torch."));
      if (type.has_value()) return type;
    }
    return std::nullopt;
  }

  absl::Status ReadKey(const json& entry) {
    const std::string key = entry["key"];
    if (!Applies(entry)) return absl::OkStatus();
    bool nested = false;
    const json* value = levels_.Find(key, &nested);
    if (value == nullptr) {
      value = ByType(entry, "absent");
      nested = levels_.all().size() > 1;
    }
    if (value == nullptr || HasValue(entry["nothing"], *value)) return absl::OkStatus();
    std::string effect = entry["effect"];
    if (const json* const other = ByType(entry, "except"); other != nullptr) effect = other->get<std::string>();
    // A wrapper with an LM head of its own may not look at the nested config.
    const bool scales = effect != "bias" && effect != "valid_vocab_size" && effect != "report";
    if (nested && scales && !head_.model_type.empty() && !HasValue(KeyTable()["nested_read_by"], head_.model_type)) {
      head_.unclear.push_back({key, *value});
    }
    if (value->is_string() && entry.contains("words")) {
      const json* const word = Find(entry["words"], *value);
      if (word == nullptr) return Wrong(key, absl::StrCat("a number or ", entry["words"].begin().key()), *value);
      return Apply(key, word->get<std::string>(), true);
    }
    return Apply(key, effect, *value);
  }

  absl::Status Apply(const std::string& key, const std::string& effect, const json& value) {
    if (effect == "report") {
      head_.unclear.push_back({key, value});
      return absl::OkStatus();
    }
    if (effect == "bias" || effect == "root_width") {
      if (!value.is_boolean()) return Wrong(key, "true or false", value);
      if (effect == "bias") {
        head_.has_bias = value.get<bool>();
      } else if (value.get<bool>()) {
        head_.logit_scale /= std::sqrt(static_cast<double>(head_.hidden_size));
      }
      return absl::OkStatus();
    }
    if (effect == "valid_vocab_size") {
      if (!value.is_number_integer() || value.get<int64_t>() < 1) return Wrong(key, "an integer >= 1", value);
      head_.valid_vocab_size = std::min(head_.valid_vocab_size, value.get<int64_t>());
      return absl::OkStatus();
    }
    const double number = value.is_number() ? value.get<double>() : 0;
    if (!std::isfinite(number) || number == 0) return Wrong(key, "a finite number other than 0", value);
    if (effect == "softcap") {
      if (number < 0) return Wrong(key, "a number > 0", value);
      head_.softcap = number;
    }
    if (effect == "multiply") head_.logit_scale *= number;
    if (effect == "divide") head_.logit_scale /= number;
    if (effect == "multiply_by_width") head_.logit_scale *= number / static_cast<double>(head_.hidden_size);
    return absl::OkStatus();
  }

  void FindUnknownKeys() {
    const json& table = KeyTable();
    for (const json* level : levels_.all()) {
      for (const auto& [key, value] : level->items()) {
        const bool is_known = std::any_of(table["keys"].begin(), table["keys"].end(),
                                          [&key = key](const json& entry) { return entry["key"] == key; });
        if (is_known || (!value.is_number() && !value.is_string()) || !ContainsPartOf(table["suspect"], key) ||
            ContainsPartOf(table["harmless_parts"], key) || HasValue(table["harmless"], key)) {
          continue;
        }
        head_.unclear.push_back({key, value});
      }
    }
  }

  const ConfigLevels levels_;
  const std::vector<std::string> types_;
  ModelHead head_;
};

}  // namespace

absl::StatusOr<ModelHead> ReadModelHead(const std::string& path) {
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  const std::string config_path = is_folder ? path + "/config.json" : path;
  HEADWATER_ASSIGN_OR_RETURN(const json config, ReadObject(config_path));
  absl::StatusOr<ModelHead> head = ConfigReader(config).Read();
  if (!head.ok()) return absl::Status(head.status().code(), absl::StrCat(config_path, ": ", head.status().message()));
  if (is_folder) {
    HEADWATER_ASSIGN_OR_RETURN(const std::optional<bool> has_bias, model_files::HasHeadBias(*model_files::LocalFiles(), path));
    if (has_bias.has_value()) head->has_bias = *has_bias;
  }
  return head;
}

std::string NamesOf(const std::vector<ModelHead::UnclearKey>& keys) {
  return absl::StrJoin(keys, ", ", [](std::string* out, const ModelHead::UnclearKey& key) { out->append(key.key); });
}

}  // namespace headwater::ctl
