// `load`: weights for a head, from the server's disk or from this machine's.
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/table.h"
#include "headwater/kernels/return_if_error.h"
#include "server/model_files/file_source.h"
#include "server/model_files/head_tensors.h"

ABSL_FLAG(bool, create, false, "make the head first, as the flags of `headwaterctl plan` describe it");
ABSL_FLAG(bool, from_file, false, "PATH is a safetensors file or a model folder on this machine; the head's tensors are uploaded");
ABSL_FLAG(std::string, tensor, "",
          "name of the weight tensor (not given: lm_head.weight, another head's name, or the embedding if the config says tied)");
ABSL_FLAG(std::string, bias_tensor, "", "name of the bias tensor (not given: the head's own, such as lm_head.bias)");
ABSL_DECLARE_FLAG(int64_t, vocab_size);
ABSL_DECLARE_FLAG(int64_t, hidden_size);
ABSL_DECLARE_FLAG(bool, bias);

namespace headwater::ctl {
namespace {

using client::HeadTensor;

// The tensors that --from_file uploads.
struct LocalTensors {
  client::TensorBuffer weight;               // [vocab_size, hidden_size]
  std::optional<client::TensorBuffer> bias;  // [vocab_size]
};

absl::StatusOr<client::TensorBuffer> ReadTensor(const model_files::FileTensor& tensor, std::vector<int64_t> shape) {
  client::TensorBuffer buffer(static_cast<client::DataType>(tensor.data_type), std::move(shape));  // both are the wire's values
  HEADWATER_RETURN_IF_ERROR(tensor.file->ReadAt(tensor.offset_bytes, buffer.bytes(), buffer.data()));
  return buffer;
}

// The tensors for the head of this name, or for the new one that the flags describe (with --create). They have the head's shape,
// and a bias if the head has one.
absl::StatusOr<LocalTensors> ReadLocalTensors(client::Client& client, const std::string& name, const std::string& path) {
  model_files::HeadTensorQuery query;
  query.weight_tensor = absl::GetFlag(FLAGS_tensor);
  query.bias_tensor = absl::GetFlag(FLAGS_bias_tensor);
  if (absl::GetFlag(FLAGS_create)) {
    if (FlagGiven("vocab_size")) query.vocab_size = absl::GetFlag(FLAGS_vocab_size);
    if (FlagGiven("hidden_size")) query.hidden_size = absl::GetFlag(FLAGS_hidden_size);
    if (FlagGiven("bias")) query.has_bias = absl::GetFlag(FLAGS_bias);
  } else {
    HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.OpenHead(name));
    query.vocab_size = head.spec().vocab_size;
    query.hidden_size = head.spec().hidden_size;
    query.has_bias = head.spec().has_bias;
  }
  HEADWATER_ASSIGN_OR_RETURN(const model_files::HeadTensors found,
                             model_files::FindHeadTensors(*model_files::LocalFiles(), path, query));
  LocalTensors tensors;
  HEADWATER_ASSIGN_OR_RETURN(tensors.weight, ReadTensor(found.weight, {found.weight.rows, found.weight.columns}));
  if (found.bias.has_value()) {
    HEADWATER_ASSIGN_OR_RETURN(tensors.bias, ReadTensor(*found.bias, {found.bias->rows}));
  }
  return tensors;
}

// The head of this name, made first with --create. `defaults`, `config_beside`: see HeadSpecFromFlags().
absl::StatusOr<client::Head> MakeOrOpen(client::Client& client, const std::string& name, const client::HeadSpec& defaults,
                                        const std::string& config_beside, const Output& output) {
  if (!absl::GetFlag(FLAGS_create)) {
    for (const std::string& flag : kHeadFlags) {
      if (FlagGiven(flag)) return UsageError(absl::StrCat("--", flag, " describes a new head: it needs --create"));
    }
    absl::StatusOr<client::Head> head = client.OpenHead(name);
    if (absl::IsNotFound(head.status())) {
      return WithHint(head.status(), "`headwaterctl heads` lists the heads that exist; --create makes one");
    }
    return head;
  }
  HEADWATER_ASSIGN_OR_RETURN(client::HeadSpec spec, HeadSpecFromFlags(defaults, config_beside, output));
  return client.CreateHead(name, spec);
}

absl::StatusOr<client::HeadInfo> UploadTensor(client::Head& head, HeadTensor tensor, const client::TensorBuffer& buffer,
                                              Output& output) {
  output.Progress(absl::StrCat("uploading ", tensor == HeadTensor::kWeight ? "weight" : "bias", ", ", FormatBytes(buffer.bytes())));
  return head.UploadWeights(tensor, {buffer.data(), buffer.data_type(), buffer.element_count()});
}

// The config.json beside local weights, or nothing.
std::string ConfigBeside(const std::string& path) {
  std::error_code error;
  const std::filesystem::path folder =
      std::filesystem::is_directory(path, error) ? std::filesystem::path(path) : std::filesystem::path(path).parent_path();
  const std::filesystem::path config = folder / "config.json";
  return std::filesystem::is_regular_file(config, error) ? config.string() : "";
}

// After a failure: a head that this command has made is deleted again, and the error says so.
absl::Status CleanUp(client::Head& head, const absl::Status& failure) {
  if (!absl::GetFlag(FLAGS_create)) return failure;
  const absl::Status deleted = head.Delete(/*force=*/true);
  absl::Status status(failure.code(), absl::StrCat(failure.message(),
                                                   deleted.ok() ? "; the head that was made for it is deleted again"
                                                                : "; the head that was made for it stays: ",
                                                   deleted.message()));
  failure.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { status.SetPayload(url, payload); });
  return status;
}

