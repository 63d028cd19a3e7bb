// `heads`, `take` and `delete`: what the server holds, and whose it is.
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/connection.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

ABSL_FLAG(bool, force, false,
          "delete a head that is in use: contributions of its open step, and those that are undecided, are lost");

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunHeads(client::Client& client, const std::vector<std::string>&, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(std::vector<client::HeadInfo> heads, client.ListHeads());
  Table table(
      {"NAME", "STATE", "CHECKPOINT", ">VOCAB", ">HIDDEN", "TYPE", "KIND", "OPTIMIZER", ">STEP", ">VERSION", ">MEMORY", ">SHARDS"});
  nlohmann::json document = nlohmann::json::array();
  for (const client::HeadInfo& head : heads) {
    table.AddRow({head.name, client::HeadStateName(head.state), head.restored_checkpoint.empty() ? "-" : head.restored_checkpoint,
                  FormatCount(head.spec.vocab_size), FormatCount(head.spec.hidden_size), client::DataTypeName(head.spec.data_type),
                  head.spec.trainable ? "trainable" : "frozen", OptimizerName(head.spec.optimizer),
                  head.open_step.has_value() ? absl::StrCat(*head.open_step) : "-", absl::StrCat(head.weight_version),
                  FormatBytes(head.memory_plan.total_bytes), absl::StrCat(head.shards.size())});
    document.push_back(ToJson(head));
  }
  output.Print(heads.empty() ? absl::StrCat("tenant ", Tenant(), " has no heads\n") : table.ToString(), {{"heads", document}});
  return kExitOk;
}

absl::StatusOr<ExitCode> RunTake(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo taken, head.Take());
  output.Print(absl::StrCat("took ", taken.name, ": step ", taken.open_step.value_or(0), " is open and empty, epoch ",
                            FormatHex(taken.epoch), "\n"),
               ToJson(taken));
  return kExitOk;
}

absl::StatusOr<ExitCode> RunDelete(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  const bool force = absl::GetFlag(FLAGS_force);
  HEADWATER_RETURN_IF_ERROR(client.DeleteHead(arguments[0], force));
  output.Print(absl::StrCat("deleted ", arguments[0], "\n"), {{"deleted", arguments[0]}});
  return kExitOk;
}

}  // namespace

Command HeadsCommand() {
  return {.name = "heads",
          .summary = "lists the heads",
          .help =
              "One line for each head of the tenant, by name. STATE `restored`: the server was started again and brought the head\n"
              "back from CHECKPOINT; its steps wait for a trainer, or `headwaterctl take`. MEMORY is what the head was planned\n"
              "with, over all shards.\n",
          .run = RunHeads};
}

Command TakeCommand() {
  return {.name = "take",
          .synopsis = "NAME",
          .summary = "takes a head over: a new epoch and an empty open step",
          .help =
              "Fences off every trainer that works on the head. Contributions of the open step are gone; weights, optimizer\n"
              "state and the step's number stay. A restored head is ready afterwards. The new epoch is printed; a trainer that\n"
              "opens the head gets it too.\n",
          .run = RunTake};
}

Command DeleteCommand() {
  return {.name = "delete",
          .synopsis = "NAME",
          .summary = "deletes a head: its weights, optimizer state and gradients",
          .help =
              "Its checkpoints stay. A head whose open step is not empty, or that has undecided contributions or running calls,\n"
              "is refused (HEAD_IN_USE) without --force.\n",
          .flags = {"force"},
          .run = RunDelete};
}

}  // namespace headwater::ctl
