#include "client/ctl/bench/bench_run.h"

#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/connection.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::ctl {
namespace {

using client::internal::DeviceBacking;
using client::internal::DeviceContext;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr int64_t kSmallestVocab = 1024;

volatile sig_atomic_t interrupted = 0;

double Milliseconds(nanoseconds time) { return std::chrono::duration<double, std::milli>(time).count(); }

// Random values of this standard deviation in a storage type: drawn from 65536 of them, because billions may be wanted.
std::vector<unsigned char> RandomElements(client::DataType type, int64_t count, double deviation, uint64_t seed) {
  constexpr size_t kValues = 1 << 16;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(deviation));
  const size_t size = static_cast<size_t>(client::ElementBytes(type));
  std::vector<unsigned char> values(kValues * size);
  for (size_t i = 0; i < kValues; ++i) {
    const float value = normal(random);
    uint32_t pattern = 0;
    std::memcpy(&pattern, &value, sizeof(pattern));
    uint16_t half = static_cast<uint16_t>((pattern + 0x8000) >> 16);
    if (type == client::DataType::kFloat16) {
      // Sign, exponent of bias 15 instead of 127, ten digits; values that are too small become 0.
      const int exponent = static_cast<int>((pattern >> 23) & 0xff) - 127 + 15;
      const uint32_t sign = (pattern >> 16) & 0x8000;
      half = static_cast<uint16_t>(
          exponent <= 0 ? sign : sign | (static_cast<uint32_t>(std::min(exponent, 30)) << 10) | ((pattern >> 13) & 0x3ff));
    }
    std::memcpy(values.data() + i * size, type == client::DataType::kFloat32 ? static_cast<const void*>(&value) : &half, size);
  }
  std::vector<unsigned char> elements(static_cast<size_t>(count) * size);
  for (size_t i = 0; i < static_cast<size_t>(count); i += 4) {
    const uint64_t number = random();
    for (size_t part = 0; part < std::min<size_t>(4, static_cast<size_t>(count) - i); ++part) {
      std::memcpy(elements.data() + (i + part) * size, values.data() + ((number >> (16 * part)) & 0xffff) * size, size);
    }
  }
  return elements;
}

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

}  // namespace

void CatchInterruptions() {
  struct sigaction action {};
  action.sa_handler = [](int) { interrupted = 1; };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool BenchInterrupted() { return interrupted != 0; }

absl::StatusOr<std::string> MakeBenchHead(client::Client& client, client::HeadSpec* spec) {
  std::random_device device;
  const std::string name = absl::StrFormat("headwaterctl-bench-%08x%08x", device(), device());
  while (true) {
    HEADWATER_ASSIGN_OR_RETURN(client::HeadInfo plan, client.PlanHead(name, *spec));
    if (plan.memory_plan.total_bytes <= plan.memory_plan.available_bytes) break;
    if (spec->vocab_size / 2 < kSmallestVocab) {
      return absl::ResourceExhaustedError(absl::StrCat("the server's memory has no room for a head of ", spec->vocab_size, " x ",
                                                       spec->hidden_size, ": `headwaterctl plan` prints its memory"));
    }
    spec->vocab_size /= 2;
  }
  HEADWATER_ASSIGN_OR_RETURN(client::Head head, client.CreateHead(name, *spec));
  const int64_t count = spec->vocab_size * spec->hidden_size;
  const std::vector<unsigned char> weight =
      RandomElements(spec->data_type, count, 1 / std::sqrt(static_cast<double>(spec->hidden_size)), 1);
  absl::StatusOr<client::HeadInfo> uploaded =
      head.UploadWeights(client::HeadTensor::kWeight, {weight.data(), spec->data_type, count});
  if (uploaded.ok()) return name;
  client.DeleteHead(name, /*force=*/true).IgnoreError();
  return uploaded.status();
}

absl::StatusOr<std::unique_ptr<BenchTrainer>> BenchTrainer::Make(client::Transport transport, const std::string& head,
                                                                 int64_t max_rows, int max_in_flight) {
  absl::StatusOr<client::Client> client = Connect(transport, /*session=*/true);
  if (!client.ok()) return client.status();
  HEADWATER_ASSIGN_OR_RETURN(client::Head opened, client->OpenHead(head));
  std::unique_ptr<BenchTrainer> trainer(new BenchTrainer(transport, *std::move(client), std::move(opened)));
  HEADWATER_RETURN_IF_ERROR(trainer->PlaceRows(max_rows, max_in_flight));
  absl::StatusOr<BenchRow> tried = trainer->Measure(1, 1, nanoseconds(0), 3);
  if (!tried.ok()) return tried.status();
  return trainer;
}

absl::Status BenchTrainer::PlaceRows(int64_t max_rows, int max_in_flight) {
  max_rows_ = max_rows;
  const client::HeadSpec& spec = head_.spec();
  std::mt19937_64 random(3);
  for (int64_t i = 0; i < max_rows; ++i) {
    targets_.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(spec.vocab_size)));
  }
  const std::vector<unsigned char> hidden = RandomElements(spec.data_type, max_rows * spec.hidden_size, 1, 2);
  const int64_t parts = 1 + max_in_flight;
  if (transport_ == client::Transport::kCudaIpc) {
    HEADWATER_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceContext> gpu, DeviceContext::OfFirstGpu());
    HEADWATER_ASSIGN_OR_RETURN(device_rows_, DeviceBacking::Allocate(gpu, static_cast<int64_t>(hidden.size()) * parts));
    rows_ = device_rows_->data();
    return gpu->CopyNow(nullptr, rows_, hidden.data(), static_cast<int64_t>(hidden.size()));
  }
  if (transport_ == client::Transport::kSharedMemory) {
    HEADWATER_ASSIGN_OR_RETURN(shared_rows_, client_.AllocateRows(max_rows * parts, spec.hidden_size, spec.data_type));
    rows_ = static_cast<unsigned char*>(shared_rows_.data());
  } else {
    own_rows_.resize(hidden.size() * static_cast<size_t>(parts));
    rows_ = own_rows_.data();
  }
  std::memcpy(rows_, hidden.data(), hidden.size());
  return absl::OkStatus();
}

