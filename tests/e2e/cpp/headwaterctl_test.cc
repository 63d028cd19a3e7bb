// headwaterctl as its user sees it: output, exit codes, errors.
#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/headwaterctl_fixture.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using nlohmann::json;

// Where a server that was given a free port serves its metrics.
std::string MetricsFlag(const ServerProcess& server) {
  const std::string output = server.output();
  const std::string line = "metrics on port ";
  const size_t begin = output.find(line);
  if (begin == std::string::npos) return "--metrics=of " + output;
  return "--metrics=127.0.0.1:" + output.substr(begin + line.size(), output.find('\n', begin) - begin - line.size());
}

TEST_F(Headwaterctl, HealthTellsByExitCode) {
  EXPECT_EQ(OutputOf({"health"}), "SERVING\n");
  EXPECT_EQ(OutputOf({"health", "headwater.v1.Nonsense"}, 1), "SERVICE_UNKNOWN\n");
  ExpectJson({"health"}, R"({"status": "SERVING"})"_json);
  server_.process().Signal(SIGKILL);
  server_.process().Wait();
  ExpectError({"health", "--connect_timeout=300ms"}, 1, {"UNAVAILABLE", "hint: is headwaterd running there?"});
}

TEST_F(Headwaterctl, InfoPrintsTheServer) {
  ExpectOutput({"info"}, 0, {"version", "engine", "cpu", "LIMIT", "max_message_bytes", "MiB", "features"});
  const json document = ExpectJson({"info"}, R"({"engine": "cpu"})"_json);
  EXPECT_GT(document["limits"]["max_heads"], 0);
  EXPECT_GT(document["limits"]["max_sessions"], 0);
  EXPECT_EQ(document["incarnation"].get<std::string>().size(), 32u);
}

// The figures are there all the same; that nothing is known of the heads must not look like a server without any.
TEST(HeadwaterctlAlone, TopTellsHeadsThatItMayNotListFromNone) {
  TemporaryDirectory directory;
  const std::string tokens = directory.path() + "/tokens.json";
  // By `printf %s secret | sha256sum`.
  WriteFile(tokens, R"({"tokens": [{"name": "operator", "compute": ["*"], "admin": ["*"],
      "sha256": "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"}]})");
  const std::string token = directory.path() + "/operator.token";
  WriteFile(token, "secret\n");
  const ServerProcess server({"--token_file=" + tokens, "--metrics_address=127.0.0.1:0"});
  const Arguments command = {MetricsFlag(server), "top", "--once", "--json", "--interval=100ms"};
  ExpectJson(RunOn(server, command), R"({"serving": true, "heads": null, "heads_error": {
      "code": "UNAUTHENTICATED", "reason": "~", "message": "~", "metadata": {}, "hint": "~"}})"_json);
  ExpectJson(RunOn(server, Joined(command, {"--token_file=" + token})), R"({"heads": [], "heads_error": null})"_json);
}

// A script that has an empty file and a 0 would take it for the answer.
TEST_F(Headwaterctl, LostOutputIsAFailure) {
  const std::string server = "--server=" + server_.target();
  const auto run = [&](const Arguments& arguments) {
    return RunProgram(Joined({"/bin/sh", "-c", "exec \"$0\" \"$@\" >/dev/full", HEADWATERCTL, server}, arguments));
  };
  for (const Arguments& arguments :
       std::vector<Arguments>{{"heads"}, {"--json", "info"}, {"info"}, {"help"}, {"--version"}, {"help", "plan"}}) {
    SCOPED_TRACE(arguments.back());
    Expect(run(arguments), 1, &ProgramResult::err, {"the output could not be written: No space left on device"});
  }
  // What has failed anyway ends as it would have.
  EXPECT_EQ(run({"nonsense", "--json"}).exit_code, 2);
  Expect(run({"take", "nobody", "--json"}), 1, &ProgramResult::err, {"HEAD_NOT_FOUND", "the output could not be written"});
}

// Looks follow each other without end, but not where nobody gets them.
TEST(HeadwaterctlAlone, TopEndsWhenItsOutputIsLost) {
  const ServerProcess server({"--metrics_address=127.0.0.1:0"});
  for (const char* form : {"--nojson", "--json"}) {
    SCOPED_TRACE(form);
    const ProgramResult lost = RunProgram({"/bin/sh", "-c", "exec timeout 30 \"$0\" \"$@\" >/dev/full", HEADWATERCTL,
                                           "--server=" + server.target(), MetricsFlag(server), "top", "--interval=100ms", form});
    Expect(lost, 1, &ProgramResult::err, {"the output could not be written"});
  }
}

