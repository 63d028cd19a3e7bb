// `plan`: what a head would take.
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/table.h"

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunPlan(client::Client& client, const std::vector<std::string>&, Output& output) {
  absl::StatusOr<client::HeadSpec> spec = HeadSpecFromFlags({});
  if (!spec.ok()) return spec.status();
  absl::StatusOr<client::HeadInfo> head = client.PlanHead("headwaterctl-plan", *spec);
  if (!head.ok()) return head.status();
  const client::MemoryPlan& plan = head->memory_plan;
  const bool fits = plan.total_bytes <= plan.available_bytes;
  Table table({"PURPOSE", "BYTES", ""}, {Table::Align::kLeft, Table::Align::kRight, Table::Align::kRight});
  for (const auto& item : plan.items) {
    if (item.bytes > 0) table.AddRow({item.purpose, FormatCount(item.bytes), FormatBytes(item.bytes)});
  }
  table.AddRow({"total", FormatCount(plan.total_bytes), FormatBytes(plan.total_bytes)});
  table.AddRow({"available", FormatCount(plan.available_bytes), FormatBytes(plan.available_bytes)});
  output.Print(absl::StrCat(table.ToString(), "\nrows computed at once: ", plan.token_chunk_rows, "\n",
                            fits ? "the head fits\n" : "the head does not fit\n"),
               {{"memory_plan", ToJson(plan)}, {"fits", fits}});
  return fits ? kExitOk : kExitFailed;
}

}  // namespace

Command PlanCommand() {
  return {.name = "plan",
          .synopsis = "",
          .summary = "prints the memory that a head would take, without making it",
          .help =
              "The server plans the head that the flags describe. Exits with 1 if it does not fit the memory that is available\n"
              "now, or is refused.\n"
              "\n"
              "  headwaterctl plan --vocab_size=128256 --hidden_size=4096 --data_type=bfloat16 --trainable --optimizer=adamw\n",
          .min_arguments = 0,
          .max_arguments = 0,
          .flags = kHeadFlags,
          .run = RunPlan};
}

}  // namespace headwater::ctl
