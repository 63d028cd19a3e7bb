#include "server/model_files/head_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "head_test_util.h"
#include "server/model_files/safetensors.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::model_files {
namespace {

using headwater::testing::ReasonOf;
using headwater::testing::TemporaryDirectory;
using headwater::testing::WriteFile;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kVocabSize = 12;
constexpr int64_t kHiddenSize = 8;

// A tensor of a file; its elements are all `value`. Without a shape [kVocabSize, kHiddenSize].
struct FileTensorSpec {
  std::string name;
  float value = 0;
  std::vector<int64_t> shape = {kVocabSize, kHiddenSize};
  std::string type = "F32";
};

std::string MakeFile(const std::vector<FileTensorSpec>& tensors) {
  std::vector<SafetensorsOutput> layout;
  std::string data;
  for (const FileTensorSpec& tensor : tensors) {
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    layout.push_back({tensor.name, tensor.type, tensor.shape, count * 4});
    for (int64_t i = 0; i < count; ++i) data.append(reinterpret_cast<const char*>(&tensor.value), 4);
  }
  return MakeSafetensorsHeader(layout) + data;
}

constexpr char kTied[] = R"({"tie_word_embeddings": true})";
constexpr char kUntied[] = R"({"tie_word_embeddings": false})";
constexpr char kNoConfig[] = "";

class HeadTensorsTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& bytes) { WriteFile(directory_.path() + "/" + path, bytes); }
  // The folder `m`, anew: a model of one file.
  void WriteModel(const std::vector<FileTensorSpec>& tensors, const std::string& config) {
    std::filesystem::remove_all(directory_.path() + "/m");
    Write("m/model.safetensors", MakeFile(tensors));
    if (!config.empty()) Write("m/config.json", config);
  }
  absl::StatusOr<HeadTensors> Find(const std::string& path = "m") {
    return FindHeadTensors(*FilesUnder(directory_.path()), path, query_);
  }
  // The value of a tensor's elements.
  static float ValueOf(const FileTensor& tensor) {
    float value = -1;
    EXPECT_OK(tensor.file->ReadAt(tensor.offset_bytes, 4, &value));
    return value;
  }
  // The value of the weight that is found, or the reason why none is.
  std::string Weight(const std::string& path = "m") {
    const absl::StatusOr<HeadTensors> found = Find(path);
    return found.ok() ? std::to_string(static_cast<int>(ValueOf(found->weight))) : ReasonOf(found);
  }
  std::string Message(const std::string& path = "m") { return std::string(Find(path).status().message()); }

  HeadTensorQuery query_{.vocab_size = kVocabSize, .hidden_size = kHiddenSize, .has_bias = false};
  TemporaryDirectory directory_;
};

TEST_F(HeadTensorsTest, NoEmbeddingStandsInForAHeadThatIsNotTied) {
  for (const char* embedding : {"model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight"}) {
    for (const std::string& config : {std::string(kUntied), std::string(R"({"model_type":"llama"})"), std::string(kNoConfig)}) {
      WriteModel({{embedding, 1}, {"some.projection.weight", 2}, {"other.weight", 3, {3, 3}}}, config);
      EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND") << embedding << config;
      EXPECT_THAT(Message(), AllOf(HasSubstr(embedding), HasSubstr("some.projection.weight"), Not(HasSubstr("other.weight")),
                                   HasSubstr("weight_tensor")))
          << config;
      query_.weight_tensor = embedding;
      EXPECT_EQ(Weight(), "1");
      query_.weight_tensor = "";
    }
  }
}

TEST_F(HeadTensorsTest, AnEmbeddingIsTheHeadWhereTheConfigSaysTied) {
  for (const char* embedding :
       {"model.embed_tokens.weight", "transformer.wte.weight", "wte.weight", "model.decoder.embed_tokens.weight", "shared.weight",
        "transformer.word_embeddings.weight", "backbone.embeddings.weight", "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight", "bert.embeddings.word_embeddings.weight", "gpt_neox.embed_in.weight"}) {
    WriteModel({{embedding, 1}}, kTied);
    EXPECT_EQ(Weight(), "1") << embedding;
  }
  // The file itself, with the config beside it.
  EXPECT_EQ(Weight("m/model.safetensors"), "1");
  // The head counts, where there is one.
  WriteModel({{"model.embed_tokens.weight", 1}, {"lm_head.weight", 2}}, kTied);
  EXPECT_EQ(Weight(), "2");
  WriteModel({{"model.embed_tokens.weight", 1}, {"head.weight", 2}}, kTied);
  EXPECT_EQ(Weight(), "2");
}

