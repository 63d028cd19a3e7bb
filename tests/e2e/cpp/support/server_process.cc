#include "tests/e2e/cpp/support/server_process.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <thread>
#include <utility>

#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

// A bundle's programs lie elsewhere than those of the build, and run on a GPU.
std::string FromEnvironmentOr(const char* name, const char* standard) {
  const char* const value = std::getenv(name);
  return value == nullptr ? standard : value;
}

size_t WorkersOf(const std::vector<std::string>& flags) {
  size_t workers = 0;
  for (const std::string& flag : flags) {
    if (flag.rfind("--workers=", 0) == 0) workers = std::stoul(flag.substr(10));
  }
  return workers;
}

}  // namespace

ServerProcess::ServerProcess(std::vector<std::string> flags, bool shares_memory) : flags_(std::move(flags)) {
  workers_.resize(WorkersOf(flags_));
  if (shares_memory) flags_.push_back("--descriptor_socket=" + descriptor_socket());
  std::filesystem::create_directory(load_root());
  Start();
}

void ServerProcess::Start() {
  const std::string port_file = directory_.path() + "/port";
  std::filesystem::remove(port_file);
  std::filesystem::remove(directory_.path() + "/socket");
  std::vector<std::string> arguments = {FromEnvironmentOr("HEADWATER_TEST_SERVER", HEADWATERD),
                                        "--listen_addresses=" + target(),
                                        "--port_file=" + port_file,
                                        "--metrics_address=",
                                        "--checkpoint_directory=" + directory_.path() + "/checkpoints",
                                        "--load_root=" + load_root(),
                                        "--engine=" + FromEnvironmentOr("HEADWATER_TEST_ENGINE", "cpu"),
                                        "--threads=2",
                                        "--drain_timeout=5s",
                                        "--log_level=warning"};
  // One server after the other on a GPU: quickly ready, with the same products each time, and little of its memory.
  if (FromEnvironmentOr("HEADWATER_TEST_ENGINE", "cpu") != "cpu") {
    arguments.insert(arguments.end(), {"--notimed_search", "--algorithm_cache=", "--workspace_bytes=268435456"});
  }
  if (!workers_.empty()) arguments.insert(arguments.end(), {"--group_listen_host=127.0.0.1", "--rank_timeout=60s"});
  arguments.insert(arguments.end(), flags_.begin(), flags_.end());
  process_ = std::make_unique<ChildProcess>(arguments, directory_.path() + "/stdout", directory_.path() + "/stderr");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!std::filesystem::exists(port_file)) {
    if (!process_->Running() || std::chrono::steady_clock::now() > deadline) {
      std::cerr << "headwaterd did not start:\n" << log();
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  for (size_t index = 0; index < workers_.size(); ++index) {
    if (workers_[index] == nullptr || !workers_[index]->Running()) StartWorker(index);
  }
  // A group says where it listens before it can serve.
  while (!workers_.empty() && !Connect().ListHeads().ok()) {
    if (!process_->Running() || std::chrono::steady_clock::now() > deadline) {
      std::cerr << "the group was not formed:\n" << log();
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void ServerProcess::KillAndStart() {
  process_->Signal(SIGKILL);
  if (process_->Wait() != -SIGKILL) {
    std::cerr << "headwaterd had ended before:\n" << log();
    std::abort();
  }
  Start();
}

void ServerProcess::StartWorker(size_t index) {
  const std::vector<std::string> arguments = {FromEnvironmentOr("HEADWATER_TEST_SERVER", HEADWATERD), "--join=" + address(),
                                              "--group_listen_host=127.0.0.1", "--log_level=warning"};
  const std::string output = directory_.path() + "/worker" + std::to_string(index);
  workers_[index] = std::make_unique<ChildProcess>(arguments, output + ".stdout", output + ".stderr");
}

std::string ServerProcess::address() const {
  const std::string addresses = ReadFile(directory_.path() + "/port");
  return addresses.substr(0, addresses.find('\n'));
}

client::Client ServerProcess::Connect(const client::ClientOptions& options) const {
  absl::StatusOr<client::Client> client = client::Client::Connect(target(), options);
  if (!client.ok()) {
    std::cerr << client.status() << "\n" << log();
    std::abort();
  }
  return *std::move(client);
}

client::Head CreateHead(client::Client client, const std::string& name, const client::HeadSpec& spec,
                        const std::vector<float>& weight) {
  client::Head head = Value(client.CreateHead(name, spec));
  Value(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight)));
  return head;
}

std::vector<float> Weight(client::Head& head) {
  const client::TensorBuffer weight = Value(head.DownloadWeights());
  return {weight.float32().begin(), weight.float32().end()};
}

}  // namespace headwater::e2e
