// `create`: a head without weights.
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::ctl {
namespace {

absl::StatusOr<ExitCode> RunCreate(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::HeadSpec spec, HeadSpecFromFlags({}, /*config_beside=*/"", output));
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.CreateHead(arguments[0], spec));
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo info, head.Info());
  output.Print(absl::StrCat("created ", info.name, ": [", info.spec.vocab_size, ", ", info.spec.hidden_size, "] ",
                            client::DataTypeName(info.spec.data_type), ", ", FormatBytes(info.memory_plan.total_bytes),
                            "; it has no weights yet\n"),
               ToJson(info));
  return kExitOk;
}

}  // namespace

Command CreateCommand() {
  return {.name = "create",
          .synopsis = "NAME",
          .summary = "makes a head without weights",
          .help =
              "The flags describe the head, or the model's config of --config. `headwaterctl load` or `headwaterctl restore` sets\n"
              "its weights.\n"
              "\n"
              "  headwaterctl create student --config ~/models/llama-8b --trainable --optimizer=adamw\n",
          .flags = kHeadFlags,
          .run = RunCreate};
}

}  // namespace headwater::ctl
