// Restarter: how a leader begins anew when its group is lost.
#ifndef HEADWATER_SERVER_GROUP_RESTARTER_H_
#define HEADWATER_SERVER_GROUP_RESTARTER_H_

#include <string>
#include <vector>

namespace headwater::group {

// In the process's own place (exec), with the arguments that it was started with, but at the addresses that it has by now: a port
// that the system picked stays the same.
class Restarter {
 public:
  void KeepArguments(int count, char** arguments) { arguments_.assign(arguments, arguments + count); }
  // As Server::addresses(), admin_addresses() and metrics_port() tell them; `metrics_address`: as the flag says, host:port.
  void KeepAddresses(const std::vector<std::string>& addresses, const std::vector<std::string>& admin_addresses,
                     const std::string& metrics_address, int metrics_port);
  // What the process will be started with.
  std::vector<std::string> Arguments() const;
  // Nothing is destroyed, and no file stays open but the standard ones. Returns only if the system does not let it. Any thread.
  void BeginAnew() const;

 private:
  std::vector<std::string> arguments_;
  std::vector<std::string> addresses_;  // flags
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RESTARTER_H_
