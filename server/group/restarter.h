// Restarter: restarts a leader or worker when its group is lost.
#ifndef HEADWATER_SERVER_GROUP_RESTARTER_H_
#define HEADWATER_SERVER_GROUP_RESTARTER_H_

#include <string>
#include <vector>

namespace headwater::group {

// Restarts the process in place (exec), with its original arguments and its current addresses: a port that the system picked stays
// the same.
class Restarter {
 public:
  void KeepArguments(int count, char** arguments) { arguments_.assign(arguments, arguments + count); }
  // Values of Server::addresses(), admin_addresses() and metrics_port(); `metrics_address`: the flag's value, host:port.
  void KeepAddresses(const std::vector<std::string>& addresses, const std::vector<std::string>& admin_addresses,
                     const std::string& metrics_address, int metrics_port);
  const std::vector<std::string>& Arguments() const { return arguments_; }
  // Restarts. Destroys nothing, and closes all files except the standard ones. Returns only if the system refuses. Any thread.
  void BeginAnew() const;

 private:
  std::vector<std::string> arguments_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RESTARTER_H_
