#include "client/ctl/output.h"

#include <cerrno>
#include <iostream>
#include <map>

#include "absl/strings/cord.h"
#include "absl/time/time.h"
#include "client/ctl/table.h"
#include "headwater/client/error.h"

namespace headwater::ctl {
namespace {

constexpr char kHintPayload[] = "headwaterctl/hint";

int lost_output_error = 0;

// The remedy for an error that operators meet. Reasons that are not here explain themselves.
std::string HintFor(const absl::Status& status, const std::string& reason) {
  if (const auto own = status.GetPayload(kHintPayload); own.has_value()) return std::string(*own);
  static const std::map<std::string, std::string> hints = {
      {"HEAD_NOT_FOUND", "`headwaterctl heads` lists the heads that exist"},
      {"HEAD_ALREADY_EXISTS",
       "`headwaterctl load` without --create sets the weights of the head that exists; `headwaterctl delete` makes room for "
       "another"},
      {"HEAD_IN_USE", "a trainer works on it; `headwaterctl delete --force` deletes it all the same"},
      {"CHECKPOINT_ALREADY_EXISTS", "choose another name, or add --overwrite"},
      {"CHECKPOINT_NOT_FOUND", "`headwaterctl checkpoints` lists the checkpoints of a head"},
      {"CHECKPOINT_SPEC_MISMATCH", "`headwaterctl delete` the head and `headwaterctl create` it as the checkpoint has it"},
      {"STEP_MISMATCH", "`headwaterctl step` shows the open step"},
      {"STORAGE_NOT_CONFIGURED", "start headwaterd with --checkpoint_directory (save, checkpoints, restore) or --load_root (load)"},
      {"WEIGHTS_NOT_FOUND", "the path is relative to headwaterd's --load_root; --from_file uploads a local file instead"},
      {"WEIGHTS_NOT_LOADED", "the head has no weights yet: `headwaterctl load NAME PATH`"},
      {"MEMORY_BUDGET_EXCEEDED",
       "see `headwaterctl plan`; fewer --staging_slots, a 2-byte --data_type or another optimizer take less"},
      {"EPOCH_FENCED", "another run changed the head meanwhile; run the command again"},
      {"STEP_LOST",
       "the server was started again and the head came back from a checkpoint: `headwaterctl take` continues from there"},
      {"HEAD_NOT_TRAINABLE", "a frozen head has no steps and no owner"},
      {"QUOTA_EXCEEDED", "`headwaterctl heads` lists the tenant's heads, `headwaterctl info` the limits"},
      {"DRAINING", "the server is shutting down; try again when it is back"},
      {"STARTING", "the server is not ready yet; try again in a moment"},
      {"FEATURE_NOT_BUILT", "this server does not have that part of the API; `headwaterctl info` lists its features"},
  };
  // A file that is there, without a tensor that can be chosen, explains itself.
  if (reason == "WEIGHTS_NOT_FOUND" && client::ErrorMetadata(status)["field"] != "path") return "";
  if (const auto hint = hints.find(reason); hint != hints.end()) return hint->second;
  if (reason.empty() && absl::IsUnavailable(status))
    return "is headwaterd running there? --server says where to look, --ca_certificate connects with TLS";
  return "";
}

}  // namespace

absl::Status WithHint(absl::Status status, const std::string& hint) {
  if (!status.ok()) status.SetPayload(kHintPayload, absl::Cord(hint));
  return status;
}

const char* OptimizerName(const client::Optimizer& optimizer) {
  if (std::holds_alternative<client::AdamW>(optimizer)) return "adamw";
  if (std::holds_alternative<client::Sgd>(optimizer)) return "sgd";
  return "none";
}

nlohmann::json ToJson(const absl::Status& error) {
  const std::string reason = client::ErrorReason(error);
  return {{"code", absl::StatusCodeToString(error.code())},
          {"reason", reason},
          {"message", std::string(error.message())},
          {"metadata", client::ErrorMetadata(error)},
          {"hint", HintFor(error, reason)}};
}

void PrintRaw(absl::string_view text) {
  // Flushed each time: later the cause would be overwritten.
  errno = 0;
  std::cout << text << std::flush;
  if (!std::cout && lost_output_error == 0) lost_output_error = errno != 0 ? errno : EIO;
}

int OutputError() { return lost_output_error; }

void Output::Print(const std::string& text, const nlohmann::json& document) const {
  if (json_) {
    // Text from elsewhere need not be UTF-8; that must not turn a result into a crash.
    PrintRaw(document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  } else {
    PrintRaw(Printable(text, /*lines=*/true));
  }
}

void Output::Progress(const std::string& line) const {
  if (!json_) std::cerr << line << "\n";
}

void Output::PrintError(const absl::Status& status) const {
  const std::string hint = HintFor(status, client::ErrorReason(status));
  std::cerr << "headwaterctl: " << Printable(client::ToString(status)) << "\n";
  if (!hint.empty()) std::cerr << "hint: " << hint << "\n";
  Print("", {{"error", ToJson(status)}});
}

}  // namespace headwater::ctl

namespace headwater::client {

void to_json(nlohmann::json& document, const HeadSpec& spec) {
  document = {{"vocab_size", spec.vocab_size},
              {"hidden_size", spec.hidden_size},
              {"data_type", DataTypeName(spec.data_type)},
              {"has_bias", spec.has_bias},
              {"logit_scale", spec.logit_scale},
              {"softcap", spec.softcap},
              {"valid_vocab_size", spec.valid_vocab_size.value_or(spec.vocab_size)},
              {"trainable", spec.trainable},
              {"optimizer", ctl::OptimizerName(spec.optimizer)},
              {"staging_slots", spec.staging_slots.value_or(spec.trainable ? 1 : 0)},
              {"parallelism", ParallelismName(spec.parallelism)},
              {"int8_teacher", spec.int8_teacher}};
}

void to_json(nlohmann::json& document, const HeadInfo& head) {
  document = {{"name", head.name},
              {"spec", head.spec},
              {"state", HeadStateName(head.state)},
              {"epoch", ctl::FormatHex(head.epoch)},
              {"weight_version", head.weight_version},
              {"weight_checksum", ctl::FormatHex(head.weight_checksum)},
              {"restored_checkpoint", nullptr},
              {"open_step", head.open_step},
              {"shards", head.shards},
              {"memory_plan", head.memory_plan},
              {"create_time", absl::FormatTime(absl::FromChrono(head.create_time), absl::UTCTimeZone())}};
  if (!head.restored_checkpoint.empty()) document["restored_checkpoint"] = head.restored_checkpoint;
}

}  // namespace headwater::client
