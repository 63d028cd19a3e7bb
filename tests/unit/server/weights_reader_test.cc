#include "server/checkpoint/weights_reader.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "server/model_files/safetensors.h"
#include "temporary_directory.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::checkpoint {
namespace {

using headwater::testing::SmallSpec;
using headwater::testing::TemporaryDirectory;
using headwater::testing::WriteFile;
using model_files::MakeSafetensorsHeader;
using model_files::SafetensorsOutput;

// A safetensors file of fp32 tensors, by name: shape and first value (the following ones rise by 1).
struct FileTensor {
  std::string name;
  std::vector<int64_t> shape;
  float first;
};

std::string MakeFile(const std::vector<FileTensor>& tensors) {
  std::vector<SafetensorsOutput> layout;
  std::string data;
  for (const FileTensor& tensor : tensors) {
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    layout.push_back({tensor.name, "F32", tensor.shape, count * 4});
    for (int64_t i = 0; i < count; ++i) {
      const float value = tensor.first + static_cast<float>(i);
      data.append(reinterpret_cast<const char*>(&value), 4);
    }
  }
  return MakeSafetensorsHeader(layout) + data;
}

class WeightsReaderTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& bytes) { WriteFile(root() + "/" + path, bytes); }
  absl::StatusOr<std::unique_ptr<WeightsReader>> Open(const std::string& path, const std::string& weight = "",
                                                      const std::string& bias = "") {
    return WeightsReader::Open(root(), path, weight, bias, spec_);
  }
  // The first weight of what is found, or the reason why not.
  std::string First(const std::string& path, const std::string& weight = "") {
    const auto reader = Open(path, weight);
    if (!reader.ok()) return headwater::testing::ReasonOf(reader);
    float value = 0;
    EXPECT_OK((*reader)->Read(HeadTensor::kWeight, 0, 1, &value));
    return std::to_string(static_cast<int>(value));
  }
  std::string root() const { return directory_.path() + "/root"; }

  HeadSpec spec_ = SmallSpec();  // [5, 3]
  TemporaryDirectory directory_;
};

TEST_F(WeightsReaderTest, ReadsAFile) {
  spec_.has_bias = true;
  Write("a/model.safetensors", MakeFile({{"other", {7}, 0}, {"lm_head.weight", {5, 3}, 100}, {"lm_head.bias", {5}, 200}}));
  ASSERT_OK_AND_ASSIGN(const auto reader, Open("a/model.safetensors"));
  EXPECT_EQ(reader->data_type(HeadTensor::kWeight), DataType::kFloat32);
  float values[15];
  ASSERT_OK(reader->Read(HeadTensor::kWeight, 0, 15, values));
  for (int i = 0; i < 15; ++i) EXPECT_EQ(values[i], 100 + i);
  ASSERT_OK(reader->Read(HeadTensor::kWeight, 7, 2, values));
  EXPECT_EQ(values[0], 107);
  ASSERT_OK(reader->Read(HeadTensor::kBias, 4, 1, values));
  EXPECT_EQ(values[0], 204);
  EXPECT_TRUE(reader->has_bias());
  EXPECT_REASON(reader->Read(HeadTensor::kWeight, 14, 2, values), kChunkOutOfRange);
  EXPECT_REASON(reader->Read(HeadTensor::kBias, -1, 2, values), kChunkOutOfRange);
}

TEST_F(WeightsReaderTest, FindsTheTensorByTheUsualNames) {
  Write("a.safetensors",
        MakeFile({{"model.embed_tokens.weight", {5, 3}, 2}, {"lm_head.weight", {5, 3}, 1}, {"weight", {5, 3}, 9}}));
  EXPECT_EQ(First("a.safetensors"), "1");
  EXPECT_EQ(First("a.safetensors", "weight"), "9");
  EXPECT_EQ(First("a.safetensors", "x"), "WEIGHTS_NOT_FOUND");
  Write("head.safetensors", MakeFile({{"weight", {5, 3}, 7}}));
  EXPECT_EQ(First("head.safetensors"), "7");
  Write("none.safetensors", MakeFile({{"something", {5, 3}, 7}}));
  EXPECT_EQ(First("none.safetensors"), "WEIGHTS_NOT_FOUND");
  EXPECT_EQ(First("none.safetensors", "something"), "7");
}