TEST_F(Headwaterctl, PlanAddsUpAndMakesNothing) {
  const Arguments flags = {"plan",        "--vocab_size=50257", "--hidden_size=1000", "--data_type=bfloat16",
                           "--trainable", "--optimizer=adamw",  "--staging_slots",    "2"};
  const json plan = ExpectJson(flags)["memory_plan"];
  int64_t sum = 0;
  for (const json& item : plan["items"]) sum += item["bytes"].get<int64_t>();
  EXPECT_EQ(plan["total_bytes"], sum);
  // bf16 weight, fp32 gradient, fp32 master and two moments: at least 18 bytes an element, before the staging slots.
  EXPECT_GE(sum, int64_t{50257} * 1000 * (18 + 2 * 4));
  ExpectOutput(flags, 0, {"optimizer_state", "the head fits"});
  ExpectJson({"heads"}, R"({"heads": []})"_json);
  ExpectOutput({"plan", "--vocab_size=1000000", "--hidden_size=65536", "--data_type=float32"}, 1, {});
}

// Of a server of one rank: what each of several like it would hold.
TEST_F(Headwaterctl, PlansTheLargestOfSeveralRanks) {
  const Arguments head = {"plan",        "--vocab_size=1003", "--hidden_size=64", "--data_type=bfloat16",
                          "--trainable", "--optimizer=adamw"};
  const auto with = [&](const std::string& flag) { return Joined(head, {flag}); };
  const json plan = ExpectJson(with("--ranks=4"), R"({"ranks": 4, "rows_per_rank": 251, "fits": true})"_json);
  const auto bytes = [](const json& of, const std::string& purpose) {
    for (const json& item : of["items"]) {
      if (item["purpose"] == purpose) return item["bytes"].get<int64_t>();
    }
    return int64_t{-1};
  };
  EXPECT_EQ(bytes(plan["rank_plan"], "weight"), 251 * 64 * 2);
  EXPECT_EQ(bytes(plan["rank_plan"], "optimizer_state"), 251 * 64 * 8);
  EXPECT_EQ(bytes(plan["memory_plan"], "weight"), 1003 * 64 * 2);
  const json info = ExpectJson({"info"});
  EXPECT_EQ(plan["rank_plan"]["available_bytes"], info["devices"][0]["memory_budget_bytes"]);
  ExpectOutput(with("--ranks=4"), 0, {"each of 4 ranks holds at most 251 rows of the vocabulary:", "the head fits"});
  // One rank is the server itself, but for what other heads take.
  ExpectJson(with("--ranks=1"), {{"rank_plan", {{"items", ExpectJson(head)["memory_plan"]["items"]}}}});
  // By rows each holds all weights, and a shard of the optimizer's state.
  const json rows_plan = ExpectJson(Joined(head, {"--ranks=4", "--parallelism=rows"}));
  const json& rank = rows_plan["rank_plan"];
  int64_t rank_sum = 0;
  for (const json& item : rank["items"]) rank_sum += item["bytes"].get<int64_t>();
  EXPECT_EQ(rank["total_bytes"], rank_sum);
  EXPECT_EQ(bytes(rank, "weight"), 1003 * 64 * 2);
  EXPECT_EQ(bytes(rank, "grad_weight"), 1003 * 64 * 4);
  EXPECT_EQ(bytes(rank, "optimizer_state"), 251 * 64 * 8);
  // GPUs exchange in place.
  const int64_t exchange_bytes = info["engine"] == "cpu" ? int64_t{4} << 20 : 0;
  EXPECT_EQ(bytes(rank, "workspace"), bytes(rows_plan["memory_plan"], "workspace") + exchange_bytes);
  for (const char* wrong : {"--ranks=0", "--ranks=-1", "--ranks=257"}) ExpectError(with(wrong), 2, {});
  ExpectOutput(with("--ranks=256"), 0, {});
  ExpectError({"plan", "--vocab_size=3", "--hidden_size=4", "--ranks=4"}, 2, {});
}

