// headwaterctl's commands on heads, their checkpoints and their steps, and against models' configs.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
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
  ExpectJson({"heads"}, R"({"heads": [{"state": "loading"}]})"_json);
  client::Client client = server_.Connect();
  client::Head head = Value(client.OpenHead("student"));
  Value(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight_)));
  EXPECT_EQ(OutputOf({"checkpoints", "student"}), "student has no checkpoints\n");
  ExpectOutput({"save", "student", "first"}, 0, {});
  Value(head.DiscardGradient(0));
  const std::vector<float> other = RandomFloats(2, kVocabSize * kHiddenSize, 0.5F);
  Value(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(other)));
  ExpectOutput({"save", "student", "second"}, 0, {});

  const json listed = ExpectJson({"checkpoints", "student"}, R"({"checkpoints": [
      {"checkpoint": "second", "step": 1}, {"checkpoint": "first", "step": 0, "damaged": false, "save_time": "~20"}]})"_json);
  EXPECT_GE(listed["checkpoints"][1]["total_bytes"], kVocabSize * kHiddenSize * 4);
  ExpectOutput({"checkpoints", "student"}, 0, {"CHECKPOINT"});

  ExpectOutput({"restore", "student", "first"}, 0, {"restored tenants/default/heads/student from first: step 0 is open and empty"});
  ExpectWeight(Value(client.OpenHead("student")));
  ExpectJson({"restore", "student", "third"},
             R"({"error": {"reason": "CHECKPOINT_NOT_FOUND", "hint": "~headwaterctl checkpoints"}})"_json, 1);
  // The deleted head's are there for one that is made as it was.
  ExpectOutput({"delete", "student"}, 0, {});
  ExpectJson({"checkpoints", "student"}, R"({"checkpoints": [{}, {}]})"_json);
  ExpectOutput(create, 0, {});
  ExpectJson({"restore", "student", "second"}, R"({"open_step": 1})"_json);
}

TEST_F(Headwaterctl, AStepIsShownAndDiscarded) {
  client::Client client = server_.Connect();
  client::Head head = MakeHead(client, "student", trained_);
  const std::vector<float> row(kHiddenSize, 0.25F);
  client::RowsView rows = {.data = row.data(), .data_type = client::DataType::kFloat32, .row_count = 1, .hidden_size = kHiddenSize};
  Value(head.AddGradient(0, 7, rows));

  ExpectJson({"step", "student"}, R"({"last_closed": null, "open": {
      "step": 0, "state": "open", "micro_batches": [{"micro_batch": 7, "state": "committed", "attempt": 0}]}})"_json);
  ExpectOutput({"step", "student"}, 0, {"step 0 is open: 1 committed micro-batches"});
  ExpectJson({"discard", "student", "--step=3"}, R"({"error": {"reason": "STEP_MISMATCH", "hint": "~headwaterctl step"}})"_json, 1);
  EXPECT_EQ(OutputOf({"discard", "student"}), "discarded step 0 of tenants/default/heads/student: step 1 is open and empty\n");
  ExpectJson({"step", "student"}, R"({"last_closed": {"state": "discarded"}, "open": {"micro_batches": []}})"_json);
  ASSERT_TRUE(client.CreateHead("teacher", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize}).ok());
  for (const char* command : {"step", "discard"}) ExpectJson({command, "teacher"}, ErrorOf("HEAD_NOT_TRAINABLE"), 1);
}

TEST_F(Headwaterctl, ExportsAHeadThatItLoadsAgain) {
  client::Client client = server_.Connect();
  client::Head head = MakeHead(client, "student", {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .has_bias = true});
  const std::vector<float> bias = RandomFloats(3, kVocabSize, 0.5F);
  Value(head.UploadWeights(client::HeadTensor::kBias, client::TensorView::Float32(bias)));
  const std::string path = Path("lm_head.safetensors");
  ExpectJson({"export", "student", path}, R"({"tensors": ["lm_head.weight", "lm_head.bias"]})"_json);
  ExpectOutput({"load", "copy", path, "--from_file", "--create"}, 0, {});
  client::Head copy = Value(client.OpenHead("copy"));
  ExpectWeight(copy);
  const client::TensorBuffer copied = Value(copy.DownloadWeights(client::HeadTensor::kBias));
  EXPECT_EQ(std::memcmp(copied.data(), bias.data(), bias.size() * 4), 0);

  WriteFile(path, "precious");
  ExpectError({"export", "student", path}, 1, {"exists\nhint: choose another name, or add --overwrite"});
  ExpectError({"export", "student", path, "--data_type=bfloat16"}, 1, {});
  EXPECT_EQ(std::filesystem::file_size(path), 8u);
  ExpectOutput({"export", "student", path, "--overwrite"}, 0, {});
  EXPECT_GT(std::filesystem::file_size(path), kVocabSize * kHiddenSize * 4u);
  ExpectError({"export", "student", directory_.path()}, 1, {});
  ExpectJson({"export", "nobody", path + "2"}, ErrorOf("HEAD_NOT_FOUND"), 1);
  EXPECT_FALSE(std::filesystem::exists(path + "2"));
}

