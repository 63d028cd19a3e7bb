// headwaterctl's commands on heads, their checkpoints and their steps, and against models' configs.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
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

TEST_F(Headwaterctl, CheckpointsAreListedAndRestored) {
  const Arguments create = Joined({"create", "student", "--trainable"}, sizes_);
  ExpectOutput(create, 0, {"created tenants/default/heads/student: [101, 12] float32"});
  EXPECT_EQ(RunJson({"heads"})["heads"][0]["state"], "loading");
  client::Client client = server_.Connect();
  client::Head head = Value(client.OpenHead("student"));
  Value(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight_)));
  EXPECT_EQ(Run({"checkpoints", "student"}).out, "student has no checkpoints\n");
  ASSERT_EQ(Run({"save", "student", "first"}).exit_code, 0);
  Value(head.DiscardGradient(0));
  const std::vector<float> other = RandomFloats(2, kVocabSize * kHiddenSize, 0.5F);
  Value(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(other)));
  ASSERT_EQ(Run({"save", "student", "second"}).exit_code, 0);

  const json listed = RunJson({"checkpoints", "student"})["checkpoints"];
  ASSERT_EQ(listed.size(), 2u);
  EXPECT_EQ(listed[0]["checkpoint"], "second");
  EXPECT_EQ(listed[0]["step"], 1);
  EXPECT_EQ(listed[1]["checkpoint"], "first");
  EXPECT_EQ(listed[1]["step"], 0);
  EXPECT_EQ(listed[1]["damaged"], false);
  EXPECT_GE(listed[1]["total_bytes"], kVocabSize * kHiddenSize * 4);
  EXPECT_EQ(listed[1]["save_time"].get<std::string>().substr(0, 2), "20");
  EXPECT_TRUE(absl::StrContains(Run({"checkpoints", "student"}).out, "CHECKPOINT")) << listed;

  ExpectOutput({"restore", "student", "first"}, 0, {"restored tenants/default/heads/student from first: step 0 is open and empty"});
  client::Head restored = Value(client.OpenHead("student"));
  ExpectWeight(restored);
  const json missing = RunJson({"restore", "student", "third"}, 1)["error"];
  EXPECT_EQ(missing["reason"], "CHECKPOINT_NOT_FOUND");
  EXPECT_TRUE(absl::StrContains(missing["hint"].get<std::string>(), "headwaterctl checkpoints"));
  // The deleted head's are there for one that is made as it was.
  ASSERT_EQ(Run({"delete", "student"}).exit_code, 0);
  EXPECT_EQ(RunJson({"checkpoints", "student"})["checkpoints"].size(), 2u);
  ASSERT_EQ(Run(create).exit_code, 0);
  EXPECT_EQ(RunJson({"restore", "student", "second"})["open_step"], 1);
}

TEST_F(Headwaterctl, AStepIsShownAndDiscarded) {
  client::Client client = server_.Connect();
  client::Head head = MakeHead(client, "student", trained_);
  const std::vector<float> row(kHiddenSize, 0.25F);
  client::RowsView rows = {.data = row.data(), .data_type = client::DataType::kFloat32, .row_count = 1, .hidden_size = kHiddenSize};
  Value(head.AddGradient(0, 7, rows));

  const json step = RunJson({"step", "student"});
  EXPECT_EQ(step["open"]["step"], 0);
  EXPECT_EQ(step["open"]["state"], "open");
  ASSERT_EQ(step["open"]["micro_batches"].size(), 1u);
  EXPECT_EQ(step["open"]["micro_batches"][0]["micro_batch"], 7);
  EXPECT_EQ(step["open"]["micro_batches"][0]["state"], "committed");
  EXPECT_EQ(step["open"]["micro_batches"][0]["attempt"], 0);
  EXPECT_EQ(step["last_closed"], nullptr);
  EXPECT_TRUE(absl::StrContains(Run({"step", "student"}).out, "step 0 is open: 1 committed micro-batches"));

  const json other = RunJson({"discard", "student", "--step=3"}, 1)["error"];
  EXPECT_EQ(other["reason"], "STEP_MISMATCH");
  EXPECT_TRUE(absl::StrContains(other["hint"].get<std::string>(), "headwaterctl step"));
  EXPECT_EQ(OutputOf({"discard", "student"}), "discarded step 0 of tenants/default/heads/student: step 1 is open and empty\n");
  EXPECT_EQ(RunJson({"step", "student"})["last_closed"]["state"], "discarded");
  EXPECT_EQ(RunJson({"step", "student"})["open"]["micro_batches"].size(), 0u);
  ASSERT_TRUE(client.CreateHead("teacher", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize}).ok());
  for (const char* command : {"step", "discard"}) {
    EXPECT_EQ(RunJson({command, "teacher"}, 1)["error"]["reason"], "HEAD_NOT_TRAINABLE") << command;
  }
}

