#include "server/group/join_leader.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <atomic>
#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/v1/group_service.grpc.pb.h"

namespace headwater::group {
namespace {

constexpr char kUnixPrefix[] = "unix:";

absl::Status ReadFile(const std::string& path, std::string* out) {
  if (path.empty()) return absl::OkStatus();
  std::ifstream file(path, std::ios::binary);
  out->assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return file && !out->empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(path, " cannot be read, or is empty"));
}

class StreamChannel final : public WorkerChannel {
 public:
  using Stream = grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>;
  explicit StreamChannel(Stream& stream) : stream_(stream) {}
  bool Read(v1::JoinResponse* message) override { return Going(stream_.Read(message)); }
  bool Write(const v1::JoinRequest& message) override { return Going(stream_.Write(message)); }
  // The leader has ended the call.
  bool ended() const { return ended_.load(); }

 private:
  bool Going(bool going) {
    if (!going) ended_.store(true);
    return going;
  }

  Stream& stream_;
  std::atomic<bool> ended_{false};
};

}  // namespace

std::string LeaderHost(const std::string& address) {
  return absl::StartsWith(address, kUnixPrefix) ? "" : address.substr(0, address.rfind(':'));
}

absl::Status JoinLeader(const LeaderAddress& leader, const WorkerOptions& options) {
  grpc::SslCredentialsOptions tls;
  std::string token;
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.ca, &tls.pem_root_certs));
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.certificate, &tls.pem_cert_chain));
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.key, &tls.pem_private_key));
  HEADWATER_RETURN_IF_ERROR(ReadFile(leader.token_file, &token));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // Each attempt connects again, instead of waiting as long as the failures of earlier ones suggest.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Pings detect a leader whose host is gone: it closes no connection.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(absl::ToInt64Milliseconds(kWorkerPingInterval)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  const auto channel = grpc::CreateCustomChannel(
      leader.address, leader.ca.empty() ? grpc::InsecureChannelCredentials() : grpc::SslCredentials(tls), arguments);
  const auto stub = v1::GroupService::NewStub(channel);
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", absl::StripAsciiWhitespace(token)));
  const auto stream = stub->Join(&context);
  StreamChannel worker_channel(*stream);
  const absl::Status ended = RunWorker(worker_channel, options);
  if (!worker_channel.ended()) context.TryCancel();
  // Reads the rest of the call, which gRPC requires before its end.
  for (v1::JoinResponse rest; stream->Read(&rest);) {
  }
  const grpc::Status status = stream->Finish();
  if (status.ok() || status.error_code() == grpc::StatusCode::CANCELLED) return ended;
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace headwater::group