absl::StatusOr<client::HeadInfo> LoadLocal(client::Client& client, const std::string& name, const std::string& path,
                                           Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(LocalTensors tensors, ReadLocalTensors(client, name, path));
  client::HeadSpec defaults;
  defaults.vocab_size = tensors.weight.shape()[0];
  defaults.hidden_size = tensors.weight.shape()[1];
  defaults.data_type = tensors.weight.data_type();
  defaults.has_bias = tensors.bias.has_value();
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, MakeOrOpen(client, name, defaults, ConfigBeside(path), output));
  absl::StatusOr<client::HeadInfo> info = UploadTensor(head, HeadTensor::kWeight, tensors.weight, output);
  if (info.ok() && head.spec().has_bias) info = UploadTensor(head, HeadTensor::kBias, *tensors.bias, output);
  if (!info.ok()) return CleanUp(head, info.status());
  return info;
}

absl::StatusOr<client::HeadInfo> LoadRemote(client::Client& client, const std::string& name, const std::string& path,
                                            const Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, MakeOrOpen(client, name, {}, /*config_beside=*/"", output));
  absl::StatusOr<client::HeadInfo> info = head.LoadWeights(path, absl::GetFlag(FLAGS_tensor), absl::GetFlag(FLAGS_bias_tensor));
  if (!info.ok()) return CleanUp(head, info.status());
  return info;
}

absl::StatusOr<ExitCode> RunLoad(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo head, absl::GetFlag(FLAGS_from_file)
                                                        ? LoadLocal(client, arguments[0], arguments[1], output)
                                                        : LoadRemote(client, arguments[0], arguments[1], output));
  output.Print(absl::StrCat(head.name, " is ", client::HeadStateName(head.state), ": [", head.spec.vocab_size, ", ",
                            head.spec.hidden_size, "] ", client::DataTypeName(head.spec.data_type), ", weight version ",
                            head.weight_version, ", ", FormatBytes(head.memory_plan.total_bytes), "\n"),
               head);
  return kExitOk;
}

}  // namespace

Command LoadCommand() {
  std::vector<std::string> flags = {"create", "from_file", "tensor", "bias_tensor"};
  flags.insert(flags.end(), kHeadFlags.begin(), kHeadFlags.end());
  return {.name = "load",
          .synopsis = "NAME PATH",
          .summary = "sets a head's weights from a safetensors file or a model folder",
          .help =
              "PATH is a .safetensors file or a Hugging Face model folder under headwaterd's --load_root, relative to it. With\n"
              "--from_file it is a safetensors file on this machine, which is uploaded. Setting the weights of a head that has\n"
              "some drops its open step and fences off trainers that still use it.\n"
              "\n"
              "With --create the head is made first, unless the tensors of --from_file are not as the flags say. If the loading\n"
              "fails afterwards the head is deleted again. --config gives what no other flag does. With --from_file sizes, type\n"
              "and bias follow from the file, and the config.json beside it is the --config where none is given.\n"
              "\n"
              "  headwaterctl load teacher llama-8b --create --config ~/models/llama-8b\n"
              "  headwaterctl load student head.safetensors --from_file --create --trainable --optimizer=adamw\n",
          .flags = std::move(flags),
          .run = RunLoad};
}

}  // namespace headwater::ctl