// The figures are those of docs/study/method.md, computed by hand.
TEST_F(Headwaterctl, PlansALossInEachWay) {
  const auto plan = [&](const std::string& text, const Arguments& flags = {}) {
    WriteFile(config_, text);
    return ExpectJson(Joined({"plan", "--model=" + config_, "--tokens=16384"}, flags));
  };
  const std::string sizes = R"({"model_type": "llama", "vocab_size": 50304, "hidden_size": 2048)";
  const std::string llama = sizes + R"(, "torch_dtype": "bfloat16"})";
  const json trained = plan(llama, {"--gpu_gib=10"});
  const json& ways = trained["loss"]["ways"];
  ASSERT_EQ(ways.size(), 4u) << trained;
  EXPECT_EQ(trained["loss"]["fused_chunk_rows"], 1024);
  const int64_t rows = 67108864, weight = 206045184, gradient = 412090368, state = 1236271104;
  const int64_t server = trained["memory_plan"]["total_bytes"];
  EXPECT_GT(server, weight + gradient + state);
  const auto way = [](const std::string& name, const std::vector<int64_t>& bytes, bool fits) {
    json row = {{"way", name}, {"fits", fits}};
    size_t column = 0;
    for (const char* of : {"rows", "logits", "weight", "gradient", "optimizer", "trainer", "server", "first_gpu", "second_gpu"}) {
      row[absl::StrCat(of, "_bytes")] = bytes[column++];
    }
    return row;
  };
  EXPECT_EQ(ways[0], way("eager", {rows, 9890168832, weight, gradient, state, 11811684352, 0, 11811684352, 0}, false));
  EXPECT_EQ(ways[1], way("fused", {2 * rows, 103022592, weight, gradient, state, 2091646976, 0, 2091646976, 0}, true));
  EXPECT_EQ(ways[2], way("headwater_same_gpu", {2 * rows, 0, weight, 0, 0, 340262912, server, 340262912 + server, 0}, true));
  EXPECT_EQ(ways[3], way("headwater_second_gpu", {2 * rows, 0, weight, 0, 0, 340262912, server, 340262912, server}, true));

  // Another owner of the optimizer, a tied weight, a frozen head.
  const json by_trainer = plan(llama, {"--trainable"})["loss"]["ways"];
  EXPECT_EQ(by_trainer[2]["gradient_bytes"], gradient);
  EXPECT_EQ(by_trainer[0]["optimizer_bytes"], 0);
  EXPECT_EQ(by_trainer[0]["fits"], nullptr);
  const json tied = plan(sizes + R"(, "dtype": "bfloat16", "tie_word_embeddings": true})")["loss"]["ways"];
  EXPECT_EQ(tied[2]["gradient_bytes"], gradient);
  EXPECT_EQ(tied[2]["optimizer_bytes"], 0);
  const json frozen = plan(llama, {"--notrainable"})["loss"]["ways"];
  EXPECT_EQ(frozen[1]["trainer_bytes"], 2 * rows + 103022592 + weight);
  EXPECT_EQ(plan("{\"text_config\": " + llama + "}")["loss"]["ways"], plan(llama)["loss"]["ways"]);
  // A chunk has at most all tokens.
  EXPECT_EQ(plan(R"({"vocab_size": 100, "hidden_size": 2048, "dtype": "float32"})")["loss"]["fused_chunk_rows"], 16384);

  ExpectOutput({"plan", "--model", config_, "--tokens=16777216", "--gpu_gib=1"}, 0,
               {"the head fits", "HEADWATER, SECOND GPU", "each GPU has 1.0 GiB", "does not fit", "of the cpu engine"});
}

TEST_F(Headwaterctl, PlanSaysWhatIsWrongWithAModel) {
  for (const char* type : {"", R"(, "dtype": "float8_e4m3fn")"}) {
    WriteFile(config_, absl::StrCat(R"({"vocab_size": 100, "hidden_size": 8)", type, "}"));
    const std::string message = config_ + ": dtype: expected float32, bfloat16 or float16, got none of them";
    ExpectJson({"plan", "--model=" + config_, "--tokens=8"}, {{"error", {{"message", message}}}}, 1);
  }
  ExpectOutput({"plan", "--model=" + config_, "--tokens=8", "--data_type=bfloat16"}, 0, {});
  const ProgramResult unclear = Run({"plan", "--model=" + config_ + "2", "--tokens=8"});
  Expect(unclear, 1, &ProgramResult::err, {config_ + "2 is not there"});
  EXPECT_FALSE(absl::StrContains(unclear.err, "beside the weights")) << unclear.err;
  for (const Arguments& flags : std::vector<Arguments>{{"--model=" + config_},
                                                       {"--model=" + config_, "--tokens=0"},
                                                       {"--model=" + config_, "--tokens=16777217"},
                                                       {"--model=" + config_, "--tokens=8", "--gpu_gib=0"},
                                                       {"--model=" + config_, "--tokens=8", "--config=" + config_},
                                                       {"--model=" + config_, "--tokens=8", "--ranks=2"},
                                                       {"--config=" + config_, "--tokens=8"}}) {
    ExpectError(Joined({"plan"}, flags), 2, {});
  }
}

