// The C++ client as a trainer of two heads, `student` (trainable) and `frozen`, which tests/bench/transport/run drives. It uploads
// the weight of engine_side.cc's problems to both, and submits their rows. bf16, cross entropy, forward and backward.
//
//   transport_client_cuda address=HOST:PORT rows=N width=N vocab=N folder=FOLDER     # or transport_client_cpu
//
// Requests (serve.h); a call that fails, or takes another path or form than wanted, is an error:
//
// - run count=N WORK...: submits micro-batches of all rows; see Work. Answers with the milliseconds of one, and with the medians of
//   where the server's time went: upload, queue, engine, download.
// - many count=N clients=N: so many connections, all at once, over gRPC; each submits its part of the rows N times. Milliseconds.
// - loss WORK...: submits one micro-batch, writes its grad_hidden into FOLDER/remote_grad_hidden, and answers with its loss.
// - new_step: empties the open step of `student`.
// - reserve count=N: the open step, and the first of so many ids of micro-batches for a trainer in another process.
// - reconnect: drops all connections, of which one may be broken; they are made again when they are needed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "headwater/client/client.h"
#include "tests/bench/common/backend.h"
#include "tests/bench/common/serve.h"

namespace headwater::bench {
namespace {

using client::Transport;

// A case's micro-batches are all of one open step, and stay in its log.
constexpr int64_t kReplayBytes = int64_t{32} << 30;
constexpr int kSlots = 2;  // gradients, for two micro-batches in flight

Transport TransportOf(const std::string& name) {
  for (const Transport known : {Transport::kSharedMemory, Transport::kCudaIpc}) {
    if (name == client::TransportName(known)) return known;
  }
  return Transport::kGrpc;
}

// How one micro-batch after the other is submitted; `request` has the members' names.
struct Work {
  Request& request;
  const Transport transport = TransportOf(request.Take<std::string>("transport", "grpc"));
  // In memory that is the trainer's `own`, `shared` with the server (Client::AllocateRows()), or of the `device`.
  const std::string rows = request.Take<std::string>("rows", "own");
  const size_t in_flight = request.Take<size_t>("in_flight", 1);
  const bool is_explicit = request.Take<bool>("explicit", false);   // then committed, with factor 1
  const bool held = request.Take<bool>("held", false);              // if explicit: as an upstream gradient for each token needs it
  const bool replay = request.Take<bool>("replay", false);          // the client keeps a copy of the open step's rows
  const bool frozen = request.Take<bool>("frozen", false);          // to the head `frozen`
  const double resolution = request.Take<double>("resolution", 0);  // gradient_resolution
};

class TransportClient {
 public:
  explicit TransportClient(Request& arguments)
      : address_(arguments.Take<std::string>("address", "")),
        folder_(arguments.Take<std::string>("folder", "")),
        rows_(arguments.Take<int64_t>("rows", 0)),
        width_(arguments.Take<int64_t>("width", 0)),
        vocab_(arguments.Take<int64_t>("vocab", 0)),
        device_hidden_(MakeNormal(DataType::kBFloat16, rows_ * width_, 21, 1)),
        device_grad_hidden_(Allocate(kSlots * HiddenBytes(rows_))),
        hidden_(OnHost(device_hidden_, rows_ * width_)) {
    std::mt19937_64 random(31);
    for (int64_t i = 0; i < rows_; ++i) {
      targets_.push_back(static_cast<int32_t>(std::uniform_int_distribution<int64_t>(0, vocab_ - 1)(random)));
    }
    const std::vector<uint16_t> weight =
        OnHost(MakeNormal(DataType::kBFloat16, vocab_ * width_, 11, 1 / std::sqrt(static_cast<double>(width_))), vocab_ * width_);
    client::Client client = Require(client::Client::Connect(address_));
    for (const bool trainable : {true, false}) {
      client::HeadSpec spec = {
          .vocab_size = vocab_, .hidden_size = width_, .data_type = client::DataType::kBFloat16, .trainable = trainable};
      client::Head head = Require(client.CreateHead(trainable ? "student" : "frozen", spec));
      Require(head.UploadWeights(client::HeadTensor::kWeight, client::TensorView::BFloat16(weight)));
    }
  }

