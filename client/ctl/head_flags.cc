#include "client/ctl/head_flags.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"
#include "client/ctl/model_config.h"
#include "headwater/kernels/return_if_error.h"

ABSL_FLAG(int64_t, vocab_size, 0, "rows of the head's weight");
ABSL_FLAG(int64_t, hidden_size, 0, "columns of the head's weight");
ABSL_FLAG(std::string, data_type, "", "storage of weight and bias: float32, bfloat16 or float16");
ABSL_FLAG(bool, bias, false, "the head has a bias [vocab_size]");
ABSL_FLAG(double, logit_scale, 1.0, "factor of the logits");
ABSL_FLAG(double, softcap, 0.0, "logits become softcap * tanh(logits / softcap); not given: no softcap");
ABSL_FLAG(int64_t, valid_vocab_size, 0, "columns from here on get probability 0; not given: vocab_size");
ABSL_FLAG(bool, trainable, false, "gradients are accumulated");
ABSL_FLAG(std::string, optimizer, "none", "the server's optimizer: none, adamw or sgd; needs --trainable");
ABSL_FLAG(double, weight_decay, 0.01, "weight decay of the optimizer (not given: 0.01 for adamw, 0 for sgd)");
ABSL_FLAG(double, momentum, 0.0, "momentum of sgd; above 0 it takes a buffer");
ABSL_FLAG(
    int32_t, staging_slots, 1,
    "micro-batches that may wait for their commit at once, each 4 x weight elements bytes (not given: 0 without --trainable)");
ABSL_FLAG(
    std::string, config, "",
    "a model's config.json, or its folder, on this machine: it gives what no other flag does of sizes, type, bias, scale, softcap "
    "and valid vocabulary");
ABSL_FLAG(bool, allow_unchecked, false, "take a config although it has keys that may change the logits in an unknown way");
ABSL_FLAG(std::string, parallelism, "vocabulary", "how a group of ranks shares the head's work: vocabulary or rows");
ABSL_FLAG(bool, int8_teacher, false, "logits as a teacher come from int8 products (a frozen 16-bit head on a Hopper GPU)");

namespace headwater::ctl {
namespace {

absl::StatusOr<client::Parallelism> ParseParallelism(const std::string& name) {
  for (const client::Parallelism parallelism : {client::Parallelism::kVocabulary, client::Parallelism::kRows}) {
    if (name == client::ParallelismName(parallelism)) return parallelism;
  }
  return UsageError(absl::StrCat("--parallelism=", name, ": expected vocabulary or rows"));
}

absl::StatusOr<client::Optimizer> OptimizerFromFlags() {
  const std::string name = absl::GetFlag(FLAGS_optimizer);
  if (FlagGiven("momentum") && name != "sgd") return UsageError("--momentum belongs to --optimizer=sgd");
  if (FlagGiven("weight_decay") && name == "none") return UsageError("--weight_decay needs an --optimizer");
  if (name == "none") return client::Optimizer();
  if (!absl::GetFlag(FLAGS_trainable)) return UsageError("--optimizer needs --trainable: a frozen head has no gradient");
  if (name == "adamw") {
    client::AdamW adamw;
    if (FlagGiven("weight_decay")) adamw.weight_decay = absl::GetFlag(FLAGS_weight_decay);
    return client::Optimizer(adamw);
  }
  if (name == "sgd") {
    client::Sgd sgd;
    sgd.momentum = absl::GetFlag(FLAGS_momentum);
    if (FlagGiven("weight_decay")) sgd.weight_decay = absl::GetFlag(FLAGS_weight_decay);
    return client::Optimizer(sgd);
  }
  return UsageError(absl::StrCat("--optimizer=", name, ": expected none, adamw or sgd"));
}

// What the config of `path` says becomes `spec`'s; sizes, type and bias only where `spec` has no sizes.
absl::Status TakeOver(const ModelHead& model, const std::string& path, client::HeadSpec* spec) {
  if (!model.unclear.empty() && !absl::GetFlag(FLAGS_allow_unchecked)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": what ", NamesOf(model.unclear),
                                                   " does to the logits is not known; describe the head by flags, or add "
                                                   "--allow_unchecked"));
  }
  if (spec->vocab_size == 0) {
    spec->vocab_size = model.vocab_size;
    spec->hidden_size = model.hidden_size;
    spec->data_type = model.data_type.value_or(spec->data_type);
    spec->has_bias = model.has_bias;
  } else if (spec->hidden_size != model.hidden_size || spec->vocab_size < model.valid_vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("the weight is [", spec->vocab_size, ", ", spec->hidden_size, "], ", path,
                                                   " says [", model.vocab_size, ", ", model.hidden_size, "]"));
  }
  spec->logit_scale = model.logit_scale;
  spec->softcap = model.softcap;
  return absl::OkStatus();
}

}  // namespace

