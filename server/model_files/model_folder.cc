#include "server/model_files/model_folder.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/strict_json.h"

namespace headwater::model_files {
namespace {

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

}  // namespace

absl::StatusOr<ModelFolder> ModelFolder::Open(const FileSource& files, const std::string& path) {
  if (path.empty()) return MakeError(ErrorReason::kMissingField, "path is required", {{"field", "path"}});
  ModelFolder model(files, path);
  if (!absl::EndsWith(path, kFileSuffix)) {
    model.folder_ = absl::StrCat(path, "/");
    absl::Status status = model.TakeFile(model.folder_ + kSingleFile);
    if (status.ok()) return model;
    if (!absl::IsNotFound(status)) return status;
    const std::string index_path = model.folder_ + kIndexFile;
    const absl::StatusOr<std::shared_ptr<ReadableFile>> index = files.Open(index_path);
    if (index.ok()) status = model.ReadIndex(**index);
    if (index.ok() && !status.ok()) return InFile(status, index_path);
    if (index.ok()) return model;
    if (!absl::IsNotFound(index.status())) return InFile(index.status(), index_path);
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

std::vector<std::string> ModelFolder::Names() const {
  std::vector<std::string> names;
  names.reserve(path_of_.size());
  for (const auto& [name, path] : path_of_) names.push_back(name);
  return names;
}

absl::StatusOr<ModelTensor> ModelFolder::Find(const std::string& name) {
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

absl::StatusOr<nlohmann::json> ModelFolder::ReadConfig() const {
  const std::string path = folder_ + kConfigFile;
  absl::StatusOr<std::shared_ptr<ReadableFile>> file = files_->Open(path);
  if (!file.ok()) return InFile(file.status(), path);
  absl::StatusOr<nlohmann::json> config = ReadLenientJson(**file, "the model's config");
  if (!config.ok()) return InFile(config.status(), path);
  return config;
}

absl::StatusOr<ModelFolder::OpenFile> ModelFolder::OpenPath(const std::string& path) const {
  absl::StatusOr<std::shared_ptr<ReadableFile>> file = files_->Open(path);
  if (!file.ok()) return InFile(file.status(), path);
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(**file);
  if (!header.ok()) return InFile(header.status(), path);
  return OpenFile{*std::move(file), *std::move(header)};
}

absl::Status ModelFolder::TakeFile(const std::string& path) {
  HEADWATER_ASSIGN_OR_RETURN(OpenFile file, OpenPath(path));
  for (const auto& [name, tensor] : file.header.tensors) path_of_[name] = path;
  open_.emplace(path, std::move(file));
  return absl::OkStatus();
}

absl::Status ModelFolder::ReadIndex(const ReadableFile& file) {
  HEADWATER_ASSIGN_OR_RETURN(nlohmann::json index, ReadLenientJson(file, "the model's index"));
  const nlohmann::json* map = FindMember(index, "weight_map", nlohmann::json::value_t::object);
  if (map == nullptr) return CorruptError("the model's index has no weight_map");
  for (const auto& [tensor, value] : map->items()) {
    const std::string name = value.is_string() ? value.get<std::string>() : "";
    if (!absl::EndsWith(name, kFileSuffix) || name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
      return CorruptError(absl::StrCat("the model's index names '", Shown(name), "' for ", Shown(tensor),
                                       ", which is not a .safetensors file of its folder"));
    }
    path_of_[tensor] = folder_ + name;
  }
  return absl::OkStatus();
}

absl::Status ModelFolder::NothingThere() const {
  std::string message =
      absl::StrCat("'", Shown(path_), "' is neither a safetensors file nor a folder with ", kSingleFile, " or ", kIndexFile);
  std::vector<std::string> others;
  bool has_part = false;
  if (!absl::EndsWith(path_, kFileSuffix)) {
    for (const std::string& name : files_->List(path_)) {
      if (!absl::EndsWith(name, kFileSuffix)) continue;
      others.push_back(name);
      has_part = has_part || IsPart(name);
    }
  }
  for (size_t i = 0; i < others.size() && i < kMaxFilesShown; ++i) {
    absl::StrAppend(&message, i == 0 ? "; it has " : ", ", Shown(others[i]));
  }
  if (others.size() > kMaxFilesShown) absl::StrAppend(&message, " and ", others.size() - kMaxFilesShown, " more");
  if (has_part) {
    absl::StrAppend(&message, ": parts of a model, whose index is missing");
  } else if (!others.empty()) {
    absl::StrAppend(&message, ": give the path of one of these");
  }
  return MakeError(ErrorReason::kWeightsNotFound, message, {{"field", "path"}, {"actual", Shown(path_)}});
}

}  // namespace headwater::model_files
