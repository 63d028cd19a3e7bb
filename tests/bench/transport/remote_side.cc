#include "tests/bench/transport/remote_side.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <utility>

namespace headwater::bench {
namespace {

using client::Transport;

// The search of the fastest products when the heads are made is part of it.
constexpr auto kStartTimeout = std::chrono::seconds(120);
// A case's micro-batches are all of one open step, and stay in its log.
constexpr int64_t kReplayBytes = int64_t{32} << 30;

template <typename T>
T ValueOf(absl::StatusOr<T> value, const std::string& what) {
  if (!value.ok()) throw std::runtime_error(what + ": " + value.status().ToString());
  return *std::move(value);
}

// This program's folder.
std::string OwnFolder() { return std::filesystem::read_symlink("/proc/self/exe").parent_path().string(); }

float FromBits(uint16_t bits) {
  const uint32_t pattern = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &pattern, sizeof(value));
  return value;
}

}  // namespace

BenchServer::BenchServer(const TransportSettings& settings, const std::string& folder, const std::string& algorithms)
    : folder_(folder) {
  const std::string port_file = folder + "/port";
  const std::string program = settings.headwaterd.empty() ? OwnFolder() + "/headwaterd" : settings.headwaterd;
  // The defaults, except for places of files and the number of micro-batches in a case's one step.
  const std::vector<std::string> arguments = {program,
                                              "--listen_addresses=127.0.0.1:0",
                                              "--port_file=" + port_file,
                                              "--metrics_address=",
                                              "--descriptor_socket=" + folder + "/memory",
                                              "--engine=" + settings.engine,
                                              "--algorithm_cache=" + algorithms,
                                              "--max_step_micro_batches=10000000",
                                              "--log_level=warning"};
  process_ = std::make_unique<e2e::ChildProcess>(arguments, folder + "/stdout", folder + "/stderr");
  const auto deadline = std::chrono::steady_clock::now() + kStartTimeout;
  while (!std::filesystem::exists(port_file)) {
    if (!process_->Running() || std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(program + " did not start:\n" + log());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  address_ = e2e::ReadFile(port_file);
  address_.erase(address_.find_last_not_of(" \n") + 1);
}

std::string BenchServer::log() const { return e2e::ReadFile(folder_ + "/stderr"); }

// A connection and its memory.
struct RemoteSide::Trainer {
  Trainer(const TransportSettings& settings, const std::string& address, Transport transport, int64_t rows, bool replay = false)
      : client(ValueOf(client::Client::Connect(address, OptionsFor(transport, replay)), "Connect")),
        student(ValueOf(client.OpenHead("student"), "OpenHead")),
        frozen(ValueOf(client.OpenHead("frozen"), "OpenHead")),
        grad_hidden(2, std::vector<unsigned char>(static_cast<size_t>(rows * settings.hidden_size * 2))) {}

  static client::ClientOptions OptionsFor(Transport transport, bool replay) {
    client::ClientOptions options = {.timeout = std::chrono::seconds(60), .client_name = "transport_bench", .transport = transport};
    if (replay) options.replay_bytes = kReplayBytes;
    options.on_notice = [](const std::string&) {};
    return options;
  }

  client::Client client;
  client::Head student, frozen;
  std::vector<std::vector<unsigned char>> grad_hidden;  // two, for two in flight
  std::optional<client::RowsBuffer> shared_hidden;
  std::vector<client::RowsBuffer> shared_grad_hidden;
};

RemoteSide::RemoteSide(const TransportSettings& settings, const Tensors& tensors, const std::string& address)
    : settings_(settings), tensors_(tensors), address_(address) {
  client::Client client = ValueOf(client::Client::Connect(address), "Connect");
  for (const bool trainable : {true, false}) {
    client::HeadSpec spec = {.vocab_size = settings.vocab_size,
                             .hidden_size = settings.hidden_size,
                             .data_type = client::DataType::kBFloat16,
                             .trainable = trainable};
    client::Head head = ValueOf(client.CreateHead(trainable ? "student" : "frozen", spec), "CreateHead");
    ValueOf(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::BFloat16(tensors.weight)), "UploadWeights");
  }
}

RemoteSide::~RemoteSide() = default;

RemoteSide::Trainer& RemoteSide::TrainerOf(Transport transport, bool replay) {
  std::unique_ptr<Trainer>& trainer = trainers_[{transport, replay}];
  if (trainer == nullptr) trainer = std::make_unique<Trainer>(settings_, address_, transport, settings_.rows, replay);
  return *trainer;
}

client::RowsView RemoteSide::HiddenOf(Trainer& trainer, Rows rows) {
  client::RowsView view = client::RowsView::BFloat16(tensors_.hidden, settings_.hidden_size);
  if (rows == Rows::kShared) {
    if (!trainer.shared_hidden.has_value()) {
      const auto allocate = [&] {
        return ValueOf(trainer.client.AllocateRows(settings_.rows, settings_.hidden_size, client::DataType::kBFloat16),
                       "AllocateRows");
      };
      trainer.shared_hidden.emplace(allocate());
      std::memcpy(trainer.shared_hidden->data(), tensors_.hidden.data(), tensors_.hidden.size() * 2);
      for (int slot = 0; slot < 2; ++slot) trainer.shared_grad_hidden.push_back(allocate());
    }
    return trainer.shared_hidden->view();
  }
  if (rows == Rows::kDevice) {
    view.data = local_->device_hidden();
    view.memory = client::Memory::kCuda;
  }
  return view;
}

void RemoteSide::GradHiddenOf(Trainer& trainer, Rows rows, int slot, client::MicroBatchOptions* options) {
  const size_t index = static_cast<size_t>(slot);
  if (rows == Rows::kOwn) {
    options->grad_hidden = absl::MakeSpan(trainer.grad_hidden[index]);
  } else if (rows == Rows::kShared) {
    options->grad_hidden = trainer.shared_grad_hidden[index].span();
  } else {
    const size_t bytes = tensors_.hidden.size() * 2;
    options->grad_hidden = absl::MakeSpan(static_cast<unsigned char*>(local_->device_grad_hidden()) + index * bytes, bytes);
    options->grad_hidden_memory = client::Memory::kCuda;
  }
}

client::Future<client::LossResult> RemoteSide::Submit(Trainer& trainer, const Work& work, int slot) {
  client::MicroBatchOptions options;
  if (!work.engine.frozen) {
    options.step = step_;
    options.micro_batch = next_id_++;
  }
  if (work.is_explicit) options.commit = client::CommitMode::kExplicit;
  options.late_token_factors = work.held;
  options.gradient_resolution = work.engine.resolution;
  const client::RowsView hidden = HiddenOf(trainer, work.rows);
  GradHiddenOf(trainer, work.rows, slot, &options);
  client::Head& head = work.engine.frozen ? trainer.frozen : trainer.student;
  return head.CrossEntropy(hidden, tensors_.targets, {}, options);
}

client::LossResult RemoteSide::Finish(client::Future<client::LossResult> future, const Work& work) {
  client::LossResult result = ValueOf(future.Get(), "CrossEntropy");
  if (result.transport != client::TransportName(work.transport)) {
    throw std::runtime_error("the rows went over " + result.transport + ", not " + client::TransportName(work.transport));
  }
  if (result.valid_token_count != settings_.rows || !(result.loss_sum > 0)) {
    throw std::runtime_error("the server computed nonsense");
  }
  times_.push_back(result.timing);
  if (work.is_explicit) {
    if ((result.form == client::ContributionForm::kHeld) != work.held) {
      throw std::runtime_error("the contribution was held in another form than wanted");
    }
    ValueOf(result.contribution->Commit().Get(), "Commit");
  }
  return result;
}

std::string RemoteSide::WhyNot(Transport transport, Rows rows) {
  if (rows == Rows::kDevice && (local_ == nullptr || local_->device_hidden() == nullptr)) return "the rows are not on a GPU";
  try {
    Work work;
    work.transport = transport;
    work.rows = rows;
    Run(work, 1);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void RemoteSide::Run(const Work& work, int count) {
  Trainer& trainer = TrainerOf(work.transport, work.replay);
  std::deque<client::Future<client::LossResult>> in_flight;
  for (int i = 0; i < count; ++i) {
    if (static_cast<int>(in_flight.size()) == work.in_flight) {
      Finish(std::move(in_flight.front()), work);
      in_flight.pop_front();
    }
    in_flight.push_back(Submit(trainer, work, i % 2));
  }
  while (!in_flight.empty()) {
    Finish(std::move(in_flight.front()), work);
    in_flight.pop_front();
  }
  AwaitLastProducts();
}

void RemoteSide::AwaitLastProducts() {
  client::MicroBatchOptions options = {.forward_only = true};
  client::RowsView hidden = client::RowsView::BFloat16(tensors_.hidden, settings_.hidden_size);
  hidden.row_count = 1;
  client::Head& student = TrainerOf(Transport::kGrpc).student;
  ValueOf(student.CrossEntropy(hidden, absl::MakeConstSpan(tensors_.targets).first(1), {}, options).Get(), "CrossEntropy");
}

RemoteSide::ServerTimes RemoteSide::TakeTimes() {
  const auto median = [this](std::chrono::nanoseconds client::Timing::*part) {
    std::vector<double> values;
    for (const client::Timing& time : times_) values.push_back(std::chrono::duration<double, std::milli>(time.*part).count());
    if (values.empty()) return 0.0;
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  };
  const ServerTimes medians = {median(&client::Timing::upload), median(&client::Timing::queue), median(&client::Timing::engine),
                               median(&client::Timing::download)};
  times_.clear();
  return medians;
}

void RemoteSide::RunManyClients(int count) {
  const int64_t part = settings_.rows / settings_.clients;
  while (static_cast<int>(many_.size()) < settings_.clients) {
    many_.push_back(std::make_unique<Trainer>(settings_, address_, Transport::kGrpc, part));
  }
  const int64_t first_id = ReserveIds(static_cast<int64_t>(count) * settings_.clients);
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(many_.size());
  for (size_t number = 0; number < many_.size(); ++number) {
    threads.emplace_back([this, part, count, first_id, number, &failures] {
      try {
        Trainer& trainer = *many_[number];
        const size_t start = number * static_cast<size_t>(part);
        client::RowsView hidden = client::RowsView::BFloat16(tensors_.hidden, settings_.hidden_size);
        hidden.data = tensors_.hidden.data() + start * static_cast<size_t>(settings_.hidden_size);
        hidden.row_count = part;
        const auto targets = absl::MakeConstSpan(tensors_.targets).subspan(start, static_cast<size_t>(part));
        for (int i = 0; i < count; ++i) {
          client::MicroBatchOptions options = {.step = step_,
                                               .micro_batch = first_id + i * settings_.clients + static_cast<int64_t>(number),
                                               .grad_hidden = absl::MakeSpan(trainer.grad_hidden[0])};
          const client::LossResult result =
              ValueOf(trainer.student.CrossEntropy(hidden, targets, {}, options).Get(), "CrossEntropy");
          if (result.valid_token_count != part) throw std::runtime_error("the server computed nonsense");
        }
      } catch (...) {
        failures[number] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  AwaitLastProducts();
}

void RemoteSide::NewStep() {
  step_ = ValueOf(TrainerOf(Transport::kGrpc).student.DiscardGradient(step_), "DiscardGradient").open_step;
  next_id_ = 0;
}

void RemoteSide::Reconnect() {
  trainers_.clear();
  many_.clear();
}

int64_t RemoteSide::ReserveIds(int64_t count) {
  const int64_t first = next_id_;
  next_id_ += count;
  return first;
}

RemoteSide::Difference RemoteSide::Compare(const Work& work, LocalSide& local) {
  local.RunEngine(1, work.engine);
  const std::vector<uint16_t> expected = local.grad_hidden();
  Trainer& trainer = TrainerOf(work.transport, work.replay);
  const client::LossResult result = Finish(Submit(trainer, work, 0), work);
  std::vector<uint16_t> actual(expected.size());
  const size_t bytes = actual.size() * 2;
  if (work.rows == Rows::kDevice) {
    local.CopyOut(actual.data(), local.device_grad_hidden(), static_cast<int64_t>(bytes));
  } else {
    const void* const data = work.rows == Rows::kShared ? trainer.shared_grad_hidden[0].data() : trainer.grad_hidden[0].data();
    std::memcpy(actual.data(), data, bytes);
  }
  Difference difference;
  difference.loss = std::abs(result.loss_sum - local.loss_sum()) / std::abs(local.loss_sum());
  double squares = 0;
  double norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double value = FromBits(expected[i]);
    squares += std::pow(FromBits(actual[i]) - value, 2);
    norm += value * value;
  }
  difference.grad_hidden = std::sqrt(squares / norm);
  return difference;
}

}  // namespace headwater::bench
