#include "server/model_files/head_tensors.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/safetensors.h"
#include "server/model_files/strict_json.h"

namespace headwater::model_files {
namespace {

// ---- a model's files -----------------------------------------------------------------------------------------------

constexpr char kFileSuffix[] = ".safetensors";
constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr char kConfigFile[] = "config.json";
constexpr size_t kMaxFilesShown = 8;

// "model-00001-of-00004.safetensors"
bool IsPart(absl::string_view path) {
  const auto number_at_end = [](absl::string_view* text) {
    const size_t begin = text->find_last_not_of("0123456789") + 1;
    int64_t number = 0;
    const bool is_number = absl::SimpleAtoi(text->substr(begin), &number);
    text->remove_suffix(text->size() - begin);
    return is_number ? number : 0;
  };
  if (!absl::ConsumeSuffix(&path, kFileSuffix)) return false;
  const int64_t count = number_at_end(&path);
  if (!absl::ConsumeSuffix(&path, "-of-")) return false;
  const size_t before = path.size();
  number_at_end(&path);
  return count > 1 && path.size() < before && absl::EndsWith(path, "-");
}

// The same error, with the file in its message.
absl::Status InFile(const absl::Status& status, const std::string& path) {
  if (status.ok() || absl::IsNotFound(status) || HasReason(status, ErrorReason::kInvalidField) ||
      HasReason(status, ErrorReason::kMissingField)) {
    return status;
  }
  ErrorMetadata metadata = GetErrorMetadata(status);
  metadata["file"] = Shown(path);
  return MakeError(GetErrorReason(status), absl::StrCat(Shown(path), ": ", status.message()), std::move(metadata));
}

// A tensor of a model, with the open file that has its bytes.
struct ModelTensor {
  std::string name;
  std::string path;  // of the file
  SafetensorsTensor entry;
  std::shared_ptr<ReadableFile> file;
};

// The tensors of a model, by name, across its files, which are opened when their tensors are requested.
class ModelFolder {
 public:
  // Errors: kWeightsNotFound (no such file or folder, with the files that the folder has instead), kFileCorrupt, kLimitExceeded
  // (see ReadSafetensorsHeader() and ReadLenientJson()), kInvalidField (see FilesUnder()). Messages name the file.
  static absl::StatusOr<ModelFolder> Open(const FileSource& files, const std::string& path) {
    if (path.empty()) return MakeError(ErrorReason::kMissingField, "path is required", {{"field", "path"}});
    ModelFolder model(files, path);
    if (!absl::EndsWith(path, kFileSuffix)) {
      model.folder_ = absl::StrCat(path, "/");
      absl::Status status = model.TakeFile(model.folder_ + kSingleFile);
      if (absl::IsNotFound(status)) status = model.TakeIndex(model.folder_ + kIndexFile);
      if (status.ok()) return model;
      if (!absl::IsNotFound(status)) return status;
    }
    model.folder_ = path.substr(0, path.rfind('/') + 1);
    model.is_part_ = IsPart(path);
    const absl::Status status = model.TakeFile(path);
    if (status.ok()) return model;
    // A folder without a model's files is not a damaged file.
    if (absl::IsNotFound(status) || (!absl::EndsWith(path, kFileSuffix) && HasReason(status, ErrorReason::kFileCorrupt))) {
      return model.NothingThere();
    }
    return status;
  }