TEST_F(HeadTensorsTest, TyingIsReadWhereConfigsHaveIt) {
  const std::pair<const char*, const char*> configs[] = {
      {R"({"text_config": {"tie_word_embeddings": true}})", "1"},
      {R"({"thinker_config": {"text_config": {"tie_word_embeddings": true}}})", "1"},
      {R"({"text_config": {"tie_word_embeddings": true}, "decoder": {"tie_word_embeddings": false}})", "WEIGHTS_NOT_FOUND"},
      {R"({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}})", "WEIGHTS_NOT_FOUND"},
      {R"({"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}})", "1"},
      {R"({"model_type": "gpt2"})", "1"},
      {R"({"model_type": "gemma"})", "1"},
      {R"({"model_type": "gpt2", "tie_word_embeddings": false})", "WEIGHTS_NOT_FOUND"},
      {R"({"model_type": "new"})", "WEIGHTS_NOT_FOUND"},
      {R"({"model_type": "blip-2", "text_config": {"model_type": "opt"}})", "1"},
      {R"({"model_type": "new", "text_config": {"model_type": "llama"}})", "WEIGHTS_NOT_FOUND"},
      {R"({"tie_word_embeddings": "true"})", "WEIGHTS_NOT_FOUND"},
      {R"({"tie_word_embeddings": true, "time_step_limit": [0.0, Infinity], "a": [NaN, -Infinity, "NaN\" Infinity"]})", "1"},
      {"{", "FILE_CORRUPT"},
  };
  for (const auto& [config, expected] : configs) {
    WriteModel({{"model.embed_tokens.weight", 1}}, config);
    EXPECT_EQ(Weight(), expected) << config;
  }
  EXPECT_THAT(Message(), HasSubstr("m/config.json"));
}

TEST_F(HeadTensorsTest, HeadsOfOtherNamesAreFound) {
  for (const char* head :
       {"embed_out.weight", "output.weight", "head.weight", "proj_out.weight", "model.lm_head.weight",
        "language_model.lm_head.weight", "thinker.lm_head.weight", "cls.predictions.decoder.weight", "talker.codec_head.weight",
        "transformer.ff_out.weight", "transformer.output_layer.weight", "decoder.lm_head.weight", "weight"}) {
    for (const char* config : {kUntied, kNoConfig}) {
      WriteModel({{"model.embed_tokens.weight", 1}, {head, 2}}, config);
      EXPECT_EQ(Weight(), "2") << head;
    }
  }
  // Names that other modules have, too.
  for (const char* other :
       {"vision_tower.head.weight", "model.layers.0.output.weight", "encoder.output.weight", "model.mtp.lm_head.weight",
        "model.layers.61.shared_head.head.weight", "head.weights", "my_lm_head.weight", "overhead.weight"}) {
    WriteModel({{other, 2}}, kUntied);
    EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND") << other;
    EXPECT_THAT(Message(), HasSubstr(other));
  }
}

TEST_F(HeadTensorsTest, TheShapeDecidesBetweenHeads) {
  WriteModel({{"thinker.lm_head.weight", 1}, {"talker.codec_head.weight", 2, {5, kHiddenSize}}}, kUntied);
  EXPECT_EQ(Weight(), "1");
  query_.vocab_size = 5;
  EXPECT_EQ(Weight(), "2");
  query_.vocab_size = std::nullopt;
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), AllOf(HasSubstr("thinker.lm_head.weight"), HasSubstr("talker.codec_head.weight")));
  query_.vocab_size = kVocabSize;
  WriteModel({{"embed_out.weight", 1}, {"output.weight", 2}}, kUntied);
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), AllOf(HasSubstr("several"), HasSubstr("embed_out.weight, output.weight")));
}

TEST_F(HeadTensorsTest, OfSeveralEmbeddingsTheDecodersCounts) {
  WriteModel({{"model.encoder.embed_tokens.weight", 1}, {"model.decoder.embed_tokens.weight", 2}}, kTied);
  EXPECT_EQ(Weight(), "2");
  WriteModel({{"model.encoder.embed_tokens.weight", 1}}, kTied);
  EXPECT_EQ(Weight(), "1");
  WriteModel({{"a.embed_tokens.weight", 1}, {"b.embed_tokens.weight", 2}}, kTied);
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), HasSubstr("a.embed_tokens.weight, b.embed_tokens.weight"));
}

