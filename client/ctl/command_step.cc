// `step` and `discard`: what the open step holds, and an end of it.
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

ABSL_FLAG(int64_t, step, 0, "the step to discard: refused if another one is open (not given: the open step, whichever it is)");

namespace headwater::ctl {
namespace {

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

}  // namespace

Command StepCommand() {
  return {.name = "step",
          .synopsis = "NAME",
          .summary = "shows a head's open step and the last closed one",
          .help =
              "Each step with its micro-batches. `undecided`: computed, and not committed yet. TOKENS are the rows whose target\n"
              "counts. FACTOR is the one of the commit.\n",
          .run = RunStep};
}

Command DiscardCommand() {
  return {.name = "discard",
          .synopsis = "NAME",
          .summary = "closes a head's open step without touching the weights",
          .help =
              "The step's gradient is dropped, and the next step is open and empty. Trainers stay; one that has contributed to\n"
              "the step gets STEP_MISMATCH. With --step only that step is discarded.\n"
              "\n"
              "  headwaterctl step student\n"
              "  headwaterctl discard student --step=17\n",
          .flags = {"step"},
          .run = RunDiscard};
}

}  // namespace headwater::ctl
