#include "server/guard/counted_calls.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/observability/monotonic_clock.h"

namespace headwater::guard {
namespace {

// Each connection has an authentication context, which its calls share; this is a property of it.
constexpr char kConnectionProperty[] = "headwater_connection";
struct Connection {
  int64_t number = 0;      // its name for the backlog
  int64_t is_counted = 0;  // 1 if its calls are
};

// gRPC's contexts have no lock of their own.
absl::Mutex& PropertiesMutex() {
  static absl::Mutex mutex(absl::kConstInit);
  return mutex;
}

std::optional<Connection> FindConnection(const grpc_auth_context* context) {
  grpc_auth_property_iterator properties = grpc_auth_context_find_properties_by_name(context, kConnectionProperty);
  const grpc_auth_property* const property = grpc_auth_property_iterator_next(&properties);
  Connection connection;
  if (property == nullptr || property->value_length != sizeof(connection)) return std::nullopt;
  std::memcpy(&connection, property->value, sizeof(connection));
  return connection;
}

std::optional<Connection> FindConnection(grpc_call* call) {
  grpc_auth_context* const context = call == nullptr ? nullptr : grpc_call_auth_context(call);
  if (context == nullptr) return std::nullopt;
  std::optional<Connection> connection;
  {
    absl::MutexLock lock(&PropertiesMutex());
    connection = FindConnection(context);
  }
  grpc_auth_context_release(context);
  return connection;
}

struct Processor {
  std::shared_ptr<CallBacklog> backlog;
  bool counts = false;
};

void OnMetadata(void* state, grpc_auth_context* context, const grpc_metadata*, size_t, grpc_process_auth_metadata_done_cb done,
                void* user_data) {
  const Processor& processor = *static_cast<const Processor*>(state);
  CallBacklog& backlog = *processor.backlog;
  std::optional<Connection> connection;
  {
    absl::MutexLock lock(&PropertiesMutex());
    connection = FindConnection(context);
    if (!connection.has_value()) {
      connection = Connection{backlog.NewConnection(), processor.counts ? 1 : 0};
      grpc_auth_context_add_property(context, kConnectionProperty, reinterpret_cast<const char*>(&*connection),
                                     sizeof(*connection));
    }
  }
  if (connection->is_counted == 0 || backlog.OnCall(connection->number, observability::MonotonicNow())) {
    done(user_data, nullptr, 0, nullptr, 0, GRPC_STATUS_OK, nullptr);
  } else {
    done(user_data, nullptr, 0, nullptr, 0, GRPC_STATUS_RESOURCE_EXHAUSTED,
         "too many calls of the connection wait that were reset (max_reset_backlog)");
  }
}

class CountedCredentials final : public grpc::ServerCredentials {
 public:
  CountedCredentials(grpc_server_credentials* credentials, Processor state) : credentials_(credentials) {
    grpc_auth_metadata_processor processor{};
    processor.process = OnMetadata;
    processor.destroy = [](void* own) { delete static_cast<Processor*>(own); };
    processor.state = new Processor(std::move(state));
    grpc_server_credentials_set_auth_metadata_processor(credentials_, processor);
  }
  ~CountedCredentials() override { grpc_server_credentials_release(credentials_); }

  // Each credentials have one processor, and this one is taken.
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override { std::abort(); }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> CountCalls(grpc_server_credentials* credentials, std::shared_ptr<CallBacklog> backlog,
                                                    bool is_counted) {
  return std::make_shared<CountedCredentials>(credentials, Processor{std::move(backlog), is_counted});
}

std::optional<int64_t> ConnectionOf(grpc_call* call) {
  const std::optional<Connection> connection = FindConnection(call);
  return connection.has_value() ? std::optional(connection->number) : std::nullopt;
}

void CountStart(CallBacklog& backlog, grpc::ServerContextBase& context) {
  const std::optional<Connection> connection = FindConnection(context.c_call());
  if (!connection.has_value() || connection->is_counted == 0) return;
  backlog.OnTaken(connection->number, context.peer(), observability::MonotonicNow());
}

}  // namespace headwater::guard