TEST_F(HeadTensorsTest, ABiasIsNeverDropped) {
  const std::pair<const char*, const char*> pairs[] = {{"lm_head.weight", "lm_head.bias"},
                                                       {"output.weight", "output.bias"},
                                                       {"model.embed_tokens.weight", "lm_head.bias"},
                                                       {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
                                                       {"distilbert.embeddings.word_embeddings.weight", "vocab_projector.bias"},
                                                       {"lm_head.decoder.weight", "lm_head.bias"},
                                                       {"weight", "bias"}};
  for (const auto& [weight, bias] : pairs) {
    WriteModel({{weight, 1}, {bias, 2, {kVocabSize}}}, kTied);
    query_.has_bias = false;
    EXPECT_EQ(Weight(), "CHECKPOINT_SPEC_MISMATCH") << weight;
    EXPECT_THAT(Message(), AllOf(HasSubstr(bias), HasSubstr("m/model.safetensors"), HasSubstr("bias=True"), HasSubstr("--bias")));
    for (const std::optional<bool> has_bias : {std::optional<bool>(true), std::optional<bool>()}) {
      query_.has_bias = has_bias;
      ASSERT_OK_AND_ASSIGN(const HeadTensors found, Find());
      EXPECT_EQ(ValueOf(found.weight), 1);
      ASSERT_TRUE(found.bias.has_value());
      EXPECT_EQ(ValueOf(*found.bias), 2);
      EXPECT_EQ(found.bias->rows, kVocabSize);
    }
  }
  // Biases of layers are none of the head's.
  query_.has_bias = false;
  WriteModel({{"lm_head.weight", 1}, {"model.layers.0.mlp.output.bias", 2, {kVocabSize}}, {"model.norm.bias", 2, {kVocabSize}}},
             kUntied);
  EXPECT_EQ(Weight(), "1");
}

TEST_F(HeadTensorsTest, ABiasThatIsAskedForMustBeThere) {
  query_.has_bias = true;
  WriteModel({{"lm_head.weight", 1}, {"a", 2, {kVocabSize}}, {"long", 3, {kVocabSize + 1}}}, kUntied);
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), HasSubstr("bias"));
  query_.bias_tensor = "a";
  ASSERT_OK_AND_ASSIGN(const HeadTensors found, Find());
  EXPECT_EQ(ValueOf(*found.bias), 2);
  query_.bias_tensor = "long";
  EXPECT_EQ(Weight(), "CHECKPOINT_SPEC_MISMATCH");
  query_.bias_tensor = "none";
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  query_.has_bias = false;
  query_.bias_tensor = "a";
  EXPECT_EQ(Weight(), "INVALID_COMBINATION");
}

TEST_F(HeadTensorsTest, ALogitsBiasCountsUnlessItIsZero) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, kVocabSize}, std::vector<int64_t>{kVocabSize}}) {
    WriteModel({{"model.shared.weight", 1}, {"final_logits_bias", 0, shape}}, kTied);
    EXPECT_EQ(Weight(), "1");
    WriteModel({{"model.shared.weight", 1}, {"final_logits_bias", 3, shape}}, kTied);
    EXPECT_EQ(Weight(), "CHECKPOINT_SPEC_MISMATCH");
    query_.has_bias = true;
    ASSERT_OK_AND_ASSIGN(const HeadTensors found, Find());
    EXPECT_EQ(ValueOf(*found.bias), 3);
    query_.has_bias = false;
  }
}

TEST_F(HeadTensorsTest, OnlyTheHeadsTensorsNeedAKnownType) {
  WriteModel({{"lm_head.weight", 1}, {"other", 2, {8}, "F8_E4M3FNUZ"}}, kUntied);
  EXPECT_EQ(Weight(), "1");
  WriteModel({{"lm_head.weight", 1, {kVocabSize, kHiddenSize}, "I4"}}, kUntied);
  EXPECT_EQ(Weight(), "DATA_TYPE_MISMATCH");
  EXPECT_THAT(Message(), AllOf(HasSubstr("I4"), HasSubstr("lm_head.weight"), HasSubstr("m/model.safetensors")));
}

TEST_F(HeadTensorsTest, AWrongShapeNamesFileTensorAndBothShapes) {
  WriteModel({{"lm_head.weight", 1, {kHiddenSize, kVocabSize}}, {"embed_out.weight", 2}}, kUntied);
  EXPECT_EQ(Weight(), "CHECKPOINT_SPEC_MISMATCH");
  EXPECT_THAT(Message(), AllOf(HasSubstr("tensor lm_head.weight of m/model.safetensors is [8, 12], the head needs [12, 8]"),
                               Not(HasSubstr("valid_vocab_size"))));
  query_.vocab_size = 10;
  WriteModel({{"output.weight", 1}}, kUntied);
  EXPECT_THAT(Message(),
              HasSubstr("output.weight of m/model.safetensors is [12, 8], the head needs [10, 8]; if rows are padding, make "
                        "the head with vocab_size=12 and valid_vocab_size=10"));
}