TEST_F(Headwaterctl, ExportsAHeadThatItLoadsAgain) {
  client::Client client = server_.Connect();
  client::Head head = MakeHead(client, "student", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .has_bias = true});
  const std::vector<float> bias = RandomFloats(3, kVocabSize, 0.5F);
  Value(head.UploadWeights(client::HeadTensor::kBias, client::TensorView::Float32(bias)));
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/lm_head.safetensors";
  const json exported = RunJson({"export", "student", path});
  EXPECT_EQ(exported["tensors"], json({"lm_head.weight", "lm_head.bias"}));
  ASSERT_EQ(Run({"load", "copy", path, "--from_file", "--create"}).exit_code, 0);
  client::Head copy = Value(client.OpenHead("copy"));
  ExpectWeight(copy);
  const client::TensorBuffer copied = Value(copy.DownloadWeights(client::HeadTensor::kBias));
  EXPECT_EQ(std::memcmp(copied.data(), bias.data(), bias.size() * 4), 0);

  WriteFile(path, "precious");
  ExpectError({"export", "student", path}, 1, {"exists\nhint: choose another name, or add --overwrite"});
  EXPECT_EQ(Run({"export", "student", path, "--data_type=bfloat16"}).exit_code, 1);
  EXPECT_EQ(std::filesystem::file_size(path), 8u);
  EXPECT_EQ(Run({"export", "student", path, "--overwrite"}).exit_code, 0);
  EXPECT_GT(std::filesystem::file_size(path), kVocabSize * kHiddenSize * 4u);
  EXPECT_EQ(Run({"export", "student", directory.path()}).exit_code, 1);
  EXPECT_EQ(RunJson({"export", "nobody", path + "2"}, 1)["error"]["reason"], "HEAD_NOT_FOUND");
  EXPECT_FALSE(std::filesystem::exists(path + "2"));
}

