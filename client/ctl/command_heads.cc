// The heads of a server, their steps and their checkpoints.
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/connection.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

ABSL_FLAG(bool, force, false,
          "delete a head that is in use: contributions of its open step, and those that are undecided, are lost");
ABSL_FLAG(int64_t, step, 0, "the step to discard: refused if another one is open (not given: the open step, whichever it is)");
ABSL_FLAG(bool, overwrite, false, "replace what has this name already, atomically");

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunHeads(client::Client& client, const std::vector<std::string>&, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(std::vector<client::HeadInfo> heads, client.ListHeads());
  Table table(
      {"NAME", "STATE", "CHECKPOINT", ">VOCAB", ">HIDDEN", "TYPE", "KIND", "OPTIMIZER", ">STEP", ">VERSION", ">MEMORY", ">SHARDS"});
  for (const client::HeadInfo& head : heads) {
    table.AddRow({head.name, client::HeadStateName(head.state), head.restored_checkpoint.empty() ? "-" : head.restored_checkpoint,
                  FormatCount(head.spec.vocab_size), FormatCount(head.spec.hidden_size), client::DataTypeName(head.spec.data_type),
                  head.spec.trainable ? "trainable" : "frozen", OptimizerName(head.spec.optimizer),
                  head.open_step.has_value() ? absl::StrCat(*head.open_step) : "-", absl::StrCat(head.weight_version),
                  FormatBytes(head.memory_plan.total_bytes), absl::StrCat(head.shards.size())});
  }
  output.Print(heads.empty() ? absl::StrCat("tenant ", Tenant(), " has no heads\n") : table.ToString(), {{"heads", heads}});
  return kExitOk;
}

absl::StatusOr<ExitCode> RunTake(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo taken, head.Take());
  output.Print(absl::StrCat("took ", taken.name, ": step ", taken.open_step.value_or(0), " is open and empty, epoch ",
                            FormatHex(taken.epoch), "\n"),
               taken);
  return kExitOk;
}

absl::StatusOr<ExitCode> RunDelete(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  const bool force = absl::GetFlag(FLAGS_force);
  HEADWATER_RETURN_IF_ERROR(client.DeleteHead(arguments[0], force));
  output.Print(absl::StrCat("deleted ", arguments[0], "\n"), {{"deleted", arguments[0]}});
  return kExitOk;
}

absl::StatusOr<ExitCode> RunCreate(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::HeadSpec spec, HeadSpecFromFlags({}, /*config_beside=*/"", output));
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.CreateHead(arguments[0], spec));
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo info, head.Info());
  output.Print(absl::StrCat("created ", info.name, ": [", info.spec.vocab_size, ", ", info.spec.hidden_size, "] ",
                            client::DataTypeName(info.spec.data_type), ", ", FormatBytes(info.memory_plan.total_bytes),
                            "; it has no weights yet\n"),
               info);
  return kExitOk;
}

const char* StepStateName(client::StepState state) {
  return NameOf(state, {"unknown", "open", "sealed", "applied", "discarded", "replaced"});
}

const char* ContributionStateName(client::ContributionState state) {
  return NameOf(state, {"announced", "in progress", "undecided", "committed", "discarded"});
}

const char* ContributionFormName(client::ContributionForm form) { return NameOf(form, {"-", "direct", "staged", "held"}); }

std::string StepText(const client::StepInfo& step) {
  std::string text = absl::StrCat("step ", step.step, " is ", StepStateName(step.state), ": ", step.totals.micro_batch_count,
                                  " committed micro-batches, ", FormatCount(step.totals.valid_token_count), " tokens");
  if (step.totals.non_finite_row_count > 0) {
    absl::StrAppend(&text, ", ", FormatCount(step.totals.non_finite_row_count), " rows not finite");
  }
  text += "\n";
  if (step.micro_batches.empty()) return text;
  Table table({">MICRO-BATCH", ">ATTEMPT", "STATE", "FORM", ">TOKENS", ">FACTOR"});
  for (const client::MicroBatchInfo& batch : step.micro_batches) {
    table.AddRow({absl::StrCat(batch.micro_batch), absl::StrCat(batch.attempt), ContributionStateName(batch.state),
                  ContributionFormName(batch.form), FormatCount(batch.valid_token_count), absl::StrCat(batch.factor)});
  }
  return text + table.ToString();
}

nlohmann::json StepToJson(const client::StepInfo& step) {
  nlohmann::json batches = nlohmann::json::array();
  for (const client::MicroBatchInfo& batch : step.micro_batches) {
    batches.push_back({{"micro_batch", batch.micro_batch},
                       {"attempt", batch.attempt},
                       {"state", ContributionStateName(batch.state)},
                       {"form", ContributionFormName(batch.form)},
                       {"valid_token_count", batch.valid_token_count},
                       {"factor", batch.factor}});
  }
  return {{"step", step.step},
          {"state", StepStateName(step.state)},
          {"micro_batch_count", step.totals.micro_batch_count},
          {"valid_token_count", step.totals.valid_token_count},
          {"loss_sum", step.totals.loss_sum},
          {"non_finite_row_count", step.totals.non_finite_row_count},
          {"micro_batches", batches}};
}

