// `verify`: whether a head computes what a model's own head would.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/model_config.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/file_source.h"
#include "server/model_files/head_tensors.h"
#include "server/model_files/xxh3.h"

ABSL_DECLARE_FLAG(bool, allow_unchecked);

namespace headwater::ctl {
namespace {

using nlohmann::json;

// Configs round their values: 1 / 13.
constexpr double kTolerance = 1e-6;

enum class Finding { kSame, kDiffers, kRounded, kWider, kNotChecked, kNoted };

const char* FindingName(Finding verdict) { return NameOf(verdict, {"same", "differs", "rounded", "wider", "not checked", "-"}); }

// One property; null: there is none, or it is not known.
struct Check {
  std::string property;
  json head;
  json model;
  Finding verdict = Finding::kSame;
};

Finding SameIf(bool same) { return same ? Finding::kSame : Finding::kDiffers; }

bool AreClose(double a, double b) { return std::abs(a - b) <= kTolerance * std::abs(b); }

std::vector<Check> Compare(const client::HeadSpec& head, const ModelHead& model) {
  std::vector<Check> checks;
  const auto add = [&](std::string property, json of_head, json of_model, Finding verdict) {
    checks.push_back({std::move(property), std::move(of_head), std::move(of_model), verdict});
  };
  const int64_t valid = head.valid_vocab_size.value_or(head.vocab_size);
  // Rows may be added to a weight, or left out, if they get no probability.
  add("vocab_size", head.vocab_size, model.vocab_size, SameIf(head.vocab_size >= model.valid_vocab_size));
  add("valid_vocab_size", valid, model.valid_vocab_size, SameIf(valid == model.valid_vocab_size));
  add("hidden_size", head.hidden_size, model.hidden_size, SameIf(head.hidden_size == model.hidden_size));
  add("logit_scale", head.logit_scale, model.logit_scale, SameIf(AreClose(head.logit_scale, model.logit_scale)));
  add("softcap", head.softcap, model.softcap,
      SameIf(head.softcap.has_value() == model.softcap.has_value() &&
             (!head.softcap.has_value() || AreClose(*head.softcap, *model.softcap))));
  add("bias", head.has_bias, model.has_bias, SameIf(head.has_bias == model.has_bias));
  Finding type = Finding::kNoted;
  if (model.data_type.has_value()) {
    type = head.data_type == *model.data_type             ? Finding::kSame
           : head.data_type == client::DataType::kFloat32 ? Finding::kWider
                                                          : Finding::kRounded;
  }
  add("data_type", client::DataTypeName(head.data_type),
      model.data_type.has_value() ? json(client::DataTypeName(*model.data_type)) : json(), type);
  if (model.tied.has_value()) add("tie_word_embeddings", json(), *model.tied, Finding::kNoted);
  for (const ModelHead::UnclearKey& unclear : model.unclear) add(unclear.key, json(), unclear.value, Finding::kNotChecked);
  return checks;
}

// XXH3-128 of a tensor's bytes, in the form of HeadInfo::weight_checksum.
absl::StatusOr<std::string> ChecksumOf(const model_files::FileTensor& tensor) {
  constexpr int64_t kPieceBytes = int64_t{4} << 20;
  model_files::Xxh3Hasher hasher;
  const int64_t total = tensor.rows * tensor.columns * ElementBytes(tensor.data_type);
  std::string piece;
  for (int64_t done = 0; done < total; done += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, total - done);
    piece.resize(static_cast<size_t>(bytes));
    HEADWATER_RETURN_IF_ERROR(tensor.file->ReadAt(tensor.offset_bytes + done, bytes, piece.data()));
    hasher.Update(piece.data(), bytes);
  }
  return hasher.Digest();
}

// Compares the head's weight with that of a model's folder. The sentence describes the finding, or why it cannot be seen.
struct WeightCheck {
  Finding verdict = Finding::kNoted;
  std::string sentence;
};
WeightCheck CompareWeights(const std::string& path, const client::HeadInfo& head) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error))
    return {Finding::kNoted, "weights are not compared: that takes the model's folder"};
  if (head.weight_checksum.empty()) {
    return {Finding::kNoted, "weights are not compared: the head has trained since they were set"};
  }
  const auto files = model_files::LocalFiles();
  model_files::HeadTensorQuery query;
  query.vocab_size = head.spec.vocab_size;
  query.hidden_size = head.spec.hidden_size;
  const absl::StatusOr<model_files::HeadTensors> found = model_files::FindHeadTensors(*files, path, query);
  if (!found.ok()) return {Finding::kNoted, absl::StrCat("weights are not compared: ", std::string(found.status().message()))};
  const std::string type = DataTypeName(found->weight.data_type);
  if (type != client::DataTypeName(head.spec.data_type)) {
    return {Finding::kNoted, absl::StrCat("weights are not compared: ", found->weight.name, " is ", type)};
  }
  const absl::StatusOr<std::string> checksum = ChecksumOf(found->weight);
  if (!checksum.ok())
    return {Finding::kNoted, absl::StrCat("weights are not compared: ", std::string(checksum.status().message()))};
  const bool same = *checksum == head.weight_checksum;
  return {SameIf(same), absl::StrCat("its weight is ", same ? "" : "not ", found->weight.name)};
}

