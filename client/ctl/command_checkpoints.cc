// `save`, `checkpoints` and `restore`: checkpoints of a head.
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/ctl/command.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

ABSL_FLAG(bool, overwrite, false, "replace what has this name already, atomically");

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunSave(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(client::SaveResult saved, head.Save(arguments[1], absl::GetFlag(FLAGS_overwrite)));
  output.Print(absl::StrCat("saved ", head.name(), " as ", saved.checkpoint, ": step ", saved.step, ", ",
                            FormatBytes(saved.total_bytes), "\n"),
               {{"name", head.name()}, {"checkpoint", saved.checkpoint}, {"step", saved.step}, {"total_bytes", saved.total_bytes}});
  return kExitOk;
}

absl::StatusOr<ExitCode> RunCheckpoints(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(std::vector<client::CheckpointInfo> checkpoints, client.ListCheckpoints(arguments[0]));
  Table table({"CHECKPOINT", ">STEP", ">SIZE", "SAVED", ""});
  nlohmann::json document = nlohmann::json::array();
  for (const client::CheckpointInfo& checkpoint : checkpoints) {
    nlohmann::json entry = {{"checkpoint", checkpoint.checkpoint}, {"damaged", checkpoint.damaged}};
    for (const char* key : {"step", "total_bytes", "save_time"}) entry[key] = nullptr;
    if (!checkpoint.damaged) {
      entry["step"] = checkpoint.step;
      entry["total_bytes"] = checkpoint.total_bytes;
    }
    std::string saved = "-";
    if (checkpoint.save_time.has_value()) {
      saved = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromChrono(*checkpoint.save_time), absl::UTCTimeZone());
      entry["save_time"] = saved;
    }
    table.AddRow({checkpoint.checkpoint, checkpoint.damaged ? "-" : absl::StrCat(checkpoint.step),
                  checkpoint.damaged ? "-" : FormatBytes(checkpoint.total_bytes), saved, checkpoint.damaged ? "damaged" : ""});
    document.push_back(std::move(entry));
  }
  output.Print(checkpoints.empty() ? absl::StrCat(arguments[0], " has no checkpoints\n") : table.ToString(),
               {{"checkpoints", document}});
  return kExitOk;
}

absl::StatusOr<ExitCode> RunRestore(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo restored, head.Restore(arguments[1]));
  output.Print(
      absl::StrCat("restored ", restored.name, " from ", arguments[1],
                   restored.open_step.has_value() ? absl::StrCat(": step ", *restored.open_step, " is open and empty") : "",
                   ", epoch ", FormatHex(restored.epoch), "\n"),
      ToJson(restored));
  return kExitOk;
}

}  // namespace

Command SaveCommand() {
  return {.name = "save",
          .synopsis = "NAME CHECKPOINT",
          .summary = "saves a head's weights, optimizer state and step as a checkpoint",
          .help =
              "The state is the one in which the open step began. The checkpoint is kept under headwaterd's\n"
              "--checkpoint_directory and is complete or not there.\n",
          .flags = {"overwrite"},
          .run = RunSave};
}

Command CheckpointsCommand() {
  return {.name = "checkpoints",
          .synopsis = "NAME",
          .summary = "lists the checkpoints under a head's name, newest first",
          .help =
              "The head need not exist: a deleted head leaves its checkpoints. STEP is the step that a restored head opens. A\n"
              "`damaged` checkpoint cannot be restored.\n",
          .run = RunCheckpoints};
}

Command RestoreCommand() {
  return {.name = "restore",
          .synopsis = "NAME CHECKPOINT",
          .summary = "sets a head to a checkpoint: weights, optimizer state and step",
          .help =
              "Fences off every trainer that works on the head, and drops its open step. The head must be as it was when it was\n"
              "saved (`headwaterctl create` makes one). The checkpoint is verified before anything changes.\n"
              "\n"
              "  headwaterctl checkpoints student\n"
              "  headwaterctl restore student step-200\n",
          .run = RunRestore};
}

}  // namespace headwater::ctl
