// Bad input for every field of every RPC. The fields come from the descriptors: one that has neither a row in the table of bad
// values nor a reason why it cannot be bad fails the test. Each bad value is sent and must be refused with its canonical code and
// reason, naming the field, what was expected and what came; and afterwards everything that a client can see is bitwise as before.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/integration/support/bad_values.h"
#include "tests/integration/support/raw_call.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using google::protobuf::Message;

std::vector<const google::protobuf::MethodDescriptor*> Methods() {
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  for (const char* name : {"headwater.v1.LossService", "headwater.v1.HeadService", "headwater.v1.SessionService"}) {
    const auto* service = pool->FindServiceByName(name);
    for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i));
  }
  return methods;
}

const google::protobuf::MethodDescriptor* MethodOf(const std::string& rpc) {
  for (const auto* method : Methods()) {
    if (method->name() == rpc) return method;
  }
  throw std::logic_error("there is no " + rpc);
}

TEST(BadInputTable, HasARowForEveryField) {
  std::map<std::string, std::set<std::string>> covered;
  for (const BadValue& row : AllBadValues()) covered[row.rpc].insert(row.path);
  std::map<std::string, std::set<std::string>> known;
  for (const auto* method : Methods()) {
    for (const std::string& path : FieldPaths(*method->input_type())) {
      known[method->name()].insert(path);
      bool harmless = false;
      for (const HarmlessField& field : HarmlessFields()) {
        if (field.rpc != method->name()) continue;
        const bool below = absl::EndsWith(field.path, ".*") && absl::StartsWith(path, field.path.substr(0, field.path.size() - 1));
        harmless = harmless || below || field.path == path;
      }
      const bool has_row = covered[method->name()].count(path) > 0;
      EXPECT_TRUE(has_row || harmless) << method->name() << ": " << path << " has no row";
      EXPECT_FALSE(has_row && harmless) << method->name() << ": " << path << " has rows and a reason to have none";
    }
  }
  for (const auto& [rpc, paths] : covered) {
    for (const std::string& path : paths) EXPECT_TRUE(known[rpc].count(path) > 0) << rpc << ": there is no field " << path;
  }
}

