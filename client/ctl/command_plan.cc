// `plan`: the memory of a head, over all ranks of a server and on each of them. With --model also that of a loss in each way.
#include <algorithm>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/loss_memory.h"
#include "client/ctl/model_config.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"

ABSL_FLAG(int32_t, ranks, 0,
          "also plan the head for a server of so many ranks like this one, evenly: --gpus of headwaterd, and --workers "
          "(not given: the server as it is)");
ABSL_FLAG(std::string, model, "",
          "like --config, and also plan the model's loss in each way, with --tokens; the head is trained with AdamW unless "
          "--trainable, --notrainable or --optimizer is given");
ABSL_FLAG(int64_t, tokens, 0, "tokens in a micro-batch of --model");
ABSL_FLAG(int32_t, gpu_gib, 0, "memory of each GPU: with --model, says in which ways the loss fits (not given: says nothing)");

namespace headwater::ctl {
namespace {

// Bytes of a rank's gradient exchange for each rank on the CPU: kReduceScatterBytes of its engine. GPUs exchange in place.
constexpr int64_t kExchangeBytes = int64_t{1} << 20;
constexpr int32_t kMostRanks = 256;  // headwaterd's --gpus and --workers
constexpr int64_t kMostTokens = int64_t{1} << 24;
constexpr int32_t kMostGpuGib = 1 << 20;

// The part of a head that one rank of a server with several ranks would hold.
struct RankShare {
  std::string device;
  int64_t vocab_start = 0;  // rows [vocab_start, vocab_end)
  int64_t vocab_end = 0;
  int64_t tensor_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t total_bytes = 0;      // of both
  int64_t available_bytes = 0;  // of the budget, beside the other heads
  int64_t budget_bytes = 0;

  bool fits() const { return total_bytes <= available_bytes; }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankShare, device, vocab_start, vocab_end, tensor_bytes, workspace_bytes, total_bytes,
                                   available_bytes, budget_bytes)

// The part of `bytes`, which grow with the rows of a head, for `rows` of `all_rows`.
int64_t Share(int64_t bytes, int64_t rows, int64_t all_rows) {
  return bytes / all_rows * rows + bytes % all_rows * rows / all_rows;  // no product overflows
}

// Whether each rank holds its shard's rows of the item, whatever the head's parallelism. A head by rows is whole on every rank in
// all other items.
bool IsAlwaysSplit(const client::MemoryPlan::Item& item) {
  return item.purpose == "master_weight" || item.purpose == "optimizer_state";
}

// The shares on a server whose devices are its ranks; empty for a server with one rank.
std::vector<RankShare> SharesOf(const client::HeadInfo& head, const client::ServerInfo& server) {
  std::vector<RankShare> shares;
  const size_t ranks = server.devices.size();
  if (ranks < 2 || head.shards.size() != ranks) return shares;
  int64_t workspace_bytes = 0;
  for (const auto& item : head.memory_plan.items) {
    if (item.purpose == "workspace") workspace_bytes = item.bytes;
  }
  int64_t budget_bytes = 0;
  for (const client::DeviceInfo& device : server.devices) budget_bytes += device.memory_budget_bytes;
  // Other heads are split as this one would be.
  const int64_t planned_bytes = budget_bytes - head.memory_plan.available_bytes;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const client::VocabShard& shard = head.shards[rank];
    RankShare share{shard.device, shard.vocab_start, shard.vocab_end};
    const int64_t rows = share.vocab_end - share.vocab_start;
    for (const auto& item : head.memory_plan.items) {
      if (item.purpose == "workspace") continue;
      const bool split = head.spec.parallelism == client::Parallelism::kVocabulary || IsAlwaysSplit(item);
      share.tensor_bytes += split ? Share(item.bytes, rows, head.spec.vocab_size) : item.bytes / static_cast<int64_t>(ranks);
    }
    share.workspace_bytes = workspace_bytes / static_cast<int64_t>(ranks);
    share.total_bytes = share.tensor_bytes + share.workspace_bytes;
    share.budget_bytes = server.devices[rank].memory_budget_bytes;
    share.available_bytes = std::max<int64_t>(0, share.budget_bytes - Share(planned_bytes, rows, head.spec.vocab_size));
    shares.push_back(std::move(share));
  }
  return shares;
}

Table PlanTable(const client::MemoryPlan& plan) {
  Table table({"PURPOSE", ">BYTES", ">"});
  for (const auto& item : plan.items) {
    if (item.bytes > 0) table.AddRow({item.purpose, FormatCount(item.bytes), FormatBytes(item.bytes)});
  }
  table.AddRow({"total", FormatCount(plan.total_bytes), FormatBytes(plan.total_bytes)});
  table.AddRow({"available", FormatCount(plan.available_bytes), FormatBytes(plan.available_bytes)});
  return table;
}

Table ShareTable(const std::vector<RankShare>& shares) {
  Table table({">RANK", "DEVICE", "ROWS", ">TENSORS", ">WORKSPACE", ">TOTAL", ">AVAILABLE", ">BUDGET", ""});
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    const RankShare& share = shares[rank];
    table.AddRow({absl::StrCat(rank), share.device, absl::StrCat("[", share.vocab_start, ", ", share.vocab_end, ")"),
                  FormatBytes(share.tensor_bytes), FormatBytes(share.workspace_bytes), FormatBytes(share.total_bytes),
                  FormatBytes(share.available_bytes), FormatBytes(share.budget_bytes), share.fits() ? "" : "too small"});
  }
  return table;
}

