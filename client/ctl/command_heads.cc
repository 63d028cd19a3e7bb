// `heads`: what the server holds.
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/table.h"

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunHeads(client::Client& client, const std::vector<std::string>&, Output& output) {
  absl::StatusOr<std::vector<client::HeadInfo>> heads = client.ListHeads();
  if (!heads.ok()) return heads.status();
  using Align = Table::Align;
  Table table({"NAME", "STATE", "VOCAB", "HIDDEN", "TYPE", "KIND", "OPTIMIZER", "STEP", "VERSION", "MEMORY", "SHARDS"},
              {Align::kLeft, Align::kLeft, Align::kRight, Align::kRight, Align::kLeft, Align::kLeft, Align::kLeft, Align::kRight,
               Align::kRight, Align::kRight, Align::kRight});
  nlohmann::json document = nlohmann::json::array();
  for (const client::HeadInfo& head : *heads) {
    table.AddRow({head.name, client::HeadStateName(head.state), FormatCount(head.spec.vocab_size),
                  FormatCount(head.spec.hidden_size), client::DataTypeName(head.spec.data_type),
                  head.spec.trainable ? "trainable" : "frozen", OptimizerName(head.spec.optimizer),
                  head.open_step.has_value() ? absl::StrCat(*head.open_step) : "-", absl::StrCat(head.weight_version),
                  FormatBytes(head.memory_plan.total_bytes), absl::StrCat(head.shards.size())});
    document.push_back(ToJson(head));
  }
  output.Print(heads->empty() ? "no heads\n" : table.ToString(), {{"heads", document}});
  return kExitOk;
}

}  // namespace

Command HeadsCommand() {
  return {.name = "heads",
          .synopsis = "",
          .summary = "lists the heads",
          .help = "One line for each head, by name. MEMORY is what the head was planned with, over all shards.\n",
          .min_arguments = 0,
          .max_arguments = 0,
          .flags = {},
          .run = RunHeads};
}

}  // namespace headwater::ctl