TEST_F(Headwaterctl, AConfigDescribesTheHead) {
  TemporaryDirectory directory;
  const std::string folder = directory.path() + "/model", config = folder + "/config.json";
  ASSERT_TRUE(std::filesystem::create_directory(folder));
  WriteFile(config, R"({"model_type": "gemma2", "vocab_size": 101, "hidden_size": 12, "dtype": "bfloat16"})");  // softcap: 30
  for (const std::string& path : {folder, config}) {
    EXPECT_EQ(RunJson({"plan", "--config=" + path})["fits"], true) << path;
  }
  const json spec = RunJson({"create", "student", "--config", folder, "--trainable"})["spec"];
  EXPECT_EQ(spec["vocab_size"], 101);
  EXPECT_EQ(spec["hidden_size"], 12);
  EXPECT_EQ(spec["data_type"], "bfloat16");
  EXPECT_EQ(spec["softcap"], 30.0);
  EXPECT_EQ(spec["has_bias"], false);
  EXPECT_EQ(spec["trainable"], true);
  EXPECT_EQ(RunJson({"verify", "student", folder})["verdict"], "fits");
  ExpectError({"create", "capped", "--config", folder, "--softcap=20", "--vocab_size=128"}, 0, {"--softcap contradicts "});
  const client::HeadSpec capped = Value(server_.Connect().OpenHead("capped")).spec();
  EXPECT_EQ(capped.softcap, 20.0);
  EXPECT_EQ(capped.vocab_size, 128);
  EXPECT_EQ(capped.valid_vocab_size, 101);
  const ProgramResult agreed = Run({"plan", "--config", folder, "--softcap=30"});
  EXPECT_FALSE(absl::StrContains(agreed.err, "contradicts")) << agreed.err;

  // Beside the weights of --from_file it counts by itself.
  const std::string weights = folder + "/head.safetensors";
  WriteFile(weights, SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, weight_));
  const json beside = RunJson({"load", "beside", weights, "--from_file", "--create"})["spec"];
  EXPECT_EQ(beside["softcap"], 30.0);
  EXPECT_EQ(beside["data_type"], "float32");  // the file's
  EXPECT_EQ(RunJson({"load", "plain", weights, "--from_file", "--create", "--config="})["spec"]["softcap"], nullptr);
  WriteFile(config, R"({"vocab_size": 102, "hidden_size": 12})");
  const json unfit = RunJson({"load", "unfit", weights, "--from_file", "--create"}, 1)["error"];
  EXPECT_TRUE(absl::StrContains(unfit["message"].get<std::string>(), "the weight is [101, 12], ")) << unfit;
  EXPECT_TRUE(absl::StrContains(unfit["hint"].get<std::string>(), "--config=")) << unfit;
  WriteFile(config, R"({"vocab_size": 101, "hidden_size": 12, "logit_temper": 2})");
  EXPECT_EQ(RunJson({"create", "unclear", "--config", folder}, 1)["error"]["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(RunJson({"create", "unclear", "--config", folder, "--allow_unchecked"})["name"], "tenants/default/heads/unclear");
}

TEST_F(Headwaterctl, ACreationThatFailsLeavesNothing) {
  const Arguments load = Joined({"load", "teacher", "nowhere.safetensors", "--create"}, sizes_);
  const json error = RunJson(load, 1)["error"];
  EXPECT_EQ(error["reason"], "WEIGHTS_NOT_FOUND");
  EXPECT_TRUE(absl::StrContains(error["message"].get<std::string>(), "; the head that was made for it is deleted again")) << error;
  EXPECT_EQ(RunJson({"heads"})["heads"].size(), 0u);
  // A head that was there stays.
  ASSERT_EQ(Run(Joined({"create", "teacher"}, sizes_)).exit_code, 0);
  EXPECT_EQ(RunJson({"load", "teacher", "nowhere.safetensors"}, 1)["error"]["reason"], "WEIGHTS_NOT_FOUND");
  EXPECT_EQ(RunJson(load, 1)["error"]["reason"], "HEAD_ALREADY_EXISTS");
  EXPECT_EQ(RunJson({"heads"})["heads"].size(), 1u);
}

// Each config as its model's class reads it.
TEST_F(Headwaterctl, VerifiesAHeadAgainstAModelsConfig) {
  TemporaryDirectory directory;
  const std::string folder = directory.path(), config = folder + "/config.json";
  const std::string llama = R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 12, "torch_dtype": "bfloat16")";
  WriteFile(folder + "/model.safetensors", SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, weight_));
  ExpectOutput({"load", "teacher", folder + "/model.safetensors", "--from-file", "--create", "--valid_vocab_size=100"}, 0, {});

  WriteFile(config, llama + "}");
  for (const std::string& path : {folder, config}) {
    const char* const compared = path == folder ? "its weight is lm_head.weight" : "weights are not compared";
    ExpectOutput({"verify", "teacher", path}, 0, {"teacher fits the config of ", compared});
    EXPECT_EQ(RunJson({"verify", "teacher", path})["checks"][5]["verdict"], "same");
  }
  // Another checkpoint of the same sizes.
  WriteFile(folder + "/model.safetensors",
            SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, std::vector<float>(weight_.size(), 1.0F)));
  ExpectOutput({"verify", "teacher", folder}, 1, {"its weight is not lm_head.weight"});
  EXPECT_EQ(RunJson({"verify", "teacher", config})["model_type"], "llama");

  const auto property_that_differs = [&](const std::string& text) {
    WriteFile(config, text);
    std::string differs;
    const json document = RunJson({"verify", "teacher", config}, 1);
    for (const json& check : document["checks"]) {
      if (check["verdict"] == "differs") absl::StrAppend(&differs, check["property"].get<std::string>(), " ");
    }
    return differs;
  };
  EXPECT_EQ(property_that_differs(R"({"vocab_size": 102, "hidden_size": 12})"), "vocab_size valid_vocab_size ");
  EXPECT_EQ(property_that_differs(R"({"vocab_size": 101, "hidden_size": 12})"), "valid_vocab_size ");
  EXPECT_EQ(property_that_differs(R"({"vocab_size": 100, "n_embd": 16})"), "hidden_size ");
  EXPECT_EQ(property_that_differs(R"({"vocab_size": 100, "hidden_size": 12, "word_embed_proj_dim": 8})"), "hidden_size ");
  EXPECT_EQ(property_that_differs(llama + R"(, "final_logit_softcapping": 30.0})"), "softcap ");
  EXPECT_EQ(property_that_differs(llama + R"(, "logits_soft_cap": 30.0})"), "softcap ");
  EXPECT_EQ(property_that_differs(llama + R"(, "logit_scale": 0.0625})"), "logit_scale ");
  EXPECT_EQ(property_that_differs(R"({"vocab_size": 100, "d_model": 12, "model_type": "t5"})"), "logit_scale ");
  EXPECT_EQ(property_that_differs(R"({"vocab_size": 100, "n_embd": 12, "model_type": "gptj"})"), "bias ");
  for (const char* place : {"text_config", "llm_config", "language_config", "decoder"}) {
    const std::string nested = absl::StrCat(R"({")", place, R"(": {"vocab_size": 100, "hidden_size": 12, "lm_head_bias": true}})");
    EXPECT_EQ(property_that_differs(nested), "bias ") << place;
  }
  EXPECT_EQ(property_that_differs(R"({"thinker_config": {"text_config": {"vocab_size": 100, "hidden_size": 8}}})"), "hidden_size ");

  // Keys that say nothing of this head, and one that might.
  WriteFile(config, llama + R"(, "final_logit_softcapping": null, "attn_logit_softcapping": 50.0, "router_logit_scale": 2,
                              "output_router_logits": false, "logit_temper": 3.0})");
  const json unknown = RunJson({"verify", "teacher", config}, 1);
  ASSERT_EQ(unknown["checks"].size(), 9u) << unknown;
  EXPECT_EQ(unknown["checks"][7]["property"], "logit_temper");
  EXPECT_EQ(unknown["checks"][7]["verdict"], "not checked");
  EXPECT_EQ(unknown["verdict"], "not checked");
  EXPECT_EQ(unknown["same"], false);
  EXPECT_EQ(RunJson({"verify", "teacher", config, "--allow_unchecked"})["verdict"], "fits");
  const ProgramResult text = Run({"verify", "teacher", config});
  EXPECT_TRUE(absl::StrContains(text.out, "is not verified: what logit_temper does to the logits is not known")) << text.out;
  EXPECT_FALSE(absl::StrContains(text.out, "fits")) << text.out;

  // A frozen float32 head of a bfloat16 model whose embedding is its head.
  WriteFile(config, R"({"vocab_size": 100, "hidden_size": 12, "dtype": "bfloat16", "tie_word_embeddings": true})");
  const json wider = RunJson({"verify", "teacher", config});
  EXPECT_EQ(wider["checks"][6]["verdict"], "wider");
  EXPECT_EQ(wider["checks"][7]["property"], "tie_word_embeddings");
  EXPECT_EQ(wider["checks"][7]["model"], true);
}