TEST_F(Headwaterctl, AConfigDescribesTheHead) {
  const std::string& folder = directory_.path();
  WriteFile(config_, R"({"model_type": "gemma2", "vocab_size": 101, "hidden_size": 12, "dtype": "bfloat16"})");  // softcap: 30
  for (const std::string& path : {folder, config_}) ExpectJson({"plan", "--config=" + path}, R"({"fits": true})"_json);
  ExpectJson({"create", "student", "--config", folder, "--trainable"}, R"({"spec": {"vocab_size": 101, "hidden_size": 12,
      "data_type": "bfloat16", "softcap": 30.0, "has_bias": false, "trainable": true}})"_json);
  ExpectJson({"verify", "student", folder}, R"({"verdict": "fits"})"_json);
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
  ExpectJson({"load", "beside", weights, "--from_file", "--create"},
             R"({"spec": {"softcap": 30.0, "data_type": "float32"}})"_json);  // the file's type
  ExpectJson({"load", "plain", weights, "--from_file", "--create", "--config="}, R"({"spec": {"softcap": null}})"_json);
  WriteFile(config_, R"({"vocab_size": 102, "hidden_size": 12})");
  ExpectJson({"load", "unfit", weights, "--from_file", "--create"},
             R"({"error": {"message": "~the weight is [101, 12], ", "hint": "~--config="}})"_json, 1);
  WriteFile(config_, R"({"vocab_size": 101, "hidden_size": 12, "logit_temper": 2})");
  ExpectJson({"create", "unclear", "--config", folder}, R"({"error": {"code": "INVALID_ARGUMENT"}})"_json, 1);
  ExpectJson({"create", "unclear", "--config", folder, "--allow_unchecked"}, R"({"name": "tenants/default/heads/unclear"})"_json);
}

