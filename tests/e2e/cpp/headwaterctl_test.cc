// headwaterctl as its user sees it: output, exit codes, errors.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstring>
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
  EXPECT_EQ(RunJson({"health"})["status"], "SERVING");
  server_.process().Signal(SIGKILL);
  server_.process().Wait();
  ExpectError({"health", "--connect_timeout=300ms"}, 1, {"UNAVAILABLE", "hint: is headwaterd running there?"});
}

TEST_F(Headwaterctl, InfoPrintsTheServer) {
  ExpectOutput({"info"}, 0, {"version", "engine", "cpu", "LIMIT", "max_message_bytes", "MiB", "features"});
  const json document = RunJson({"info"});
  EXPECT_EQ(document["engine"], "cpu");
  EXPECT_GT(document["limits"]["max_heads"], 0);
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
  const ProgramResult refused = RunOn(server, command);
  EXPECT_EQ(refused.exit_code, 0) << refused.err;
  json unknown = json::parse(refused.out, nullptr, false);
  ASSERT_TRUE(unknown.is_object()) << refused.out;
  EXPECT_TRUE(unknown["serving"]);
  EXPECT_TRUE(unknown.contains("heads"));
  EXPECT_EQ(unknown["heads"], nullptr);
  EXPECT_EQ(unknown["heads_error"]["code"], "UNAUTHENTICATED") << unknown;
  for (const char* key : {"reason", "message", "metadata", "hint"}) EXPECT_TRUE(unknown["heads_error"].contains(key)) << key;

  const ProgramResult listed = RunOn(server, Joined(command, {"--token_file=" + token}));
  EXPECT_EQ(listed.exit_code, 0) << listed.err;
  json none = json::parse(listed.out, nullptr, false);
  ASSERT_TRUE(none.is_object()) << listed.out;
  EXPECT_EQ(none["heads"], json::array());
  EXPECT_EQ(none["heads_error"], nullptr);
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

TEST(HeadwaterctlAlone, TellsItsVersion) {
  const ProgramResult result = RunProgram({HEADWATERCTL, "--version"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "headwaterctl " HEADWATER_VERSION "\n");
}

TEST_F(Headwaterctl, PlanAddsUpAndMakesNothing) {
  const Arguments flags = {"plan",        "--vocab_size=50257", "--hidden_size=1000", "--data_type=bfloat16",
                           "--trainable", "--optimizer=adamw",  "--staging_slots",    "2"};
  const json plan = RunJson(flags)["memory_plan"];
  int64_t sum = 0;
  for (const json& item : plan["items"]) sum += item["bytes"].get<int64_t>();
  EXPECT_EQ(plan["total_bytes"], sum);
  // bf16 weight, fp32 gradient, fp32 master and two moments: at least 18 bytes an element, before the staging slots.
  EXPECT_GE(sum, int64_t{50257} * 1000 * (18 + 2 * 4));
  ExpectOutput(flags, 0, {"optimizer_state", "the head fits"});
  EXPECT_EQ(RunJson({"heads"})["heads"].size(), 0u);
  const ProgramResult huge = Run({"plan", "--vocab_size=1000000", "--hidden_size=65536", "--data_type=float32"});
  EXPECT_EQ(huge.exit_code, 1) << huge.out;
}

// Of a server of one rank: what each of several like it would hold.
TEST_F(Headwaterctl, PlansTheLargestOfSeveralRanks) {
  const Arguments head = {"plan",        "--vocab_size=1003", "--hidden_size=64", "--data_type=bfloat16",
                          "--trainable", "--optimizer=adamw"};
  const auto with = [&](const std::string& flag) { return Joined(head, {flag}); };
  const json plan = RunJson(with("--ranks=4"));
  EXPECT_EQ(plan["ranks"], 4);
  EXPECT_EQ(plan["rows_per_rank"], 251);
  EXPECT_TRUE(plan["fits"]);
  const auto bytes = [](const json& of, const std::string& purpose) {
    for (const json& item : of["items"]) {
      if (item["purpose"] == purpose) return item["bytes"].get<int64_t>();
    }
    return int64_t{-1};
  };
  EXPECT_EQ(bytes(plan["rank_plan"], "weight"), 251 * 64 * 2);
  EXPECT_EQ(bytes(plan["rank_plan"], "optimizer_state"), 251 * 64 * 8);
  EXPECT_EQ(bytes(plan["memory_plan"], "weight"), 1003 * 64 * 2);
  const json info = RunJson({"info"});
  EXPECT_EQ(plan["rank_plan"]["available_bytes"], info["devices"][0]["memory_budget_bytes"]);
  ExpectOutput(with("--ranks=4"), 0, {"each of 4 ranks holds at most 251 rows of the vocabulary:", "the head fits"});
  // One rank is the server itself, but for what other heads take.
  EXPECT_EQ(RunJson(with("--ranks=1"))["rank_plan"]["items"], RunJson(head)["memory_plan"]["items"]);
  // By rows each holds all weights, and a shard of the optimizer's state.
  const json rows_plan = RunJson(Joined(head, {"--ranks=4", "--parallelism=rows"}));
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
  for (const char* wrong : {"--ranks=0", "--ranks=-1", "--ranks=257"}) EXPECT_EQ(Run(with(wrong)).exit_code, 2) << wrong;
  EXPECT_EQ(Run(with("--ranks=256")).exit_code, 0);
  EXPECT_EQ(Run({"plan", "--vocab_size=3", "--hidden_size=4", "--ranks=4"}).exit_code, 2);
}

// The figures are those of docs/study/method.md, computed by hand.
TEST_F(Headwaterctl, PlansALossInEachWay) {
  TemporaryDirectory directory;
  const std::string config = directory.path() + "/config.json";
  const auto plan = [&](const std::string& text, const Arguments& flags = {}) {
    WriteFile(config, text);
    return RunJson(Joined({"plan", "--model=" + config, "--tokens=16384"}, flags));
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
  const auto way = [](const std::string& name, std::vector<int64_t> bytes, bool fits) {
    return json{{"way", name},
                {"rows_bytes", bytes[0]},
                {"logits_bytes", bytes[1]},
                {"weight_bytes", bytes[2]},
                {"gradient_bytes", bytes[3]},
                {"optimizer_bytes", bytes[4]},
                {"trainer_bytes", bytes[5]},
                {"server_bytes", bytes[6]},
                {"first_gpu_bytes", bytes[7]},
                {"second_gpu_bytes", bytes[8]},
                {"fits", fits}};
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

  ExpectOutput({"plan", "--model", config, "--tokens=16777216", "--gpu_gib=1"}, 0,
               {"the head fits", "HEADWATER, SECOND GPU", "each GPU has 1.0 GiB", "does not fit", "of the cpu engine"});
}

TEST_F(Headwaterctl, PlanSaysWhatIsWrongWithAModel) {
  TemporaryDirectory directory;
  const std::string config = directory.path() + "/config.json";
  const auto message = [&](const std::string& text) {
    WriteFile(config, text);
    return RunJson({"plan", "--model=" + config, "--tokens=8"}, 1)["error"]["message"].get<std::string>();
  };
  for (const char* type : {"", R"(, "dtype": "float8_e4m3fn")"}) {
    EXPECT_EQ(message(absl::StrCat(R"({"vocab_size": 100, "hidden_size": 8)", type, "}")),
              config + ": dtype: expected float32, bfloat16 or float16, got none of them");
  }
  EXPECT_EQ(Run({"plan", "--model=" + config, "--tokens=8", "--data_type=bfloat16"}).exit_code, 0);
  const ProgramResult unclear = Run({"plan", "--model=" + config + "2", "--tokens=8"});
  EXPECT_EQ(unclear.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(unclear.err, config + "2 is not there")) << unclear.err;
  EXPECT_FALSE(absl::StrContains(unclear.err, "beside the weights")) << unclear.err;
  for (const Arguments& flags : std::vector<Arguments>{{"--model=" + config},
                                                       {"--model=" + config, "--tokens=0"},
                                                       {"--model=" + config, "--tokens=16777217"},
                                                       {"--model=" + config, "--tokens=8", "--gpu_gib=0"},
                                                       {"--model=" + config, "--tokens=8", "--config=" + config},
                                                       {"--model=" + config, "--tokens=8", "--ranks=2"},
                                                       {"--config=" + config, "--tokens=8"}}) {
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
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/head.safetensors";
  WriteFile(path, SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, weight_));
  const ProgramResult loaded =
      Run({"load", "student", path, "--from-file", "--create", "--trainable", "--optimizer=adamw", "--parallelism=rows"});
  ASSERT_EQ(loaded.exit_code, 0) << loaded.err;
  ExpectError({"plan", "--vocab_size=8", "--hidden_size=8", "--data_type=float32", "--parallelism=columns"}, 2,
              {"expected vocabulary or rows"});
  client::Client client = server_.Connect();
  client::Head head = Value(client.OpenHead("student"));
  EXPECT_EQ(head.spec().vocab_size, kVocabSize);
  EXPECT_TRUE(std::holds_alternative<client::AdamW>(head.spec().optimizer));
  ExpectWeight(head);

  const json heads = RunJson({"heads"})["heads"];
  ASSERT_EQ(heads.size(), 1u);
  EXPECT_EQ(heads[0]["state"], "ready");
  EXPECT_EQ(heads[0]["spec"]["optimizer"], "adamw");
  EXPECT_EQ(heads[0]["spec"]["parallelism"], "rows");
  ExpectOutput({"heads"}, 0, {"tenants/default/heads/student  ready"});

  EXPECT_EQ(RunJson({"save", "student", "first"})["step"], 0);
  ExpectError({"save", "student", "first"}, 1, {"ALREADY_EXISTS / CHECKPOINT_ALREADY_EXISTS", "--overwrite"});
  EXPECT_EQ(Run({"save", "student", "first", "--overwrite"}).exit_code, 0);

  WriteFile(path, SafetensorsBytes("lm_head.weight", {kHiddenSize, kVocabSize}, weight_));
  ExpectError({"load", "student", path, "--from-file"}, 1, {"[12, 101], the head needs [101, 12]"});
  // Of a head that would not fit nothing is left.
  ExpectError({"load", "other", path, "--from-file", "--create", "--vocab_size=101"}, 1,
              {"[12, 101], the head needs [101, hidden_size]"});
  EXPECT_EQ(RunJson({"heads"})["heads"].size(), 1u);
}

TEST_F(Headwaterctl, RestoredHeadIsShownWithItsCheckpointAndTaken) {
  {
    client::Client client = server_.Connect();
    Value(MakeHead(client, "student", trained_).Save("begin"));
  }
  server_.KillAndStart();
  const json restored = RunJson({"heads"})["heads"];
  ASSERT_EQ(restored.size(), 1u);
  EXPECT_EQ(restored[0]["state"], "restored");
  EXPECT_EQ(restored[0]["restored_checkpoint"], "begin");
  ExpectOutput({"heads"}, 0, {"tenants/default/heads/student  restored  begin"});

  ExpectOutput({"take", "student"}, 0, {"took tenants/default/heads/student: step 0 is open and empty, epoch "});
  const json again = RunJson({"take", "student"});
  EXPECT_EQ(again["state"], "ready");
  EXPECT_EQ(again["restored_checkpoint"], nullptr);
  EXPECT_EQ(again["epoch"].get<std::string>().size(), 32u);
  EXPECT_EQ(RunJson({"heads"})["heads"][0]["epoch"], again["epoch"]);
  EXPECT_EQ(RunJson({"heads", "--tenant=research"})["heads"].size(), 0u);
  EXPECT_EQ(RunJson({"take", "nobody"}, 1)["error"]["reason"], "HEAD_NOT_FOUND");
  EXPECT_GT(RunJson({"info"})["limits"]["max_sessions"], 0);
}

TEST_F(Headwaterctl, LoadsFromTheServersDisk) {
  WriteFile(server_.load_root() + "/head.safetensors", SafetensorsBytes("weight", {kVocabSize, kHiddenSize}, weight_));
  const json head = RunJson(Joined({"load", "teacher", "head.safetensors", "--create"}, sizes_));
  EXPECT_EQ(head["state"], "ready");
  EXPECT_EQ(head["spec"]["trainable"], false);
  const json error = RunJson({"load", "teacher", "nowhere.safetensors"}, 1)["error"];
  EXPECT_EQ(error["reason"], "WEIGHTS_NOT_FOUND");
  EXPECT_TRUE(absl::StrContains(error["hint"].get<std::string>(), "--load_root"));
  EXPECT_EQ(RunJson({"save", "nobody", "x"}, 1)["error"]["reason"], "HEAD_NOT_FOUND");
}

TEST_F(Headwaterctl, DeletesAHeadThatNobodyUsesUnlessForced) {
  client::Client client = server_.Connect();
  Value(client.CreateHead("student", trained_));
  EXPECT_EQ(OutputOf({"delete", "student"}), "deleted student\n");  // it has no weights yet, as after a loading that has failed
  EXPECT_EQ(OutputOf({"heads"}), "tenant default has no heads\n");
  EXPECT_EQ(RunJson({"delete", "student"}, 1)["error"]["reason"], "HEAD_NOT_FOUND");

  client::Head head = MakeHead(client, "student", trained_);
  const std::vector<float> rows(2 * kHiddenSize, 0.5f);
  client::MicroBatchOptions micro_batch = {.step = 0, .micro_batch = 0};
  Value(head.CrossEntropy(client::RowsView::Float32(rows, kHiddenSize), std::vector<int32_t>{1, 2}, {}, micro_batch).Get());
  const json error = RunJson({"delete", "student"}, 1)["error"];
  EXPECT_EQ(error["reason"], "HEAD_IN_USE");
  EXPECT_TRUE(absl::StrContains(error["hint"].get<std::string>(), "--force")) << error;
  EXPECT_EQ(RunJson({"heads"})["heads"].size(), 1u);
  EXPECT_EQ(RunJson({"delete", "student", "--force"})["deleted"], "student");
  EXPECT_EQ(RunJson({"heads"})["heads"].size(), 0u);
}

TEST_F(Headwaterctl, ErrorsSayWhatToDoNext) {
  EXPECT_EQ(Run({"health", "--timeout=5", "--connect_timeout=1m30s"}).exit_code, 0);
  ExpectError({"plan", "--vocab_size=-1", "--hidden_size=1"}, 2,
              {"--vocab_size: expected at least 1, got -1", "hint: `headwaterctl help plan` explains it and its flags"});
  ExpectError({"info", "--timeout=soon"}, 2, {"expected a duration such as 30, 30s, 500ms or 1m30s", "headwaterctl help info"});
  EXPECT_FALSE(absl::StrContains(Run({"delete", "nosuch"}).err, "--create"));
  EXPECT_TRUE(absl::StrContains(Run({"load", "nosuch", "x"}).err, "--create makes one"));
  TemporaryDirectory directory;
  const std::string token = directory.path() + "/token";
  WriteFile(token, "secret\tand more\n");
  const ProgramResult bad = Run({"health", "--token_file=" + token});
  EXPECT_EQ(bad.exit_code, 2) << bad.err;
  EXPECT_TRUE(absl::StrContains(bad.err, "--token_file")) << bad.err;
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
    EXPECT_EQ(result.exit_code, 2) << (arguments.empty() ? "" : arguments.back()) << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "hint: ")) << result.err;
    EXPECT_EQ(result.out, "");
    // Behind what is wrong, also where it stands for a value that is missing: the error is JSON.
    const json error = RunJson(arguments, 2)["error"];
    EXPECT_EQ(error["code"], "INVALID_ARGUMENT") << error;
    EXPECT_EQ(error["reason"], "");
    EXPECT_FALSE(error["message"].get<std::string>().empty());
    EXPECT_EQ(error["metadata"], json::object());
    EXPECT_TRUE(absl::StrContains(error["hint"].get<std::string>(), "headwaterctl help")) << error;
  }
  for (const Arguments& arguments : std::vector<Arguments>{{"--json", "nonsense"},
                                                           {"nonsense", "-json"},
                                                           {"--nonsense", "--json=true", "info"},
                                                           {"--nojson", "nonsense", "--json"}}) {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0];
    EXPECT_TRUE(json::parse(result.out, nullptr, false).contains("error")) << arguments[0] << result.out;
  }
  for (const Arguments& arguments : std::vector<Arguments>{{"--json", "nonsense", "--nojson"},
                                                           {"nonsense", "--json=false"},
                                                           {"nonsense", "--json=maybe"},
                                                           {"info", "--", "--json"}}) {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0];
    EXPECT_EQ(result.out, "") << arguments[0];
  }
}

