// Bad values of HeadService's and SessionService's requests, and the fields that have none.
#include <cmath>
#include <string>
#include <vector>

#include "headwater/v1/head_service.pb.h"
#include "tests/integration/support/bad_values.h"

namespace headwater::testing {
namespace {

const Edit kLongPath = Text(std::string(1025, 'p'));
const Edit kLargeChunk = Text(std::string((4 << 20) + 1, '\0'));
const Prepare kFrozen = {{"spec.trainable", Int(0)}};

// The `name` of a head; `looks_up`: it must exist.
void AddNameRows(const BadValues& rows, const std::string& name, bool looks_up) {
  rows.Add("MISSING_FIELD", {name}, {Text("")});
  rows.Add("INVALID_NAME", {name}, {Text("tenants/default/heads/.."), Text("tenants/default/heads/" + std::string(65, 'a'))});
  if (!looks_up) return;
  rows.Add("HEAD_NOT_FOUND", {name}, {Text("tenants/default/heads/nobody"), Text("tenants/other/heads/student")}, "");
}

void AddEpochRows(const BadValues& rows, const std::string& name, bool required) {
  if (required) rows.Add("MISSING_FIELD", {name}, {Clear()});
  rows.Add("INVALID_FIELD", {name}, {Text("abc")});
  rows.Add("EPOCH_FENCED", {name}, {kStaleEpoch}, "");
}

void AddTensorKindRows(const BadValues& rows, const std::string& name) {
  rows.Add("MISSING_FIELD", {name}, {Clear()});
  rows.Add("INVALID_FIELD", {name}, {Int(9)});
}

// Of 0 and 1, which are there.
void AddExpectedRows(const BadValues& rows) {
  rows.Add("MISSING_FIELD", {"expected"}, {Clear()});
  rows.At("", {{"expected", Clear()}}).Add("MISSING_FIELD", {"expected"}, {Make()});
  rows.Add("INVALID_FIELD", {"expected.count"}, {Int(-1)});
  rows.Add("LIMIT_EXCEEDED", {"expected.count"}, {Int((1 << 16) + 1)});
  rows.Add("MICRO_BATCH_MISSING", {"expected.count"}, {Int(9)}, "");
  rows.At("", {{"expected.ids.ids", Ints({0, 1, 2})}}).Add("MICRO_BATCH_MISSING", {"expected.ids"}, {Make()}, "");
  rows.Add("INVALID_FIELD", {"expected.ids.ids"}, {Ints({-4})}, "expected.ids.ids[0]");
  rows.Add("INVALID_FIELD", {"expected.ids.ids"}, {Ints({0, 1, 0})}, "expected.ids.ids[2]");
}

// The 260 bytes of an upload, or the 20 of a part of a gradient.
void AddByteChunkRows(const BadValues& rows, size_t bytes) {
  rows.Add("MISSING_FIELD", {"header"}, {Clear()}, "message");
  rows.Add("PROTOCOL_VIOLATION", {"chunk"}, {Make()}, "header");
  rows.Add("INVALID_FIELD", {"chunk.offset_bytes"}, {Int(-1)});
  rows.Add("CHUNK_OUT_OF_RANGE", {"chunk.offset_bytes"}, {Int(4)});
  rows.Add("CHUNK_OUT_OF_RANGE", {"chunk.data"}, {Text(""), Text(std::string(bytes + 1, '\0'))});
  rows.Add("LIMIT_EXCEEDED", {"chunk.data"}, {kLargeChunk});
  rows.Add("PROTOCOL_VIOLATION", {"chunk.data"}, {Text(std::string(8, '\0'))}, "chunk");
}

void AddCreateRows(const BadValues& rows) {
  const BadValues spec = rows.At("spec.");
  rows.Add("MISSING_FIELD", {"spec"}, {Clear()});
  spec.Add("INVALID_FIELD", {"vocab_size"}, {Int(0), Int(-5)});
  spec.Add("LIMIT_EXCEEDED", {"vocab_size"}, {Int((1 << 24) + 1), kFar});
  spec.At("", {{"spec.hidden_size", Int(1 << 16)}}).Add("MEMORY_BUDGET_EXCEEDED", {"vocab_size"}, {Int(1 << 24)}, "");
  spec.Add("INVALID_FIELD", {"hidden_size"}, {Int(0)});
  spec.Add("LIMIT_EXCEEDED", {"hidden_size"}, {Int((1 << 16) + 1)});
  spec.Add("MISSING_FIELD", {"data_type"}, {Clear()});
  spec.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32)});
  spec.Add("INVALID_FIELD", {"transform.logit_scale"}, {Real(0)});
  spec.Add("INVALID_FIELD", {"transform.valid_vocab_size"}, {Int(0), Int(14)});
  spec.Add("INVALID_COMBINATION", {"trainable"}, {Int(0)}, "spec.optimizer");
  spec.Add("MISSING_FIELD", {"optimizer"}, {Empty()}, "spec.optimizer.optimizer");
  spec.At("", kFrozen).Add("INVALID_COMBINATION", {"optimizer.adamw", "optimizer.sgd"}, {Make()}, "spec.optimizer");
  spec.Add("INVALID_COMBINATION", {"optimizer.sgd.nesterov"}, {Int(1)});  // without momentum, and with dampening
  spec.At("", {{"spec.optimizer.sgd.momentum", Real(0.9)}, {"spec.optimizer.sgd.dampening", Real(0.1)}})
      .Add("INVALID_COMBINATION", {"optimizer.sgd.nesterov"}, {Int(1)});
  spec.Add("INVALID_FIELD", {"staging_slots", "low_rank", "initial_step"}, {Int(-1)});
  spec.Add("LIMIT_EXCEEDED", {"staging_slots"}, {Int(65)});
  spec.At("", Join(kFrozen, {{"spec.optimizer", Clear()}})).Add("INVALID_COMBINATION", {"staging_slots"}, {Int(1)});
  spec.Add("FEATURE_NOT_BUILT", {"low_rank"}, {Int(8)});
  spec.Add("INVALID_FIELD", {"parallelism"}, {Int(99)});
  rows.Add("INVALID_FIELD", {"if_exists"}, {Int(9)});
  rows.At("", {{"name", Text(kHeadName)}}).Add("HEAD_SPEC_MISMATCH", {"if_exists"}, {Int(v1::IF_EXISTS_ATTACH_IF_SAME_SPEC)}, "");
  AddNameRows(rows, "name", false);
  rows.Add("HEAD_ALREADY_EXISTS", {"name"}, {Text(kHeadName)}, "");
  AddNumberRows(spec, {"transform.logit_scale"}, {});
  AddNumberRows(spec, {"transform.softcap"}, {0, -1});
  AddNumberRows(spec, {"optimizer.adamw.beta1", "optimizer.adamw.beta2", "optimizer.sgd.momentum"}, {-0.1, 1});
  AddNumberRows(spec, {"optimizer.adamw.epsilon"}, {-1e-9});
  AddNumberRows(spec, {"optimizer.adamw.weight_decay", "optimizer.sgd.weight_decay"}, {-1e-9, 4e38});
  AddNumberRows(spec, {"optimizer.sgd.dampening"}, {-0.1, 1.1});
}