  const std::string& path() const { return path_; }
  bool Has(const std::string& name) const { return path_of_.contains(name); }
  // All names, sorted.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    names.reserve(path_of_.size());
    for (const auto& [name, path] : path_of_) names.push_back(name);
    return names;
  }
  // kWeightsNotFound if the index names a missing file, or a file without the tensor; else as Open().
  absl::StatusOr<ModelTensor> Find(const std::string& name) {
    const auto place = path_of_.find(name);
    if (place == path_of_.end()) return absl::NotFoundError("no such tensor");
    const std::string& path = place->second;
    auto known = open_.find(path);
    if (known == open_.end()) {
      absl::StatusOr<OpenFile> file = OpenPath(path);
      if (absl::IsNotFound(file.status())) {
        return MakeError(ErrorReason::kWeightsNotFound,
                         absl::StrCat(Shown(path), " is not there; the model's index says that it has ", Shown(name)),
                         {{"file", Shown(path)}, {"tensor", Shown(name)}});
      }
      if (!file.ok()) return file.status();
      known = open_.emplace(path, *std::move(file)).first;
    }
    const auto entry = known->second.header.tensors.find(name);
    if (entry == known->second.header.tensors.end()) {
      return MakeError(ErrorReason::kWeightsNotFound,
                       absl::StrCat(Shown(path), " does not have ", Shown(name), "; the model's index says that it does"),
                       {{"file", Shown(path)}, {"tensor", Shown(name)}});
    }
    return ModelTensor{name, path, entry->second, known->second.file};
  }
  // True if Open()'s path is one file of a model that is split.
  bool is_part() const { return is_part_; }
  // The config.json beside the files. absl::NotFoundError if it is missing; else as Open().
  absl::StatusOr<nlohmann::json> ReadConfig() const { return ReadJson(folder_ + kConfigFile, "the model's config"); }

 private:
  struct OpenFile {
    std::shared_ptr<ReadableFile> file;
    SafetensorsHeader header;
  };
  ModelFolder(const FileSource& files, const std::string& path) : files_(&files), path_(path) {}

  absl::StatusOr<OpenFile> OpenPath(const std::string& path) const {
    absl::StatusOr<std::shared_ptr<ReadableFile>> file = files_->Open(path);
    if (!file.ok()) return InFile(file.status(), path);
    absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(**file);
    if (!header.ok()) return InFile(header.status(), path);
    return OpenFile{*std::move(file), *std::move(header)};
  }

  absl::Status TakeFile(const std::string& path) {
    HEADWATER_ASSIGN_OR_RETURN(OpenFile file, OpenPath(path));
    for (const auto& [name, tensor] : file.header.tensors) path_of_[name] = path;
    open_.emplace(path, std::move(file));
    return absl::OkStatus();
  }

  absl::StatusOr<nlohmann::json> ReadJson(const std::string& path, const std::string& what) const {
    absl::StatusOr<std::shared_ptr<ReadableFile>> file = files_->Open(path);
    if (!file.ok()) return InFile(file.status(), path);
    absl::StatusOr<nlohmann::json> json = ReadLenientJson(**file, what);
    if (!json.ok()) return InFile(json.status(), path);
    return json;
  }

  absl::Status TakeIndex(const std::string& path) {
    HEADWATER_ASSIGN_OR_RETURN(const nlohmann::json index, ReadJson(path, "the model's index"));
    const nlohmann::json* map = FindMember(index, "weight_map", nlohmann::json::value_t::object);
    if (map == nullptr) return InFile(CorruptError("the model's index has no weight_map"), path);
    for (const auto& [tensor, value] : map->items()) {
      const std::string name = value.is_string() ? value.get<std::string>() : "";
      if (!absl::EndsWith(name, kFileSuffix) || name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
        return InFile(CorruptError(absl::StrCat("the model's index names '", Shown(name), "' for ", Shown(tensor),
                                                ", which is not a .safetensors file of its folder")),
                      path);
      }
      path_of_[tensor] = folder_ + name;
    }
    return absl::OkStatus();
  }

  absl::Status NothingThere() const {
    std::string message =
        absl::StrCat("'", Shown(path_), "' is neither a safetensors file nor a folder with ", kSingleFile, " or ", kIndexFile);
    std::vector<std::string> others = files_->List(path_);  // none for a file
    std::erase_if(others, [](const std::string& name) { return !absl::EndsWith(name, kFileSuffix); });
    for (size_t i = 0; i < others.size() && i < kMaxFilesShown; ++i) {
      absl::StrAppend(&message, i == 0 ? "; it has " : ", ", Shown(others[i]));
    }
    if (others.size() > kMaxFilesShown) absl::StrAppend(&message, " and ", others.size() - kMaxFilesShown, " more");
    if (std::any_of(others.begin(), others.end(), IsPart)) {
      absl::StrAppend(&message, ": parts of a model, whose index is missing");
    } else if (!others.empty()) {
      absl::StrAppend(&message, ": give the path of one of these");
    }
    return MakeError(ErrorReason::kWeightsNotFound, message, {{"field", "path"}, {"actual", Shown(path_)}});
  }

