#include "server/checkpoint/manifest.h"

#include <optional>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "headwater/kernels/each_name.h"
#include "headwater/kernels/error.h"
#include "server/model_files/strict_json.h"
#include "server/model_files/xxh3.h"

namespace headwater::checkpoint {
namespace {

using model_files::CorruptError;
using model_files::FindMember;
using model_files::GetCount;
using model_files::ReadStrictJson;
using nlohmann::json;

constexpr char kFormat[] = "headwater-checkpoint";
constexpr int64_t kFormatVersion = 1;
constexpr char kInitialStep[] = "initial_step";
constexpr char kManifestTitle[] = "the checkpoint's manifest";
constexpr char kOldLocalFormat[] = "headwater.local/1";

// Calls visit(name, field) for each field that a manifest has by its own name.
#define HEADWATER_VISIT(name) visit(#name, value.name);
template <typename Visitor>
void Visit(AdamWSpec& value, const Visitor& visit) {
  HEADWATER_EACH(HEADWATER_VISIT, HEADWATER_ADAMW_FIELDS)
}
template <typename Visitor>
void Visit(SgdSpec& value, const Visitor& visit) {
  HEADWATER_EACH(HEADWATER_VISIT, HEADWATER_SGD_FIELDS)
}
template <typename Visitor>
void Visit(LogitTransform& value, const Visitor& visit) {
  HEADWATER_EACH(HEADWATER_VISIT, HEADWATER_LOGIT_TRANSFORM_FIELDS)
}
template <typename Visitor>
void Visit(HeadSpec& value, const Visitor& visit) {
  HEADWATER_EACH(HEADWATER_VISIT, HEADWATER_HEAD_SPEC_FIELDS)
  Visit(value.transform, visit);
}
#undef HEADWATER_VISIT

template <typename T>
json ToJson(const T& value) {
  return value;
}
json ToJson(DataType value) { return DataTypeName(value); }
json ToJson(const std::optional<double>& value) { return value.has_value() ? json(*value) : json(nullptr); }

json SpecToJson(HeadSpec spec) {
  const auto put_into = [](json& object) {
    return [&object](const char* name, const auto& field) { object[name] = ToJson(field); };
  };
  json object;
  Visit(spec, put_into(object));
  json& optimizer = object["optimizer"];
  if (auto* adamw = std::get_if<AdamWSpec>(&spec.optimizer)) {
    optimizer["kind"] = "adamw";
    Visit(*adamw, put_into(optimizer));
  } else if (auto* sgd = std::get_if<SgdSpec>(&spec.optimizer)) {
    optimizer["kind"] = "sgd";
    Visit(*sgd, put_into(optimizer));
  }
  return object;
}

// False unless the value is of the field's type.
bool Parse(const json& value, int64_t* out) { return GetCount(value, out); }
bool Parse(const json& value, double* out) {
  if (value.is_number()) *out = value.get<double>();
  return value.is_number();
}
template <typename T>  // bool or std::string
bool Parse(const json& value, T* out) {
  const T* const there = value.get_ptr<const T*>();
  if (there != nullptr) *out = *there;
  return there != nullptr;
}
bool Parse(const json& value, std::optional<double>* out) { return value.is_null() || Parse(value, &out->emplace()); }
bool Parse(const json& value, DataType* out) {
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    if (value != DataTypeName(type)) continue;
    *out = type;
    return true;
  }
  return false;
}

// Reads members of an object and records whether all were present and of their type.
class MemberReader {
 public:
  explicit MemberReader(const json& object) : object_(object) {}

  template <typename T>
  void Read(const char* key, T* out) {
    Note(Find(key) != nullptr && Parse(*Find(key), out));
  }
  template <typename T>
  void ReadIfThere(const char* key, T* out) {
    if (Find(key) != nullptr) Read(key, out);
  }
  // Null if it is absent.
  const json* Find(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() ? &*found : nullptr;
  }
  void Note(bool good) { good_ = good_ && good; }
  bool good() const { return good_; }

 private:
  const json& object_;
  bool good_ = true;
};

bool ParseOptimizer(const json& object, OptimizerSpec* out) {
  if (object.is_null()) return true;
  if (!object.is_object()) return false;
  MemberReader reader(object);
  const auto read = [&](const char* name, auto& field) { reader.Read(name, &field); };
  std::string kind;
  reader.Read("kind", &kind);
  if (kind != "adamw" && kind != "sgd") return false;
  if (kind == "adamw") Visit(out->emplace<AdamWSpec>(), read);
  if (kind == "sgd") Visit(out->emplace<SgdSpec>(), read);
  return reader.good();
}

bool ParseSpec(const json& object, HeadSpec* out) {
  MemberReader reader(object);
  Visit(*out, [&](const char* name, auto& field) { reader.Read(name, &field); });
  const json* optimizer = reader.Find("optimizer");
  reader.Note(optimizer != nullptr && ParseOptimizer(*optimizer, &out->optimizer));
  return reader.good() && out->vocab_size > 0 && out->hidden_size > 0;
}

bool ParseFiles(const json& value, int64_t vocab_size, std::vector<ManifestFile>* out) {
  if (value.empty() || static_cast<int64_t>(value.size()) > kMaxCheckpointFiles) return false;
  int64_t next_row = 0;
  for (size_t index = 0; index < value.size(); ++index) {
    if (!value[index].is_object()) return false;
    MemberReader reader(value[index]);
    ManifestFile& file = out->emplace_back();
    reader.Read("name", &file.name);
    reader.Read("bytes", &file.bytes);
    reader.Read("xxh3_128", &file.checksum);
    reader.Read("vocab_start", &file.rows.vocab_start);
    reader.Read("vocab_end", &file.rows.vocab_end);
    if (!reader.good() || file.name != ShardFileName(index, value.size())) return false;
    if (file.rows.vocab_start != next_row || file.rows.vocab_end <= next_row) return false;
    next_row = file.rows.vocab_end;
  }
  return next_row == vocab_size;
}

std::string ChecksumOf(const json& body) {
  const std::string text = body.dump(-1, ' ', false, json::error_handler_t::replace);
  model_files::Xxh3Hasher hasher;
  hasher.Update(text.data(), static_cast<int64_t>(text.size()));
  return hasher.HexDigest();
}

}  // namespace