// Each config as its model's class reads it.
TEST_F(Headwaterctl, VerifiesAHeadAgainstAModelsConfig) {
  const std::string& folder = directory_.path();
  const std::string llama = R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 12, "torch_dtype": "bfloat16")";
  WriteFile(folder + "/model.safetensors", SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, weight_));
  ExpectOutput({"load", "teacher", folder + "/model.safetensors", "--from-file", "--create", "--valid_vocab_size=100"}, 0, {});

  WriteFile(config_, llama + "}");
  for (const std::string& path : {folder, config_}) {
    const char* const compared = path == folder ? "its weight is lm_head.weight" : "weights are not compared";
    ExpectOutput({"verify", "teacher", path}, 0, {"teacher fits the config of ", compared});
    EXPECT_EQ(ExpectJson({"verify", "teacher", path})["checks"][5]["verdict"], "same");
  }
  // Another checkpoint of the same sizes.
  WriteFile(folder + "/model.safetensors",
            SafetensorsBytes("lm_head.weight", {kVocabSize, kHiddenSize}, std::vector<float>(weight_.size(), 1.0F)));
  ExpectOutput({"verify", "teacher", folder}, 1, {"its weight is not lm_head.weight"});
  ExpectJson({"verify", "teacher", config_}, R"({"model_type": "llama"})"_json);

  const std::string head = R"({"vocab_size": 100, "hidden_size": 12, "lm_head_bias": true})";
  for (const auto& [text, differing] : std::vector<std::pair<std::string, std::string>>{
           {R"({"vocab_size": 102, "hidden_size": 12})", "vocab_size valid_vocab_size "},
           {R"({"vocab_size": 101, "hidden_size": 12})", "valid_vocab_size "},
           {R"({"vocab_size": 100, "n_embd": 16})", "hidden_size "},
           {R"({"vocab_size": 100, "hidden_size": 12, "word_embed_proj_dim": 8})", "hidden_size "},
           {llama + R"(, "final_logit_softcapping": 30.0})", "softcap "},
           {llama + R"(, "logits_soft_cap": 30.0})", "softcap "},
           {llama + R"(, "logit_scale": 0.0625})", "logit_scale "},
           {R"({"vocab_size": 100, "d_model": 12, "model_type": "t5"})", "logit_scale "},
           {R"({"vocab_size": 100, "n_embd": 12, "model_type": "gptj"})", "bias "},
           {R"({"text_config": )" + head + "}", "bias "},
           {R"({"llm_config": )" + head + "}", "bias "},
           {R"({"language_config": )" + head + "}", "bias "},
           {R"({"decoder": )" + head + "}", "bias "},
           {R"({"thinker_config": {"text_config": {"vocab_size": 100, "hidden_size": 8}}})", "hidden_size "}}) {
    WriteFile(config_, text);
    std::string differs;
    const json document = ExpectJson({"verify", "teacher", config_}, json::object(), 1);
    for (const json& check : document["checks"]) {
      if (check["verdict"] == "differs") absl::StrAppend(&differs, check["property"].get<std::string>(), " ");
    }
    EXPECT_EQ(differs, differing) << text;
  }

  // Keys that say nothing of this head, and one that might.
  WriteFile(config_, llama + R"(, "final_logit_softcapping": null, "attn_logit_softcapping": 50.0, "router_logit_scale": 2,
                              "output_router_logits": false, "logit_temper": 3.0})");
  ExpectJson({"verify", "teacher", config_},
             R"({"verdict": "not checked", "same": false,
                 "checks": [{}, {}, {}, {}, {}, {}, {}, {"property": "logit_temper", "verdict": "not checked"}, {}]})"_json,
             1);
  ExpectJson({"verify", "teacher", config_, "--allow_unchecked"}, R"({"verdict": "fits"})"_json);
  const std::string text = OutputOf({"verify", "teacher", config_}, 1);
  EXPECT_TRUE(absl::StrContains(text, "is not verified: what logit_temper does to the logits is not known")) << text;
  EXPECT_FALSE(absl::StrContains(text, "fits")) << text;

  // A frozen float32 head of a bfloat16 model whose embedding is its head.
  WriteFile(config_, R"({"vocab_size": 100, "hidden_size": 12, "dtype": "bfloat16", "tie_word_embeddings": true})");
  const json wider = ExpectJson({"verify", "teacher", config_})["checks"];
  EXPECT_EQ(wider[6]["verdict"], "wider");
  EXPECT_TRUE(Has(wider[7], R"({"property": "tie_word_embeddings", "model": true})"_json)) << wider;
}

