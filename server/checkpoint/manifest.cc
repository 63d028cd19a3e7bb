#include "server/checkpoint/manifest.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
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

json OptimizerToJson(const OptimizerSpec& optimizer) {
  if (const AdamWSpec* adamw = std::get_if<AdamWSpec>(&optimizer)) {
    return {{"kind", "adamw"},
            {"beta1", adamw->beta1},
            {"beta2", adamw->beta2},
            {"epsilon", adamw->epsilon},
            {"weight_decay", adamw->weight_decay}};
  }
  if (const SgdSpec* sgd = std::get_if<SgdSpec>(&optimizer)) {
    return {{"kind", "sgd"},
            {"momentum", sgd->momentum},
            {"dampening", sgd->dampening},
            {"nesterov", sgd->nesterov},
            {"weight_decay", sgd->weight_decay}};
  }
  return nullptr;
}

json SpecToJson(const HeadSpec& spec) {
  return {{"vocab_size", spec.vocab_size},
          {"hidden_size", spec.hidden_size},
          {"data_type", DataTypeName(spec.data_type)},
          {"has_bias", spec.has_bias},
          {"logit_scale", spec.transform.logit_scale},
          {"softcap", spec.transform.softcap.has_value() ? json(*spec.transform.softcap) : json(nullptr)},
          {"valid_vocab_size", spec.transform.valid_vocab_size},
          {"trainable", spec.trainable},
          {"optimizer", OptimizerToJson(spec.optimizer)},
          {kInitialStep, spec.initial_step}};
}

// Reads members of an object and remembers whether all were there and of their type.
class MemberReader {
 public:
  explicit MemberReader(const json& object) : object_(object) {}

  void Read(const char* key, int64_t* out) { Note(Find(key) != nullptr && GetCount(*Find(key), out)); }
  void ReadIfThere(const char* key, int64_t* out) {
    if (Find(key) != nullptr) Read(key, out);
  }
  void Read(const char* key, double* out) {
    const json* value = Find(key);
    Note(value != nullptr && value->is_number());
    if (value != nullptr && value->is_number()) *out = value->get<double>();
  }
  void Read(const char* key, bool* out) {
    const json* value = FindMember(object_, key, json::value_t::boolean);
    Note(value != nullptr);
    if (value != nullptr) *out = value->get<bool>();
  }
  void Read(const char* key, std::string* out) {
    const json* value = FindMember(object_, key, json::value_t::string);
    Note(value != nullptr);
    if (value != nullptr) *out = value->get<std::string>();
  }
  // Null if it is not there.
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

bool ParseOptimizer(const json& value, OptimizerSpec* out) {
  if (value.is_null()) {
    *out = std::monostate();
    return true;
  }
  if (!value.is_object()) return false;
  MemberReader reader(value);
  std::string kind;
  reader.Read("kind", &kind);
  if (kind == "adamw") {
    AdamWSpec adamw;
    reader.Read("beta1", &adamw.beta1);
    reader.Read("beta2", &adamw.beta2);
    reader.Read("epsilon", &adamw.epsilon);
    reader.Read("weight_decay", &adamw.weight_decay);
    *out = adamw;
  } else if (kind == "sgd") {
    SgdSpec sgd;
    reader.Read("momentum", &sgd.momentum);
    reader.Read("dampening", &sgd.dampening);
    reader.Read("nesterov", &sgd.nesterov);
    reader.Read("weight_decay", &sgd.weight_decay);
    *out = sgd;
  } else {
    return false;
  }
  return reader.good();
}

bool ParseSpec(const json& value, HeadSpec* out) {
  MemberReader reader(value);
  reader.Read("vocab_size", &out->vocab_size);
  reader.Read("hidden_size", &out->hidden_size);
  reader.Read("has_bias", &out->has_bias);
  reader.Read("logit_scale", &out->transform.logit_scale);
  reader.Read("valid_vocab_size", &out->transform.valid_vocab_size);
  reader.Read("trainable", &out->trainable);
  reader.Read(kInitialStep, &out->initial_step);
  std::string data_type;
  reader.Read("data_type", &data_type);
  bool known_type = false;
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    if (data_type != DataTypeName(type)) continue;
    out->data_type = type;
    known_type = true;
  }
  const json* softcap = reader.Find("softcap");
  if (softcap != nullptr && softcap->is_number()) out->transform.softcap = softcap->get<double>();
  reader.Note(softcap != nullptr && (softcap->is_null() || softcap->is_number()));
  const json* optimizer = reader.Find("optimizer");
  reader.Note(optimizer != nullptr && ParseOptimizer(*optimizer, &out->optimizer));
  return reader.good() && known_type && out->vocab_size > 0 && out->hidden_size > 0;
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
                     {"step", manifest.info.step},
                     {"update_count", manifest.info.update_count},
                     {"sequence", manifest.info.sequence},
                     {"first_sequence", manifest.info.first_sequence},
                     {"save_time_s", manifest.info.save_time_s},
                     {"numerics", manifest.info.numerics},
                     {"files", files}};
  const std::string text = body.dump();
  model_files::Xxh3Hasher hasher;
  hasher.Update(text.data(), static_cast<int64_t>(text.size()));
  const json document = {{"checksum", hasher.HexDigest()}, {"manifest", body}};
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
  const std::string text = body->dump(-1, ' ', false, json::error_handler_t::replace);
  model_files::Xxh3Hasher hasher;
  hasher.Update(text.data(), static_cast<int64_t>(text.size()));
  if (checksum->get<std::string>() != hasher.HexDigest())
    return CorruptError(absl::StrCat(kManifestTitle, " does not match its checksum"));

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
  if (reader.Find("parallelism") != nullptr) reader.Read("parallelism", &parallelism);
  const bool by_rows = parallelism == ParallelismName(Parallelism::kRows);
  reader.Note(by_rows || parallelism == ParallelismName(Parallelism::kVocabulary));
  if (reader.Find("numerics") != nullptr) reader.Read("numerics", &manifest.info.numerics);
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
