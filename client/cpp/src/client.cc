#include "headwater/client/client.h"

#include <utility>

#include "client/cpp/src/connection.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/head_handle.h"
#include "client/cpp/src/health.h"

namespace headwater::client {

using internal::FullHeadName;
using Heads = v1::HeadService::Stub;

namespace {

v1::CreateHeadRequest MakeCreateRequest(const std::string& name, const HeadSpec& spec) {
  v1::CreateHeadRequest request;
  request.set_name(FullHeadName(name));
  *request.mutable_spec() = internal::ToProto(spec);
  return request;
}

}  // namespace

Client::Client(std::shared_ptr<internal::Connection> connection) : connection_(std::move(connection)) {}

absl::StatusOr<Client> Client::Connect(const std::string& target, const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<internal::Connection>> connection = internal::Connection::Open(target, options);
  if (!connection.ok()) return connection.status();
  return Client(*std::move(connection));
}

absl::StatusOr<Head> Client::CreateHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  absl::StatusOr<v1::CreateHeadResponse> response =
      connection_->Call(connection_->heads(), &Heads::CreateHead, MakeCreateRequest(name, spec), options);
  if (!response.ok()) return response.status();
  return Head(std::make_shared<internal::HeadHandle>(connection_, response->head()));
}

absl::StatusOr<HeadInfo> Client::PlanHead(const std::string& name, const HeadSpec& spec, const CallOptions& options) {
  v1::CreateHeadRequest request = MakeCreateRequest(name, spec);
  request.set_validate_only(true);
  absl::StatusOr<v1::CreateHeadResponse> response = connection_->Call(connection_->heads(), &Heads::CreateHead, request, options);
  if (!response.ok()) return response.status();
  return internal::FromProto(response->head());
}

absl::StatusOr<Head> Client::OpenHead(const std::string& name, const CallOptions& options) {
  v1::GetHeadRequest request;
  request.set_name(FullHeadName(name));
  absl::StatusOr<v1::Head> head = connection_->Call(connection_->heads(), &Heads::GetHead, request, options);
  if (!head.ok()) return head.status();
  return Head(std::make_shared<internal::HeadHandle>(connection_, *head));
}

absl::StatusOr<std::vector<HeadInfo>> Client::ListHeads(const CallOptions& options) {
  std::vector<HeadInfo> heads;
  v1::ListHeadsRequest request;
  do {
    absl::StatusOr<v1::ListHeadsResponse> page = connection_->Call(connection_->heads(), &Heads::ListHeads, request, options);
    if (!page.ok()) return page.status();
    for (const v1::Head& head : page->heads()) heads.push_back(internal::FromProto(head));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return heads;
}

absl::Status Client::DeleteHead(const std::string& name, bool force, const CallOptions& options) {
  v1::DeleteHeadRequest request;
  request.set_name(FullHeadName(name));
  request.set_force(force);
  return connection_->Call(connection_->heads(), &Heads::DeleteHead, request, options).status();
}

absl::StatusOr<ServerInfo> Client::GetServerInfo(const CallOptions& options) {
  absl::StatusOr<v1::ServerInfo> info =
      connection_->Call(connection_->session(), &v1::SessionService::Stub::GetServerInfo, v1::GetServerInfoRequest(), options);
  if (!info.ok()) return info.status();
  return internal::FromProto(*info);
}

absl::StatusOr<HealthStatus> Client::CheckHealth(const std::string& service, const CallOptions& options) {
  return internal::CheckHealth(*connection_, service, options);
}

}  // namespace headwater::client
