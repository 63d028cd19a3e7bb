// Bad values of HeadService's and SessionService's requests, and the fields that have none.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "headwater/v1/head_service.pb.h"
#include "tests/integration/support/bad_values.h"

namespace headwater::testing {
namespace {

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

// The `name` of a head that the RPC looks up.
void AddNameRows(const std::string& rpc, const std::string& path, bool looks_up, std::vector<BadValue>* rows) {
  rows->push_back({rpc, path, "empty", Text(""), "MISSING_FIELD"});
  rows->push_back({rpc, path, "malformed", Text("tenants/default/heads/.."), "INVALID_NAME"});
  rows->push_back({rpc, path, "too long", Text("tenants/default/heads/" + std::string(65, 'a')), "INVALID_NAME"});
  if (!looks_up) return;
  rows->push_back({rpc, path, "unknown", Text("tenants/default/heads/nobody"), "HEAD_NOT_FOUND", ""});
  rows->push_back({rpc, path, "another tenant's", Text("tenants/other/heads/student"), "HEAD_NOT_FOUND", ""});
}

void AddEpochRows(const std::string& rpc, const std::string& path, bool required, std::vector<BadValue>* rows) {
  if (required) rows->push_back({rpc, path, "unset", Clear(), "MISSING_FIELD"});
  rows->push_back({rpc, path, "short", Text("abc"), "INVALID_FIELD"});
  rows->push_back({rpc, path, "stale", Text(std::string(16, 'x')), "EPOCH_FENCED", ""});
}

void AddTensorKindRows(const std::string& rpc, const std::string& path, std::vector<BadValue>* rows) {
  rows->push_back({rpc, path, "unset", Clear(), "MISSING_FIELD"});
  rows->push_back({rpc, path, "unknown", Int(9), "INVALID_FIELD"});
}

void AddExpectedRows(const std::string& rpc, std::vector<BadValue>* rows) {
  rows->push_back({rpc, "expected.count", "negative", Int(-1), "INVALID_FIELD"});
  rows->push_back({rpc, "expected.count", "above the limit", Int((1 << 16) + 1), "LIMIT_EXCEEDED"});
  rows->push_back({rpc, "expected.count", "more than there are", Int(9), "MICRO_BATCH_MISSING", ""});
  rows->push_back(
      {rpc, "expected.ids", "more than there are", Make(), "MICRO_BATCH_MISSING", "", Set("expected.ids.ids", Ints({0, 1, 2}))});
  rows->push_back({rpc, "expected.ids.ids", "negative", Ints({-4}), "INVALID_FIELD", "expected.ids.ids[0]"});
  rows->push_back({rpc, "expected.ids.ids", "twice", Ints({0, 1, 0}), "INVALID_FIELD", "expected.ids.ids[2]"});
}

std::vector<BadValue> CreateRows() {
  const std::string rpc = "CreateHead";
  std::vector<BadValue> rows = {
      {rpc, "spec", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "spec.vocab_size", "zero", Int(0), "INVALID_FIELD"},
      {rpc, "spec.vocab_size", "negative", Int(-5), "INVALID_FIELD"},
      {rpc, "spec.vocab_size", "above the limit", Int((1 << 24) + 1), "LIMIT_EXCEEDED"},
      {rpc, "spec.vocab_size", "far above", Int(kFar), "LIMIT_EXCEEDED"},
      {rpc, "spec.vocab_size", "beyond the memory", Int(1 << 24), "MEMORY_BUDGET_EXCEEDED", "",
       Set("spec.hidden_size", Int(1 << 16))},
      {rpc, "spec.hidden_size", "zero", Int(0), "INVALID_FIELD"},
      {rpc, "spec.hidden_size", "above the limit", Int((1 << 16) + 1), "LIMIT_EXCEEDED"},
      {rpc, "spec.data_type", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "spec.data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH"},
      {rpc, "spec.transform.logit_scale", "zero", Real(0), "INVALID_FIELD"},
      {rpc, "spec.transform.valid_vocab_size", "zero", Int(0), "INVALID_FIELD"},
      {rpc, "spec.transform.valid_vocab_size", "beyond the vocabulary", Int(14), "INVALID_FIELD"},
      {rpc, "spec.trainable", "false with an optimizer", Int(0), "INVALID_COMBINATION", "spec.optimizer"},
      {rpc, "spec.optimizer", "none chosen", Clear(), "MISSING_FIELD", "spec.optimizer.optimizer", {}},
      {rpc, "spec.optimizer.adamw", "on a frozen head", Make(), "INVALID_COMBINATION", "spec.optimizer",
       Set("spec.trainable", Int(0))},
      {rpc, "spec.optimizer.sgd", "on a frozen head", Make(), "INVALID_COMBINATION", "spec.optimizer",
       Set("spec.trainable", Int(0))},
      {rpc, "spec.optimizer.sgd.nesterov", "without momentum", Int(1), "INVALID_COMBINATION"},
      {rpc, "spec.optimizer.sgd.nesterov", "with dampening", Int(1), "INVALID_COMBINATION", kThePath,
       Join(Set("spec.optimizer.sgd.momentum", Real(0.9)), Set("spec.optimizer.sgd.dampening", Real(0.1)))},
      {rpc, "spec.staging_slots", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "spec.staging_slots", "above the limit", Int(65), "LIMIT_EXCEEDED"},
      {rpc, "spec.staging_slots", "on a frozen head", Int(1), "INVALID_COMBINATION", kThePath,
       Join(Set("spec.trainable", Int(0)), Set("spec.optimizer", Clear()))},
      {rpc, "spec.low_rank", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "spec.low_rank", "given", Int(8), "FEATURE_NOT_BUILT"},
      {rpc, "spec.initial_step", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "spec.parallelism", "of no known kind", Int(99), "INVALID_FIELD"},
      {rpc, "if_exists", "unknown", Int(9), "INVALID_FIELD"},
      {rpc, "if_exists", "ATTACH_IF_SAME_SPEC to one of another", Int(v1::IF_EXISTS_ATTACH_IF_SAME_SPEC), "HEAD_SPEC_MISMATCH", "",
       Set("name", Text(kHeadName))},
  };
  // The optimizer message without a choice in it.
  rows[14].edit = [](google::protobuf::Message* parent, const google::protobuf::FieldDescriptor* field) {
    parent->GetReflection()->MutableMessage(parent, field)->Clear();
  };
  AddNameRows(rpc, "name", false, &rows);
  rows.push_back({rpc, "name", "of a head that exists", Text(kHeadName), "HEAD_ALREADY_EXISTS", ""});
  AddNumberRows(rpc, "spec.transform.logit_scale", {}, {}, &rows);
  AddNumberRows(rpc, "spec.transform.softcap", {0, -1}, {}, &rows);
  const std::string adamw = "spec.optimizer.adamw.";
  AddNumberRows(rpc, adamw + "beta1", {-0.1, 1}, {}, &rows);
  AddNumberRows(rpc, adamw + "beta2", {-0.1, 1}, {}, &rows);
  AddNumberRows(rpc, adamw + "epsilon", {-1e-9}, {}, &rows);
  AddNumberRows(rpc, adamw + "weight_decay", {-1e-9, 4e38}, {}, &rows);
  const std::string sgd = "spec.optimizer.sgd.";
  AddNumberRows(rpc, sgd + "momentum", {-0.1, 1}, {}, &rows);
  AddNumberRows(rpc, sgd + "dampening", {-0.1, 1.1}, {}, &rows);
  AddNumberRows(rpc, sgd + "weight_decay", {-1e-9, 4e38}, {}, &rows);
  return rows;
}

std::vector<BadValue> WeightRows() {
  const std::string upload = "UploadWeights";
  std::vector<BadValue> rows = {
      {upload, "header", "unset", Clear(), "MISSING_FIELD", "message"},
      {upload, "header.upload_id", "empty", Text(""), "MISSING_FIELD"},
      {upload, "header.upload_id", "long", Text(std::string(65, 'u')), "INVALID_FIELD"},
      {upload, "header.data_type", "unset", Clear(), "MISSING_FIELD"},
      {upload, "header.data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH"},
      {upload, "header.data_type", "neither fp32 nor the storage type", Int(v1::DATA_TYPE_FLOAT16), "DATA_TYPE_MISMATCH"},
      {upload, "header.total_bytes", "zero", Int(0), "INVALID_FIELD"},
      {upload, "header.total_bytes", "not the tensor's", Int(259), "DATA_LENGTH_MISMATCH"},
      {upload, "header.total_bytes", "far too many", Int(kFar), "DATA_LENGTH_MISMATCH"},
      {upload, "header.checksum", "short", Text("abc"), "INVALID_FIELD"},
      {upload, "header.checksum", "of other bytes", Text(std::string(16, 'c')), "CHECKSUM_MISMATCH"},
      {upload, "header.closes_step", "negative", Int(-1), "INVALID_FIELD"},
      {upload, "header.closes_step", "of a step that is open", Int(0), "STEP_NOT_SEALED"},
      {upload, "header.closes_step", "of another step", Int(7), "STEP_MISMATCH"},
      {upload, "chunk", "before the header", Make(), "PROTOCOL_VIOLATION", "header"},
      {upload, "chunk.offset_bytes", "negative", Int(-1), "INVALID_FIELD"},
      {upload, "chunk.offset_bytes", "behind a gap", Int(4), "CHUNK_OUT_OF_RANGE"},
      {upload, "chunk.data", "empty", Text(""), "CHUNK_OUT_OF_RANGE"},
      {upload, "chunk.data", "beyond the total", Text(std::string(261, '\0')), "CHUNK_OUT_OF_RANGE"},
      {upload, "chunk.data", "above the limit", Text(std::string((4 << 20) + 1, '\0')), "LIMIT_EXCEEDED"},
      {upload, "chunk.data", "too few in all", Text(std::string(8, '\0')), "PROTOCOL_VIOLATION", "chunk"},
      {"LoadWeights", "path", "empty", Text(""), "MISSING_FIELD"},
      {"LoadWeights", "path", "absolute", Text("/etc/passwd"), "INVALID_FIELD"},
      {"LoadWeights", "path", "out of the root", Text("a/../../b"), "INVALID_FIELD"},
      {"LoadWeights", "path", "with a zero byte", Text(std::string("a\0b", 3)), "INVALID_FIELD"},
      {"LoadWeights", "path", "long", Text(std::string(1025, 'p')), "INVALID_FIELD"},
      {"LoadWeights", "path", "nothing there", Text("nowhere.safetensors"), "WEIGHTS_NOT_FOUND", ""},
      {"LoadWeights", "weight_tensor", "long", Text(std::string(1025, 'p')), "INVALID_FIELD"},
      {"LoadWeights", "weight_tensor", "unknown", Text("no.such.tensor"), "WEIGHTS_NOT_FOUND", ""},
      {"LoadWeights", "bias_tensor", "long", Text(std::string(1025, 'p')), "INVALID_FIELD"},
      {"LoadWeights", "bias_tensor", "unknown", Text("no.such.tensor"), "WEIGHTS_NOT_FOUND", ""},
      {"DownloadWeights", "data_type", "INT32", Int(v1::DATA_TYPE_INT32), "DATA_TYPE_MISMATCH"},
      {"DownloadWeights", "data_type", "neither fp32 nor the storage type", Int(v1::DATA_TYPE_BFLOAT16), "DATA_TYPE_MISMATCH"},
      {"DownloadWeights", "offset_bytes", "negative", Int(-4), "INVALID_FIELD"},
      {"DownloadWeights", "offset_bytes", "beyond the end", Int(264), "INVALID_FIELD"},
      {"DownloadWeights", "offset_bytes", "within an element", Int(6), "INVALID_FIELD"},
      {"DownloadWeights", "expected_weight_version", "negative", Int(-1), "INVALID_FIELD"},
      {"DownloadWeights", "expected_weight_version", "another", Int(99), "WEIGHT_VERSION_MISMATCH", ""},
  };
  AddNameRows(upload, "header.name", true, &rows);
  AddEpochRows(upload, "header.epoch", true, &rows);
  AddTensorKindRows(upload, "header.tensor", &rows);
  AddNameRows("LoadWeights", "name", true, &rows);
  AddEpochRows("LoadWeights", "epoch", true, &rows);
  AddNameRows("DownloadWeights", "name", true, &rows);
  AddEpochRows("DownloadWeights", "epoch", false, &rows);
  AddTensorKindRows("DownloadWeights", "tensor", &rows);
  return rows;
}

std::vector<BadValue> StepRows() {
  std::vector<BadValue> rows = {
      {"SealStep", "expected", "unset", Clear(), "MISSING_FIELD"},
      {"SealStep", "expected", "empty", Make(), "MISSING_FIELD", kThePath, Set("expected", Clear())},
      {"ApplyOptimizerStep", "expected", "empty", Make(), "MISSING_FIELD", kThePath, Set("expected", Clear())},
      {"ApplyOptimizerStep", "expected", "unset though the step is open", Clear(), "MISSING_FIELD"},
      {"ApplyOptimizerStep", "learning_rate", "unset", Clear(), "MISSING_FIELD"},
      {"ApplyOptimizerStep", "momentum", "of a head with AdamW", Real(0.9), "INVALID_COMBINATION"},
      {"DownloadGradient", "offset_bytes", "negative", Int(-4), "INVALID_FIELD"},
      {"DownloadGradient", "offset_bytes", "beyond the end", Int(264), "INVALID_FIELD"},
      {"DownloadGradient", "offset_bytes", "within an element", Int(6), "INVALID_FIELD"},
  };
  AddHeadStepRows("GetStep", "head", true, false, &rows);
  for (const char* rpc : {"SealStep", "ApplyOptimizerStep", "DiscardGradient", "DownloadGradient", "GetGradientNorm"}) {
    AddHeadStepRows(rpc, "head", true, true, &rows);
  }
  AddExpectedRows("SealStep", &rows);
  AddExpectedRows("ApplyOptimizerStep", &rows);
  AddTensorKindRows("DownloadGradient", "tensor", &rows);
  AddNumberRows("DownloadGradient", "gradient_factor", kBeyondFloat32, {}, &rows);
  AddNumberRows("GetGradientNorm", "gradient_factor", kBeyondFloat32, {}, &rows);
  const std::string apply = "ApplyOptimizerStep";
  AddNumberRows(apply, "learning_rate", {-1e-9, 4e38}, {}, &rows);
  AddNumberRows(apply, "gradient_factor", kBeyondFloat32, {}, &rows);
  for (const double wrong : {std::nan(""), -1.0, -HUGE_VAL}) {  // 0 and infinity: no clipping
    rows.push_back({apply, "max_grad_norm", std::to_string(wrong), Real(wrong), "INVALID_FIELD"});
  }
  AddNumberRows(apply, "other_grad_norm_squared", {-1e-9}, {}, &rows);
  AddNumberRows(apply, "weight_decay", {-1e-9, 4e38}, {}, &rows);
  AddNumberRows(apply, "beta1", {-0.1, 1}, {}, &rows);
  AddNumberRows(apply, "beta2", {-0.1, 1}, {}, &rows);
  AddNumberRows(apply, "epsilon", {-1e-9}, {}, &rows);
  AddNumberRows(apply, "momentum", {-0.1, 1}, {}, &rows);
  return rows;
}

std::vector<BadValue> OtherRows() {
  std::vector<BadValue> rows = {
      {"ListHeads", "parent", "malformed", Text("tenants/UPPER"), "INVALID_NAME"},
      {"ListHeads", "page_size", "negative", Int(-1), "INVALID_FIELD"},
      {"ListHeads", "page_size", "above the maximum", Int(1001), "INVALID_FIELD"},
      {"ListHeads", "page_token", "made up", Text("second page"), "INVALID_FIELD"},
      {"ListCheckpoints", "page_size", "negative", Int(-1), "INVALID_FIELD"},
      {"ListCheckpoints", "page_size", "above the maximum", Int(1001), "INVALID_FIELD"},
      {"ListCheckpoints", "page_token", "made up", Text("second page"), "INVALID_FIELD"},
      {"ListCheckpoints", "page_token", "of no checkpoint", Text("nowhere"), "INVALID_FIELD"},
      {"TakeHead", "name", "of a frozen head", Text(kTeacherName), "HEAD_NOT_TRAINABLE", ""},
      {"DeleteHead", "force", "false for a head in use", Int(0), "HEAD_IN_USE", ""},
      {"SaveCheckpoint", "checkpoint", "empty", Text(""), "MISSING_FIELD"},
      {"SaveCheckpoint", "checkpoint", "out of the directory", Text("../x"), "INVALID_NAME"},
      {"SaveCheckpoint", "checkpoint", "long", Text(std::string(129, 'c')), "INVALID_NAME"},
      {"SaveCheckpoint", "overwrite", "false for one that exists", Int(0), "CHECKPOINT_ALREADY_EXISTS", "",
       Set("checkpoint", Text("there"))},
      {"RestoreCheckpoint", "checkpoint", "empty", Text(""), "MISSING_FIELD"},
      {"RestoreCheckpoint", "checkpoint", "out of the directory", Text("a/b"), "INVALID_NAME"},
      {"RestoreCheckpoint", "checkpoint", "unknown", Text("nowhere"), "CHECKPOINT_NOT_FOUND", ""},
      {"DeleteCheckpoint", "checkpoint", "empty", Text(""), "MISSING_FIELD"},
      {"DeleteCheckpoint", "checkpoint", "out of the directory", Text("a/b"), "INVALID_NAME"},
  };
  for (const char* rpc : {"GetHead", "TakeHead", "DeleteHead", "SaveCheckpoint", "RestoreCheckpoint"})
    AddNameRows(rpc, "name", true, &rows);
  AddNameRows("ListCheckpoints", "name", false, &rows);
  AddNameRows("DeleteCheckpoint", "name", false, &rows);
  AddEpochRows("DeleteHead", "epoch", false, &rows);
  AddEpochRows("TakeHead", "epoch", false, &rows);
  const std::string epoch(16, 'x');
  rows.push_back({"TakeHead", "recovers_epochs", "an empty one", Texts({epoch, ""}), "MISSING_FIELD", "recovers_epochs[1]"});
  rows.push_back({"TakeHead", "recovers_epochs", "a short one", Texts({"abc"}), "INVALID_FIELD", "recovers_epochs[0]"});
  rows.push_back({"TakeHead", "recovers_epochs", "too many", Texts(std::vector<std::string>(17, epoch)), "INVALID_FIELD"});
  AddEpochRows("SaveCheckpoint", "epoch", true, &rows);
  AddEpochRows("RestoreCheckpoint", "epoch", true, &rows);
  return rows;
}

std::vector<BadValue> AddGradientRows() {
  const std::string rpc = "AddGradient";
  std::vector<BadValue> rows = {
      {rpc, "header", "unset", Clear(), "MISSING_FIELD", "message"},
      {rpc, "header.micro_batch", "unset", Clear(), "MISSING_FIELD"},
      {rpc, "header.micro_batch", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.micro_batch", "of other rows", Int(0), "MICRO_BATCH_CONFLICT", ""},
      {rpc, "header.attempt", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.row_start", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "header.row_start", "beyond the weight", Int(13), "INVALID_FIELD"},
      {rpc, "header.row_count", "zero", Int(0), "INVALID_FIELD"},
      {rpc, "header.row_count", "beyond the weight", Int(14), "INVALID_FIELD"},
      {rpc, "header.row_count", "far beyond", Int(kFar), "INVALID_FIELD", kThePath, Set("header.row_start", Int(1))},
      {rpc, "header.row_count", "more than the bytes'", Int(2), "PROTOCOL_VIOLATION", "chunk"},
      {rpc, "chunk", "before the header", Make(), "PROTOCOL_VIOLATION", "header"},
      {rpc, "chunk.offset_bytes", "negative", Int(-1), "INVALID_FIELD"},
      {rpc, "chunk.offset_bytes", "behind a gap", Int(4), "CHUNK_OUT_OF_RANGE"},
      {rpc, "chunk.data", "empty", Text(""), "CHUNK_OUT_OF_RANGE"},
      {rpc, "chunk.data", "beyond the total", Text(std::string(21, '\0')), "CHUNK_OUT_OF_RANGE"},
      {rpc, "chunk.data", "above the limit", Text(std::string((4 << 20) + 1, '\0')), "LIMIT_EXCEEDED"},
      {rpc, "chunk.data", "too few in all", Text(std::string(8, '\0')), "PROTOCOL_VIOLATION", "chunk"},
  };
  AddHeadStepRows(rpc, "header.head", true, true, &rows);
  AddNumberRows(rpc, "header.factor", kBeyondFloat32, {}, &rows);
  AddSessionRows(rpc, "header.session_id", false, true, &rows);
  return rows;
}

}  // namespace

std::vector<BadValue> HeadServiceBadValues() {
  std::vector<BadValue> rows = CreateRows();
  for (const auto& more : {WeightRows(), StepRows(), OtherRows(), AddGradientRows()})
    rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

std::vector<BadValue> SessionServiceBadValues() {
  std::vector<BadValue> rows = {
      {"OpenSession", "client_name", "long", Text(std::string(129, 'n')), "INVALID_FIELD"},
      {"OpenSession", "lease.seconds", "negative", Int(-1), "INVALID_FIELD"},
      {"OpenSession", "lease.seconds", "beyond a Duration's range", Int(315576000001), "INVALID_FIELD"},
      {"OpenSession", "lease.nanos", "negative", Int(-1), "INVALID_FIELD"},
      {"OpenSession", "lease.nanos", "a second", Int(1000000000), "INVALID_FIELD"},
      {"OpenSession", "lease", "zero", Make(), "INVALID_FIELD"},
      {"UnregisterSharedMemory", "region_id", "empty", Text(""), "MISSING_FIELD"},
      {"UnregisterSharedMemory", "region_id", "unknown", Text("r"), "REGION_NOT_FOUND", ""},
  };
  AddSessionRows("KeepAlive", "session_id", true, true, &rows);
  AddSessionRows("CloseSession", "session_id", true, false, &rows);
  AddSessionRows("RegisterSharedMemory", "session_id", true, true, &rows);
  AddSessionRows("UnregisterSharedMemory", "session_id", true, true, &rows);
  const std::string rpc = "RegisterSharedMemory";
  rows.push_back({rpc, "descriptor_token", "no source", Clear(), "MISSING_FIELD", "source"});
  rows.push_back({rpc, "descriptor_token", "empty", Text(""), "MISSING_FIELD"});
  rows.push_back({rpc, "descriptor_token", "any, without a socket", Text("t"), "STORAGE_NOT_CONFIGURED", ""});
  rows.push_back({rpc, "shared_memory_name", "empty", Text(""), "INVALID_NAME"});
  rows.push_back({rpc, "shared_memory_name", "out of the folder", Text("../mem"), "INVALID_NAME"});
  rows.push_back({rpc, "shared_memory_name", "of somebody else's", Text("nccl-x"), "INVALID_NAME"});
  rows.push_back(
      {rpc, "shared_memory_name", "any, where names are not allowed", Text("headwater-x"), "STORAGE_NOT_CONFIGURED", ""});
  rows.push_back({rpc, "cuda_ipc_handle", "short", Text("abc"), "INVALID_FIELD"});
  rows.push_back({rpc, "cuda_ipc_handle", "any, without a device", Text(std::string(64, 'h')), "FEATURE_NOT_BUILT", ""});
  rows.push_back({rpc, "cuda_event_handle", "without memory", Text(std::string(64, 'e')), "INVALID_COMBINATION"});
  rows.push_back({rpc, "cuda_event_handle", "short", Text("abc"), "INVALID_FIELD", kThePath,
                  Set("cuda_ipc_handle", Text(std::string(64, 'h')))});
  rows.push_back({rpc, "size_bytes", "zero", Int(0), "INVALID_FIELD"});
  rows.push_back({rpc, "offset_bytes", "negative", Int(-1), "INVALID_FIELD"});
  rows.push_back({rpc, "offset_bytes", "wraps with the size", Int(kFar), "INVALID_FIELD"});
  return rows;
}

std::vector<HarmlessField> HarmlessFields() {
  const char* const optional_message = "an optional message; its fields have rows";
  const char* const behind_refusal = "the RPC is refused at its header, so a chunk is never looked at";
  const char* const any_boolean = "both booleans are legal";
  return {
      {"ComputeLoss", "header.terms.token_weights", optional_message},
      {"ComputeLoss", "header.terms.entropy_factors", optional_message},
      {"ComputeLoss", "header.terms.lse_factors", optional_message},
      {"ComputeLoss", "header.terms.cross_entropy.token_scaling", any_boolean},
      {"ComputeLoss", "header.terms.cross_entropy.class_weights", optional_message},
      {"ComputeLoss", "header.terms.jensen_shannon.hard_loss.class_weights", optional_message},
      {"TransferRows", "chunk.*", "looked at like those of the primary stream, once there is one: stripes_test.cc"},
      {"StreamTeacher", "chunk.*", behind_refusal},
      {"SealStep", "wait", any_boolean},
      {"CreateHead", "spec.transform", optional_message},
      {"CreateHead", "spec.has_bias", any_boolean},
      {"CreateHead", "validate_only", any_boolean},
  };
}

}  // namespace headwater::testing