TEST_F(WeightsReaderTest, TakesNoEmbeddingOfOneFileOfSeveralUnlessItIsNamed) {
  const std::string embedding = "model.embed_tokens.weight";
  Write("m/model-00001-of-00002.safetensors", MakeFile({{embedding, {5, 3}, 2}}));
  Write("m/model-00002-of-00002.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 1}}));
  const auto refused = Open("m/model-00001-of-00002.safetensors");
  EXPECT_REASON(refused, kWeightsNotFound);
  EXPECT_NE(refused.status().message().find("one of several"), std::string::npos) << refused.status();
  EXPECT_EQ(First("m/model-00001-of-00002.safetensors", embedding), "2");
  EXPECT_EQ(First("m/model-00002-of-00002.safetensors"), "1");
  Write("m/model.safetensors.index.json", R"({"weight_map":{"model.embed_tokens.weight":"model-00001-of-00002.safetensors",)"
                                          R"("lm_head.weight":"model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(First("m"), "1");
  // Not with a config that says tied, either: the other part may have the head.
  Write("m/config.json", R"({"tie_word_embeddings":true})");
  EXPECT_EQ(First("m/model-00001-of-00002.safetensors"), "WEIGHTS_NOT_FOUND");
  // Whole models, and names that only look so.
  Write("config.json", R"({"tie_word_embeddings":true})");
  for (const std::string name : {"model-00001-of-00001", "model", "1-of-2", "a-of-2", "model-1-of-b", "-of-", "of-00002", "2"}) {
    Write(name + ".safetensors", MakeFile({{embedding, {5, 3}, 7}}));
    EXPECT_EQ(First(name + ".safetensors"), "7") << name;
  }
}

TEST_F(WeightsReaderTest, ReadsFolders) {
  Write("single/model.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 3}}));
  EXPECT_EQ(First("single"), "3");
  EXPECT_EQ(First("./single/"), "3");
  // A whole file counts more than an index, which may be left from another save.
  Write("both/model.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 3}}));
  Write("both/part-2.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 4}}));
  Write("both/model.safetensors.index.json", R"({"weight_map":{"lm_head.weight":"part-2.safetensors"}})");
  EXPECT_EQ(First("both"), "3");
  // A file of another name, by its path.
  Write("single/head.st", MakeFile({{"weight", {5, 3}, 8}}));
  EXPECT_EQ(First("single/head.st"), "8");
  Write("many/part-1.safetensors", MakeFile({{"model.norm", {3}, 0}}));
  Write("many/part-2.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 4}, {"bias", {5}, 40}}));
  Write("many/model.safetensors.index.json",
        R"({"metadata":{"total_size":1},"weight_map":{"model.norm":"part-1.safetensors","lm_head.weight":"part-2.safetensors",)"
        R"("bias":"part-2.safetensors"}})");
  spec_.has_bias = true;
  ASSERT_OK_AND_ASSIGN(const auto reader, Open("many"));
  float value;
  ASSERT_OK(reader->Read(HeadTensor::kWeight, 0, 1, &value));
  EXPECT_EQ(value, 4);
  ASSERT_OK(reader->Read(HeadTensor::kBias, 0, 1, &value));
  EXPECT_EQ(value, 40);
  EXPECT_EQ(First("single"), "WEIGHTS_NOT_FOUND");  // no bias
  EXPECT_EQ(First("nothing"), "WEIGHTS_NOT_FOUND");
  EXPECT_EQ(First("nothing.safetensors"), "WEIGHTS_NOT_FOUND");
}

TEST_F(WeightsReaderTest, BrokenIndexes) {
  const auto with_index = [this](const std::string& index) {
    Write("m/model.safetensors.index.json", index);
    return First("m");
  };
  Write("m/good.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 3}}));
  Write("outside.safetensors", MakeFile({{"lm_head.weight", {5, 3}, 3}}));
  EXPECT_EQ(with_index(R"({"weight_map":{"lm_head.weight":"good.safetensors"}})"), "3");
  EXPECT_EQ(with_index(R"({"weight_map":{"lm_head.weight":"absent.safetensors"}})"), "WEIGHTS_NOT_FOUND");
  EXPECT_EQ(with_index(R"({"weight_map":{"weight":"good.safetensors"}})"), "WEIGHTS_NOT_FOUND");
  EXPECT_EQ(with_index(R"({"weight_map":{"lm_head.weight":"../outside.safetensors"}})"), "FILE_CORRUPT");
  EXPECT_EQ(with_index(R"({"weight_map":{"lm_head.weight":"good.bin"}})"), "FILE_CORRUPT");
  EXPECT_EQ(with_index(R"({"weight_map":{"lm_head.weight":7}})"), "FILE_CORRUPT");
  EXPECT_EQ(with_index(R"({"weight_map":[]})"), "FILE_CORRUPT");
  EXPECT_EQ(with_index("{"), "FILE_CORRUPT");
}

TEST_F(WeightsReaderTest, PathsStayUnderTheRoot) {
  const std::string file = MakeFile({{"lm_head.weight", {5, 3}, 3}});
  Write("in/model.safetensors", file);
  WriteFile(directory_.path() + "/secret.safetensors", file);
  WriteFile(directory_.path() + "/root2/secret.safetensors", file);
  EXPECT_EQ(First(""), "MISSING_FIELD");
  for (const std::string path : {"/etc/passwd", "../secret.safetensors", "in/../../secret.safetensors", "in/..", ".."}) {
    EXPECT_EQ(First(path), "INVALID_FIELD") << path;
  }
  EXPECT_EQ(First(std::string("in\0x", 4)), "INVALID_FIELD");
  EXPECT_EQ(First(std::string(5000, 'a')), "INVALID_FIELD");
  std::filesystem::create_symlink("../secret.safetensors", root() + "/out.safetensors");
  std::filesystem::create_symlink("..", root() + "/up");
  std::filesystem::create_symlink("../root2", root() + "/sibling");  // its name begins with the root's
  std::filesystem::create_symlink("in/model.safetensors", root() + "/inside.safetensors");
  EXPECT_EQ(First("out.safetensors"), "INVALID_FIELD");
  EXPECT_EQ(First("up/secret.safetensors"), "INVALID_FIELD");
  EXPECT_EQ(First("sibling/secret.safetensors"), "INVALID_FIELD");
  EXPECT_EQ(First("inside.safetensors"), "3");
  std::filesystem::create_symlink("loop.safetensors", root() + "/loop.safetensors");
  EXPECT_EQ(First("loop.safetensors"), "WEIGHTS_NOT_FOUND");
  std::filesystem::create_directories(root() + "/folder.safetensors");
  EXPECT_EQ(First("folder.safetensors"), "FILE_CORRUPT");
  ASSERT_EQ(mkfifo((root() + "/fifo.safetensors").c_str(), 0600), 0);
  EXPECT_EQ(First("fifo.safetensors"), "FILE_CORRUPT");
  EXPECT_REASON(WeightsReader::Open(root() + "/absent", "in", "", "", spec_), kWeightsNotFound);
  // A name of 4 KiB that four times as many characters would show.
  const std::string long_path(4000, '\x01');
  const absl::Status status = WeightsReader::Open(root(), long_path, "", "", spec_).status();
  EXPECT_REASON(status, kWeightsNotFound);
  EXPECT_LT(status.message().size(), 2000u) << status;
  // The message never names the root.
  EXPECT_EQ(std::string(Open("out.safetensors").status().message()).find(directory_.path()), std::string::npos);
}

TEST_F(WeightsReaderTest, ShapesAndTypesMustBeTheHeads) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{4, 3}, std::vector<int64_t>{6, 3}, std::vector<int64_t>{3, 5}, std::vector<int64_t>{15}}) {
    Write("a.safetensors", MakeFile({{"weight", shape, 0}}));
    EXPECT_EQ(First("a.safetensors"), "CHECKPOINT_SPEC_MISMATCH");
  }
  Write("i.safetensors", MakeSafetensorsHeader({{"weight", "I32", {5, 3}, 60}}) + std::string(60, 'x'));
  EXPECT_EQ(First("i.safetensors"), "DATA_TYPE_MISMATCH");
  EXPECT_REASON(Open("a.safetensors", "", "bias"), kInvalidCombination);
  Write("cut.safetensors", MakeFile({{"weight", {5, 3}, 0}}).substr(0, 100));
  EXPECT_EQ(First("cut.safetensors"), "FILE_CORRUPT");
}

TEST_F(WeightsReaderTest, AFileThatIsCutLaterIsAnError) {
  const std::string bytes = MakeFile({{"weight", {5, 3}, 0}});
  Write("a.safetensors", bytes);
  ASSERT_OK_AND_ASSIGN(const auto reader, Open("a.safetensors"));
  std::filesystem::resize_file(root() + "/a.safetensors", bytes.size() - 4);
  float values[15];
  EXPECT_REASON(reader->Read(HeadTensor::kWeight, 0, 15, values), kFileCorrupt);
  EXPECT_OK(reader->Read(HeadTensor::kWeight, 0, 14, values));
}

TEST_F(WeightsReaderTest, SixteenBitsAreKeptOrWidenedExactly) {
  // 1.5, -2, the largest finite, the smallest subnormal, infinity.
  const uint16_t bfloat16[] = {0x3fc0, 0xc000, 0x7f7f, 0x0001, 0x7f80};
  const uint16_t float16[] = {0x3e00, 0xc000, 0x7bff, 0x0001, 0x7c00};
  const float from_bfloat16[] = {1.5f, -2, 3.38953139e38f, 9.18354962e-41f, std::numeric_limits<float>::infinity()};
  const float from_float16[] = {1.5f, -2, 65504, 5.96046448e-8f, std::numeric_limits<float>::infinity()};
  spec_ = SmallSpec(5, 1);
  const auto write = [this](const char* type, const uint16_t* values) {
    Write("a.safetensors",
          MakeSafetensorsHeader({{"weight", type, {5, 1}, 10}}) + std::string(reinterpret_cast<const char*>(values), 10));
  };
  for (const DataType head_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    spec_.data_type = head_type;
    for (const bool is_bfloat16 : {true, false}) {
      write(is_bfloat16 ? "BF16" : "F16", is_bfloat16 ? bfloat16 : float16);
      ASSERT_OK_AND_ASSIGN(const auto reader, Open("a.safetensors"));
      const bool kept = head_type == (is_bfloat16 ? DataType::kBFloat16 : DataType::kFloat16);
      EXPECT_EQ(reader->data_type(HeadTensor::kWeight), kept ? head_type : DataType::kFloat32);
      if (kept) {
        uint16_t values[5];
        ASSERT_OK(reader->Read(HeadTensor::kWeight, 0, 5, values));
        EXPECT_EQ(std::memcmp(values, is_bfloat16 ? bfloat16 : float16, 10), 0);
      } else {
        float values[5];
        ASSERT_OK(reader->Read(HeadTensor::kWeight, 0, 5, values));
        for (int i = 0; i < 5; ++i) EXPECT_EQ(values[i], (is_bfloat16 ? from_bfloat16 : from_float16)[i]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace headwater::checkpoint