// A wrapper that has an LM head of its own need not apply what the nested config says.
TEST_F(Headwaterctl, VerifyDoesNotTrustANestedConfigThatItsWrapperMayIgnore) {
  TemporaryDirectory directory;
  const std::string config = directory.path() + "/config.json";
  client::Client client = server_.Connect();
  client::HeadSpec spec = {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .logit_scale = 0.125};
  ASSERT_TRUE(client.CreateHead("eighth", spec).ok());
  const auto verdict = [&](const std::string& wrapper, const std::string& type, const std::string& keys, int exit_code) {
    WriteFile(config, R"({"model_type": ")" + wrapper +
                          R"(", "text_config": {"vocab_size": 101, "hidden_size": 12, "model_type": ")" + type + "\", " + keys +
                          "}}");
    return RunJson({"verify", "eighth", config}, exit_code)["verdict"];
  };
  EXPECT_EQ(verdict("granite4_vision", "granite", R"("logits_scaling": 8)", 0), "fits");
  EXPECT_EQ(verdict("granite_speech", "granite", R"("logits_scaling": 8)", 1), "not checked");
  EXPECT_EQ(verdict("aya_vision", "cohere2", R"("logit_scale": 0.125)", 1), "not checked");
}

TEST_F(Headwaterctl, VerifyKnowsHowModelsScaleTheirLogits) {
  TemporaryDirectory directory;
  const std::string config = directory.path() + "/config.json";
  const auto verify = [&](const std::string& name, const std::string& keys, int exit_code) {
    WriteFile(config, R"({"vocab_size": 101, "hidden_size": 12, "dtype": "float16", )" + keys + "}");
    return RunJson({"verify", name, config}, exit_code);
  };
  const auto is_same = [&](const std::string& name, const std::string& keys) { return verify(name, keys, 0)["same"] == true; };
  const auto differs = [&](const std::string& name, const std::string& keys) {
    return verify(name, keys, 1)["verdict"] == "differs";
  };
  client::Client client = server_.Connect();
  client::HeadSpec spec = {.vocab_size = kVocabSize,
                           .hidden_size = kHiddenSize,
                           .data_type = client::DataType::kBFloat16,
                           .logit_scale = 0.25,
                           .softcap = 30.0};
  ASSERT_TRUE(client.CreateHead("quarter", spec).ok());
  const std::string softcap = R"("final_logit_softcapping": 30, )";
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "cohere", "logit_scale": 0.25)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "granite", "logits_scaling": 4)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "falcon_h1", "lm_head_multiplier": 0.25)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "grok-1", "output_multiplier_scale": 0.25)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "minicpm", "dim_model_base": 3)"));
  EXPECT_TRUE(is_same("quarter", R"("output_logit_soft_cap": 30, "output_multiplier": 0.25)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("mup_output_alpha": 2, "mup_width_scale": 0.125)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("mup_width_multiplier": 4.0)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("logits_mup_width_multiplier": 4.0)"));
  // HyperCLOVA X multiplies by what Granite divides by.
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "hyperclovax", "logits_scaling": 0.25)"));
  EXPECT_TRUE(differs("quarter", softcap + R"("model_type": "hyperclovax", "logits_scaling": 4)"));
  EXPECT_TRUE(is_same("quarter", softcap + R"("model_type": "minicpm3", "dim_model_base": 3, "logits_scaling": 4)"));
  // Half of float16's digits are more than bfloat16 has.
  EXPECT_EQ(RunJson({"verify", "quarter", config})["checks"][6]["verdict"], "rounded");
  spec.logit_scale = 0.288675;  // 1 / sqrt(12), as somebody may write it
  spec.softcap.reset();
  ASSERT_TRUE(client.CreateHead("root", spec).ok());
  EXPECT_TRUE(is_same("root", R"("model_type": "mpt", "logit_scale": "inv_sqrt_d_model")"));
  EXPECT_TRUE(is_same("root", R"("model_type": "t5")"));
  EXPECT_TRUE(is_same("root", R"("model_type": "umt5", "tie_word_embeddings": true)"));
  EXPECT_TRUE(is_same("root", R"("model_type": "pop2piano", "scale_decoder_outputs": true)"));
  EXPECT_TRUE(differs("root", R"("model_type": "t5", "tie_word_embeddings": true, "scale_decoder_outputs": false)"));
  EXPECT_TRUE(differs("root", R"("model_type": "mt5", "tie_word_embeddings": true)"));
  spec.logit_scale = 1;
  spec.valid_vocab_size = 99;
  ASSERT_TRUE(client.CreateHead("cut", spec).ok());
  EXPECT_TRUE(is_same("cut", R"("unpadded_vocab_size": 99)"));
  EXPECT_TRUE(differs("root", R"("model_type": "mpt", "logit_scale": "inv_sqrt_d_model", "unpadded_vocab_size": 99)"));
}