  std::string Answer(Request& request) {
    const std::string& command = request.command();
    const int64_t count = request.Take<int64_t>("count", 1);
    const auto start = std::chrono::steady_clock::now();
    const auto ms = [&] {
      return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() /
             static_cast<double>(count);
    };
    if (command == "run") {
      times_.clear();
      Run(Work{request}, count);
      return Words({ms(), MedianMs(&client::Timing::upload), MedianMs(&client::Timing::queue), MedianMs(&client::Timing::engine),
                    MedianMs(&client::Timing::download)});
    }
    if (command == "many") {
      RunManyClients(request.Take<int64_t>("clients", 1), count);
      return Words({ms()});
    }
    if (command == "loss") return Words({Loss(Work{request})});
    if (command == "reserve")
      return Words({static_cast<double>(step_), static_cast<double>(std::exchange(next_id_, next_id_ + count))});
    if (command == "new_step") {
      step_ = Require(TrainerOf(Transport::kGrpc).student.DiscardGradient(step_)).open_step;
      next_id_ = 0;
    } else if (command == "reconnect") {
      trainers_.clear();
      many_.clear();
    } else {
      throw std::runtime_error("no such command: " + command);
    }
    return "";
  }

 private:
  // A connection and its memory.
  struct Trainer {
    Trainer(const std::string& address, Transport transport, int64_t grad_hidden_bytes, bool replay)
        : client(Require(client::Client::Connect(address, OptionsFor(transport, replay)))),
          student(Require(client.OpenHead("student"))),
          frozen(Require(client.OpenHead("frozen"))),
          grad_hidden(kSlots, std::vector<unsigned char>(static_cast<size_t>(grad_hidden_bytes))) {}

    static client::ClientOptions OptionsFor(Transport transport, bool replay) {
      client::ClientOptions options = {
          .timeout = std::chrono::seconds(60), .client_name = "transport_client", .transport = transport};
      if (replay) options.replay_bytes = kReplayBytes;
      options.on_notice = [](const std::string&) {};
      return options;
    }

    client::Client client;
    client::Head student, frozen;
    std::vector<std::vector<unsigned char>> grad_hidden;
    std::optional<client::RowsBuffer> shared_hidden;
    std::vector<client::RowsBuffer> shared_grad_hidden;
  };

  int64_t HiddenBytes(int64_t rows) const { return rows * width_ * 2; }

  static std::vector<uint16_t> OnHost(const Memory& memory, int64_t count) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    Copy(values.data(), memory.get(), count * 2);
    return values;
  }

  Trainer& TrainerOf(Transport transport, bool replay = false) {
    std::unique_ptr<Trainer>& trainer = trainers_[{transport, replay}];
    if (trainer == nullptr) trainer = std::make_unique<Trainer>(address_, transport, HiddenBytes(rows_), replay);
    return *trainer;
  }

  // Sets where the gradient goes, and returns the rows.
  client::RowsView Place(Trainer& trainer, const Work& work, size_t slot, client::MicroBatchOptions* options) {
    client::RowsView view = client::RowsView::BFloat16(hidden_, width_);
    if (work.rows == "device") {
      if (kMemorySpace != MemorySpace::kDevice) throw std::runtime_error("the rows are not on a GPU");
      const auto bytes = static_cast<size_t>(HiddenBytes(rows_));
      options->grad_hidden = absl::MakeSpan(device_grad_hidden_.get() + slot * bytes, bytes);
      options->grad_hidden_memory = client::Memory::kCuda;
      view.data = device_hidden_.get();
      view.memory = client::Memory::kCuda;
    } else if (work.rows == "shared") {
      if (!trainer.shared_hidden.has_value()) {
        const auto allocate = [&] { return Require(trainer.client.AllocateRows(rows_, width_, client::DataType::kBFloat16)); };
        trainer.shared_hidden.emplace(allocate());
        std::memcpy(trainer.shared_hidden->data(), hidden_.data(), hidden_.size() * 2);
        for (int i = 0; i < kSlots; ++i) trainer.shared_grad_hidden.push_back(allocate());
      }
      options->grad_hidden = trainer.shared_grad_hidden[slot].span();
      view = trainer.shared_hidden->view();
    } else {
      options->grad_hidden = absl::MakeSpan(trainer.grad_hidden[slot]);
    }
    return view;
  }

  client::Future<client::LossResult> Submit(Trainer& trainer, const Work& work, size_t slot) {
    client::MicroBatchOptions options;
    if (!work.frozen) {
      options.step = step_;
      options.micro_batch = next_id_++;
    }
    if (work.is_explicit) options.commit = client::CommitMode::kExplicit;
    options.late_token_factors = work.held;
    options.gradient_resolution = work.resolution;
    const client::RowsView hidden = Place(trainer, work, slot, &options);
    return (work.frozen ? trainer.frozen : trainer.student).CrossEntropy(hidden, targets_, {}, options);
  }

  client::LossResult Finish(client::Future<client::LossResult> future, const Work& work) {
    client::LossResult result = Require(future.Get());
    if (result.transport != client::TransportName(work.transport)) {
      throw std::runtime_error("the rows went over " + result.transport + ", not " + client::TransportName(work.transport));
    }
    ExpectPlausible(result, rows_);
    times_.push_back(result.timing);
    if (work.is_explicit) {
      if ((result.form == client::ContributionForm::kHeld) != work.held) {
        throw std::runtime_error("the contribution was held in another form than wanted");
      }
      Require(result.contribution->Commit().Get());
    }
    return result;
  }

