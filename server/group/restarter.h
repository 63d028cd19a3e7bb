// Restarter: restarts a leader or worker when its group is lost.
#ifndef HEADWATER_SERVER_GROUP_RESTARTER_H_
#define HEADWATER_SERVER_GROUP_RESTARTER_H_

#include <linux/close_range.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace headwater::group {

// Restarts the process in place (exec), with its original arguments and its current addresses: a port that the system picked stays
// the same.
class Restarter {
 public:
  void KeepArguments(int count, char** arguments) { arguments_.assign(arguments, arguments + count); }
  // Values of Server::addresses(), admin_addresses() and metrics_port(); `metrics_address`: the flag's value, host:port.
  void KeepAddresses(const std::vector<std::string>& addresses, const std::vector<std::string>& admin_addresses,
                     const std::string& metrics_address, int metrics_port) {
    std::vector<std::string> flags = {"--listen_addresses=" + absl::StrJoin(addresses, ",")};
    if (!admin_addresses.empty()) flags.push_back("--admin_listen_addresses=" + absl::StrJoin(admin_addresses, ","));
    if (metrics_port != 0) {  // 0: no metrics are served
      const std::string host = metrics_address.substr(0, metrics_address.rfind(':'));
      flags.push_back(absl::StrCat("--metrics_address=", host, ":", metrics_port));
    }
    for (const std::string& flag : flags) {
      // Earlier addresses move to the end: the last value of a flag counts.
      std::erase(arguments_, flag);
      arguments_.push_back(flag);
    }
  }
  const std::vector<std::string>& Arguments() const { return arguments_; }
  // Restarts. Destroys nothing, and closes all files except the standard ones. Returns only if the system refuses. Any thread.
  void BeginAnew() const {
    std::vector<std::string> all = arguments_;
    std::vector<char*> pointers;
    for (std::string& argument : all) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC);
    execv("/proc/self/exe", pointers.data());
  }

 private:
  std::vector<std::string> arguments_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RESTARTER_H_
