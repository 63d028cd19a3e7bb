#include "headwater/client/client.h"

#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core/core.h"
#include "client/core/link/error.h"
#include "client/core/rows/tensor_exchanges.h"
#include "client/cpp/src/calls.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::client {

using internal::FullHeadName;
using internal::Run;

namespace {

v1::CreateHeadRequest MakeCreateRequest(const internal::Core& core, const std::string& name, const HeadSpec& spec) {
  v1::CreateHeadRequest request;
  request.set_name(FullHeadName(core.options().tenant, name));
  *request.mutable_spec() = internal::ToProto(spec);
  return request;
}

// Buffers for downloads are as large as the head is said to be, in float32 at most: TensorBuffer requires that their bytes can be
// counted.
absl::Status CheckSizes(const v1::HeadSpec& spec) {
  constexpr int64_t kMostElements = INT64_MAX / ElementBytes(DataType::kFloat32);
  const bool fits = spec.vocab_size() >= 1 && spec.hidden_size() >= 1 && spec.vocab_size() <= kMostElements / spec.hidden_size();
  if (fits) return absl::OkStatus();
  return internal::MakeAnswerError(absl::StrCat("a head of [", spec.vocab_size(), ", ", spec.hidden_size(), "] weights"));
}

// The handle of a head that the server has just described.
absl::StatusOr<std::shared_ptr<internal::HeadHandle>> MakeHandle(const std::shared_ptr<internal::Core>& core, const v1::Head& head,
                                                                 bool created) {
  HEADWATER_RETURN_IF_ERROR(CheckSizes(head.spec()));
  return std::make_shared<internal::HeadHandle>(core, head, created);
}

absl::StatusOr<std::shared_ptr<internal::HeadHandle>> Create(const std::shared_ptr<internal::Core>& core,
                                                             const v1::CreateHeadRequest& request, const CallOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(auto response, Run<v1::CreateHeadResponse>(*core, request, options));
  return MakeHandle(core, response.head(), response.created());
}

// The items of all pages of a listing. One deadline bounds the pages together, however many the server reports.
template <typename Page, typename Item, typename Message, typename Items>
absl::StatusOr<std::vector<Item>> List(internal::Core& core, Message request, const CallOptions& options, Items items_of) {
  std::vector<Item> items;
  const internal::Deadline deadline = DeadlineOf(core, options);
  do {
    HEADWATER_ASSIGN_OR_RETURN(auto page, Run<Page>(core, request, deadline));
    for (const auto& item : items_of(page)) items.push_back(internal::FromProto(item));
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return items;
}

}  // namespace

Client::Client(std::shared_ptr<internal::Core> core) : core_(std::move(core)) {}

absl::StatusOr<Client> Client::Connect(const std::string& target, const ClientOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(std::shared_ptr<internal::Core> core, internal::Core::Open(target, options));
  return Client(std::move(core));
}

absl::StatusOr<Head> Client::CreateHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(auto handle, Create(core_, MakeCreateRequest(*core_, name, spec), options));
  return Head(std::move(handle));
}

absl::StatusOr<Head> Client::AttachHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  v1::CreateHeadRequest request = MakeCreateRequest(*core_, name, spec);
  request.set_if_exists(v1::IF_EXISTS_ATTACH_IF_SAME_SPEC);
  HEADWATER_ASSIGN_OR_RETURN(auto handle, Create(core_, request, options));
  return Head(std::move(handle));
}

absl::StatusOr<HeadInfo> Client::PlanHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  v1::CreateHeadRequest request = MakeCreateRequest(*core_, name, spec);
  request.set_validate_only(true);
  HEADWATER_ASSIGN_OR_RETURN(auto response, Run<v1::CreateHeadResponse>(*core_, request, options));
  return internal::FromProto(response.head());
}

