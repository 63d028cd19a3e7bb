// `load`: weights for a head, from the server's disk or from this machine's.
#include <optional>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/arguments.h"
#include "client/ctl/command.h"
#include "client/ctl/head_flags.h"
#include "client/ctl/safetensors_file.h"
#include "client/ctl/table.h"

ABSL_FLAG(bool, create, false, "make the head first, as the flags of `headwaterctl plan` describe it");
ABSL_FLAG(bool, from_file, false, "PATH is a safetensors file on this machine; its tensors are uploaded");
ABSL_FLAG(
    std::string, tensor, "",
    "name of the weight tensor (not given: lm_head.weight, the tied embedding, or weight; of one of a model's several files no "
    "embedding)");
ABSL_FLAG(std::string, bias_tensor, "", "name of the bias tensor (not given: lm_head.bias or bias)");

namespace headwater::ctl {
namespace {

using client::HeadTensor;

// The first of `names` that the file has.
std::optional<std::string> FindTensor(const SafetensorsFile& file, const std::string& wanted,
                                      const std::vector<std::string>& names) {
  if (!wanted.empty()) return wanted;
  for (const std::string& name : names) {
    if (file.entries().count(name) > 0) return name;
  }
  return std::nullopt;
}

// What is uploaded with --from_file.
struct LocalTensors {
  client::TensorBuffer weight;               // [vocab_size, hidden_size]
  std::optional<client::TensorBuffer> bias;  // [vocab_size]
};

absl::StatusOr<LocalTensors> ReadLocalTensors(const std::string& path) {
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  // The names that LoadWeights knows. Of one file of several an embedding may not be the head's: another file may have that.
  std::vector<std::string> names = {"lm_head.weight", "weight"};
  if (!IsPartOfModel(path)) {
    names.insert(names.begin() + 1, {"model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight"});
  }
  const std::string weight_name = FindTensor(*file, absl::GetFlag(FLAGS_tensor), names).value_or("lm_head.weight");
  absl::StatusOr<client::TensorBuffer> weight = file->Read(weight_name);
  if (!weight.ok()) return weight.status();
  if (weight->shape().size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", weight_name, " has ", weight->shape().size(),
                                                   " dimensions, expected 2: [vocab_size, hidden_size]"));
  }
  LocalTensors tensors;
  tensors.weight = *std::move(weight);
  const std::string given_bias = absl::GetFlag(FLAGS_bias_tensor);
  const auto name = FindTensor(*file, given_bias, {"lm_head.bias", "bias"});
  // One of a type that heads do not have, and that nobody has named, is something else.
  if (name.has_value() && (!given_bias.empty() || file->entries().at(*name).data_type.has_value())) {
    absl::StatusOr<client::TensorBuffer> bias = file->Read(*name);
    if (!bias.ok()) return bias.status();
    tensors.bias.emplace(*std::move(bias));
  }
  return tensors;
}

// The new head's description (with --create), or the head's that is there, is given to `check` before anything is made.
absl::StatusOr<client::Head> MakeOrOpen(client::Client& client, const std::string& name, const client::HeadSpec& defaults,
                                        absl::FunctionRef<absl::Status(const client::HeadSpec&)> check) {
  if (!absl::GetFlag(FLAGS_create)) {
    for (const std::string& flag : kHeadFlags) {
      if (FlagGiven(flag)) return UsageError(absl::StrCat("--", flag, " describes a new head: it needs --create"));
    }
    absl::StatusOr<client::Head> head = client.OpenHead(name);
    if (!head.ok()) return head.status();
    if (absl::Status status = check(head->spec()); !status.ok()) return status;
    return head;
  }
  absl::StatusOr<client::HeadSpec> spec = HeadSpecFromFlags(defaults);
  if (!spec.ok()) return spec.status();
  if (absl::Status status = check(*spec); !status.ok()) return status;
  return client.CreateHead(name, *spec);
}

// The wire carries bytes: a transposed weight of the same size would be taken without this.
absl::Status CheckShape(const char* name, const client::TensorBuffer& buffer, const std::vector<int64_t>& expected) {
  if (buffer.shape() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the ", name, " is [", absl::StrJoin(buffer.shape(), ", "), "], the head needs [",
                                                 absl::StrJoin(expected, ", "), "]"));
}