std::string Verdict(bool fits) { return fits ? "the head fits\n" : "the head does not fit\n"; }

// The plan of the rank that holds most of the head. Its available_bytes are a device's whole budget: such a server has no heads
// yet.
absl::StatusOr<client::MemoryPlan> PlanLargestRank(client::Client& client, const client::HeadSpec& spec, int32_t ranks,
                                                   const client::ServerInfo& server) {
  if (server.devices.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("--ranks: expected a server of one rank to plan on, this one has ",
                                                   server.devices.size(), "; without it the plan is this server's"));
  }
  const int64_t rows = (spec.vocab_size + ranks - 1) / ranks;
  const bool is_whole = spec.parallelism == client::Parallelism::kRows;
  client::HeadSpec held = spec;
  if (!is_whole) {
    held.vocab_size = rows;
    if (held.valid_vocab_size.has_value()) held.valid_vocab_size = std::min(*held.valid_vocab_size, held.vocab_size);
  }
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo head, client.PlanHead("headwaterctl-plan", held));
  for (auto& item : head.memory_plan.items) {
    if (!is_whole) continue;
    const int64_t before = item.bytes;
    if (IsAlwaysSplit(item)) item.bytes = Share(item.bytes, rows, spec.vocab_size);
    if (item.purpose == "workspace" && spec.trainable && ranks > 1 && server.engine == "cpu") item.bytes += ranks * kExchangeBytes;
    head.memory_plan.total_bytes += item.bytes - before;
  }
  head.memory_plan.available_bytes = server.devices[0].memory_budget_bytes;
  return head.memory_plan;
}

absl::Status CheckModelFlags() {
  if (!FlagGiven("model")) {
    for (const char* flag : {"tokens", "gpu_gib"}) {
      if (FlagGiven(flag)) return UsageError(absl::StrCat("--", flag, " needs --model"));
    }
    return absl::OkStatus();
  }
  for (const char* flag : {"config", "ranks"}) {
    if (FlagGiven(flag)) return UsageError(absl::StrCat("--model and --", flag, " exclude each other"));
  }
  if (!FlagGiven("tokens")) return UsageError("--model needs --tokens");
  const int64_t tokens = absl::GetFlag(FLAGS_tokens);
  if (tokens < 1 || tokens > kMostTokens) {
    return UsageError(absl::StrCat("--tokens: expected 1 to ", kMostTokens, ", got ", tokens));
  }
  const int32_t gpu_gib = absl::GetFlag(FLAGS_gpu_gib);
  if (FlagGiven("gpu_gib") && (gpu_gib < 1 || gpu_gib > kMostGpuGib)) {
    return UsageError(absl::StrCat("--gpu_gib: expected 1 to ", kMostGpuGib, ", got ", gpu_gib));
  }
  return absl::OkStatus();
}