// Of a server of several: each as it is.
TEST(HeadwaterctlOfAGroup, PlansEachRank) {
  ServerProcess server({"--workers=2", "--shard_weights=3,1,2", "--memory_budget_bytes=2000000000"});
  const auto expect = [&](const Arguments& arguments, int exit_code, std::string ProgramResult::*stream, const Arguments& texts) {
    Expect(RunOn(server, arguments), exit_code, stream, texts);
  };
  const Arguments head = {"plan", "--vocab_size=600", "--hidden_size=16", "--data_type=float32", "--trainable"};
  expect(head, 0, &ProgramResult::out, {"[0, 300)", "[300, 400)", "[400, 600)"});
  const json plan = json::parse(RunOn(server, Joined(head, {"--json"})).out);
  ASSERT_EQ(plan["rank_shares"].size(), 3U);
  int64_t tensor_bytes = 0;
  for (const json& share : plan["rank_shares"]) {
    tensor_bytes += share["tensor_bytes"].get<int64_t>();
    EXPECT_LE(share["total_bytes"], share["available_bytes"]);
    EXPECT_FALSE(share["device"].get<std::string>().empty());
  }
  // fp32 weight, gradient and one staging slot.
  EXPECT_EQ(tensor_bytes, int64_t{600} * 16 * 12);
  EXPECT_EQ(plan["rank_shares"][0]["tensor_bytes"], int64_t{300} * 16 * 12);
  EXPECT_EQ(plan["rank_shares"][0]["budget_bytes"], 2000000000);  // the workers' are what their machine has
  // All budgets together would do, but not that of the rank that holds half of the rows.
  expect({"plan", "--vocab_size=300000", "--hidden_size=2048", "--data_type=bfloat16", "--trainable"}, 1, &ProgramResult::out,
         {"too small"});
  expect(Joined(head, {"--json", "--ranks=2"}), 1, &ProgramResult::err,
         {"expected a server of one rank to plan on, this one has 3"});
  TemporaryDirectory directory;
  const std::string config = directory.path() + "/config.json";
  WriteFile(config, R"({"vocab_size": 600, "hidden_size": 16, "dtype": "float32"})");
  expect({"plan", "--model=" + config, "--tokens=8"}, 1, &ProgramResult::err, {"--model: expected a server of one rank"});
}

TEST_F(Headwaterctl, LoadsFromLocalFileAndSaves) {
  const std::string path = Path("head.safetensors");
  WriteFile(path, SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, weight_));
  ExpectOutput({"load", "student", path, "--from-file", "--create", "--trainable", "--optimizer=adamw", "--parallelism=rows"}, 0,
               {});
  ExpectError({"plan", "--vocab_size=8", "--hidden_size=8", "--data_type=float32", "--parallelism=columns"}, 2,
              {"expected vocabulary or rows"});
  client::Client client = server_.Connect();
  client::Head head = Value(client.OpenHead("student"));
  EXPECT_EQ(head.spec().vocab_size, kVocabSize);
  EXPECT_TRUE(std::holds_alternative<client::AdamW>(head.spec().optimizer));
  ExpectWeight(head);

  ExpectJson({"heads"}, R"({"heads": [{"state": "ready", "spec": {"optimizer": "adamw", "parallelism": "rows"}}]})"_json);
  ExpectOutput({"heads"}, 0, {"tenants/default/heads/student  ready"});

  ExpectJson({"save", "student", "first"}, R"({"step": 0})"_json);
  ExpectError({"save", "student", "first"}, 1, {"ALREADY_EXISTS / CHECKPOINT_ALREADY_EXISTS", "--overwrite"});
  ExpectOutput({"save", "student", "first", "--overwrite"}, 0, {});
  ExpectJson({"save", "nobody", "x"}, ErrorOf("HEAD_NOT_FOUND"), 1);

  WriteFile(path, SafetensorsBytes("lm_head.weight", {kHiddenSize, kVocabSize}, weight_));
  ExpectError({"load", "student", path, "--from-file"}, 1, {"[12, 101], the head needs [101, 12]"});
  // Of a head that would not fit nothing is left.
  ExpectError({"load", "other", path, "--from-file", "--create", "--vocab_size=101"}, 1,
              {"[12, 101], the head needs [101, hidden_size]"});
  ExpectJson({"heads"}, R"({"heads": [{"name": "tenants/default/heads/student"}]})"_json);
}