std::string Shown(const json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  return value.dump();
}

absl::StatusOr<ExitCode> RunVerify(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(const ModelHead model, ReadModelHead(arguments[1]));
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(const client::HeadInfo info, head.Info());
  const WeightCheck weights = CompareWeights(arguments[1], info);
  std::vector<Check> checks = Compare(head.spec(), model);
  checks.push_back({"weight", json(), json(), weights.verdict});
  Table table({"PROPERTY", ">HEAD", ">MODEL", ""});
  json rows = json::array();
  bool differs = false;
  for (const Check& check : checks) {
    table.AddRow({check.property, Shown(check.head), Shown(check.model), FindingName(check.verdict)});
    rows.push_back(
        {{"property", check.property}, {"head", check.head}, {"model", check.model}, {"verdict", FindingName(check.verdict)}});
    differs = differs || check.verdict == Finding::kDiffers;
  }
  const bool unclear = !model.unclear.empty() && !absl::GetFlag(FLAGS_allow_unchecked);
  std::string sentence = absl::StrCat(head.name(), " fits the config of ", arguments[1], "; ", weights.sentence, "\n");
  if (unclear) {
    sentence = absl::StrCat(head.name(), " is not verified: what ", NamesOf(model.unclear),
                            " does to the logits is not known; --allow_unchecked leaves it out\n");
  }
  if (differs) sentence = absl::StrCat(head.name(), " does not fit ", arguments[1], "; ", weights.sentence, "\n");
  if (model.tied.value_or(false) && head.spec().trainable) {
    sentence += "the model's weight is its embedding's too: a trainer must train both as one (`tied` of headwater.torch.attach)\n";
  }
  const bool fits = !differs && !unclear;
  output.Print(absl::StrCat(table.ToString(), sentence), {{"name", head.name()},
                                                          {"model_type", model.model_type},
                                                          {"same", fits},
                                                          {"verdict", differs   ? "differs"
                                                                      : unclear ? "not checked"
                                                                                : "fits"},
                                                          {"checks", rows}});
  return fits ? kExitOk : kExitFailed;
}

}  // namespace

Command VerifyCommand() {
  return {
      .name = "verify",
      .synopsis = "NAME CONFIG",
      .summary = "compares a head's sizes and transform with a model's config",
      .help =
          "CONFIG is a model's config.json, or its folder, on this machine, as Hugging Face's transformers has it. A softcap or\n"
          "a factor of the logits that a head lacks is no error anywhere else: it trains another model. Ends with\n"
          "1 if a property differs, or if the config has a key that may change the logits and that this program does not know\n"
          "(`not checked`; --allow_unchecked leaves it out). `rounded`: the head stores fewer digits than the model, or others.\n"
          "`wider`: it stores more. `-`: said, not compared. With a folder the weights are compared, too, if the head stores them "
          "as the\n"
          "files do and has not trained since they were set.\n"
          "\n"
          "  headwaterctl verify teacher ~/models/gemma-2-9b\n",
      .flags = {"allow_unchecked"},
      .run = RunVerify};
}

}  // namespace headwater::ctl