TEST_F(Headwaterctl, VerifyRefusesWhatIsNoConfig) {
  TemporaryDirectory directory;
  const std::string config = directory.path() + "/config.json";
  const auto error_of = [&](const std::string& text) {
    WriteFile(config, text);
    return RunJson({"verify", "teacher", config}, 1)["error"];
  };
  EXPECT_EQ(RunJson({"verify", "teacher", directory.path()}, 1)["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(error_of("[1]")["code"], "DATA_LOSS");
  EXPECT_EQ(error_of("{")["code"], "DATA_LOSS");
  for (const auto& [text, word] : std::vector<std::pair<std::string, std::string>>{
           {R"({"hidden_size": 12})", "vocab_size: expected"},
           {R"({"vocab_size": 100})", "hidden_size: expected"},
           {R"({"vocab_size": "100", "hidden_size": 12})", "vocab_size: expected an integer >= 1, got \"100\""},
           {R"({"vocab_size": 0, "hidden_size": 12})", "vocab_size: expected an integer >= 1, got 0"},
           {R"({"vocab_size": 100, "hidden_size": 12, "logits_scaling": 0})", "logits_scaling: expected a finite number"},
           {R"({"vocab_size": 100, "hidden_size": 12, "logit_scale": "big"})", "logit_scale: expected a number or"},
           {R"({"vocab_size": 100, "hidden_size": 12, "logits_soft_cap": -1})",
            "logits_soft_cap: expected a number > 0, got -1"}}) {
    const json error = error_of(text);
    EXPECT_EQ(error["code"], "INVALID_ARGUMENT") << text;
    EXPECT_TRUE(absl::StrContains(error["message"].get<std::string>(), word)) << error;
  }
  WriteFile(config, R"({"vocab_size": 100, "hidden_size": 12})");
  EXPECT_EQ(RunJson({"verify", "nobody", config}, 1)["error"]["reason"], "HEAD_NOT_FOUND");
}

}  // namespace
}  // namespace headwater::e2e