TEST_F(Headwaterctl, RestoredHeadIsShownWithItsCheckpointAndTaken) {
  {
    client::Client client = server_.Connect();
    Value(MakeHead(client, "student", trained_).Save("begin"));
  }
  server_.KillAndStart();
  ExpectJson({"heads"}, R"({"heads": [{"state": "restored", "restored_checkpoint": "begin"}]})"_json);
  ExpectOutput({"heads"}, 0, {"tenants/default/heads/student  restored  begin"});

  ExpectOutput({"take", "student"}, 0, {"took tenants/default/heads/student: step 0 is open and empty, epoch "});
  const json again = ExpectJson({"take", "student"}, R"({"state": "ready", "restored_checkpoint": null})"_json);
  EXPECT_EQ(again["epoch"].get<std::string>().size(), 32u);
  ExpectJson({"heads"}, {{"heads", json::array({{{"epoch", again["epoch"]}}})}});
  ExpectJson({"heads", "--tenant=research"}, R"({"heads": []})"_json);
  ExpectJson({"take", "nobody"}, ErrorOf("HEAD_NOT_FOUND"), 1);
}

TEST_F(Headwaterctl, LoadsFromTheServersDisk) {
  WriteFile(server_.load_root() + "/head.safetensors", SafetensorsBytes("weight", {kVocabSize, kHiddenSize}, weight_));
  const json nowhere = R"({"error": {"reason": "WEIGHTS_NOT_FOUND", "hint": "~--load_root"}})"_json;
  // Of a creation that fails nothing is left.
  const Arguments create = Joined({"load", "teacher", "nowhere.safetensors", "--create"}, sizes_);
  ExpectJson(create, nowhere, 1);
  ExpectJson(create, R"({"error": {"message": "~; the head that was made for it is deleted again"}})"_json, 1);
  ExpectJson({"heads"}, R"({"heads": []})"_json);
  ExpectJson(Joined({"load", "teacher", "head.safetensors", "--create"}, sizes_),
             R"({"state": "ready", "spec": {"trainable": false}})"_json);
  // A head that was there stays.
  ExpectJson({"load", "teacher", "nowhere.safetensors"}, nowhere, 1);
  ExpectJson(create, ErrorOf("HEAD_ALREADY_EXISTS"), 1);
  ExpectJson({"heads"}, R"({"heads": [{"name": "tenants/default/heads/teacher"}]})"_json);
}

TEST_F(Headwaterctl, DeletesAHeadThatNobodyUsesUnlessForced) {
  client::Client client = server_.Connect();
  Value(client.CreateHead("student", trained_));
  EXPECT_EQ(OutputOf({"delete", "student"}), "deleted student\n");  // it has no weights yet, as after a loading that has failed
  EXPECT_EQ(OutputOf({"heads"}), "tenant default has no heads\n");
  ExpectJson({"delete", "student"}, ErrorOf("HEAD_NOT_FOUND"), 1);

  client::Head head = MakeHead(client, "student", trained_);
  Value(SubmitRandom(head, 2, {.step = 0, .micro_batch = 0}));
  ExpectJson({"delete", "student"}, R"({"error": {"reason": "HEAD_IN_USE", "hint": "~--force"}})"_json, 1);
  ExpectOutput({"heads"}, 0, {"student"});
  ExpectJson({"delete", "student", "--force"}, R"({"deleted": "student"})"_json);
  ExpectJson({"heads"}, R"({"heads": []})"_json);
}