client::Future<client::LossResult> BenchTrainer::Submit(int64_t rows, int slot) {
  const client::HeadSpec& spec = head_.spec();
  const client::Memory memory = device_rows_ != nullptr ? client::Memory::kCuda : client::Memory::kHost;
  const client::RowsView hidden{rows_, spec.data_type, rows, spec.hidden_size, memory};
  client::MicroBatchOptions options;
  options.step = step_;
  options.micro_batch = next_id_++;
  options.grad_hidden = {rows_ + (1 + slot) * max_rows_ * hidden.row_bytes(), static_cast<size_t>(rows * hidden.row_bytes())};
  options.grad_hidden_memory = memory;
  return head_.CrossEntropy(hidden, absl::MakeConstSpan(targets_).first(static_cast<size_t>(rows)), {}, options);
}

absl::StatusOr<BenchRow> BenchTrainer::Measure(int64_t rows, int in_flight, nanoseconds duration, int64_t max_micro_batches) {
  HEADWATER_ASSIGN_OR_RETURN(client::StepStates states, head_.GetStep());
  step_ = states.open.step;
  next_id_ = 0;
  struct Flight {
    client::Future<client::LossResult> future;
    steady_clock::time_point start;
  };
  std::deque<Flight> flights;
  std::vector<double> latencies;
  std::vector<double> engine;
  int64_t finished = 0;
  const steady_clock::time_point begin = steady_clock::now();
  steady_clock::time_point counted_from = begin;
  steady_clock::time_point last = begin;
  const auto more = [&] {
    const bool enough = latencies.size() >= 3 && steady_clock::now() - counted_from >= duration;
    return !enough && next_id_ < max_micro_batches && !BenchInterrupted();
  };
  int slot = 0;
  while (more() || !flights.empty()) {
    while (static_cast<int>(flights.size()) < in_flight && more()) {
      const steady_clock::time_point start = steady_clock::now();
      flights.push_back({Submit(rows, slot), start});
      slot = (slot + 1) % in_flight;
    }
    if (flights.empty()) break;
    HEADWATER_ASSIGN_OR_RETURN(client::LossResult result, flights.front().future.Get());
    const steady_clock::time_point now = steady_clock::now();
    if (result.transport != client::TransportName(transport_)) {
      return absl::FailedPreconditionError(absl::StrCat("the rows went over ", result.transport));
    }
    // The first ones warm up: a quarter of the time, and all that were in flight together with them; not beyond what a step takes.
    if ((now - begin < duration / 4 || finished < in_flight) && next_id_ < max_micro_batches) {
      counted_from = now;
    } else {
      latencies.push_back(Milliseconds(now - flights.front().start));
      engine.push_back(Milliseconds(result.timing.engine));
      last = now;
    }
    ++finished;
    flights.pop_front();
  }
  HEADWATER_RETURN_IF_ERROR(head_.DiscardGradient(step_).status());
  if (BenchInterrupted()) return absl::CancelledError("interrupted");
  if (latencies.empty()) return absl::InternalError("nothing was measured");
  BenchRow row;
  row.transport = client::TransportName(transport_);
  row.in_flight = in_flight;
  row.rows = rows;
  row.micro_batches = static_cast<int64_t>(latencies.size());
  row.median_ms = Quantile(latencies, 0.5);
  row.p90_ms = Quantile(latencies, 0.9);
  row.engine_ms = Quantile(engine, 0.5);
  row.period_ms = Milliseconds(last - counted_from) / static_cast<double>(latencies.size());
  row.rows_per_second = 1000 * static_cast<double>(rows) / row.period_ms;
  return row;
}

}  // namespace headwater::ctl