// Nothing is sent: scripts that try again after a 1 would do so for ever.
TEST_F(Headwaterctl, WhatCannotBeConnectedWithEndsWithTwo) {
  TemporaryDirectory directory;
  for (const std::string& flag : {std::string("--server=localhost"), "--token_file=" + directory.path() + "/missing",
                                  "--ca_certificate=" + directory.path() + "/missing"}) {
    SCOPED_TRACE(flag);
    Expect(RunProgram({HEADWATERCTL, flag, "health"}), 2, &ProgramResult::err, {"hint:"});
  }
}

TEST_F(Headwaterctl, HelpExplainsEveryCommand) {
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

TEST_F(Headwaterctl, TheTrainingRunOfTheGuideLearns) {
  for (int run = 0; run < 2; ++run) {  // it cleans up behind itself
    const ProgramResult result = RunProgram({EXAMPLE_TRAINING_RUN, server_.target()});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    double first = 0, last = 0;
    ASSERT_EQ(
        std::sscanf(result.out.c_str(), "step 0: loss %lf\nstep 10: loss %*f\nstep 20: loss %*f\nstep 30: loss %lf", &first, &last),
        2)
        << result.out;
    EXPECT_LT(last, first);
  }
}

}  // namespace
}  // namespace headwater::e2e