TEST_F(Headwaterctl, ErrorsSayWhatToDoNext) {
  ExpectOutput({"health", "--timeout=5", "--connect_timeout=1m30s"}, 0, {});
  ExpectError({"plan", "--vocab_size=-1", "--hidden_size=1"}, 2,
              {"--vocab_size: expected at least 1, got -1", "hint: `headwaterctl help plan` explains it and its flags"});
  ExpectError({"info", "--timeout=soon"}, 2, {"expected a duration such as 30, 30s, 500ms or 1m30s", "headwaterctl help info"});
  EXPECT_FALSE(absl::StrContains(Run({"delete", "nosuch"}).err, "--create"));
  EXPECT_TRUE(absl::StrContains(Run({"load", "nosuch", "x"}).err, "--create makes one"));
  const std::string token = Path("token");
  WriteFile(token, "secret\tand more\n");
  const ProgramResult bad = Run({"health", "--token_file=" + token});
  Expect(bad, 2, &ProgramResult::err, {"--token_file"});
  EXPECT_FALSE(absl::StrContains(bad.err, "ClientOptions")) << bad.err;
}

TEST_F(Headwaterctl, WrongCommandLinesEndWithTwo) {
  for (const Arguments& arguments : std::vector<Arguments>{{},
                                                           {"nonsense"},
                                                           {"health", "--nonsense"},
                                                           {"health", "--vocab_size=5"},
                                                           {"save", "student"},
                                                           {"info", "more"},
                                                           {"info", "--timeout=0"},
                                                           {"info", "--connect_timeout=-1s"},
                                                           {"info", "--client_certificate=here"},
                                                           {"plan", "--vocab_size=many"},
                                                           {"plan", "--vocab_size"},
                                                           {"plan", "--vocab_size=5"},
                                                           {"plan", "--vocab_size=5", "--hidden_size=4", "--data_type=int8"},
                                                           {"plan", "--vocab_size=5", "--hidden_size=4", "--momentum=0.5"},
                                                           {"plan", "--vocab_size=5", "--hidden_size=4", "--optimizer=adamw"},
                                                           {"load", "a", "b", "--trainable"}}) {
    const ProgramResult result = Run(arguments);
    Expect(result, 2, &ProgramResult::err, {"hint: "});
    EXPECT_EQ(result.out, "");
    // Behind what is wrong, also where it stands for a value that is missing: the error is JSON.
    const json error =
        ExpectJson(arguments, R"({"error": {"code": "INVALID_ARGUMENT", "reason": "", "hint": "~headwaterctl help"}})"_json, 2);
    EXPECT_FALSE(error["error"]["message"].get<std::string>().empty());
    EXPECT_EQ(error["error"]["metadata"], json::object());
  }
  for (const Arguments& arguments : std::vector<Arguments>{{"--json", "nonsense"},
                                                           {"nonsense", "-json"},
                                                           {"--nonsense", "--json=true", "info"},
                                                           {"--nojson", "nonsense", "--json"}}) {
    e2e::ExpectJson(Run(arguments), R"({"error": {}})"_json, 2);
  }
  for (const Arguments& arguments : std::vector<Arguments>{{"--json", "nonsense", "--nojson"},
                                                           {"nonsense", "--json=false"},
                                                           {"nonsense", "--json=maybe"},
                                                           {"info", "--", "--json"}}) {
    EXPECT_EQ(OutputOf(arguments, 2), "") << arguments[0];
  }
}

// Nothing is sent: scripts that try again after a 1 would do so for ever.
TEST_F(Headwaterctl, WhatCannotBeConnectedWithEndsWithTwo) {
  for (const std::string& flag :
       {std::string("--server=localhost"), "--token_file=" + Path("missing"), "--ca_certificate=" + Path("missing")}) {
    SCOPED_TRACE(flag);
    Expect(RunProgram({HEADWATERCTL, flag, "health"}), 2, &ProgramResult::err, {"hint:"});
  }
}

TEST_F(Headwaterctl, HelpExplainsEveryCommand) {
  EXPECT_EQ(OutputOf({"--version"}), "headwaterctl " HEADWATER_VERSION "\n");
  const ProgramResult general = Run({"help"});
  EXPECT_EQ(general.exit_code, 0);
  EXPECT_EQ(Run({"--help"}).out, general.out);
  EXPECT_EQ(Run({"help", "help"}).out, general.out);
  for (const std::string command : {"health", "info", "heads", "create", "load", "verify", "export", "delete", "take", "step",
                                    "discard", "save", "checkpoints", "restore", "plan", "bench", "top"}) {
    EXPECT_TRUE(absl::StrContains(general.out, absl::StrCat("  ", command))) << general.out;
    ExpectOutput({"help", command}, 0, {"headwaterctl " + command, "Exit codes:"});
    EXPECT_EQ(Run({command, "--help"}).out, Run({"help", command}).out);
  }
}

}  // namespace
}  // namespace headwater::e2e
