#include "client/core/call/method_table.h"

#include <algorithm>
#include <vector>

#include "client/core/call/messages.h"
#include "google/protobuf/empty.pb.h"
#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "headwater/v1/session_service.pb.h"

namespace headwater::client::internal {
namespace {

using google::protobuf::Message;

// A row of the table, for messages that `when` accepts. The first one that fits is taken.
struct Row {
  bool (*when)(const Message& request);
  Method method;
};

bool Always(const Message&) { return true; }
bool HasEpoch(const Message& request) { return !GetText(request, "epoch").value_or("").empty(); }
bool ValidatesOnly(const Message& request) { return GetBool(request, "validate_only").value_or(false); }
bool Overwrites(const Message& request) { return GetBool(request, "overwrite").value_or(false); }
bool ClosesStep(const Message& request) { return GetInteger(request, "closes_step").has_value(); }

template <typename Request, typename Answer>
Method Make(const char* path, Repeat repeat) {
  Method method{};
  method.path = path;
  method.shape = Shape::kUnary;
  method.request = &Request::default_instance();
  method.answer = &Answer::default_instance();
  method.repeat = repeat;
  method.patient = true;
  return method;
}

Method Following(Method method, Record record = Record::kNone) {
  method.follows = true;
  method.record = record;
  method.settles = record == Record::kSeal || record == Record::kApply || record == Record::kClose || record == Record::kGradient ||
                   record == Record::kLoss;
  if (record == Record::kCommit || record == Record::kDiscard) method.session = InSession::kIfOpen;
  return method;
}

Method Settling(Method method) {
  method.settles = true;
  return method;
}

Method With(HeadNews news, Method method) {
  method.news = news;
  method.settles = news == HeadNews::kDeleted;
  return method;
}

Method As(Shape shape, Method method) {
  method.shape = shape;
  if (shape == Shape::kLoss) method.session = InSession::kExplicit;
  if (shape == Shape::kTeacher) method.session = InSession::kOwned;
  return method;
}

#define HEADS "/headwater.v1.HeadService/"
#define LOSS "/headwater.v1.LossService/"

const std::vector<Row>& Rows() {
  using enum Repeat;
  using enum Record;
  using enum HeadNews;
  static const auto* const rows = new std::vector<Row>{
      {ValidatesOnly, Make<v1::CreateHeadRequest, v1::CreateHeadResponse>(HEADS "CreateHead", kSafe)},
      // Only the first answer says that the head is new, and wants its weights.
      {Always, With(kDescribed, Make<v1::CreateHeadRequest, v1::CreateHeadResponse>(HEADS "CreateHead", kIfNothingWasDone))},
      {Always, With(kDescribed, Make<v1::GetHeadRequest, v1::Head>(HEADS "GetHead", kSafe))},
      {Always, Make<v1::ListHeadsRequest, v1::ListHeadsResponse>(HEADS "ListHeads", kSafe)},
      {Always, With(kDeleted, Make<v1::DeleteHeadRequest, v1::DeleteHeadResponse>(HEADS "DeleteHead", kIfNothingWasDone))},
      // A repeat of a conditional one would find the epoch that the first one has made.
      {HasEpoch, With(kReplaced, Make<v1::TakeHeadRequest, v1::Head>(HEADS "TakeHead", kIfNothingWasDone))},
      {Always, With(kReplaced, Make<v1::TakeHeadRequest, v1::Head>(HEADS "TakeHead", kSafe))},
      {ClosesStep, As(Shape::kUpload, Following(Make<v1::UploadWeightsHeader, v1::Head>(HEADS "UploadWeights", kSafe), kClose))},
      {Always, As(Shape::kUpload, With(kReplaced, Make<v1::UploadWeightsHeader, v1::Head>(HEADS "UploadWeights", kUntilSent)))},
      {Always, With(kReplaced, Make<v1::LoadWeightsRequest, v1::Head>(HEADS "LoadWeights", kIfNothingWasDone))},
      {Always, As(Shape::kDownload,
                  Following(Make<v1::DownloadWeightsRequest, v1::DownloadTensorHeader>(HEADS "DownloadWeights", kSafe)))},
      {Always, Settling(Following(Make<v1::GetStepRequest, v1::GetStepResponse>(HEADS "GetStep", kSafe)))},
      {Always, Following(Make<v1::SealStepRequest, v1::SealStepResponse>(HEADS "SealStep", kSafe), kSeal)},
      {Always, Following(Make<v1::ApplyOptimizerStepRequest, v1::ApplyOptimizerStepResponse>(HEADS "ApplyOptimizerStep", kSafe),
                         kApply)},
      {Always,
       Following(Make<v1::DiscardGradientRequest, v1::DiscardGradientResponse>(HEADS "DiscardGradient", kSafe), kClose)},
      {Always, As(Shape::kDownload,
                  Following(Make<v1::DownloadGradientRequest, v1::DownloadTensorHeader>(HEADS "DownloadGradient", kSafe)))},
      {Always, Following(Make<v1::GetGradientNormRequest, v1::GetGradientNormResponse>(HEADS "GetGradientNorm", kSafe))},
      {Always, As(Shape::kGradient,
                  Following(Make<v1::AddGradientHeader, v1::AddGradientResponse>(HEADS "AddGradient", kSafe), kGradient))},
      {Overwrites, Following(Make<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(HEADS "SaveCheckpoint", kSafe))},
      {Always, Following(Make<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>(HEADS "SaveCheckpoint", kIfNothingWasDone))},
      {Always, Make<v1::ListCheckpointsRequest, v1::ListCheckpointsResponse>(HEADS "ListCheckpoints", kSafe)},
      {Always, With(kReplaced, Make<v1::RestoreCheckpointRequest, v1::Head>(HEADS "RestoreCheckpoint", kIfNothingWasDone))},
      {Always, Make<v1::DeleteCheckpointRequest, v1::DeleteCheckpointResponse>(HEADS "DeleteCheckpoint", kSafe)},
      {Always, As(Shape::kLoss, Following(Make<v1::MicroBatchHeader, v1::MicroBatchSummary>(LOSS "ComputeLoss", kSafe), kLoss))},
      // A stream whose answer was cut off had worked if its rows are there.
      {Always, As(Shape::kTeacher, Make<v1::StreamTeacherHeader, v1::StreamTeacherResponse>(LOSS "StreamTeacher", kSafe))},
      {Always,
       Following(Make<v1::CommitMicroBatchRequest, v1::CommitMicroBatchResponse>(LOSS "CommitMicroBatch", kSafe), kCommit)},
      {Always, Following(Make<v1::DiscardMicroBatchRequest, v1::DiscardMicroBatchResponse>(LOSS "DiscardMicroBatch", kSafe), kDiscard)},
      {Always, Make<v1::GetServerInfoRequest, v1::ServerInfo>("/headwater.v1.SessionService/GetServerInfo", kSafe)},
      // Methods of grpc.health.v1, whose messages the core need not read.
      {Always,
       [] {
         Method method = Make<google::protobuf::Empty, google::protobuf::Empty>("/grpc.health.v1.Health/Check", kSafe);
         method.patient = false;
         return method;
       }()},
  };
  return *rows;
}

#undef HEADS
#undef LOSS

}  // namespace

const Method* FindMethod(const std::string& path) {
  for (const Row& row : Rows()) {
    if (path == row.method.path) return &row.method;
  }
  return nullptr;
}

const Method& MethodOf(const Message& request) {
  const auto is_for = [&request](const Row& row) {
    return row.method.request->GetDescriptor() == request.GetDescriptor() && row.when(request);
  };
  return std::find_if(Rows().begin(), Rows().end(), is_for)->method;
}

}  // namespace headwater::client::internal