// The head of --model, trained unless the flags say otherwise.
absl::StatusOr<client::HeadSpec> TrainedSpec(const ModelHead& model, const Output& output) {
  const std::string path = absl::GetFlag(FLAGS_model);
  if (!model.data_type.has_value() && !FlagGiven("data_type")) {
    return WithHint(
        absl::InvalidArgumentError(absl::StrCat(path, ": dtype: expected float32, bfloat16 or float16, got none of them")),
        "--data_type= names the type of the head's weight");
  }
  HEADWATER_ASSIGN_OR_RETURN(client::HeadSpec spec, HeadSpecFromFlags({}, path, output));
  if (!FlagGiven("trainable") && !FlagGiven("optimizer")) {
    spec.trainable = true;
    spec.optimizer = client::AdamW();
  }
  return spec;
}

// Adds the memory of the loss in each way to `document`, and returns it as text.
absl::StatusOr<std::string> CompareWays(const ModelHead& model, const client::HeadInfo& head, const client::ServerInfo& server,
                                        nlohmann::json* document) {
  if (server.devices.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model: expected a server of one rank to plan on, this one has ", server.devices.size()));
  }
  const int64_t tokens = absl::GetFlag(FLAGS_tokens);
  const int64_t chunk_rows = FusedChunkRows(tokens, head.spec.vocab_size, head.spec.hidden_size);
  std::optional<int64_t> gpu_bytes;
  if (FlagGiven("gpu_gib")) gpu_bytes = int64_t{absl::GetFlag(FLAGS_gpu_gib)} << 30;
  const bool tied = model.tied.value_or(false);
  const bool owner_is_trainer = head.spec.trainable && std::holds_alternative<std::monostate>(head.spec.optimizer);
  const std::vector<LossMemory> ways = PlanLossMemory(head, tokens, tied, gpu_bytes);
  (*document)["loss"] = {
      {"model_type", model.model_type}, {"tied", tied}, {"tokens", tokens}, {"gpu_bytes", gpu_bytes}, {"engine", server.engine},
      {"fused_chunk_rows", chunk_rows}, {"ways", ways}};
  return absl::StrCat("\nthe loss of ", FormatCount(tokens), " tokens, rows [", tokens, ", ", head.spec.hidden_size,
                      "] and logits [", tokens, ", ", head.spec.vocab_size, "] in bfloat16",
                      tied ? ", the weight tied to the embedding" : "", ":\n", LossMemoryTable(ways, gpu_bytes).ToString(),
                      "\nfused: Liger's, in chunks of ", FormatCount(chunk_rows),
                      " rows. The rest of the model takes as much in every way, and comes on top.\n",
                      owner_is_trainer ? "optimizer's state: the trainer's own, which comes on top as well.\n" : "",
                      "server: the plan above, of the ", server.engine, " engine",
                      server.engine == "cuda" ? ".\n" : ". The workspace of a GPU is larger: ask a server with --engine=cuda.\n");
}

