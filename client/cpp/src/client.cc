#include "headwater/client/client.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/connection.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/error.h"
#include "client/cpp/src/head_handle.h"
#include "client/cpp/src/health.h"
#include "client/cpp/src/row_memory.h"
#include "client/cpp/src/tensor_stream.h"

namespace headwater::client {

using internal::FullHeadName;
using internal::Repeat;
using Heads = v1::HeadService::Stub;

namespace {

v1::CreateHeadRequest MakeCreateRequest(const internal::Connection& connection, const std::string& name, const HeadSpec& spec) {
  v1::CreateHeadRequest request;
  request.set_name(FullHeadName(connection.options().tenant, name));
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
absl::StatusOr<std::shared_ptr<internal::HeadHandle>> MakeHandle(const std::shared_ptr<internal::Connection>& connection,
                                                                 const v1::Head& head, bool created, internal::Deadline deadline) {
  if (absl::Status status = CheckSizes(head.spec()); !status.ok()) return status;
  absl::StatusOr<std::string> incarnation = connection->Incarnation(deadline);
  if (!incarnation.ok()) return incarnation.status();
  return std::make_shared<internal::HeadHandle>(connection, connection->head_states().Open(head, *std::move(incarnation)), created);
}

absl::StatusOr<std::shared_ptr<internal::HeadHandle>> Create(const std::shared_ptr<internal::Connection>& connection,
                                                             const v1::CreateHeadRequest& request, Repeat repeat,
                                                             const CallOptions& options) {
  const internal::Deadline deadline = connection->DeadlineOf(options);
  absl::StatusOr<v1::CreateHeadResponse> response =
      connection->Call(connection->heads(), &Heads::CreateHead, request, repeat, deadline);
  if (!response.ok()) return response.status();
  return MakeHandle(connection, response->head(), response->created(), deadline);
}

}  // namespace

Client::Client(std::shared_ptr<internal::Connection> connection) : connection_(std::move(connection)) {}

absl::StatusOr<Client> Client::Connect(const std::string& target, const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<internal::Connection>> connection = internal::Connection::Open(target, options);
  if (!connection.ok()) return connection.status();
  return Client(*std::move(connection));
}

absl::StatusOr<Head> Client::CreateHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  auto handle = Create(connection_, MakeCreateRequest(*connection_, name, spec), Repeat::kIfNothingWasDone, options);
  if (!handle.ok()) return handle.status();
  return Head(*std::move(handle));
}

absl::StatusOr<Head> Client::AttachHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  v1::CreateHeadRequest request = MakeCreateRequest(*connection_, name, spec);
  request.set_if_exists(v1::IF_EXISTS_ATTACH_IF_SAME_SPEC);
  auto handle = Create(connection_, request, Repeat::kSafe, options);
  if (!handle.ok()) return handle.status();
  return Head(*std::move(handle));
}

absl::StatusOr<HeadInfo> Client::PlanHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  v1::CreateHeadRequest request = MakeCreateRequest(*connection_, name, spec);
  request.set_validate_only(true);
  absl::StatusOr<v1::CreateHeadResponse> response =
      connection_->Call(connection_->heads(), &Heads::CreateHead, request, Repeat::kSafe, options);
  if (!response.ok()) return response.status();
  return internal::FromProto(response->head());
}

absl::StatusOr<Head> Client::OpenHead(const std::string& name, const CallOptions& options) {
  v1::GetHeadRequest request;
  request.set_name(FullHeadName(connection_->options().tenant, name));
  const internal::Deadline deadline = connection_->DeadlineOf(options);
  absl::StatusOr<v1::Head> head = connection_->Call(connection_->heads(), &Heads::GetHead, request, Repeat::kSafe, deadline);
  if (!head.ok()) return head.status();
  auto handle = MakeHandle(connection_, *head, /*created=*/false, deadline);
  if (!handle.ok()) return handle.status();
  return Head(*std::move(handle));
}

absl::StatusOr<std::vector<HeadInfo>> Client::ListHeads(const CallOptions& options) {
  std::vector<HeadInfo> heads;
  v1::ListHeadsRequest request;
  request.set_parent(absl::StrCat("tenants/", connection_->options().tenant));
  // Of all pages: a server that has always one more would keep the call for ever.
  const internal::Deadline deadline = connection_->DeadlineOf(options);
  do {
    absl::StatusOr<v1::ListHeadsResponse> page =
        connection_->Call(connection_->heads(), &Heads::ListHeads, request, Repeat::kSafe, deadline);
    if (!page.ok()) return page.status();
    for (const v1::Head& head : page->heads()) heads.push_back(internal::FromProto(head));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return heads;
}

absl::StatusOr<std::vector<CheckpointInfo>> Client::ListCheckpoints(const std::string& head, const CallOptions& options) {
  std::vector<CheckpointInfo> checkpoints;
  v1::ListCheckpointsRequest request;
  request.set_name(FullHeadName(connection_->options().tenant, head));
  const internal::Deadline deadline = connection_->DeadlineOf(options);
  do {
    absl::StatusOr<v1::ListCheckpointsResponse> page =
        connection_->Call(connection_->heads(), &Heads::ListCheckpoints, request, Repeat::kSafe, deadline);
    if (!page.ok()) return page.status();
    for (const v1::Checkpoint& checkpoint : page->checkpoints()) checkpoints.push_back(internal::FromProto(checkpoint));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return checkpoints;
}

absl::Status Client::DeleteHead(const std::string& name, bool force, const CallOptions& options) {
  v1::DeleteHeadRequest request;
  request.set_name(FullHeadName(connection_->options().tenant, name));
  request.set_force(force);
  return connection_->Call(connection_->heads(), &Heads::DeleteHead, request, Repeat::kIfNothingWasDone, options).status();
}

absl::StatusOr<RowsBuffer> Client::AllocateRows(int64_t row_count, int64_t hidden_size, DataType data_type) {
  RowsView view;
  view.data = this;  // not null: the sizes are what is checked
  view.data_type = data_type;
  view.row_count = row_count;
  view.hidden_size = hidden_size;
  if (absl::Status status = internal::CheckRows("rows", view); !status.ok()) return status;
  absl::StatusOr<internal::RowMemory> memory = internal::AllocateRowMemory(connection_, row_count * view.row_bytes());
  if (!memory.ok()) return memory.status();
  return RowsBuffer(std::move(memory->owner), memory->data, data_type, row_count, hidden_size, memory->shared);
}

TransportStats Client::stats() const { return connection_->row_transport().stats(); }

Teacher Client::OpenTeacher(const std::string& join_key, int64_t total_rows) { return Teacher(connection_, join_key, total_rows); }

absl::StatusOr<ServerInfo> Client::GetServerInfo(const CallOptions& options) {
  absl::StatusOr<v1::ServerInfo> info = connection_->Call(connection_->server(), &v1::SessionService::Stub::GetServerInfo,
                                                          v1::GetServerInfoRequest(), Repeat::kSafe, options);
  if (!info.ok()) return info.status();
  return internal::FromProto(*info);
}

absl::StatusOr<HealthStatus> Client::CheckHealth(const std::string& service, const CallOptions& options) {
  return internal::CheckHealth(*connection_, service, options);
}

}  // namespace headwater::client