absl::StatusOr<ExitCode> RunStep(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(client::StepStates steps, head.GetStep());
  nlohmann::json document = {{"name", head.name()}, {"open", StepToJson(steps.open)}, {"last_closed", nullptr}};
  std::string text = StepText(steps.open);
  if (steps.last_closed.has_value()) {
    document["last_closed"] = StepToJson(*steps.last_closed);
    absl::StrAppend(&text, "\n", StepText(*steps.last_closed));
  }
  output.Print(text, document);
  return kExitOk;
}

absl::StatusOr<ExitCode> RunDiscard(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo info, head.Info());
  const int64_t step = FlagGiven("step") ? absl::GetFlag(FLAGS_step) : info.open_step.value_or(0);
  HEADWATER_ASSIGN_OR_RETURN(client::DiscardGradientResult discarded, head.DiscardGradient(step));
  output.Print(absl::StrCat("discarded step ", step, " of ", head.name(), ": step ", discarded.open_step, " is open and empty\n"),
               {{"name", head.name()}, {"discarded", step}, {"open_step", discarded.open_step}});
  return kExitOk;
}

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
      restored);
  return kExitOk;
}

}  // namespace

std::vector<Command> HeadCommands() {
  return {
      {.name = "heads",
       .summary = "lists the heads",
       .help =
           "One line for each head of the tenant, by name. STATE `restored`: the server was started again and brought the head\n"
           "back from CHECKPOINT; its steps wait for a trainer, or `headwaterctl take`. MEMORY is what the head was planned\n"
           "with, over all shards.\n",
       .run = RunHeads},
      {.name = "create",
       .synopsis = "NAME",
       .summary = "makes a head without weights",
       .help =
           "The flags describe the head, or the model's config of --config. `headwaterctl load` or `headwaterctl restore` sets\n"
           "its weights.\n"
           "\n"
           "  headwaterctl create student --config ~/models/llama-8b --trainable --optimizer=adamw\n",
       .flags = kHeadFlags,
       .run = RunCreate},
      {.name = "delete",
       .synopsis = "NAME",
       .summary = "deletes a head: its weights, optimizer state and gradients",
       .help = "Its checkpoints stay. A head whose open step is not empty, or that has undecided contributions or running calls,\n"
               "is refused (HEAD_IN_USE) without --force.\n",
       .flags = {"force"},
       .run = RunDelete},
      {.name = "take",
       .synopsis = "NAME",
       .summary = "takes a head over: a new epoch and an empty open step",
       .help = "Fences off every trainer that works on the head. Contributions of the open step are gone; weights, optimizer\n"
               "state and the step's number stay. A restored head is ready afterwards. The new epoch is printed; a trainer that\n"
               "opens the head gets it too.\n",
       .run = RunTake},
      {.name = "step",
       .synopsis = "NAME",
       .summary = "shows a head's open step and the last closed one",
       .help = "Each step with its micro-batches. `undecided`: computed, and not committed yet. TOKENS are the rows whose target\n"
               "counts. FACTOR is the one of the commit.\n",
       .run = RunStep},
      {.name = "discard",
       .synopsis = "NAME",
       .summary = "closes a head's open step without touching the weights",
       .help = "The step's gradient is dropped, and the next step is open and empty. Trainers stay; one that has contributed to\n"
               "the step gets STEP_MISMATCH. With --step only that step is discarded.\n"
               "\n"
               "  headwaterctl step student\n"
               "  headwaterctl discard student --step=17\n",
       .flags = {"step"},
       .run = RunDiscard},
      {.name = "save",
       .synopsis = "NAME CHECKPOINT",
       .summary = "saves a head's weights, optimizer state and step as a checkpoint",
       .help = "The state is the one in which the open step began. The checkpoint is kept under headwaterd's\n"
               "--checkpoint_directory and is complete or not there.\n",
       .flags = {"overwrite"},
       .run = RunSave},
      {.name = "checkpoints",
       .synopsis = "NAME",
       .summary = "lists the checkpoints under a head's name, newest first",
       .help = "The head need not exist: a deleted head leaves its checkpoints. STEP is the step that a restored head opens. A\n"
               "`damaged` checkpoint cannot be restored.\n",
       .run = RunCheckpoints},
      {.name = "restore",
       .synopsis = "NAME CHECKPOINT",
       .summary = "sets a head to a checkpoint: weights, optimizer state and step",
       .help = "Fences off every trainer that works on the head, and drops its open step. The head must be as it was when it was\n"
               "saved (`headwaterctl create` makes one). The checkpoint is verified before anything changes.\n"
               "\n"
               "  headwaterctl checkpoints student\n"
               "  headwaterctl restore student step-200\n",
       .run = RunRestore}};
}

}  // namespace headwater::ctl