  static void ExpectPlausible(const client::LossResult& result, int64_t rows) {
    if (result.valid_token_count != rows || !(result.loss_sum > 0)) throw std::runtime_error("the server computed nonsense");
  }

  void Run(const Work& work, int64_t count) {
    Trainer& trainer = TrainerOf(work.transport, work.replay);
    std::deque<client::Future<client::LossResult>> in_flight;
    const auto finish_first = [&] {
      Finish(std::move(in_flight.front()), work);
      in_flight.pop_front();
    };
    for (int64_t i = 0; i < count; ++i) {
      if (in_flight.size() == work.in_flight) finish_first();
      in_flight.push_back(Submit(trainer, work, static_cast<size_t>(i % kSlots)));
    }
    while (!in_flight.empty()) finish_first();
    AwaitLastProducts();
  }

  // The server answers before it has added the last micro-batch's grad_weight: one row is computed behind that, and its time
  // counted.
  void AwaitLastProducts() {
    client::RowsView hidden = client::RowsView::BFloat16(hidden_, width_);
    hidden.row_count = 1;
    const client::MicroBatchOptions options = {.forward_only = true};
    client::Head& student = TrainerOf(Transport::kGrpc).student;
    Require(student.CrossEntropy(hidden, absl::MakeConstSpan(targets_).first(1), {}, options).Get());
  }

  double MedianMs(std::chrono::nanoseconds client::Timing::*part) const {
    std::vector<double> values;
    for (const client::Timing& time : times_) values.push_back(std::chrono::duration<double, std::milli>(time.*part).count());
    if (values.empty()) return 0;
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  }

  void RunManyClients(int64_t clients, int64_t count) {
    const int64_t part = rows_ / clients;
    while (static_cast<int64_t>(many_.size()) < clients) {
      many_.push_back(std::make_unique<Trainer>(address_, Transport::kGrpc, HiddenBytes(part), /*replay=*/false));
    }
    const int64_t first_id = std::exchange(next_id_, next_id_ + count * clients);
    std::vector<std::future<void>> submitted;
    for (int64_t number = 0; number < clients; ++number) {
      submitted.push_back(std::async(std::launch::async, [=, this] {
        Trainer& trainer = *many_[static_cast<size_t>(number)];
        client::RowsView hidden = client::RowsView::BFloat16(hidden_, width_);
        hidden.data = hidden_.data() + number * part * width_;
        hidden.row_count = part;
        const auto targets = absl::MakeConstSpan(targets_).subspan(static_cast<size_t>(number * part), static_cast<size_t>(part));
        for (int64_t i = 0; i < count; ++i) {
          const client::MicroBatchOptions options = {
              .step = step_, .micro_batch = first_id + i * clients + number, .grad_hidden = absl::MakeSpan(trainer.grad_hidden[0])};
          ExpectPlausible(Require(trainer.student.CrossEntropy(hidden, targets, {}, options).Get()), part);
        }
      }));
    }
    for (std::future<void>& part_submitted : submitted) part_submitted.get();
    AwaitLastProducts();
  }

  double Loss(const Work& work) {
    Trainer& trainer = TrainerOf(work.transport, work.replay);
    const client::LossResult result = Finish(Submit(trainer, work, 0), work);
    const void* data = trainer.grad_hidden[0].data();
    std::vector<uint16_t> of_device;
    if (work.rows == "device") {
      of_device = OnHost(device_grad_hidden_, rows_ * width_);
      data = of_device.data();
    } else if (work.rows == "shared") {
      data = trainer.shared_grad_hidden[0].data();
    }
    std::ofstream file(folder_ + "/remote_grad_hidden", std::ios::binary);
    file.write(static_cast<const char*>(data), HiddenBytes(rows_));
    if (!file.flush()) throw std::runtime_error("grad_hidden cannot be written");
    return result.loss_sum;
  }

  const std::string address_, folder_;
  const int64_t rows_, width_, vocab_;
  const Memory device_hidden_, device_grad_hidden_;  // with the CPU engine ordinary memory
  const std::vector<uint16_t> hidden_;
  std::vector<int32_t> targets_;
  std::map<std::pair<Transport, bool>, std::unique_ptr<Trainer>> trainers_;  // and whether they have a replay log
  std::vector<std::unique_ptr<Trainer>> many_;
  std::vector<client::Timing> times_;
  int64_t step_ = 0;
  int64_t next_id_ = 0;
};

int Main(int argc, char** argv) {
  return Serve(argc, argv, [](Request& arguments) {
    return [trainer = std::make_shared<TransportClient>(arguments)](Request& request) { return trainer->Answer(request); };
  });
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) { return headwater::bench::Main(argc, argv); }
