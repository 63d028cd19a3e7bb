#include "server/checkpoint/weights_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "headwater/kernels/error.h"
#include "server/checkpoint/strict_json.h"

namespace headwater::checkpoint {
namespace {

constexpr int64_t kMaxIndexBytes = int64_t{16} << 20;
constexpr size_t kMaxPathLength = 4096;
constexpr int64_t kPieceElements = int64_t{1} << 20;
constexpr char kFileSuffix[] = ".safetensors";
constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
// In this order. All but the first and the last are embeddings that the head is tied to.
constexpr const char* kWeightNames[] = {"lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight",
                                        "model.decoder.embed_tokens.weight", "weight"};
// Of one file of several: an embedding there says nothing of whether another one has the head itself.
constexpr const char* kPartWeightNames[] = {"lm_head.weight", "weight"};
constexpr const char* kBiasNames[] = {"lm_head.bias", "bias"};

float FromBFloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Without a type for it, which not every compiler has.
float FromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1F;
  const uint32_t mantissa = bits & 0x3FF;
  float magnitude;
  if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-24F;  // zero and subnormal numbers
  } else {
    // Exponents of 31, infinities and NaNs, stay the largest there is.
    const uint32_t wide = (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    std::memcpy(&magnitude, &wide, sizeof(magnitude));
  }
  return sign != 0 ? -magnitude : magnitude;
}

// A name of somebody else's in a message.
std::string Shown(const std::string& name) { return absl::CHexEscape(name.substr(0, 200)); }

absl::Status InvalidPath(const std::string& path, const char* problem) {
  const std::string shown = Shown(path);
  return MakeError(
      ErrorReason::kInvalidField,
      absl::StrCat("path must be relative, without `..`, and stay under the server's load root; '", shown, "' ", problem),
      {{"field", "path"}, {"actual", shown}});
}

absl::Status CheckPath(const std::string& path) {
  if (path.empty()) return MakeError(ErrorReason::kMissingField, "path is required", {{"field", "path"}});
  if (path.size() > kMaxPathLength) return InvalidPath(path, "is too long");
  if (path.find('\0') != std::string::npos) return InvalidPath(path, "has a NUL character");
  if (path.front() == '/') return InvalidPath(path, "is absolute");
  for (const absl::string_view component : absl::StrSplit(path, '/')) {
    if (component == "..") return InvalidPath(path, "has `..`");
  }
  return absl::OkStatus();
}

bool IsBeneath(const std::string& path, const std::string& root) {
  return path.size() > root.size() && path.compare(0, root.size(), root) == 0 && (root == "/" || path[root.size()] == '/');
}

// The path without links; empty if it is not there.
std::string RealPath(const std::string& path) {
  char* resolved = realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return "";
  std::string text(resolved);
  free(resolved);
  return text;
}

// Whether a file is named as one of several that a model is cut into: "model-00001-of-00004.safetensors".
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

// Opens files under one directory, wherever symbolic links lead.
class LoadRoot {
 public:
  explicit LoadRoot(const std::string& root) : root_(RealPath(root)) {}

  // NotFound if there is no such file; kInvalidField if it lies outside the root.
  absl::StatusOr<std::shared_ptr<ReadableFile>> Open(const std::string& path) const {
    if (root_.empty()) return absl::NotFoundError("the load root is not there");
    const std::string resolved = RealPath(absl::StrCat(root_, "/", path));
    if (resolved.empty()) return absl::NotFoundError("no such file");
    if (!IsBeneath(resolved, root_)) return InvalidPath(path, "leads out of it");
    const int descriptor = open(resolved.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0 && errno == ENOENT) return absl::NotFoundError("no such file");
    if (descriptor < 0) return MakeError(ErrorReason::kFileCorrupt, "the file cannot be opened", {{"errno", absl::StrCat(errno)}});
    // A directory on the way may have been replaced by a link since: what counts is where the open file lies.
    if (RealPath(absl::StrCat("/proc/self/fd/", descriptor)) != resolved) {
      close(descriptor);
      return InvalidPath(path, "changed while it was opened");
    }
    absl::StatusOr<std::unique_ptr<ReadableFile>> file = ReadableFromDescriptor(descriptor);
    if (!file.ok()) return file.status();
    return std::shared_ptr<ReadableFile>(*std::move(file));
  }

