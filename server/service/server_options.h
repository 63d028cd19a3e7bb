// The settings of a server; from flags (server/main_flags.cc) or from a test.
#ifndef HEADWATER_SERVER_SERVICE_SERVER_OPTIONS_H_
#define HEADWATER_SERVER_SERVICE_SERVER_OPTIONS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/scheduler/work_queue.h"
#include "server/service/limits.h"

namespace headwater::group {
class GroupAssembly;
}

namespace headwater::service {

struct ServerOptions {
  std::vector<std::string> listen_addresses;  // host:port (port 0 picks one) or unix:PATH; at least one
  // Addresses for all calls; with any, `listen_addresses` take no calls that need the permission admin.
  std::vector<std::string> admin_listen_addresses;
  // PEM files of all host:port addresses, read again when they change; Unix sockets have no TLS.
  std::string tls_certificate;    // the chain, the server's own first; empty: no TLS
  std::string tls_key;            // goes with it
  std::string tls_client_ca;      // clients must show a certificate that one of these has signed; empty: none is asked for
  std::string token_file;         // docs/security.md; empty: every call is allowed
  int unix_socket_mode = 0600;    // permissions of Unix sockets among the addresses
  std::string unix_socket_owner;  // USER, USER:GROUP or :GROUP, by name or number; empty: the process's
  Limits limits;
#define HEADWATER_SETTING_FIELD(unit, name, default_value, ...) unit##Limit::Value name = default_value;
  HEADWATER_SERVER_SETTINGS(HEADWATER_SETTING_FIELD)
#undef HEADWATER_SETTING_FIELD
  std::string checkpoint_directory;   // empty: no checkpoints
  bool restore_heads = true;          // with a checkpoint directory: bring back the heads that were saved
  int64_t keep_checkpoints = 3;       // of a series of a head's; 0: all
  bool drain_checkpoint = false;      // save the heads that have changed when the server drains
  std::string load_root;              // a folder that is there; empty: no LoadWeights
  std::string metrics_address;        // host:port; empty: no endpoint
  std::string trace_dir;              // where traced calls are written; empty: none is
  int64_t max_trace_files = 1000;     // that stay there
  double product_tflops = 0;          // of bare matrix products here; 0: measured on the CPU engine
  bool idle_head_checkpoint = false;  // they are saved before; needs a checkpoint directory
  bool reflection = false;
  bool deterministic = false;               // contributions are added in ascending id; the engine must have been made so too
  std::string descriptor_socket;            // path of the Unix socket that takes descriptors of shared memory; empty: none
  int descriptor_socket_mode = 0600;        // its permissions
  bool descriptor_socket_any_user = false;  // also from processes of other users than the server's own and root
  bool named_regions = false;               // whether sessions may register files under /dev/shm by name
  scheduler::QueueWidths queue_widths;      // micro-batches at the engine at once
  // The workers that the engine, which is this assembly's, waits for; null: none. When the engine is lost its calls are answered
  // STEP_LOST. The process should then Drain(), restart, and bring the heads back once the workers have joined again.
  std::shared_ptr<group::GroupAssembly> group;
  std::string worker_token;  // with a token file: the name of the token that workers join with; empty: none may
  std::string engine_note;   // why the engine is not a faster one, and what its products run on
  // Called once, on any thread, when the engine's device is lost: health is NOT_SERVING then, and calls are answered ENGINE_FAILED.
  // Heads cannot be recovered: the process should Drain() and end. Must not call the server.
  std::function<void(const absl::Status&)> on_engine_lost;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_SERVER_OPTIONS_H_
