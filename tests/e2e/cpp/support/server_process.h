// ServerProcess: the real headwaterd on a Unix socket in a temporary directory. HEADWATER_TEST_SERVER names another program than
// the build's, HEADWATER_TEST_ENGINE another engine than cpu.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_SERVER_PROCESS_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_SERVER_PROCESS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/child_process.h"

namespace headwater::e2e {

class ServerProcess {
 public:
  // Starts it and waits until it says where it listens. `flags` come behind the ones for sockets and directories.
  // `shares_memory`: clients can hand it memory, on a socket of its own.
  explicit ServerProcess(std::vector<std::string> flags = {}, bool shares_memory = false);

  // `unix:PATH`.
  std::string target() const { return "unix:" + directory_.path() + "/socket"; }
  // What it says that it listens on first: of another kind if the flags say so.
  std::string address() const;
  // Where descriptors of memory are taken, if it shares memory.
  std::string descriptor_socket() const { return directory_.path() + "/memory"; }
  std::string load_root() const { return directory_.path() + "/load"; }
  std::string output() const { return ReadFile(directory_.path() + "/stdout"); }
  std::string log() const { return ReadFile(directory_.path() + "/stderr"); }
  ChildProcess& process() { return *process_; }

  // Starts it again in the same directory, after its end. Workers that live join it by themselves.
  void Start();
  // Kills it, and starts it again.
  void KillAndStart();
  // The processes that hold a shard beside it: those of --workers, if the flags have that.
  size_t worker_count() const { return workers_.size(); }
  ChildProcess& worker(size_t index) { return *workers_[index]; }
  // Starts a worker again, after its end.
  void StartWorker(size_t index);
  // A connection; ends the test program if there is none.
  client::Client Connect(const client::ClientOptions& options = {}) const;

 private:
  // Waits for what a process that runs does; ends the test program if it does not.
  void AwaitOrAbort(const char* failure, const std::function<bool()>& holds);

  TemporaryDirectory directory_;
  std::vector<std::string> flags_;
  std::unique_ptr<ChildProcess> process_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
};

// Makes a head, and uploads its weight; without one a pseudo-random one.
client::Head CreateHead(client::Client client, const std::string& name, const client::HeadSpec& spec,
                        const std::vector<float>& weight = {});
// Submits pseudo-random rows and targets to cross entropy: the same ones each time.
absl::StatusOr<client::LossResult> SubmitRandom(client::Head& head, int64_t row_count, const client::MicroBatchOptions& options);
// The weight that it has on the server, in float32.
std::vector<float> Weight(client::Head& head);

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_SERVER_PROCESS_H_