 private:
  const std::string root_;
};

// A file with its header.
struct TensorFile {
  std::shared_ptr<ReadableFile> file;
  SafetensorsHeader header;
};

// What a path stands for: one file, or a folder with an index that says which file has which tensor.
class Model {
 public:
  static absl::StatusOr<Model> Open(const LoadRoot& root, const std::string& path) {
    Model model(root);
    std::string file_path = path;
    if (!absl::EndsWith(path, kFileSuffix)) {
      model.folder_ = path;
      absl::StatusOr<std::shared_ptr<ReadableFile>> index = root.Open(absl::StrCat(path, "/", kIndexFile));
      if (index.ok()) {
        absl::Status status = model.ReadIndex(**index);
        if (!status.ok()) return status;
        return model;
      }
      if (!absl::IsNotFound(index.status())) return index.status();
      file_path = absl::StrCat(path, "/", kSingleFile);
    }
    absl::StatusOr<TensorFile> file = model.OpenFile(file_path);
    if (absl::IsNotFound(file.status())) {
      const std::string shown = Shown(path);
      return MakeError(ErrorReason::kWeightsNotFound,
                       absl::StrCat("'", shown, "' under the load root is neither a .safetensors file nor a folder with ",
                                    kSingleFile, " or ", kIndexFile),
                       {{"field", "path"}, {"actual", shown}});
    }
    if (!file.ok()) return file.status();
    for (const auto& [name, tensor] : file->header.tensors) model.file_of_[name] = file_path;
    model.open_[file_path] = *std::move(file);
    return model;
  }

  bool Has(const std::string& tensor) const { return file_of_.contains(tensor); }

  // The file that holds a tensor which Has() knows.
  absl::StatusOr<const TensorFile*> FileOf(const std::string& tensor) {
    const std::string& path = file_of_.at(tensor);
    auto known = open_.find(path);
    if (known == open_.end()) {
      absl::StatusOr<TensorFile> file = OpenFile(path);
      if (absl::IsNotFound(file.status())) return CorruptError("a file that the model's index names is not there");
      if (!file.ok()) return file.status();
      known = open_.emplace(path, *std::move(file)).first;
    }
    // Also of a file that is open for another tensor: the index may say more of it than it has.
    if (!known->second.header.tensors.contains(tensor)) {
      return CorruptError("a file does not have the tensor that the model's index says");
    }
    return &known->second;
  }

 private:
  explicit Model(const LoadRoot& root) : root_(&root) {}

  absl::StatusOr<TensorFile> OpenFile(const std::string& path) const {
    absl::StatusOr<std::shared_ptr<ReadableFile>> file = root_->Open(path);
    if (!file.ok()) return file.status();
    absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(**file);
    if (!header.ok()) return header.status();
    return TensorFile{*std::move(file), *std::move(header)};
  }

  absl::Status ReadIndex(const ReadableFile& file) {
    absl::StatusOr<nlohmann::json> index = ReadStrictJson(file, kMaxIndexBytes, "the model's index");
    if (!index.ok()) return index.status();
    const nlohmann::json* map = FindMember(*index, "weight_map", nlohmann::json::value_t::object);
    if (map == nullptr) return CorruptError("the model's index has no weight_map");
    for (const auto& [tensor, value] : map->items()) {
      const std::string name = value.is_string() ? value.get<std::string>() : "";
      if (!absl::EndsWith(name, kFileSuffix) || name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
        return CorruptError("the model's index names a file that is not a .safetensors file of its folder");
      }
      file_of_[tensor] = absl::StrCat(folder_, "/", name);
    }
    return absl::OkStatus();
  }