class BadInput : public ::testing::Test {
 protected:
  ServerSetup MakeSetup() {
    ServerSetup setup;
    setup.options.limits.max_stripe_wait = absl::Milliseconds(20);
    setup.options.limits.max_join_wait = absl::Milliseconds(20);
    setup.options.load_root = root_.path();
    setup.options.checkpoint_directory = absl::StrCat(root_.path(), "/checkpoints");
    return setup;
  }
  BadInput() {
    v1::HeadSpec spec = SmallSpec();
    spec.set_has_bias(true);
    spec.set_staging_slots(2);
    head_ = server_.MakeHead("student", spec);
    teacher_ = server_.MakeHead("teacher", FrozenSpec(13, 4));
    // One committed micro-batch, one that waits for its decision, one checkpoint, one file to load.
    v1::MicroBatchHeader header = CrossEntropyHeader(head_, 0, 0, {1, 2, 3});
    server_.MustCompute(header, rows_);
    header.set_micro_batch(1);
    header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
    server_.MustCompute(header, rows_);
    Require(server_.Save(head_, "there"), "SaveCheckpoint");
    const std::string json = R"({"lm_head.weight":{"dtype":"F32","shape":[13,5],"data_offsets":[0,260]},)"
                             R"("lm_head.bias":{"dtype":"F32","shape":[13],"data_offsets":[260,312]}})";
    const uint64_t length = json.size();
    std::ofstream file(absl::StrCat(root_.path(), "/w.safetensors"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << json << std::string(312, '\1');
  }

  std::string Snapshot() { return absl::StrCat(server_.Snapshot(head_), "#", server_.Snapshot(teacher_), "#", HeadNames()); }
  std::string HeadNames() {
    const v1::ListHeadsResponse response = server_.Must(&Heads::ListHeads, {});
    std::string names;
    for (const v1::Head& head : response.heads()) absl::StrAppend(&names, head.name(), ",");
    return names;
  }

  // A request that the server accepts, or would if the RPC were built.
  std::unique_ptr<Message> ValidRequest(const std::string& rpc, bool chunk);
  grpc::Status Send(const BadValue& row, const Message& request, bool chunk);
  grpc::Status SendAll(const std::string& rpc, const std::vector<std::string>& messages);

  const TemporaryDirectory root_;
  WireServer server_{MakeSetup()};
  const std::shared_ptr<grpc::Channel> channel_ = server_.NewChannel();
  const std::string rows_ = Rows(3);
  TestHead head_;
  TestHead teacher_;
  int upload_count_ = 0;
  const std::string session_ = server_.OpenSession(600000);
};

// In text format. $AT is the student's step 0, $NAME and $EPOCH are the student's, $ROWS are three rows, $WEIGHT is a weight.
const std::map<std::string, std::string> kValidRequests = {
    {"ComputeLoss chunk", "chunk { role: CHUNK_ROLE_HIDDEN row_count: 3 data: '$ROWS' }"},
    {"CommitMicroBatch", "heads { $AT } micro_batch: 1"},
    {"DiscardMicroBatch", "heads { $AT } micro_batch: 1"},
    {"TransferRows", "header { transfer_id: 'iiiiiiiiiiiiiiii' stripe_index: 1 }"},
    {"StreamTeacher",
     "header { tenant: 'tenants/default' join_key: 'key' total_row_count: 9 data_type: DATA_TYPE_FLOAT32 hidden_size: 4 "
     "row_indices { data_type: DATA_TYPE_INT32 shape: 2 data: '\\0\\0\\0\\0\\10\\0\\0\\0' } }"},
    {"AddGradient", "header { head { $AT } micro_batch: 6 row_count: 1 }"},
    {"AddGradient chunk", "chunk { data: '01234567890123456789' }"},
    {"CreateHead",
     "name: 'tenants/default/heads/new' "
     "spec { vocab_size: 13 hidden_size: 5 data_type: DATA_TYPE_FLOAT32 trainable: true optimizer { adamw {} } }"},
    {"UploadWeights",
     "header { name: '$NAME' epoch: '$EPOCH' upload_id: 'upload-$COUNT' tensor: HEAD_TENSOR_WEIGHT data_type: DATA_TYPE_FLOAT32 "
     "total_bytes: 260 }"},
    {"UploadWeights chunk", "chunk { data: '$WEIGHT' }"},
    {"GetStep", "head { $AT }"},
    {"SealStep", "head { $AT } expected { count: 2 }"},
    {"ApplyOptimizerStep", "head { $AT } expected { count: 2 } learning_rate: 0.1"},
    {"DiscardGradient", "head { $AT }"},
    {"DownloadGradient", "head { $AT } tensor: HEAD_TENSOR_WEIGHT"},
    {"GetGradientNorm", "head { $AT }"},
    {"GetHead", "name: '$NAME'"},
    {"TakeHead", "name: '$NAME'"},
    {"DeleteHead", "name: '$NAME' force: true"},
    {"LoadWeights", "name: '$NAME' epoch: '$EPOCH' path: 'w.safetensors'"},
    {"DownloadWeights", "name: '$NAME' tensor: HEAD_TENSOR_WEIGHT"},
    {"SaveCheckpoint", "name: '$NAME' epoch: '$EPOCH' checkpoint: 'new'"},
    {"RestoreCheckpoint", "name: '$NAME' epoch: '$EPOCH' checkpoint: 'there'"},
    {"ListCheckpoints", "name: '$NAME'"},
    {"DeleteCheckpoint", "name: '$NAME' checkpoint: 'new'"},
    {"KeepAlive", "session_id: '$SESSION'"},
    {"CloseSession", "session_id: '$SESSION'"},
    {"RegisterSharedMemory", "session_id: '$SESSION' descriptor_token: 'token' size_bytes: 4096"},
    {"UnregisterSharedMemory", "session_id: '$SESSION' region_id: 'region'"},
    {"OpenSession", ""},
    {"ListHeads", ""},
    {"GetServerInfo", ""},
};

std::unique_ptr<Message> BadInput::ValidRequest(const std::string& rpc, bool chunk) {
  std::unique_ptr<Message> request(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(MethodOf(rpc)->input_type())->New());
  if (rpc == "ComputeLoss" && !chunk) {
    *static_cast<v1::ComputeLossRequest*>(request.get())->mutable_header() = CrossEntropyHeader(head_, 0, 5, {1, 2, 3});
  } else {
    std::string text = kValidRequests.at(chunk ? rpc + " chunk" : rpc);
    text = absl::StrReplaceAll(text, {{"$AT", "head: '$NAME' head_epoch: '$EPOCH' step: 0"}});
    text = absl::StrReplaceAll(text, {{"$NAME", head_.name()},
                                      {"$EPOCH", absl::CEscape(head_.head.epoch())},
                                      {"$ROWS", absl::CEscape(rows_)},
                                      {"$WEIGHT", absl::CEscape(std::string(260, '\1'))},
                                      {"$SESSION", absl::CEscape(session_)},
                                      {"$COUNT", absl::StrCat(++upload_count_)}});
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, request.get())) << text;
  }
  return request;
}

grpc::Status BadInput::Send(const BadValue& row, const Message& request, bool chunk) {
  std::vector<std::string> messages = {request.SerializeAsString()};
  const bool has_rows = row.rpc == "ComputeLoss" || row.rpc == "UploadWeights" || row.rpc == "AddGradient";
  if (has_rows && row.path != "chunk") {
    messages.insert(chunk ? messages.begin() : messages.end(), ValidRequest(row.rpc, !chunk)->SerializeAsString());
  }
  return SendAll(row.rpc, messages);
}