void AddWeightRows(std::vector<BadValue>* table) {
  const BadValues upload(table, "UploadWeights");
  AddByteChunkRows(upload, 260);
  const BadValues header = upload.At("header.");
  header.Add("MISSING_FIELD", {"upload_id"}, {Text("")});
  header.Add("INVALID_FIELD", {"upload_id"}, {Text(std::string(65, 'u'))});
  header.Add("MISSING_FIELD", {"data_type"}, {Clear()});
  header.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32), Int(v1::DATA_TYPE_FLOAT16)});
  header.Add("INVALID_FIELD", {"total_bytes"}, {Int(0)});
  header.Add("DATA_LENGTH_MISMATCH", {"total_bytes"}, {Int(259), kFar});
  header.Add("INVALID_FIELD", {"checksum"}, {Text("abc")});
  header.Add("CHECKSUM_MISMATCH", {"checksum"}, {Text(std::string(16, 'c'))});
  header.Add("INVALID_FIELD", {"closes_step"}, {Int(-1)});
  header.Add("STEP_NOT_SEALED", {"closes_step"}, {Int(0)});
  header.Add("STEP_MISMATCH", {"closes_step"}, {Int(7)});
  AddNameRows(header, "name", true);
  AddEpochRows(header, "epoch", true);
  AddTensorKindRows(header, "tensor");
  const BadValues load(table, "LoadWeights");
  load.Add("MISSING_FIELD", {"path"}, {Text("")});
  load.Add("INVALID_FIELD", {"path"}, {Text("/etc/passwd"), Text("a/../../b"), Text(std::string("a\0b", 3))});
  load.Add("INVALID_FIELD", {"path", "weight_tensor", "bias_tensor"}, {kLongPath});
  load.Add("WEIGHTS_NOT_FOUND", {"path"}, {Text("nowhere.safetensors")}, "");
  load.Add("WEIGHTS_NOT_FOUND", {"weight_tensor", "bias_tensor"}, {Text("no.such.tensor")}, "");
  AddNameRows(load, "name", true);
  AddEpochRows(load, "epoch", true);
  const BadValues download(table, "DownloadWeights");
  download.Add("DATA_TYPE_MISMATCH", {"data_type"}, {Int(v1::DATA_TYPE_INT32), Int(v1::DATA_TYPE_BFLOAT16)});
  download.Add("INVALID_FIELD", {"offset_bytes"}, {Int(-4), Int(264), Int(6)});
  download.Add("INVALID_FIELD", {"expected_weight_version"}, {Int(-1)});
  download.Add("WEIGHT_VERSION_MISMATCH", {"expected_weight_version"}, {Int(99)}, "");
  AddNameRows(download, "name", true);
  AddEpochRows(download, "epoch", false);
  AddTensorKindRows(download, "tensor");
}