absl::StatusOr<ExitCode> RunPlan(client::Client& client, const std::vector<std::string>&, Output& output) {
  const int32_t ranks = absl::GetFlag(FLAGS_ranks);
  if (FlagGiven("ranks") && (ranks < 1 || ranks > kMostRanks)) {
    return UsageError(absl::StrCat("--ranks: expected 1 to ", kMostRanks, ", got ", ranks));
  }
  HEADWATER_RETURN_IF_ERROR(CheckModelFlags());
  std::optional<ModelHead> model;
  if (FlagGiven("model")) {
    HEADWATER_ASSIGN_OR_RETURN(model, ReadModelHead(absl::GetFlag(FLAGS_model)));
  }
  HEADWATER_ASSIGN_OR_RETURN(client::HeadSpec spec, model ? TrainedSpec(*model, output) : HeadSpecFromFlags({}, "", output));
  if (ranks > spec.vocab_size) {
    return UsageError(absl::StrCat("--ranks: expected at most --vocab_size, ", spec.vocab_size, ", got ", ranks));
  }
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo head, client.PlanHead("headwaterctl-plan", spec));
  HEADWATER_ASSIGN_OR_RETURN(client::ServerInfo server, client.GetServerInfo());
  const client::MemoryPlan& plan = head.memory_plan;
  if (ranks > 0) {
    HEADWATER_ASSIGN_OR_RETURN(client::MemoryPlan rank_plan, PlanLargestRank(client, spec, ranks, server));
    const bool fits = rank_plan.total_bytes <= rank_plan.available_bytes;
    const int64_t rows = (spec.vocab_size + ranks - 1) / ranks;
    const bool is_whole = spec.parallelism == client::Parallelism::kRows;
    output.Print(absl::StrCat("each of ", ranks, " ranks holds ",
                              is_whole ? "all rows of the vocabulary, and the optimizer's state of at most " : "at most ",
                              FormatCount(rows), is_whole ? ":\n" : " rows of the vocabulary:\n", PlanTable(rank_plan).ToString(),
                              "\nrows computed at once: ", rank_plan.token_chunk_rows, "\n", Verdict(fits)),
                 {{"memory_plan", plan}, {"ranks", ranks}, {"rows_per_rank", rows}, {"rank_plan", rank_plan}, {"fits", fits}});
    return fits ? kExitOk : kExitFailed;
  }
  const std::vector<RankShare> shares = SharesOf(head, server);
  const bool fits = plan.total_bytes <= plan.available_bytes &&
                    std::all_of(shares.begin(), shares.end(), [](const RankShare& share) { return share.fits(); });
  nlohmann::json document = {{"memory_plan", plan}, {"fits", fits}};
  if (!shares.empty()) document["rank_shares"] = shares;
  std::string comparison;
  if (model.has_value()) {
    HEADWATER_ASSIGN_OR_RETURN(comparison, CompareWays(*model, head, server, &document));
  }
  output.Print(absl::StrCat(PlanTable(plan).ToString(), shares.empty() ? "" : absl::StrCat("\n", ShareTable(shares).ToString()),
                            "\nrows computed at once: ", plan.token_chunk_rows, "\n", Verdict(fits), comparison),
               document);
  return fits ? kExitOk : kExitFailed;
}

}  // namespace

Command PlanCommand() {
  std::vector<std::string> flags = {"ranks", "model", "tokens", "gpu_gib"};
  flags.insert(flags.end(), kHeadFlags.begin(), kHeadFlags.end());
  return {.name = "plan",
          .summary = "prints the memory that a head or a loss would take, without making it",
          .help =
              "The server plans the head that the flags describe, or the model's config of --config. Exits with 1 if it does not\n"
              "fit the memory that is available now, or is refused. If the server has several ranks (--gpus, --workers), each has "
              "a line: the rows that it would\n"
              "hold, the memory of these and of the workspace (an even share of all ranks' workspaces), and the available memory.\n"
              "\n"
              "With --ranks a server of one rank plans what each of so many ranks like itself would hold, against one budget.\n"
              "\n"
              "With --model and --tokens it also prints what a loss of so many tokens takes in each way: eager PyTorch, a fused\n"
              "loss in chunks, Headwater on the trainer's GPU (a server, or headwater.local), and on a second one. The formulas\n"
              "are those of docs/study/method.md. Rows and logits are in bf16, the head is in the server's types.\n"
              "\n"
              "  headwaterctl plan --vocab_size=128256 --hidden_size=4096 --data_type=bfloat16 --trainable --optimizer=adamw\n"
              "  headwaterctl plan --config ~/models/llama-8b --trainable --optimizer=adamw\n"
              "  headwaterctl plan --vocab_size=262144 --hidden_size=8192 --data_type=bfloat16 --trainable --ranks=4\n"
              "  headwaterctl plan --model ~/models/llama-8b --tokens 16384 --gpu_gib 80\n",
          .flags = std::move(flags),
          .run = RunPlan};
}

}  // namespace headwater::ctl
