// `save`: a checkpoint of a head.
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/table.h"

ABSL_FLAG(bool, overwrite, false, "replace a checkpoint of the same name, atomically");

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunSave(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  absl::StatusOr<client::Head> head = client.OpenHead(arguments[0]);
  if (!head.ok()) return head.status();
  absl::StatusOr<client::SaveResult> saved = head->Save(arguments[1], absl::GetFlag(FLAGS_overwrite));
  if (!saved.ok()) return saved.status();
  output.Print(
      absl::StrCat("saved ", head->name(), " as ", saved->checkpoint, ": step ", saved->step, ", ", FormatBytes(saved->total_bytes),
                   "\n"),
      {{"name", head->name()}, {"checkpoint", saved->checkpoint}, {"step", saved->step}, {"total_bytes", saved->total_bytes}});
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
          .min_arguments = 2,
          .max_arguments = 2,
          .flags = {"overwrite"},
          .run = RunSave};
}

}  // namespace headwater::ctl