TEST_F(Headwaterctl, VerifyKnowsHowModelsScaleTheirLogits) {
  client::Client client = server_.Connect();
  const client::HeadSpec plain = {.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .data_type = client::DataType::kBFloat16};
  const auto make = [&](const std::string& name, double logit_scale, std::optional<double> softcap, int64_t valid_vocab_size) {
    client::HeadSpec spec = plain;
    spec.logit_scale = logit_scale;
    spec.softcap = softcap;
    spec.valid_vocab_size = valid_vocab_size;
    ASSERT_TRUE(client.CreateHead(name, spec).ok());
  };
  make("eighth", 0.125, {}, kVocabSize);
  make("quarter", 0.25, 30.0, kVocabSize);
  make("root", 0.288675, {}, kVocabSize);  // 1 / sqrt(12), as somebody may write it
  make("cut", 1, {}, 99);
  const std::string sizes = R"({"vocab_size": 101, "hidden_size": 12, "dtype": "float16", )";
  const std::string softcap = sizes + R"("final_logit_softcapping": 30, )";
  const auto nested = [&](const std::string& wrapper, const std::string& keys) {
    return R"({"model_type": ")" + wrapper + R"(", "text_config": )" + sizes + keys + "}";
  };
  struct Row {
    const char* head;
    std::string config;
    const char* verdict = "fits";
  };
  for (const Row& row : std::vector<Row>{
           {"quarter", softcap + R"("model_type": "cohere", "logit_scale": 0.25})"},
           {"quarter", softcap + R"("model_type": "granite", "logits_scaling": 4})"},
           {"quarter", softcap + R"("model_type": "falcon_h1", "lm_head_multiplier": 0.25})"},
           {"quarter", softcap + R"("model_type": "grok-1", "output_multiplier_scale": 0.25})"},
           {"quarter", softcap + R"("model_type": "minicpm", "dim_model_base": 3})"},
           {"quarter", sizes + R"("output_logit_soft_cap": 30, "output_multiplier": 0.25})"},
           {"quarter", softcap + R"("mup_output_alpha": 2, "mup_width_scale": 0.125})"},
           {"quarter", softcap + R"("mup_width_multiplier": 4.0})"},
           {"quarter", softcap + R"("logits_mup_width_multiplier": 4.0})"},
           // HyperCLOVA X multiplies by what Granite divides by.
           {"quarter", softcap + R"("model_type": "hyperclovax", "logits_scaling": 0.25})"},
           {"quarter", softcap + R"("model_type": "hyperclovax", "logits_scaling": 4})", "differs"},
           {"quarter", softcap + R"("model_type": "minicpm3", "dim_model_base": 3, "logits_scaling": 4})"},
           {"root", sizes + R"("model_type": "mpt", "logit_scale": "inv_sqrt_d_model"})"},
           {"root", sizes + R"("model_type": "t5"})"},
           {"root", sizes + R"("model_type": "umt5", "tie_word_embeddings": true})"},
           {"root", sizes + R"("model_type": "pop2piano", "scale_decoder_outputs": true})"},
           {"root", sizes + R"("model_type": "t5", "tie_word_embeddings": true, "scale_decoder_outputs": false})", "differs"},
           {"root", sizes + R"("model_type": "mt5", "tie_word_embeddings": true})", "differs"},
           {"cut", sizes + R"("unpadded_vocab_size": 99})"},
           {"root", sizes + R"("model_type": "mpt", "logit_scale": "inv_sqrt_d_model", "unpadded_vocab_size": 99})", "differs"},
           // A wrapper that has an LM head of its own need not apply what the nested config says.
           {"eighth", nested("granite4_vision", R"("model_type": "granite", "logits_scaling": 8})")},
           {"eighth", nested("granite_speech", R"("model_type": "granite", "logits_scaling": 8})"), "not checked"},
           {"eighth", nested("aya_vision", R"("model_type": "cohere2", "logit_scale": 0.125})"), "not checked"}}) {
    const bool fits = row.verdict == std::string("fits");
    WriteFile(config_, row.config);
    ExpectJson({"verify", row.head, config_}, {{"verdict", row.verdict}, {"same", fits}}, fits ? 0 : 1);
  }
  // Half of float16's digits are more than bfloat16 has.
  WriteFile(config_, softcap + R"("mup_width_multiplier": 4.0})");
  EXPECT_EQ(ExpectJson({"verify", "quarter", config_})["checks"][6]["verdict"], "rounded");
}

TEST_F(Headwaterctl, VerifyRefusesWhatIsNoConfig) {
  ExpectJson({"verify", "teacher", directory_.path()}, R"({"error": {"code": "NOT_FOUND"}})"_json, 1);
  const char* const wrong = "INVALID_ARGUMENT";
  for (const auto& [text, code, message] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {"[1]", "DATA_LOSS", "~"},
           {"{", "DATA_LOSS", "~"},
           {R"({"hidden_size": 12})", wrong, "~vocab_size: expected"},
           {R"({"vocab_size": 100})", wrong, "~hidden_size: expected"},
           {R"({"vocab_size": "100", "hidden_size": 12})", wrong, "~vocab_size: expected an integer >= 1, got \"100\""},
           {R"({"vocab_size": 0, "hidden_size": 12})", wrong, "~vocab_size: expected an integer >= 1, got 0"},
           {R"({"vocab_size": 100, "hidden_size": 12, "logits_scaling": 0})", wrong, "~logits_scaling: expected a finite number"},
           {R"({"vocab_size": 100, "hidden_size": 12, "logit_scale": "big"})", wrong, "~logit_scale: expected a number or"},
           {R"({"vocab_size": 100, "hidden_size": 12, "logits_soft_cap": -1})", wrong,
            "~logits_soft_cap: expected a number > 0, got -1"}}) {
    WriteFile(config_, text);
    ExpectJson({"verify", "teacher", config_}, {{"error", {{"code", code}, {"message", message}}}}, 1);
  }
  WriteFile(config_, R"({"vocab_size": 100, "hidden_size": 12})");
  ExpectJson({"verify", "nobody", config_}, ErrorOf("HEAD_NOT_FOUND"), 1);
}

}  // namespace
}  // namespace headwater::e2e