  const LoadRoot* root_;
  std::string folder_;
  std::map<std::string, std::string> file_of_;  // by tensor
  std::map<std::string, TensorFile> open_;      // by path
};

// The name to use for a tensor: the one asked for, or the first of the usual ones that is there.
absl::StatusOr<std::string> ChooseName(const Model& model, const std::string& asked, absl::Span<const char* const> usual,
                                       const char* field) {
  if (!asked.empty() && model.Has(asked)) return asked;
  if (!asked.empty()) {
    const std::string shown = Shown(asked);
    return MakeError(ErrorReason::kWeightsNotFound, absl::StrCat("there is no tensor '", shown, "'"),
                     {{"field", field}, {"actual", shown}});
  }
  for (const char* name : usual) {
    if (model.Has(name)) return std::string(name);
  }
  return MakeError(ErrorReason::kWeightsNotFound,
                   absl::StrCat("none of the tensors ", absl::StrJoin(usual, ", "), " is there; set ", field),
                   {{"field", field}, {"expected", absl::StrJoin(usual, ",")}});
}

std::string ShapeToString(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

}  // namespace

absl::StatusOr<std::unique_ptr<WeightsReader>> WeightsReader::Open(const std::string& load_root, const std::string& path,
                                                                   const std::string& weight_tensor, const std::string& bias_tensor,
                                                                   const HeadSpec& spec) {
  if (absl::Status status = CheckPath(path); !status.ok()) return status;
  if (!spec.has_bias && !bias_tensor.empty()) {
    return MakeError(ErrorReason::kInvalidCombination, "bias_tensor must be empty, the head has no bias",
                     {{"field", "bias_tensor"}});
  }
  const LoadRoot root(load_root);
  absl::StatusOr<Model> model = Model::Open(root, path);
  if (!model.ok()) return model.status();
  const bool is_part = IsPart(path);

  const auto find = [&](const std::string& asked, absl::Span<const char* const> usual, const char* field,
                        const std::vector<int64_t>& shape) -> absl::StatusOr<Source> {
    absl::StatusOr<std::string> name = ChooseName(*model, asked, usual, field);
    if (!name.ok()) return name.status();
    absl::StatusOr<const TensorFile*> file = model->FileOf(*name);
    if (!file.ok()) return file.status();
    const SafetensorsTensor& tensor = (*file)->header.tensors.at(*name);
    const std::string shown = absl::CHexEscape(name->substr(0, 200));
    if (tensor.shape != shape) {
      return MakeError(ErrorReason::kCheckpointSpecMismatch,
                       absl::StrCat(shown, " has shape ", ShapeToString(tensor.shape), ", the head needs ", ShapeToString(shape)),
                       {{"tensor", shown}, {"expected", ShapeToString(shape)}, {"actual", ShapeToString(tensor.shape)}});
    }
    Source source;
    if (tensor.data_type == "BF16") {
      source.file_type = DataType::kBFloat16;
    } else if (tensor.data_type == "F16") {
      source.file_type = DataType::kFloat16;
    } else if (tensor.data_type != "F32") {
      return MakeError(ErrorReason::kDataTypeMismatch,
                       absl::StrCat(shown, " is of type ", tensor.data_type, ", F32, BF16 or F16 was expected"),
                       {{"tensor", shown}, {"expected", "F32, BF16 or F16"}, {"actual", tensor.data_type}});
    }
    source.read_type = source.file_type == spec.data_type ? spec.data_type : DataType::kFloat32;
    source.file = (*file)->file;
    source.offset_bytes = tensor.begin;
    source.element_count = (tensor.end - tensor.begin) / ElementBytes(source.file_type);
    return source;
  };
  std::unique_ptr<WeightsReader> reader(new WeightsReader());
  const absl::Span<const char* const> usual_names =
      is_part ? absl::MakeConstSpan(kPartWeightNames) : absl::MakeConstSpan(kWeightNames);
  absl::StatusOr<Source> weight = find(weight_tensor, usual_names, "weight_tensor", {spec.vocab_size, spec.hidden_size});
  if (is_part && weight_tensor.empty() && HasReason(weight.status(), ErrorReason::kWeightsNotFound)) {
    return MakeError(ErrorReason::kWeightsNotFound,
                     absl::StrCat(weight.status().message(),
                                  "; the file is one of several of its model, so an embedding in it need not be the head's weight: "
                                  "the model's folder says where that is"),
                     GetErrorMetadata(weight.status()));
  }
  if (!weight.ok()) return weight.status();
  reader->weight_ = *std::move(weight);
  if (spec.has_bias) {
    absl::StatusOr<Source> bias = find(bias_tensor, kBiasNames, "bias_tensor", {spec.vocab_size});
    if (!bias.ok()) return bias.status();
    reader->bias_ = *std::move(bias);
  }
  return reader;
}

DataType WeightsReader::data_type(HeadTensor tensor) const { return source(tensor).read_type; }

absl::Status WeightsReader::Read(HeadTensor tensor, int64_t element_start, int64_t element_count, void* out) const {
  const Source& from = source(tensor);
  if (element_start < 0 || element_count < 0 || element_count > from.element_count ||
      element_start > from.element_count - element_count) {
    return MakeError(
        ErrorReason::kChunkOutOfRange,
        absl::StrCat(element_count, " elements from ", element_start, " on do not lie in a tensor of ", from.element_count),
        {{"expected", absl::StrCat(from.element_count)}});
  }
  const int64_t element_bytes = ElementBytes(from.file_type);
  const int64_t offset = from.offset_bytes + element_start * element_bytes;
  if (from.file_type == from.read_type) return from.file->ReadAt(offset, element_count * element_bytes, out);
  // 16 bits that the head does not store: as fp32, exactly.
  float* next = static_cast<float*>(out);
  std::vector<uint16_t> piece(static_cast<size_t>(std::min(element_count, kPieceElements)));
  for (int64_t done = 0; done < element_count; done += kPieceElements) {
    const int64_t count = std::min(kPieceElements, element_count - done);
    absl::Status status = from.file->ReadAt(offset + done * element_bytes, count * element_bytes, piece.data());
    if (!status.ok()) return status;
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = piece[static_cast<size_t>(i)];
      *next++ = from.file_type == DataType::kBFloat16 ? FromBFloat16(bits) : FromFloat16(bits);
    }
  }
  return absl::OkStatus();
}

}  // namespace headwater::checkpoint
