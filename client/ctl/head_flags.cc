#include "client/ctl/head_flags.h"

#include <cstdint>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"

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
ABSL_FLAG(std::string, parallelism, "vocabulary", "how a group of ranks shares the head's work: vocabulary or rows");

namespace headwater::ctl {
namespace {

absl::StatusOr<client::DataType> ParseDataType(const std::string& name) {
  for (const client::DataType type : {client::DataType::kFloat32, client::DataType::kBFloat16, client::DataType::kFloat16}) {
    if (name == client::DataTypeName(type)) return type;
  }
  return UsageError(absl::StrCat("--data_type=", name, ": expected float32, bfloat16 or float16"));
}

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

}  // namespace

const std::vector<std::string> kHeadFlags = {"vocab_size", "hidden_size",      "data_type",  "bias",      "logit_scale",
                                             "softcap",    "valid_vocab_size", "trainable",  "optimizer", "weight_decay",
                                             "momentum",   "staging_slots",    "parallelism"};

absl::StatusOr<client::HeadSpec> HeadSpecFromFlags(const client::HeadSpec& defaults) {
  client::HeadSpec spec = defaults;
  if (FlagGiven("vocab_size")) spec.vocab_size = absl::GetFlag(FLAGS_vocab_size);
  if (FlagGiven("hidden_size")) spec.hidden_size = absl::GetFlag(FLAGS_hidden_size);
  for (const auto& [flag, size] : {std::pair("vocab_size", spec.vocab_size), std::pair("hidden_size", spec.hidden_size)}) {
    if (size == 0) return UsageError(absl::StrCat("--", flag, " is needed, and must not be 0"));
  }
  if (FlagGiven("data_type")) {
    absl::StatusOr<client::DataType> type = ParseDataType(absl::GetFlag(FLAGS_data_type));
    if (!type.ok()) return type.status();
    spec.data_type = *type;
  }
  if (FlagGiven("bias")) spec.has_bias = absl::GetFlag(FLAGS_bias);
  spec.logit_scale = absl::GetFlag(FLAGS_logit_scale);
  if (FlagGiven("softcap")) spec.softcap = absl::GetFlag(FLAGS_softcap);
  if (FlagGiven("valid_vocab_size")) spec.valid_vocab_size = absl::GetFlag(FLAGS_valid_vocab_size);
  spec.trainable = absl::GetFlag(FLAGS_trainable);
  absl::StatusOr<client::Optimizer> optimizer = OptimizerFromFlags();
  if (!optimizer.ok()) return optimizer.status();
  spec.optimizer = *optimizer;
  if (FlagGiven("staging_slots")) spec.staging_slots = absl::GetFlag(FLAGS_staging_slots);
  const absl::StatusOr<client::Parallelism> parallelism = ParseParallelism(absl::GetFlag(FLAGS_parallelism));
  if (!parallelism.ok()) return parallelism.status();
  spec.parallelism = *parallelism;
  return spec;
}

}  // namespace headwater::ctl
