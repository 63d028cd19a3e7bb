// `verify`: whether a head computes what a model's own head would.
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/model_config.h"
#include "client/ctl/table.h"

namespace headwater::ctl {
namespace {

using nlohmann::json;

// Configs round what they mean: 1 / 13.
constexpr double kTolerance = 1e-6;

enum class Verdict { kSame, kDiffers, kRounded, kNotChecked };

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSame:
      return "same";
    case Verdict::kDiffers:
      return "differs";
    case Verdict::kRounded:
      return "rounded";
    case Verdict::kNotChecked:
      return "not checked";
  }
  return "";
}

// One property; null: there is none, or it is not known.
struct Check {
  std::string property;
  json head;
  json model;
  Verdict verdict = Verdict::kSame;
};

Verdict SameIf(bool same) { return same ? Verdict::kSame : Verdict::kDiffers; }

bool AreClose(double a, double b) { return std::abs(a - b) <= kTolerance * std::abs(b); }

std::vector<Check> Compare(const client::HeadSpec& head, const ModelHead& model) {
  std::vector<Check> checks;
  const auto add = [&](std::string property, json of_head, json of_model, Verdict verdict) {
    checks.push_back({std::move(property), std::move(of_head), std::move(of_model), verdict});
  };
  const int64_t valid = head.valid_vocab_size.value_or(head.vocab_size);
  // Rows may be added to a weight, if they get no probability.
  add("vocab_size", head.vocab_size, model.vocab_size, SameIf(head.vocab_size >= model.vocab_size));
  add("valid_vocab_size", valid, model.vocab_size, SameIf(valid == model.vocab_size));
  add("hidden_size", head.hidden_size, model.hidden_size, SameIf(head.hidden_size == model.hidden_size));
  add("logit_scale", head.logit_scale, model.logit_scale, SameIf(AreClose(head.logit_scale, model.logit_scale)));
  add("softcap", head.softcap.has_value() ? json(*head.softcap) : json(), model.softcap.has_value() ? json(*model.softcap) : json(),
      SameIf(head.softcap.has_value() == model.softcap.has_value() &&
             (!head.softcap.has_value() || AreClose(*head.softcap, *model.softcap))));
  add("bias", head.has_bias, model.has_bias.has_value() ? json(*model.has_bias) : json(),
      model.has_bias.has_value() ? SameIf(head.has_bias == *model.has_bias) : Verdict::kNotChecked);
  Verdict type = Verdict::kNotChecked;
  if (model.data_type.has_value()) {
    type = head.data_type == *model.data_type || head.data_type == client::DataType::kFloat32 ? Verdict::kSame : Verdict::kRounded;
  }
  add("data_type", client::DataTypeName(head.data_type),
      model.data_type.has_value() ? json(client::DataTypeName(*model.data_type)) : json(), type);
  for (const std::string& key : model.unknown_keys) add(key, json(), "?", Verdict::kNotChecked);
  return checks;
}

std::string Shown(const json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  return value.dump();
}

absl::StatusOr<ExitCode> RunVerify(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  const absl::StatusOr<ModelHead> model = ReadModelHead(arguments[1]);
  if (!model.ok()) return model.status();
  absl::StatusOr<client::Head> head = client.OpenHead(arguments[0]);
  if (!head.ok()) return head.status();
  Table table({"PROPERTY", "HEAD", "MODEL", ""},
              {Table::Align::kLeft, Table::Align::kRight, Table::Align::kRight, Table::Align::kLeft});
  json rows = json::array();
  bool same = true;
  for (const Check& check : Compare(head->spec(), *model)) {
    table.AddRow({check.property, Shown(check.head), Shown(check.model), VerdictName(check.verdict)});
    rows.push_back(
        {{"property", check.property}, {"head", check.head}, {"model", check.model}, {"verdict", VerdictName(check.verdict)}});
    same = same && check.verdict != Verdict::kDiffers;
  }
  output.Print(absl::StrCat(table.ToString(), head->name(), same ? " is" : " is not", " the head of ", arguments[1],
                            same ? ", as far as it was checked\n" : "\n"),
               {{"name", head->name()}, {"model_type", model->model_type}, {"same", same}, {"checks", rows}});
  return same ? kExitOk : kExitFailed;
}

}  // namespace

Command VerifyCommand() {
  return {
      .name = "verify",
      .synopsis = "NAME CONFIG",
      .summary = "compares a head's sizes and transform with a model's config",
      .help =
          "CONFIG is a model's config.json, or its folder, on this machine, as Hugging Face's transformers has it. A softcap or\n"
          "a factor of the logits that a head lacks is no error anywhere else: it trains a model that nobody meant. Ends with\n"
          "1 if a property differs. `rounded`: the head stores fewer digits than the model. `not checked`: the config does\n"
          "not say, or has a key that this program does not know. Weights are not compared.\n"
          "\n"
          "  headwaterctl verify teacher ~/models/gemma-2-9b\n",
      .min_arguments = 2,
      .max_arguments = 2,
      .flags = {},
      .run = RunVerify};
}

}  // namespace headwater::ctl