absl::StatusOr<Head> Client::OpenHead(const std::string& name, const CallOptions& options) {
  v1::GetHeadRequest request;
  request.set_name(FullHeadName(core_->options().tenant, name));
  HEADWATER_ASSIGN_OR_RETURN(auto head, Run<v1::Head>(*core_, request, options));
  HEADWATER_ASSIGN_OR_RETURN(auto handle, MakeHandle(core_, head, /*created=*/false));
  return Head(std::move(handle));
}

absl::StatusOr<std::vector<HeadInfo>> Client::ListHeads(const CallOptions& options) {
  v1::ListHeadsRequest request;
  request.set_parent(absl::StrCat("tenants/", core_->options().tenant));
  return List<v1::ListHeadsResponse, HeadInfo>(
      *core_, std::move(request), options, [](const v1::ListHeadsResponse& page) -> auto& { return page.heads(); });
}

absl::StatusOr<std::vector<CheckpointInfo>> Client::ListCheckpoints(const std::string& head, const CallOptions& options) {
  v1::ListCheckpointsRequest request;
  request.set_name(FullHeadName(core_->options().tenant, head));
  return List<v1::ListCheckpointsResponse, CheckpointInfo>(
      *core_, std::move(request), options, [](const v1::ListCheckpointsResponse& page) -> auto& { return page.checkpoints(); });
}

absl::StatusOr<bool> Client::DeleteCheckpoint(const std::string& head, const std::string& checkpoint, const CallOptions& options) {
  v1::DeleteCheckpointRequest request;
  request.set_name(FullHeadName(core_->options().tenant, head));
  request.set_checkpoint(checkpoint);
  HEADWATER_ASSIGN_OR_RETURN(auto response, Run<v1::DeleteCheckpointResponse>(*core_, request, options));
  return response.deleted();
}

absl::Status Client::DeleteHead(const std::string& name, bool force, const CallOptions& options) {
  v1::DeleteHeadRequest request;
  request.set_name(FullHeadName(core_->options().tenant, name));
  request.set_force(force);
  return Run<v1::DeleteHeadResponse>(*core_, request, options).status();
}

absl::StatusOr<RowsBuffer> Client::AllocateRows(int64_t row_count, int64_t hidden_size, DataType data_type) {
  const RowsView view{this, data_type, row_count, hidden_size};  // not null: only the sizes are checked
  HEADWATER_RETURN_IF_ERROR(internal::CheckRows("rows", view));
  HEADWATER_ASSIGN_OR_RETURN(internal::RowMemory memory, core_->AllocateRows(view.bytes()));
  return RowsBuffer(std::move(memory.owner), memory.data, data_type, row_count, hidden_size, memory.shared);
}

TransportStats Client::stats() const { return core_->row_transport().stats(); }

Teacher Client::OpenTeacher(const std::string& join_key, int64_t total_rows) { return Teacher(core_, join_key, total_rows); }

absl::StatusOr<ServerInfo> Client::GetServerInfo(const CallOptions& options) {
  HEADWATER_ASSIGN_OR_RETURN(auto info, Run<v1::ServerInfo>(*core_, v1::GetServerInfoRequest(), options));
  return internal::FromProto(info);
}

absl::StatusOr<HealthStatus> Client::CheckHealth(const std::string& service, const CallOptions& options) {
  google::protobuf::Empty request;  // message HealthCheckRequest { string service = 1; }
  const google::protobuf::Reflection& reflection = *google::protobuf::Empty::GetReflection();
  if (!service.empty()) reflection.MutableUnknownFields(&request)->AddLengthDelimited(1, service);
  const auto response = Run<google::protobuf::Empty>(*core_, request, options);
  if (response.status().code() == absl::StatusCode::kNotFound) return HealthStatus::kServiceUnknown;
  if (!response.ok()) return response.status();
  // message HealthCheckResponse { ServingStatus status = 1; }
  const std::string answer = response->SerializeAsString();
  const bool has_status = answer.size() == 2 && answer[0] == 8;  // the field's tag
  return has_status ? static_cast<HealthStatus>(answer[1]) : HealthStatus::kUnknown;
}

}  // namespace headwater::client