void AddStepRows(std::vector<BadValue>* table) {
  AddHeadStepRows({table, "GetStep"}, "head", false);
  for (const char* rpc : {"SealStep", "ApplyOptimizerStep", "DiscardGradient", "DownloadGradient", "GetGradientNorm"}) {
    AddHeadStepRows({table, rpc}, "head", true);
  }
  AddExpectedRows({table, "SealStep"});
  const BadValues apply(table, "ApplyOptimizerStep");
  AddExpectedRows(apply);
  apply.Add("MISSING_FIELD", {"learning_rate"}, {Clear()});
  apply.Add("INVALID_COMBINATION", {"momentum"}, {Real(0.9)});                                     // of a head with AdamW
  apply.Add("INVALID_FIELD", {"max_grad_norm"}, {Real(std::nan("")), Real(-1), Real(-HUGE_VAL)});  // 0 and infinity: no clipping
  AddNumberRows(apply, {"learning_rate", "weight_decay"}, {-1e-9, 4e38});
  AddNumberRows(apply, {"gradient_factor"}, kBeyondFloat32);
  AddNumberRows(apply, {"other_grad_norm_squared", "epsilon"}, {-1e-9});
  AddNumberRows(apply, {"beta1", "beta2", "momentum"}, {-0.1, 1});
  const BadValues download(table, "DownloadGradient");
  download.Add("INVALID_FIELD", {"offset_bytes"}, {Int(-4), Int(264), Int(6)});
  AddTensorKindRows(download, "tensor");
  AddNumberRows(download, {"gradient_factor"}, kBeyondFloat32);
  AddNumberRows({table, "GetGradientNorm"}, {"gradient_factor"}, kBeyondFloat32);
}

void AddOtherRows(std::vector<BadValue>* table) {
  const BadValues heads(table, "ListHeads"), checkpoints(table, "ListCheckpoints");
  heads.Add("INVALID_NAME", {"parent"}, {Text("tenants/UPPER")});
  for (const BadValues& list : {heads, checkpoints}) {
    list.Add("INVALID_FIELD", {"page_size"}, {Int(-1), Int(1001)});
    list.Add("INVALID_FIELD", {"page_token"}, {Text("second page")});
  }
  checkpoints.Add("INVALID_FIELD", {"page_token"}, {Text("nowhere")});
  for (const char* rpc : {"GetHead", "TakeHead", "DeleteHead", "SaveCheckpoint", "RestoreCheckpoint"}) {
    AddNameRows({table, rpc}, "name", true);
  }
  for (const char* rpc : {"ListCheckpoints", "DeleteCheckpoint"}) AddNameRows({table, rpc}, "name", false);
  for (const char* rpc : {"DeleteHead", "TakeHead"}) AddEpochRows({table, rpc}, "epoch", false);
  for (const char* rpc : {"SaveCheckpoint", "RestoreCheckpoint"}) AddEpochRows({table, rpc}, "epoch", true);
  const BadValues take(table, "TakeHead");
  take.Add("HEAD_NOT_TRAINABLE", {"name"}, {Text(kTeacherName)}, "");
  const std::string epoch(16, 'x');
  take.Add("MISSING_FIELD", {"recovers_epochs"}, {Texts({epoch, ""})}, "recovers_epochs[1]");
  take.Add("INVALID_FIELD", {"recovers_epochs"}, {Texts({"abc"})}, "recovers_epochs[0]");
  take.Add("INVALID_FIELD", {"recovers_epochs"}, {Texts(std::vector<std::string>(17, epoch))});
  BadValues(table, "DeleteHead").Add("HEAD_IN_USE", {"force"}, {Int(0)}, "");
  const BadValues save(table, "SaveCheckpoint"), restore(table, "RestoreCheckpoint"), remove(table, "DeleteCheckpoint");
  for (const BadValues& rows : {save, restore, remove}) {
    rows.Add("MISSING_FIELD", {"checkpoint"}, {Text("")});
    rows.Add("INVALID_NAME", {"checkpoint"}, {Text("../x"), Text("a/b"), Text(std::string(129, 'c'))});
  }
  save.At("", {{"checkpoint", Text("there")}}).Add("CHECKPOINT_ALREADY_EXISTS", {"overwrite"}, {Int(0)}, "");
  restore.Add("CHECKPOINT_NOT_FOUND", {"checkpoint"}, {Text("nowhere")}, "");
}