const std::vector<std::string> kHeadFlags = {"vocab_size",  "hidden_size",  "data_type",        "bias",
                                             "logit_scale", "softcap",      "valid_vocab_size", "trainable",
                                             "optimizer",   "weight_decay", "momentum",         "staging_slots",
                                             "parallelism", "int8_teacher", "config",           "allow_unchecked"};

std::optional<client::DataType> DataTypeNamed(absl::string_view name) {
  for (const client::DataType type : {client::DataType::kFloat32, client::DataType::kBFloat16, client::DataType::kFloat16}) {
    if (name == client::DataTypeName(type)) return type;
  }
  return std::nullopt;
}

absl::StatusOr<client::DataType> DataTypeFromFlags(client::DataType otherwise) {
  if (!FlagGiven("data_type")) return otherwise;
  const std::string name = absl::GetFlag(FLAGS_data_type);
  if (const auto type = DataTypeNamed(name); type.has_value()) return *type;
  return UsageError(absl::StrCat("--data_type=", name, ": expected float32, bfloat16 or float16"));
}

absl::StatusOr<client::HeadSpec> HeadSpecFromFlags(const client::HeadSpec& defaults, const std::string& config_beside,
                                                   const Output& output) {
  client::HeadSpec spec = defaults;
  const std::string config = FlagGiven("config") ? absl::GetFlag(FLAGS_config) : config_beside;
  absl::StatusOr<ModelHead> model = ModelHead();
  if (!config.empty()) {
    model = ReadModelHead(config);
    absl::Status status = model.ok() ? TakeOver(*model, config, &spec) : model.status();
    const bool beside_weights = !FlagGiven("config") && defaults.vocab_size > 0;
    if (!status.ok()) return beside_weights ? WithHint(status, "--config= leaves the config beside the weights out") : status;
  }
  const auto set = [&](const char* flag, auto* field, const auto& value) {
    if (!FlagGiven(flag)) return;
    if (!config.empty() && *field != value) output.Progress(absl::StrCat("--", flag, " contradicts ", config, "; the flag counts"));
    *field = value;
  };
  if (FlagGiven("vocab_size")) spec.vocab_size = absl::GetFlag(FLAGS_vocab_size);  // of a padded weight, say
  set("hidden_size", &spec.hidden_size, absl::GetFlag(FLAGS_hidden_size));
  for (const auto& [flag, size] : {std::pair("vocab_size", spec.vocab_size), std::pair("hidden_size", spec.hidden_size)}) {
    if (size == 0 && !FlagGiven(flag)) return UsageError(absl::StrCat("--", flag, " is needed, or --config"));
    if (size < 1) return UsageError(absl::StrCat("--", flag, ": expected at least 1, got ", size));
  }
  HEADWATER_ASSIGN_OR_RETURN(spec.data_type, DataTypeFromFlags(spec.data_type));
  set("bias", &spec.has_bias, absl::GetFlag(FLAGS_bias));
  set("logit_scale", &spec.logit_scale, absl::GetFlag(FLAGS_logit_scale));
  set("softcap", &spec.softcap, std::optional<double>(absl::GetFlag(FLAGS_softcap)));
  if (model->valid_vocab_size > 0 && model->valid_vocab_size < spec.vocab_size) spec.valid_vocab_size = model->valid_vocab_size;
  set("valid_vocab_size", &spec.valid_vocab_size, std::optional<int64_t>(absl::GetFlag(FLAGS_valid_vocab_size)));
  spec.trainable = absl::GetFlag(FLAGS_trainable);
  HEADWATER_ASSIGN_OR_RETURN(spec.optimizer, OptimizerFromFlags());
  if (FlagGiven("staging_slots")) spec.staging_slots = absl::GetFlag(FLAGS_staging_slots);
  spec.int8_teacher = absl::GetFlag(FLAGS_int8_teacher);
  HEADWATER_ASSIGN_OR_RETURN(spec.parallelism, ParseParallelism(absl::GetFlag(FLAGS_parallelism)));
  return spec;
}

}  // namespace headwater::ctl