  const FileSource* files_;
  std::string path_;
  std::string folder_;  // with a slash at its end; empty: where a relative path begins
  bool is_part_ = false;
  std::map<std::string, std::string> path_of_;  // a tensor's file
  std::map<std::string, OpenFile> open_;        // by path
};

// ---- names ---------------------------------------------------------------------------------------------------------

using Names = absl::Span<const absl::string_view>;

constexpr size_t kMaxListedBytes = 600;  // of names in a message: errors travel in headers that are bounded
constexpr char kUsualWeight[] = "lm_head.weight";
constexpr char kWeightSuffix[] = ".weight";
constexpr char kBiasSuffix[] = ".bias";
constexpr char kLogitsBias[] = "final_logits_bias";

// Modules that transformers' classes, and known remote code, compute logits with. Under any prefix.
constexpr absl::string_view kHeadModules[] = {
    "lm_head",         "embed_out",           "codec_head",   "generator_lm_head", "vocab_projector", "cls.predictions.decoder",
    "lm_head.decoder", "predictions.decoder", "head.decoder", "pred_layer.proj"};
// Names that other modules have, too: only at the top, or under kModelPrefixes. Empty: a tensor named `weight` or `bias`.
constexpr absl::string_view kCommonHeadModules[] = {"output", "head", "proj_out", "output_layer", "ff_out", "decoder", "cls", ""};
constexpr absl::string_view kModelPrefixes[] = {
    "model", "transformer", "language_model", "language_model.model", "model.language_model", "text_model",
    "llm",   "thinker",     "module"};
// Modules that hold a head's bias but not its weight.
constexpr absl::string_view kBiasModules[] = {"cls.predictions", "predictions"};
constexpr absl::string_view kEmbeddingModules[] = {"embed_tokens",   "wte",      "word_embeddings", "embeddings", "shared",
                                                   "tok_embeddings", "embed_in", "tokens_embed",    "w"};
// Other models, which hold no part of the language model's head.
constexpr absl::string_view kOtherModels[] = {"qformer", "vision_model", "vision_tower", "visual", "audio_tower"};

// Model types whose class in transformers ties by default, so that their config.json may omit it.
constexpr char kTiedTypes[] =
    "albert bart bert big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert cohere cohere2 "
    "convbert ctrl data2vec-text deberta deberta-v2 distilbert electra ernie falcon falcon_mamba fnet gemma gemma2 "
    "gemma3 gemma3_text gemma3n gemma3n_text gpt2 gpt_bigcode gpt_neo led longformer longt5 m2m_100 mamba marian "
    "mbart modernbert mpt mvp nomic_bert openai-gpt opt paligemma pegasus pegasus_x plbart prophetnet "
    "recurrent_gemma roberta starcoder2 switch_transformers t5 whisper xglm xlm-roberta xlm-roberta-xl";

bool IsIn(absl::string_view text, Names names) { return std::find(names.begin(), names.end(), text) != names.end(); }

// Whether a module's path is `module`, or ends in it.
bool EndsInModule(absl::string_view path, absl::string_view module) {
  return path == module || absl::EndsWith(path, absl::StrCat(".", module));
}

bool EndsInOneOf(absl::string_view path, Names modules) {
  return std::any_of(modules.begin(), modules.end(), [&](absl::string_view module) { return EndsInModule(path, module); });
}

// A part of a layer, of an extra prediction head, or of another model.
bool IsElsewhere(absl::string_view module) {
  for (const absl::string_view part : absl::StrSplit(module, '.')) {
    const bool is_number = !part.empty() && part.find_first_not_of("0123456789") == absl::string_view::npos;
    if (is_number || absl::StartsWith(part, "mtp") || IsIn(part, kOtherModels)) return true;
  }
  return false;
}

bool IsHeadModule(absl::string_view module) {
  if (IsElsewhere(module)) return false;
  if (EndsInOneOf(module, kHeadModules) || IsIn(module, kCommonHeadModules)) return true;
  const size_t dot = module.rfind('.');
  return dot != absl::string_view::npos && IsIn(module.substr(dot + 1), kCommonHeadModules) &&
         IsIn(module.substr(0, dot), kModelPrefixes);
}

// The module that owns a tensor, by the suffix for weight or bias.
std::optional<absl::string_view> ModuleOf(absl::string_view name, absl::string_view suffix) {
  if (name == suffix.substr(1)) return absl::string_view();
  if (!absl::ConsumeSuffix(&name, suffix)) return std::nullopt;
  return name;
}

bool IsHeadWeightName(absl::string_view name) {
  const std::optional<absl::string_view> module = ModuleOf(name, kWeightSuffix);
  return module.has_value() && IsHeadModule(*module);
}

bool IsEmbeddingName(absl::string_view name) {
  const std::optional<absl::string_view> module = ModuleOf(name, kWeightSuffix);
  return module.has_value() && !IsElsewhere(*module) && EndsInOneOf(*module, kEmbeddingModules);
}

bool IsOfEncoder(absl::string_view name) { return absl::StrContains(absl::StrCat(".", name, "."), ".encoder."); }

bool IsHeadBiasName(absl::string_view name) {
  const std::optional<absl::string_view> module = ModuleOf(name, kBiasSuffix);
  return module.has_value() && (IsHeadModule(*module) || (!IsElsewhere(*module) && EndsInOneOf(*module, kBiasModules)));
}

// nullopt for a type that heads do not support.
std::optional<DataType> DataTypeOf(const std::string& name) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    if (name == SafetensorsType(type)) return type;
  }
  return std::nullopt;
}