TEST_F(HeadTensorsTest, MissingPartsAreNamed) {
  Write("m/model-00001-of-00002.safetensors", MakeFile({{"model.embed_tokens.weight", 1}}));
  Write("m/config.json", kTied);
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), AllOf(HasSubstr("model-00001-of-00002.safetensors"), HasSubstr("index is missing")));
  Write("m/model.safetensors.index.json", R"({"weight_map":{"model.embed_tokens.weight":"model-00001-of-00002.safetensors",)"
                                          R"("lm_head.weight":"model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), AllOf(HasSubstr("m/model-00002-of-00002.safetensors is not there"), HasSubstr("lm_head.weight")));
  Write("m/model-00002-of-00002.safetensors", MakeFile({{"model.norm.weight", 1, {kHiddenSize}}}));
  EXPECT_EQ(Weight(), "WEIGHTS_NOT_FOUND");
  EXPECT_THAT(Message(), HasSubstr("m/model-00002-of-00002.safetensors does not have lm_head.weight"));
  Write("m/model-00002-of-00002.safetensors", "damaged");
  EXPECT_EQ(Weight(), "FILE_CORRUPT");
  EXPECT_THAT(Message(), HasSubstr("m/model-00002-of-00002.safetensors: "));
  EXPECT_EQ(Weight("m/config.json"), "WEIGHTS_NOT_FOUND");
  Write("lora/adapter_model.safetensors", MakeFile({{"a", 1}}));
  EXPECT_THAT(Message("lora"), AllOf(HasSubstr("adapter_model.safetensors"), Not(HasSubstr("index is missing"))));
}

// 384 experts x 61 layers x 9 tensors.
TEST_F(HeadTensorsTest, LargeIndexesAreReadAndTooLargeOnesAreALimit) {
  std::string index = R"({"weight_map":{"lm_head.weight":"model-00002-of-00002.safetensors")";
  for (int i = 0; i < 220'000; ++i) {
    absl::StrAppend(&index, R"(,"model.layers.60.mlp.experts.)", i,
                    R"(.up_proj.weight_scale_inv":"model-00001-of-00002.safetensors")");
  }
  index += "}}";
  ASSERT_GT(index.size(), size_t{16} << 20);
  Write("m/model.safetensors.index.json", index);
  Write("m/model-00002-of-00002.safetensors", MakeFile({{"lm_head.weight", 1}}));
  EXPECT_EQ(Weight(), "1");
  index.resize((size_t{64} << 20) + 1, ' ');
  Write("m/model.safetensors.index.json", index);
  const absl::Status status = Find().status();
  EXPECT_REASON(status, kLimitExceeded);
  EXPECT_EQ(GetErrorMetadata(status)["limit"], "json_bytes");
  EXPECT_THAT(status.message(), HasSubstr("m/model.safetensors.index.json: "));
}

TEST_F(HeadTensorsTest, NamesOfManyTensorsDoNotFillAMessage) {
  std::vector<FileTensorSpec> tensors;
  for (int i = 0; i < 1000; ++i) tensors.push_back({absl::StrCat("tensor.", i)});
  WriteModel(tensors, kUntied);
  EXPECT_THAT(Message(), AllOf(HasSubstr("tensor.0, tensor.1, "), HasSubstr(" more")));
  EXPECT_LT(Message().size(), 1500u);
}

TEST_F(HeadTensorsTest, TheFilesTellWhetherAHeadHasABias) {
  const auto has_bias = [this](const std::string& path) { return HasHeadBias(*FilesUnder(directory_.path()), path); };
  WriteModel({{"lm_head.weight", 1}}, kNoConfig);
  EXPECT_EQ(*has_bias("m"), std::optional<bool>(false));
  WriteModel({{"lm_head.weight", 1}, {"lm_head.bias", 1, {kVocabSize}}}, kNoConfig);
  EXPECT_EQ(*has_bias("m"), std::optional<bool>(true));
  // An index alone tells as well.
  Write("i/model.safetensors.index.json", R"({"weight_map":{"lm_head.weight":"a.safetensors","lm_head.bias":"a.safetensors"}})");
  EXPECT_EQ(*has_bias("i"), std::optional<bool>(true));
  Write("bin/pytorch_model.bin", "");
  EXPECT_EQ(*has_bias("bin"), std::optional<bool>());
}

TEST_F(HeadTensorsTest, LocalFilesAreReadByAnyPath) {
  WriteModel({{"lm_head.weight", 1}}, kNoConfig);
  ASSERT_OK_AND_ASSIGN(const HeadTensors found, FindHeadTensors(*LocalFiles(), directory_.path() + "/m/../m", query_));
  EXPECT_EQ(ValueOf(found.weight), 1);
  EXPECT_REASON(FindHeadTensors(*LocalFiles(), directory_.path() + "/none", query_), kWeightsNotFound);
  EXPECT_REASON(FindHeadTensors(*LocalFiles(), "", query_), kMissingField);
}

}  // namespace
}  // namespace headwater::model_files
