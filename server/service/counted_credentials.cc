#include "server/service/counted_credentials.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace headwater::service {
namespace {

// Each connection has an authentication context, which its calls share; its name for the backlog is a property of it.
constexpr char kConnectionProperty[] = "headwater_connection";

// gRPC's contexts have no lock of their own.
absl::Mutex& PropertiesMutex() {
  static absl::Mutex mutex(absl::kConstInit);
  return mutex;
}

std::optional<int64_t> ConnectionOf(const grpc_auth_context* context) {
  grpc_auth_property_iterator properties = grpc_auth_context_find_properties_by_name(context, kConnectionProperty);
  const grpc_auth_property* const property = grpc_auth_property_iterator_next(&properties);
  int64_t connection = 0;
  if (property == nullptr || property->value_length != sizeof(connection)) return std::nullopt;
  std::memcpy(&connection, property->value, sizeof(connection));
  return connection;
}

using SharedBacklog = std::shared_ptr<transport::CallBacklog>;

void OnMetadata(void* state, grpc_auth_context* context, const grpc_metadata*, size_t, grpc_process_auth_metadata_done_cb done,
                void* user_data) {
  transport::CallBacklog& backlog = **static_cast<SharedBacklog*>(state);
  std::optional<int64_t> connection;
  {
    absl::MutexLock lock(&PropertiesMutex());
    connection = ConnectionOf(context);
    if (!connection.has_value()) {
      connection = backlog.NewConnection();
      grpc_auth_context_add_property(context, kConnectionProperty, reinterpret_cast<const char*>(&*connection),
                                     sizeof(*connection));
    }
  }
  if (backlog.OnCall(*connection, absl::Now())) {
    done(user_data, nullptr, 0, nullptr, 0, GRPC_STATUS_OK, nullptr);
  } else {
    done(user_data, nullptr, 0, nullptr, 0, GRPC_STATUS_RESOURCE_EXHAUSTED,
         "too many calls of the connection wait that were reset (max_reset_backlog)");
  }
}

class CountedCredentials final : public grpc::ServerCredentials {
 public:
  CountedCredentials(grpc_server_credentials* credentials, SharedBacklog backlog) : credentials_(credentials) {
    grpc_auth_metadata_processor processor{};
    processor.process = OnMetadata;
    processor.destroy = [](void* state) { delete static_cast<SharedBacklog*>(state); };
    processor.state = new SharedBacklog(std::move(backlog));
    grpc_server_credentials_set_auth_metadata_processor(credentials_, processor);
  }
  ~CountedCredentials() override { grpc_server_credentials_release(credentials_); }

  // There is one processor for each, and it is taken.
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override { std::abort(); }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials, SharedBacklog backlog) {
  return std::make_shared<CountedCredentials>(credentials, std::move(backlog));
}

void OnCallTaken(transport::CallBacklog& backlog, grpc_call* call, const std::string& peer) {
  grpc_auth_context* const context = grpc_call_auth_context(call);
  if (context == nullptr) return;
  std::optional<int64_t> connection;
  {
    absl::MutexLock lock(&PropertiesMutex());
    connection = ConnectionOf(context);
  }
  grpc_auth_context_release(context);
  if (connection.has_value()) backlog.OnTaken(*connection, peer, absl::Now());
}

}  // namespace headwater::service