std::string ShapeToString(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

std::string SizeToString(const std::optional<int64_t>& size, const char* unknown) {
  return size.has_value() ? absl::StrCat(*size) : unknown;
}

// The shape that a weight must have.
std::string WeightShape(const HeadTensorQuery& query) {
  return absl::StrCat("[", SizeToString(query.vocab_size, "vocab_size"), ", ", SizeToString(query.hidden_size, "hidden_size"), "]");
}

bool IsWeightShape(const std::vector<int64_t>& shape, const HeadTensorQuery& query) {
  return shape.size() == 2 && shape[0] == query.vocab_size.value_or(shape[0]) && shape[1] == query.hidden_size.value_or(shape[1]);
}

bool IsBiasShape(const std::vector<int64_t>& shape, int64_t vocab_size) {
  return !shape.empty() && shape.size() <= 2 && shape.back() == vocab_size && (shape.size() == 1 || shape[0] == 1);
}

// Some of the names, with how many more there are.
std::string ListNames(const std::vector<std::string>& names) {
  std::string list;
  size_t count = 0;
  for (; count < names.size() && list.size() < kMaxListedBytes; ++count) {
    absl::StrAppend(&list, count == 0 ? "" : ", ", Shown(names[count]));
  }
  if (count < names.size()) absl::StrAppend(&list, " and ", names.size() - count, " more");
  return list;
}

// Whether a config ties the embedding to the head's weight.
struct Tying {
  bool is_tied = false;
  const char* reason = "";  // if not
};

// Every `tie_word_embeddings` of the objects within `config`.
void CollectTying(const nlohmann::json& config, std::vector<bool>* values) {
  for (const nlohmann::json& member : config) {
    if (!member.is_object()) continue;
    if (const auto* value = FindMember(member, "tie_word_embeddings", nlohmann::json::value_t::boolean)) {
      values->push_back(value->get<bool>());
    }
    CollectTying(member, values);
  }
}

Tying TyingOf(const nlohmann::json& config) {
  if (const auto* value = FindMember(config, "tie_word_embeddings", nlohmann::json::value_t::boolean)) {
    return {value->get<bool>(), "config.json says tie_word_embeddings=false"};
  }
  std::vector<bool> nested;
  CollectTying(config, &nested);
  if (!nested.empty()) {
    const bool all = std::find(nested.begin(), nested.end(), false) == nested.end();
    return {all,
            all ? "config.json says tie_word_embeddings=true" : "config.json does not say tie_word_embeddings=true throughout"};
  }
  const std::vector<absl::string_view> tied = absl::StrSplit(kTiedTypes, ' ');
  for (const nlohmann::json* part : {&config, FindMember(config, "text_config", nlohmann::json::value_t::object)}) {
    if (part == nullptr) continue;
    const auto* type = FindMember(*part, "model_type", nlohmann::json::value_t::string);
    if (type != nullptr && IsIn(type->get_ref<const std::string&>(), tied)) return {true, ""};
  }
  return {false, "config.json does not say tie_word_embeddings=true"};
}

// Applies the rules to one model.
class Chooser {
 public:
  Chooser(ModelFolder& model, const HeadTensorQuery& query) : model_(model), query_(query) {}

  absl::StatusOr<HeadTensors> Choose() {
    if (query_.has_bias == false && !query_.bias_tensor.empty()) {
      return MakeError(ErrorReason::kInvalidCombination, "bias_tensor must be empty, the head has no bias",
                       {{"field", "bias_tensor"}});
    }
    HEADWATER_ASSIGN_OR_RETURN(ModelTensor weight, ChooseWeight());
    HEADWATER_ASSIGN_OR_RETURN(FileTensor taken, TakeWeight(weight));
    HEADWATER_ASSIGN_OR_RETURN(std::optional<FileTensor> bias, TakeBias(taken.name, taken.rows));
    return HeadTensors{std::move(taken), std::move(bias)};
  }

 private:
  absl::StatusOr<ModelTensor> ChooseWeight() {
    if (!query_.weight_tensor.empty()) return FindAsked(query_.weight_tensor, "weight_tensor");
    if (model_.Has(kUsualWeight)) return model_.Find(kUsualWeight);
    HEADWATER_ASSIGN_OR_RETURN(std::vector<ModelTensor> named, FindNamed(IsHeadWeightName));
    std::vector<ModelTensor> fitting = Fitting(named);
    if (fitting.size() > 1) return SeveralFit(fitting, "a head's weight", "weight_tensor (--tensor)");
    if (fitting.size() == 1) return fitting[0];
    std::string no_embedding;
    HEADWATER_ASSIGN_OR_RETURN(std::vector<ModelTensor> embeddings, FittingEmbeddings(&no_embedding));
    if (embeddings.size() > 1) return SeveralFit(embeddings, "the embedding that the head is tied to", "weight_tensor (--tensor)");
    if (embeddings.size() == 1) return embeddings[0];
    // The later error on its shape explains more than NothingFits().
    if (named.size() == 1) return named[0];
    return NothingFits(no_embedding);
  }

  absl::StatusOr<ModelTensor> FindAsked(const std::string& name, const char* field) {
    if (model_.Has(name)) return model_.Find(name);
    return MakeError(
        ErrorReason::kWeightsNotFound,
        absl::StrCat("'", Shown(model_.path()), "' has no tensor ", Shown(name), "; it has: ", ListNames(model_.Names())),
        {{"field", field}, {"actual", Shown(name)}});
  }

  // The tensors whose names `is_meant` accepts.
  absl::StatusOr<std::vector<ModelTensor>> FindNamed(bool (*is_meant)(absl::string_view)) {
    std::vector<ModelTensor> found;
    for (const std::string& name : model_.Names()) {
      if (!is_meant(name)) continue;
      HEADWATER_ASSIGN_OR_RETURN(ModelTensor tensor, model_.Find(name));
      found.push_back(std::move(tensor));
    }
    return found;
  }

  std::vector<ModelTensor> Fitting(std::vector<ModelTensor> tensors) const {
    std::erase_if(tensors, [this](const ModelTensor& tensor) { return !IsWeightShape(tensor.entry.shape, query_); });
    return tensors;
  }

  // The embeddings that may be the head's weight. If empty, `reason` says why, or is empty.
  absl::StatusOr<std::vector<ModelTensor>> FittingEmbeddings(std::string* reason) {
    const std::vector<std::string> names = model_.Names();
    if (std::none_of(names.begin(), names.end(), IsEmbeddingName)) return std::vector<ModelTensor>();
    if (model_.is_part()) {
      *reason = "the file is one of several of its model, and another one may have the head";
      return std::vector<ModelTensor>();
    }
    const absl::StatusOr<nlohmann::json> config = model_.ReadConfig();
    if (!config.ok() && !absl::IsNotFound(config.status())) return config.status();
    const Tying tying = config.ok() ? TyingOf(*config) : Tying{false, "there is no config.json to say tie_word_embeddings=true"};
    if (!tying.is_tied) {
      *reason = tying.reason;
      return std::vector<ModelTensor>();
    }
    HEADWATER_ASSIGN_OR_RETURN(std::vector<ModelTensor> named, FindNamed(IsEmbeddingName));
    std::vector<ModelTensor> fitting = Fitting(named);
    const auto is_of_encoder = [](const ModelTensor& tensor) { return IsOfEncoder(tensor.name); };
    if (!std::all_of(fitting.begin(), fitting.end(), is_of_encoder)) std::erase_if(fitting, is_of_encoder);
    return fitting;
  }

  absl::Status SeveralFit(const std::vector<ModelTensor>& tensors, const char* role, const char* field) const {
    std::vector<std::string> names;
    for (const ModelTensor& tensor : tensors) names.push_back(tensor.name);
    return MakeError(ErrorReason::kWeightsNotFound,
                     absl::StrCat("'", Shown(model_.path()), "' has several tensors that may be ", role, ": ", ListNames(names),
                                  "; name one with ", field),
                     {{"field", std::string(absl::string_view(field).substr(0, absl::string_view(field).find(' ')))}});
  }

  absl::Status NothingFits(const std::string& no_embedding) {
    std::vector<std::string> fitting = model_.Names();
    std::erase_if(fitting, [this](const std::string& name) {
      const absl::StatusOr<ModelTensor> tensor = model_.Find(name);  // fails for a missing file
      return !tensor.ok() || !IsWeightShape(tensor->entry.shape, query_);
    });
    std::string message = absl::StrCat("'", Shown(model_.path()), "' has no tensor ", WeightShape(query_),
                                       " with the name of a head (", kUsualWeight, " and the like)");
    if (!no_embedding.empty()) absl::StrAppend(&message, ", and an embedding is not taken: ", no_embedding);
    if (fitting.empty()) {
      absl::StrAppend(&message, "; it has no tensor of that shape; it has: ", ListNames(model_.Names()));
    } else {
      absl::StrAppend(&message, "; tensors of that shape: ", ListNames(fitting), "; name one with weight_tensor (--tensor)");
    }
    return MakeError(ErrorReason::kWeightsNotFound, message, {{"field", "weight_tensor"}, {"expected", kUsualWeight}});
  }

  // `tensor` as one of the types that heads have.
  static absl::StatusOr<FileTensor> Take(const ModelTensor& tensor, int64_t rows, int64_t columns) {
    const std::string& type = tensor.entry.data_type;
    const std::optional<DataType> data_type = DataTypeOf(type);
    if (!data_type.has_value()) {
      return MakeError(ErrorReason::kDataTypeMismatch,
                       absl::StrCat("tensor ", Shown(tensor.name), " of ", Shown(tensor.path), " is of type ", Shown(type),
                                    ", heads have F32, BF16 or F16"),
                       {{"tensor", Shown(tensor.name)}, {"expected", "F32, BF16 or F16"}, {"actual", Shown(type)}});
    }
    return FileTensor{tensor.name, tensor.file, tensor.entry.begin, rows, columns, *data_type};
  }

  absl::Status WrongShape(const ModelTensor& tensor, const std::string& expected, const std::string& advice) const {
    const std::string actual = ShapeToString(tensor.entry.shape);
    return MakeError(ErrorReason::kCheckpointSpecMismatch,
                     absl::StrCat("tensor ", Shown(tensor.name), " of ", Shown(tensor.path), " is ", actual, ", the head needs ",
                                  expected, advice),
                     {{"tensor", Shown(tensor.name)}, {"expected", expected}, {"actual", actual}});
  }

  absl::StatusOr<FileTensor> TakeWeight(const ModelTensor& tensor) const {
    const std::vector<int64_t>& shape = tensor.entry.shape;
    if (!IsWeightShape(shape, query_)) {
      std::string advice;
      if (shape.size() == 2 && shape[1] == query_.hidden_size && shape[0] > query_.vocab_size) {
        advice = absl::StrCat("; if rows are padding, make the head with vocab_size=", shape[0],
                              " and valid_vocab_size=", *query_.vocab_size);
      }
      return WrongShape(tensor, WeightShape(query_), advice);
    }
    return Take(tensor, shape[0], shape[1]);
  }

  absl::StatusOr<std::optional<FileTensor>> TakeBias(const std::string& weight, int64_t vocab_size) {
    HEADWATER_ASSIGN_OR_RETURN(const std::optional<ModelTensor> bias, ChooseBias(weight, vocab_size));
    if (!bias.has_value()) {
      if (query_.has_bias != true) return std::nullopt;
      return MakeError(ErrorReason::kWeightsNotFound,
                       absl::StrCat("the head has a bias, and '", Shown(model_.path()),
                                    "' has no tensor with the name of a head's bias (lm_head.bias and the like); name one with "
                                    "bias_tensor (--bias_tensor), or make the head without a bias"),
                       {{"field", "bias_tensor"}, {"expected", "lm_head.bias"}});
    }
    const ModelTensor& tensor = *bias;
    if (query_.has_bias == false) {
      return MakeError(ErrorReason::kCheckpointSpecMismatch,
                       absl::StrCat(Shown(tensor.path), " has a bias, ", Shown(tensor.name),
                                    ", and the head has none; make the head with bias=True (--bias)"),
                       {{"field", "bias"}, {"tensor", Shown(tensor.name)}});
    }
    if (!IsBiasShape(tensor.entry.shape, vocab_size)) return WrongShape(tensor, ShapeToString({vocab_size}), "");
    return Take(tensor, vocab_size, 1);
  }

  absl::StatusOr<std::optional<ModelTensor>> ChooseBias(const std::string& weight, int64_t vocab_size) {
    if (!query_.bias_tensor.empty()) return FindAsked(query_.bias_tensor, "bias_tensor");
    const std::optional<absl::string_view> module = ModuleOf(weight, kWeightSuffix);
    if (module.has_value()) {
      const std::string own = module->empty() ? "bias" : absl::StrCat(*module, kBiasSuffix);
      if (model_.Has(own)) return model_.Find(own);
    }
    HEADWATER_ASSIGN_OR_RETURN(std::vector<ModelTensor> fitting, FindNamed(IsHeadBiasName));
    std::erase_if(fitting, [vocab_size](const ModelTensor& tensor) { return !IsBiasShape(tensor.entry.shape, vocab_size); });
    if (fitting.size() > 1) return SeveralFit(fitting, "the head's bias", "bias_tensor (--bias_tensor)");
    if (fitting.size() == 1) return std::move(fitting[0]);
    return FindLogitsBias(vocab_size);
  }

  // BART and its relatives add a buffer to the logits, which is zero in nearly every model.
  absl::StatusOr<std::optional<ModelTensor>> FindLogitsBias(int64_t vocab_size) {
    HEADWATER_ASSIGN_OR_RETURN(const std::vector<ModelTensor> named,
                               FindNamed([](absl::string_view name) { return EndsInModule(name, kLogitsBias); }));
    for (const ModelTensor& tensor : named) {
      if (!IsBiasShape(tensor.entry.shape, vocab_size)) continue;
      if (query_.has_bias == true || !DataTypeOf(tensor.entry.data_type).has_value()) return tensor;
      std::string bytes(static_cast<size_t>(tensor.entry.end - tensor.entry.begin), '\0');
      HEADWATER_RETURN_IF_ERROR(tensor.file->ReadAt(tensor.entry.begin, static_cast<int64_t>(bytes.size()), bytes.data()));
      if (bytes.find_first_not_of('\0') != std::string::npos) return tensor;
    }
    return std::nullopt;
  }

  ModelFolder& model_;
  const HeadTensorQuery& query_;
};

}  // namespace

absl::StatusOr<HeadTensors> FindHeadTensors(const FileSource& files, const std::string& path, const HeadTensorQuery& query) {
  HEADWATER_ASSIGN_OR_RETURN(ModelFolder model, ModelFolder::Open(files, path));
  return Chooser(model, query).Choose();
}

absl::StatusOr<std::optional<bool>> HasHeadBias(const FileSource& files, const std::string& path) {
  absl::StatusOr<ModelFolder> model = ModelFolder::Open(files, path);
  if (HasReason(model.status(), ErrorReason::kWeightsNotFound)) return std::nullopt;
  HEADWATER_RETURN_IF_ERROR(model.status());
  const absl::StatusOr<HeadTensors> tensors = Chooser(*model, HeadTensorQuery()).Choose();
  if (tensors.ok()) return tensors->bias.has_value();
  const std::vector<std::string> names = model->Names();
  return std::any_of(names.begin(), names.end(), IsHeadBiasName);
}

}  // namespace headwater::model_files
