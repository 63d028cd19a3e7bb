// `export`: a head's weight and bias as a safetensors file.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/command.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/safetensors.h"

ABSL_DECLARE_FLAG(bool, overwrite);

namespace headwater::ctl {
namespace {

using nlohmann::json;

const char* SafetensorsTypeName(client::DataType type) { return NameOf(type, {"", "F32", "BF16", "F16"}); }

struct NamedTensor {
  const char* name;
  const client::TensorBuffer* buffer;
};

std::string HeaderBytes(const std::vector<NamedTensor>& tensors) {
  std::vector<model_files::SafetensorsOutput> outputs;
  for (const NamedTensor& tensor : tensors) {
    const client::TensorBuffer& buffer = *tensor.buffer;
    outputs.push_back({tensor.name, SafetensorsTypeName(buffer.data_type()), buffer.shape(), buffer.bytes()});
  }
  return model_files::MakeSafetensorsHeader(outputs);
}

absl::Status FileError(const std::string& path, const char* operation) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": ", operation));
}

// `path` is complete, or as it was.
absl::Status WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  const std::string temporary = absl::StrCat(path, ".tmp-", getpid());
  std::FILE* const file = std::fopen(temporary.c_str(), "wxe");  // a new file
  if (file == nullptr) return FileError(temporary, "cannot be made");
  const std::string header = HeaderBytes(tensors);
  bool written = std::fwrite(header.data(), 1, header.size(), file) == header.size();
  for (const NamedTensor& tensor : tensors) {
    const size_t bytes = static_cast<size_t>(tensor.buffer->bytes());
    written = written && std::fwrite(tensor.buffer->data(), 1, bytes, file) == bytes;
  }
  written = written && std::fflush(file) == 0 && fsync(fileno(file)) == 0;
  absl::Status status = written ? absl::OkStatus() : FileError(temporary, "cannot be written");
  if (std::fclose(file) != 0 && status.ok()) status = FileError(temporary, "cannot be written");
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) status = FileError(path, "cannot be replaced");
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

absl::Status CheckPlace(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a folder; expected a file, such as ", path, "/lm_head.safetensors"));
  }
  if (!absl::GetFlag(FLAGS_overwrite) && std::filesystem::exists(path, error)) {
    return WithHint(absl::AlreadyExistsError(absl::StrCat(path, " exists")), "choose another name, or add --overwrite");
  }
  return absl::OkStatus();
}

absl::StatusOr<ExitCode> RunExport(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  const std::string& path = arguments[1];
  HEADWATER_RETURN_IF_ERROR(CheckPlace(path));
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(arguments[0]));
  HEADWATER_ASSIGN_OR_RETURN(const client::DataType type, DataTypeFromFlags(head.spec().data_type));
  HEADWATER_ASSIGN_OR_RETURN(const client::HeadInfo before, head.Info());
  HEADWATER_ASSIGN_OR_RETURN(const client::TensorBuffer weight, head.DownloadWeights(client::HeadTensor::kWeight, type));
  std::vector<NamedTensor> tensors = {{"lm_head.weight", &weight}};
  absl::StatusOr<client::TensorBuffer> bias = absl::NotFoundError("");
  if (head.spec().has_bias) {
    bias = head.DownloadWeights(client::HeadTensor::kBias, type);
    if (!bias.ok()) return bias.status();
    tensors.push_back({"lm_head.bias", &*bias});
  }
  HEADWATER_ASSIGN_OR_RETURN(const client::HeadInfo after, head.Info());
  if (after.epoch != before.epoch || after.weight_version != before.weight_version) {
    return WithHint(absl::AbortedError(absl::StrCat(head.name(), " got other weights meanwhile; ", path, " is not written")),
                    "run the command again between two steps");
  }
  HEADWATER_RETURN_IF_ERROR(CheckPlace(path));
  HEADWATER_RETURN_IF_ERROR(WriteSafetensors(path, tensors));
  json names = json::array();
  for (const NamedTensor& tensor : tensors) names.push_back(tensor.name);
  output.Print(
      absl::StrCat("wrote ", head.spec().has_bias ? "lm_head.weight and lm_head.bias" : "lm_head.weight", " of ", head.name(), ", ",
                   client::DataTypeName(type), ", weight version ", after.weight_version, ", to ", path, "\n"),
      {{"name", head.name()},
       {"file", path},
       {"tensors", names},
       {"data_type", client::DataTypeName(type)},
       {"weight_version", after.weight_version}});
  return kExitOk;
}

}  // namespace

Command ExportCommand() {
  return {.name = "export",
          .synopsis = "NAME FILE",
          .summary = "writes a head's weight and bias to a safetensors file",
          .help =
              "FILE is on this machine, and gets lm_head.weight and lm_head.bias. It is complete or as it was. --data_type is the\n"
              "head's own, or float32: of a head with an optimizer the master weights.\n"
              "\n"
              "  headwaterctl export student lm_head.safetensors\n",
          .flags = {"overwrite", "data_type"},
          .run = RunExport};
}

}  // namespace headwater::ctl