std::string ShardFileName(size_t index, size_t count) { return absl::StrFormat("shard-%05u-of-%05u.safetensors", index, count); }

std::string FormatManifest(const Manifest& manifest) {
  json files = json::array();
  for (const ManifestFile& file : manifest.files) {
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"xxh3_128", file.checksum},
                     {"vocab_start", file.rows.vocab_start},
                     {"vocab_end", file.rows.vocab_end}});
  }
  const json body = {{"format", kFormat},
                     {"format_version", kFormatVersion},
                     {"spec", SpecToJson(manifest.info.spec)},
                     {"staging_slots", manifest.info.spec.staging_slots},
                     {"parallelism", ParallelismName(manifest.info.spec.parallelism)},
                     {"int8_teacher", manifest.info.spec.int8_teacher},
                     {"step", manifest.info.step},
                     {"update_count", manifest.info.update_count},
                     {"sequence", manifest.info.sequence},
                     {"first_sequence", manifest.info.first_sequence},
                     {"save_time_s", manifest.info.save_time_s},
                     {"numerics", manifest.info.numerics},
                     {"files", files}};
  const json document = {{"checksum", ChecksumOf(body)}, {"manifest", body}};
  return document.dump(1) + "\n";
}

absl::StatusOr<Manifest> ReadManifest(const ReadableFile& file) {
  HEADWATER_ASSIGN_OR_RETURN(json document, ReadStrictJson(file, kMaxManifestBytes, kManifestTitle));
  if (const json* format = FindMember(document, "format", json::value_t::string); format != nullptr && *format == kOldLocalFormat) {
    return MakeError(ErrorReason::kCheckpointSpecMismatch,
                     "this checkpoint was written by headwater.local 0.1, whose format this version does not read; Head.load reads "
                     "the weights in its file head.safetensors");
  }
  const json* checksum = FindMember(document, "checksum", json::value_t::string);
  const json* body = FindMember(document, "manifest", json::value_t::object);
  if (checksum == nullptr || body == nullptr) return CorruptError(absl::StrCat(kManifestTitle, " lacks `checksum` or `manifest`"));
  if (*checksum != ChecksumOf(*body)) return CorruptError(absl::StrCat(kManifestTitle, " does not match its checksum"));

  Manifest manifest;
  MemberReader reader(*body);
  std::string format;
  int64_t version = 0;
  reader.Read("format", &format);
  reader.Read("format_version", &version);
  if (!reader.good() || format != kFormat || version != kFormatVersion) {
    return CorruptError(absl::StrCat(kManifestTitle, " must be of format ", kFormat, " ", kFormatVersion));
  }
  reader.Read("step", &manifest.info.step);
  reader.Read("update_count", &manifest.info.update_count);
  int64_t staging_slots = 0;
  reader.ReadIfThere("staging_slots", &staging_slots);
  reader.ReadIfThere("sequence", &manifest.info.sequence);
  reader.ReadIfThere("first_sequence", &manifest.info.first_sequence);
  reader.ReadIfThere("save_time_s", &manifest.info.save_time_s);
  std::string parallelism = ParallelismName(Parallelism::kVocabulary);
  reader.ReadIfThere("parallelism", &parallelism);
  const bool by_rows = parallelism == ParallelismName(Parallelism::kRows);
  reader.Note(by_rows || parallelism == ParallelismName(Parallelism::kVocabulary));
  reader.ReadIfThere("int8_teacher", &manifest.info.spec.int8_teacher);
  reader.ReadIfThere("numerics", &manifest.info.numerics);
  reader.Note(staging_slots <= INT32_MAX);
  const json* spec = FindMember(*body, "spec", json::value_t::object);
  const json* files = FindMember(*body, "files", json::value_t::array);
  if (!reader.good() || spec == nullptr || !ParseSpec(*spec, &manifest.info.spec) || files == nullptr ||
      !ParseFiles(*files, manifest.info.spec.vocab_size, &manifest.files)) {
    return CorruptError(
        absl::StrCat(kManifestTitle, " lacks a member, has one of a wrong type, or its files do not cover the vocabulary"));
  }
  manifest.info.spec.staging_slots = static_cast<int32_t>(staging_slots);
  manifest.info.spec.parallelism = by_rows ? Parallelism::kRows : Parallelism::kVocabulary;
  return manifest;
}

std::vector<SpecDifference> FindSpecDifferences(const HeadSpec& a, const HeadSpec& b) {
  const json first = SpecToJson(a);
  const json second = SpecToJson(b);
  std::vector<SpecDifference> differences;
  for (const auto& [key, value] : first.items()) {
    if (key != kInitialStep && value != second[key]) differences.push_back({key, value.dump(), second[key].dump()});
  }
  return differences;
}

}  // namespace headwater::checkpoint