absl::Status CheckTensors(const LocalTensors& tensors, const client::HeadSpec& spec) {
  if (!spec.has_bias && FlagGiven("bias_tensor")) {
    return absl::InvalidArgumentError("--bias_tensor was given, and the head has no bias");
  }
  if (spec.has_bias && !tensors.bias.has_value()) {
    return absl::NotFoundError("the head has a bias and the file has no lm_head.bias or bias; --bias_tensor names another one");
  }
  absl::Status status = CheckShape("weight", tensors.weight, {spec.vocab_size, spec.hidden_size});
  if (status.ok() && spec.has_bias) status = CheckShape("bias", *tensors.bias, {spec.vocab_size});
  return status;
}

absl::StatusOr<client::HeadInfo> UploadTensor(client::Head& head, HeadTensor tensor, const client::TensorBuffer& buffer,
                                              Output& output) {
  output.Progress(absl::StrCat("uploading ", tensor == HeadTensor::kWeight ? "weight" : "bias", ", ", FormatBytes(buffer.bytes())));
  return head.UploadWeights(tensor, {buffer.data(), buffer.data_type(), buffer.element_count()});
}

absl::StatusOr<client::HeadInfo> LoadLocal(client::Client& client, const std::string& name, const std::string& path,
                                           Output& output) {
  absl::StatusOr<LocalTensors> tensors = ReadLocalTensors(path);
  if (!tensors.ok()) return tensors.status();
  client::HeadSpec defaults;
  defaults.vocab_size = tensors->weight.shape()[0];
  defaults.hidden_size = tensors->weight.shape()[1];
  defaults.data_type = tensors->weight.data_type();
  defaults.has_bias = tensors->bias.has_value();
  absl::StatusOr<client::Head> head =
      MakeOrOpen(client, name, defaults, [&](const client::HeadSpec& spec) { return CheckTensors(*tensors, spec); });
  if (!head.ok()) return head.status();
  absl::StatusOr<client::HeadInfo> info = UploadTensor(*head, HeadTensor::kWeight, tensors->weight, output);
  if (info.ok() && head->spec().has_bias) info = UploadTensor(*head, HeadTensor::kBias, *tensors->bias, output);
  return info;
}

absl::StatusOr<client::HeadInfo> LoadRemote(client::Client& client, const std::string& name, const std::string& path) {
  absl::StatusOr<client::Head> head = MakeOrOpen(client, name, {}, [](const client::HeadSpec&) { return absl::OkStatus(); });
  if (!head.ok()) return head.status();
  return head->LoadWeights(path, absl::GetFlag(FLAGS_tensor), absl::GetFlag(FLAGS_bias_tensor));
}

absl::StatusOr<ExitCode> RunLoad(client::Client& client, const std::vector<std::string>& arguments, Output& output) {
  absl::StatusOr<client::HeadInfo> head = absl::GetFlag(FLAGS_from_file) ? LoadLocal(client, arguments[0], arguments[1], output)
                                                                         : LoadRemote(client, arguments[0], arguments[1]);
  if (!head.ok()) return head.status();
  output.Print(absl::StrCat(head->name, " is ", client::HeadStateName(head->state), ": [", head->spec.vocab_size, ", ",
                            head->spec.hidden_size, "] ", client::DataTypeName(head->spec.data_type), ", weight version ",
                            head->weight_version, ", ", FormatBytes(head->memory_plan.total_bytes), "\n"),
               ToJson(*head));
  return kExitOk;
}

}  // namespace

Command LoadCommand() {
  std::vector<std::string> flags = {"create", "from_file", "tensor", "bias_tensor"};
  flags.insert(flags.end(), kHeadFlags.begin(), kHeadFlags.end());
  return {
      .name = "load",
      .synopsis = "NAME PATH",
      .summary = "sets a head's weights from a safetensors file or a model folder",
      .help =
          "PATH is a .safetensors file or a Hugging Face model folder under headwaterd's --load_root, relative to it. With\n"
          "--from_file it is a safetensors file on this machine, which is uploaded. Setting the weights of a head that has\n"
          "some drops its open step and fences off trainers that still use it.\n"
          "\n"
          "With --create the head is made first, unless the tensors of --from_file are not as the flags say. It stays when the\n"
          "loading fails afterwards; run the command again without --create, or `headwaterctl delete` the head. With\n"
          "--from_file, --vocab_size, --hidden_size, --data_type and --bias follow from the file.\n"
          "\n"
          "  headwaterctl load teacher llama-8b --create --vocab_size=128256 --hidden_size=4096 --data_type=bfloat16\n"
          "  headwaterctl load student head.safetensors --from_file --create --trainable --optimizer=adamw\n",
      .min_arguments = 2,
      .max_arguments = 2,
      .flags = std::move(flags),
      .run = RunLoad};
}

}  // namespace headwater::ctl