grpc::Status BadInput::SendAll(const std::string& rpc, const std::vector<std::string>& messages) {
  return CallRaw(channel_, absl::StrCat("/", MethodOf(rpc)->service()->full_name(), "/", rpc), messages).status;
}

TEST_F(BadInput, IsRefusedAndChangesNothing) {
  const std::string before = Snapshot();
  for (const BadValue& row : AllBadValues()) {
    SCOPED_TRACE(absl::StrCat(row.rpc, ": ", row.path, ": ", row.edit.what));
    const bool chunk = absl::StartsWith(row.path, "chunk") && row.rpc != "TransferRows" && row.rpc != "StreamTeacher";
    const auto request = ValidRequest(row.rpc, chunk);
    for (const auto& [path, edit] : row.prepare) Apply(request.get(), path, edit);
    Apply(request.get(), row.path, row.edit);
    const WireError error = ExpectError(Send(row, *request, chunk), row.reason);
    if (!row.field.empty()) {
      std::string field = row.field == kThePath ? row.path : row.field;
      if (row.field == kThePath) field = absl::StrReplaceAll(field, {{"terms.", "terms[0]."}, {"heads.", "heads[0]."}});
      EXPECT_EQ(error.at("field"), field) << error.message;
      if (error.code == grpc::StatusCode::INVALID_ARGUMENT) {
        EXPECT_THAT(error.message, ::testing::HasSubstr(field));
      }
      if (row.reason == "FEATURE_NOT_BUILT") {
        EXPECT_FALSE(error.at("feature").empty());
      } else {
        EXPECT_FALSE(error.at("expected").empty()) << error.message;
        EXPECT_FALSE(error.at("actual").empty()) << error.message;
      }
    }
    ASSERT_EQ(Snapshot(), before);
  }
}

TEST_F(BadInput, TheValidRequestsAreAccepted) {
  // Otherwise a row could be refused for another reason than the one it is about.
  for (const char* rpc :
       {"ComputeLoss", "CommitMicroBatch", "CreateHead", "GetHead", "ListHeads", "GetStep", "GetGradientNorm", "DownloadGradient",
        "DownloadWeights", "SaveCheckpoint", "ListCheckpoints", "DeleteCheckpoint", "AddGradient", "OpenSession"}) {
    const BadValue nothing = {rpc, "", {}, ""};
    EXPECT_EQ(ReasonOf(Send(nothing, *ValidRequest(rpc, false), false)), "OK") << rpc;
  }
  Require(server_.Seal(head_, {.ids = {0, 1, 5, 6}}), "SealStep");
  for (const char* rpc : {"ApplyOptimizerStep", "UploadWeights"}) {
    auto request = ValidRequest(rpc, false);
    if (std::string(rpc) == "ApplyOptimizerStep") Apply(request.get(), "expected", Clear());
    EXPECT_EQ(ReasonOf(Send({rpc, "", {}, ""}, *request, false)), "OK") << rpc;
  }
}

TEST_F(BadInput, OfTheStreamsOrderIsRefused) {
  const std::string before = Snapshot();
  const auto send = [&](const std::vector<v1::ComputeLossRequest>& requests) {
    std::vector<std::string> messages;
    for (const v1::ComputeLossRequest& request : requests) messages.push_back(request.SerializeAsString());
    return SendAll("ComputeLoss", messages);
  };
  const auto header = static_cast<const v1::ComputeLossRequest&>(*ValidRequest("ComputeLoss", false));
  const auto rows = static_cast<const v1::ComputeLossRequest&>(*ValidRequest("ComputeLoss", true));
  v1::ComputeLossRequest first_row = rows;
  first_row.mutable_chunk()->set_row_count(1);
  first_row.mutable_chunk()->set_data(rows_.substr(0, 20));
  v1::ComputeLossRequest last_row = first_row;
  last_row.mutable_chunk()->set_row_start(2);
  ExpectError(send({}), "PROTOCOL_VIOLATION");
  ExpectError(send({header, header}), "PROTOCOL_VIOLATION");
  ExpectError(send({header, rows, rows}), "CHUNK_OUT_OF_RANGE");
  ExpectError(send({header, last_row, last_row}), "CHUNK_OUT_OF_RANGE");
  ExpectError(send({header, last_row, rows}), "CHUNK_OUT_OF_RANGE");
  ExpectError(send({header, last_row, first_row}), "PROTOCOL_VIOLATION",
              {{"expected", "3"}, {"actual", "2"}, {"firstMissingRow", "1"}});
  EXPECT_EQ(Snapshot(), before);
}

}  // namespace
}  // namespace headwater::testing
