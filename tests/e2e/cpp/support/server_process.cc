#include "tests/e2e/cpp/support/server_process.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <utility>

#include "tests/e2e/cpp/support/await.h"
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
  AwaitOrAbort("headwaterd did not start", [&] { return std::filesystem::exists(port_file); });
  for (size_t index = 0; index < workers_.size(); ++index) {
    if (workers_[index] == nullptr || !workers_[index]->Running()) StartWorker(index);
  }
  // A group says where it listens before it can serve.
  if (!workers_.empty()) AwaitOrAbort("the group was not formed", [&] { return Connect().ListHeads().ok(); });
}

void ServerProcess::AwaitOrAbort(const char* failure, const std::function<bool()>& holds) {
  bool held = false;
  Await([&] { return (held = holds()) || !process_->Running(); });
  if (held) return;
  std::cerr << failure << ":\n" << log();
  std::abort();
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
  const std::vector<float> uploaded = weight.empty() ? RandomFloats(1, spec.vocab_size * spec.hidden_size, 0.3F) : weight;
  Value(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(uploaded)));
  return head;
}

absl::StatusOr<client::LossResult> SubmitRandom(client::Head& head, int64_t row_count, const client::MicroBatchOptions& options) {
  const std::vector<float> rows = RandomFloats(2, row_count * head.spec().hidden_size, 1.0F);
  const std::vector<int32_t> targets = RandomTargets(3, row_count, head.spec().vocab_size);
  return head.CrossEntropy(client::RowsView::Float32(rows, head.spec().hidden_size), targets, {}, options).Get();
}

std::vector<float> Weight(client::Head& head) {
  const client::TensorBuffer weight = Value(head.DownloadWeights());
  return {weight.float32().begin(), weight.float32().end()};
}

}  // namespace headwater::e2e
