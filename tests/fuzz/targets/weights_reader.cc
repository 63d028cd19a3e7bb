// Weights of a model folder under the load root. Input: a byte with the head's type and bias, and what the tensors' bytes are;
// then, each up to a byte 1, the path, the names of both tensors, and an index; then the JSON header of the folders' safetensors
// file (see safetensors.cc).
#include "server/checkpoint/weights_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "server/transport/file_descriptor.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/target.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::fuzz {
namespace {

// The bytes of tensors: everywhere under the root, and beside it.
// As halves: a normal number, a negative subnormal one, no number, zero.
constexpr char kInside[] = {'\x3c', '\x81', '\x7c', '\0'};
constexpr char kOutside = '\x41';
constexpr int64_t kVocabSize = 3;
constexpr int64_t kHiddenSize = 2;

transport::FileDescriptor Create(const std::string& path) {
  transport::FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  FUZZ_CHECK(file.valid(), path);
  return file;
}

// Makes `bytes` all that the file holds.
void Write(const transport::FileDescriptor& file, const std::string& bytes) {
  FUZZ_CHECK(ftruncate(file.get(), 0) == 0);
  FUZZ_CHECK(pwrite(file.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
}

// root/model.safetensors, root/m with a file of that name and a config that says tied, root/i with an index and part.safetensors,
// root/folder.safetensors; and, where no path may lead, a file beside the root that root/link points to. An input takes no more
// system calls than it must: the files stay open, and all but the one beside the root are one.
class Folders {
 public:
  Folders() : root_(directory_.path() + "/root") {
    for (const char* folder : {"", "/m", "/i", "/folder.safetensors"}) FUZZ_CHECK(mkdir((root_ + folder).c_str(), 0700) == 0);
    Write(Create(root_ + "/m/config.json"), R"({"tie_word_embeddings": true})");
    const std::string secret = R"({"weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}})";
    Write(Create(directory_.path() + "/secret.safetensors"), SafetensorsFile(secret, kOutside));
    model_ = Create(root_ + "/model.safetensors");
    FUZZ_CHECK(link((root_ + "/model.safetensors").c_str(), (root_ + "/m/model.safetensors").c_str()) == 0);
    FUZZ_CHECK(link((root_ + "/model.safetensors").c_str(), (root_ + "/i/part.safetensors").c_str()) == 0);
    FUZZ_CHECK(symlink("../secret.safetensors", (root_ + "/link.safetensors").c_str()) == 0);
    FUZZ_CHECK(symlink("../..", (root_ + "/m/up").c_str()) == 0);
  }
  const std::string& root() const { return root_; }

  void Fill(const std::string& index, const std::string& file) {
    Write(model_, file);
    if (index.empty() && index_.valid()) {
      index_ = transport::FileDescriptor();
      FUZZ_CHECK(unlink(index_path_.c_str()) == 0);
    }
    if (index.empty()) return;
    if (!index_.valid()) index_ = Create(index_path_);
    Write(index_, index);
  }

 private:
  const testing::TemporaryDirectory directory_;
  const std::string root_;
  const std::string index_path_ = root_ + "/i/model.safetensors.index.json";
  transport::FileDescriptor model_;
  transport::FileDescriptor index_;  // not valid: there is none
};

void CheckTensor(const checkpoint::WeightsReader& reader, HeadTensor tensor, int64_t elements, const HeadSpec& spec) {
  const DataType type = reader.data_type(tensor);
  FUZZ_CHECK(type == spec.data_type || type == DataType::kFloat32);
  const size_t bytes = static_cast<size_t>(elements * ElementBytes(type));
  std::vector<char> values(bytes);
  if (const absl::Status status = reader.Read(tensor, 0, elements, values.data()); !status.ok()) {
    CheckRefusal(status);  // a file whose claims are larger than it
    return;
  }
  // All bytes that the folder's files hold are alike, so all elements are; the file beside the root would show.
  for (size_t i = 0; i < bytes; ++i) FUZZ_CHECK(values[i] == values[i % static_cast<size_t>(ElementBytes(type))]);
  FUZZ_CHECK(values.back() != kOutside);
  // Each element alone is the same.
  std::vector<char> one(static_cast<size_t>(ElementBytes(type)));
  for (int64_t i = 0; i < elements; ++i) {
    FUZZ_CHECK(reader.Read(tensor, i, 1, one.data()).ok());
    FUZZ_CHECK(std::string(one.begin(), one.end()) == std::string(values.begin(), values.begin() + ElementBytes(type)));
  }
  const int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t least = std::numeric_limits<int64_t>::min();
  const std::pair<int64_t, int64_t> outside[] = {{-1, 1},      {0, -1},    {0, elements + 1}, {elements, 1}, {elements - 1, 2},
                                                 {most, most}, {least, 1}, {1, most},         {1, least}};
  std::vector<char> none(bytes + 64);
  for (const auto& [start, count] : outside) {
    FUZZ_CHECK(HasReason(reader.Read(tensor, start, count, none.data()), ErrorReason::kChunkOutOfRange));
  }
}

}  // namespace

void CheckInput(InputReader input) {
  static Folders folders;
  const uint8_t flags = input.Byte();
  HeadSpec spec;
  spec.vocab_size = kVocabSize;
  spec.hidden_size = kHiddenSize;
  spec.has_bias = flags % 2 == 1;
  constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
  spec.data_type = kTypes[flags / 2 % 3];
  const std::string path = input.Text();
  const std::string weight_tensor = input.Text();
  const std::string bias_tensor = input.Text();
  const std::string index = input.Text();
  folders.Fill(index, SafetensorsFile(input.Rest(), kInside[flags / 6 % std::size(kInside)]));
  const auto reader = checkpoint::WeightsReader::Open(folders.root(), path, weight_tensor, bias_tensor, spec);
  if (!reader.ok()) return CheckRefusal(reader.status());
  FUZZ_CHECK((*reader)->has_bias() == spec.has_bias);
  CheckTensor(**reader, HeadTensor::kWeight, kVocabSize * kHiddenSize, spec);
  if (spec.has_bias) CheckTensor(**reader, HeadTensor::kBias, kVocabSize, spec);
}

}  // namespace headwater::fuzz