void AddGradientRows(const BadValues& rows) {
  AddByteChunkRows(rows, 20);
  const BadValues header = rows.At("header.");
  header.Add("MISSING_FIELD", {"micro_batch"}, {Clear()});
  header.Add("INVALID_FIELD", {"micro_batch", "attempt", "row_start"}, {Int(-1)});
  header.Add("MICRO_BATCH_CONFLICT", {"micro_batch"}, {Int(0)}, "");
  header.Add("INVALID_FIELD", {"row_start"}, {Int(13)});
  header.Add("INVALID_FIELD", {"row_count"}, {Int(0), Int(14)});
  header.At("", {{"header.row_start", Int(1)}}).Add("INVALID_FIELD", {"row_count"}, {kFar});
  header.Add("PROTOCOL_VIOLATION", {"row_count"}, {Int(2)}, "chunk");
  AddHeadStepRows(header, "head", true);
  AddNumberRows(header, {"factor"}, kBeyondFloat32);
  AddSessionRows(header, "session_id", false, true);
}

}  // namespace

std::vector<BadValue> HeadServiceBadValues() {
  std::vector<BadValue> table;
  AddCreateRows({&table, "CreateHead"});
  AddWeightRows(&table);
  AddStepRows(&table);
  AddOtherRows(&table);
  AddGradientRows({&table, "AddGradient"});
  return table;
}

std::vector<BadValue> SessionServiceBadValues() {
  std::vector<BadValue> table;
  const BadValues open(&table, "OpenSession");
  open.Add("INVALID_FIELD", {"client_name"}, {Text(std::string(129, 'n'))});
  open.Add("INVALID_FIELD", {"lease.seconds"}, {Int(-1), Int(315576000001)});  // beyond a Duration's range
  open.Add("INVALID_FIELD", {"lease.nanos"}, {Int(-1), Int(1000000000)});
  open.Add("INVALID_FIELD", {"lease"}, {Make()});  // 0
  const BadValues unregister(&table, "UnregisterSharedMemory");
  unregister.Add("MISSING_FIELD", {"region_id"}, {Text("")});
  unregister.Add("REGION_NOT_FOUND", {"region_id"}, {Text("r")}, "");
  for (const char* rpc : {"KeepAlive", "CloseSession", "RegisterSharedMemory", "UnregisterSharedMemory"}) {
    AddSessionRows({&table, rpc}, "session_id", true, std::string(rpc) != "CloseSession");
  }
  const BadValues rows(&table, "RegisterSharedMemory");
  const Edit handle = Text(std::string(64, 'h'));
  rows.Add("MISSING_FIELD", {"descriptor_token"}, {Clear()}, "source");
  rows.Add("MISSING_FIELD", {"descriptor_token"}, {Text("")});
  rows.Add("STORAGE_NOT_CONFIGURED", {"descriptor_token"}, {Text("t")}, "");
  rows.Add("INVALID_NAME", {"shared_memory_name"}, {Text(""), Text("../mem"), Text("nccl-x")});
  rows.Add("STORAGE_NOT_CONFIGURED", {"shared_memory_name"}, {Text("headwater-x")}, "");
  rows.Add("INVALID_FIELD", {"cuda_ipc_handle"}, {Text("abc")});
  rows.Add("FEATURE_NOT_BUILT", {"cuda_ipc_handle"}, {handle}, "");
  rows.Add("INVALID_COMBINATION", {"cuda_event_handle"}, {handle});  // without memory
  rows.At("", {{"cuda_ipc_handle", handle}}).Add("INVALID_FIELD", {"cuda_event_handle"}, {Text("abc")});
  rows.Add("INVALID_FIELD", {"size_bytes"}, {Int(0)});
  rows.Add("INVALID_FIELD", {"offset_bytes"}, {Int(-1), kFar});
  return table;
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
