// The cost of a remote step beside a local one. headwaterd runs in one process, its trainers in this one and in Python's. In
// alternating blocks with them, this process calls the engine directly, on the same GPU (alternating_blocks.h). bf16, cross
// entropy, forward and backward.
//
//   transport_bench [--engine=cuda] [--rows=8192 --hidden=4096 --vocab=128256] [--clients=64] [--cases=PART,...] [--list]
//                   [--seconds=1 --warmup=2 --rounds=2 --idle=2] [--headwaterd=PATH] [--python=PROGRAM --scripts=FOLDER]
//                   [--algorithms=FILE] [--output=FILE.csv --commit=NAME] [--smoke]
//
// Writes a table to standard output, and the figures into the file (figure_file.h). Ends with 1 if a figure misses its requirement
// (not with --smoke), or a case of this engine could not be measured.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/bench/common/alternating_blocks.h"
#include "tests/bench/common/card_monitor.h"
#include "tests/bench/transport/local_side.h"
#include "tests/bench/transport/remote_side.h"
#include "tests/bench/transport/settings.h"
#include "tests/bench/transport/worker.h"
#include "tests/kernels/support/figure_file.h"

namespace headwater::bench {
namespace {

using client::Transport;

// The divisor of a case's time.
enum class Base {
  kProducts,  // the bare products
  kEngine,    // the engine, called directly, for the same work
  kEager,     // an EAGER micro-batch over the same path
  kCpp,       // this process's client over the same path
  kSameCpp,   // this process's client, of the same work: explicit and committed
  kGrpc,      // one client, all rows, gRPC
  kPeer,      // a loss in PyTorch's process on the same GPU
};

enum class Kind { kEngine, kWork, kManyClients, kPython };

struct Case {
  std::string name;
  Kind kind = Kind::kWork;
  Base base = Base::kEngine;
  std::optional<double> at_most;
  Work work;
  std::string peer;     // kPeer: which
  bool is_jax = false;  // kPython: headwater.jax; measured where it is named, as tests/bench/jax/run does
};

Work Path(Transport transport, Rows rows) {
  Work work;
  work.transport = transport;
  work.rows = rows;
  return work;
}

std::vector<Case> AllCases() {
  const Work grpc = Path(Transport::kGrpc, Rows::kOwn);
  const Work shared = Path(Transport::kSharedMemory, Rows::kShared);
  const Work copied = Path(Transport::kSharedMemory, Rows::kOwn);
  const Work ipc = Path(Transport::kCudaIpc, Rows::kDevice);
  std::vector<Case> cases;
  cases.push_back({"engine", Kind::kEngine, Base::kProducts, {}, {}, ""});
  cases.push_back({"grpc", Kind::kWork, Base::kEngine, 1.20, grpc, ""});
  Work two = grpc;
  two.in_flight = 2;
  cases.push_back({"grpc_two_in_flight", Kind::kWork, Base::kEngine, 1.05, two, ""});
  cases.push_back({"shared_memory", Kind::kWork, Base::kEngine, 1.05, shared, ""});
  cases.push_back({"shared_memory_own_rows", Kind::kWork, Base::kEngine, {}, copied, ""});
  cases.push_back({"cuda_ipc", Kind::kWork, Base::kEngine, 1.03, ipc, ""});
  Work frozen = grpc;
  frozen.engine.frozen = true;
  cases.push_back({"grpc_frozen_head", Kind::kWork, Base::kEngine, 1.30, frozen, ""});
  for (const auto& [name, path, at_most] : {std::tuple("cuda_ipc", ipc, 1.05), std::tuple("shared_memory", shared, 1.08),
                                            std::tuple("grpc_two_in_flight", two, 1.12)}) {
    Work work = path;
    work.engine.resolution = 0x1p-8;
    cases.push_back({std::string(name) + "_tau_2_8", Kind::kWork, Base::kEngine, at_most, work, ""});
  }
  for (const auto& [name, path] : {std::pair("grpc", grpc), std::pair("shared_memory", shared), std::pair("cuda_ipc", ipc)}) {
    Work work = path;
    work.is_explicit = true;
    cases.push_back({std::string(name) + "_explicit", Kind::kWork, Base::kEager, 1.08, work, ""});
    work.held = true;
    cases.push_back({std::string(name) + "_held", Kind::kWork, Base::kEager, 1.40, work, ""});
    cases.push_back({std::string(name) + "_python", Kind::kPython, Base::kCpp, 1.02, path, ""});
    work = path;
    work.replay = true;
    cases.push_back({std::string(name) + "_replay", Kind::kWork, Base::kCpp, {}, work, ""});
  }
  for (const auto& [name, path, at_most] :
       {std::tuple("cuda_ipc_jax", ipc, std::optional(1.05)), std::tuple("shared_memory_jax", copied, std::optional<double>())}) {
    Work work = path;
    work.is_explicit = true;
    cases.push_back({name, Kind::kPython, Base::kSameCpp, at_most, work, "", /*is_jax=*/true});
  }
  // 80 % of the rows a second are 1.25 times the time.
  cases.push_back({"grpc_many_clients", Kind::kManyClients, Base::kGrpc, 1.25, grpc, ""});
  cases.push_back({"grpc_against_torch_eager", Kind::kWork, Base::kPeer, 1.0, grpc, "torch_eager"});
  cases.push_back({"grpc_against_liger", Kind::kWork, Base::kPeer, 1.0, grpc, "liger_fp32"});
  cases.push_back({"grpc_against_torch_compile", Kind::kWork, Base::kPeer, {}, grpc, "torch_compile"});
  return cases;
}

const char* BaseName(Base base) {
  // In their order.
  constexpr const char* kNames[] = {"products", "engine", "EAGER", "C++ client", "C++ client", "one client", "peer"};
  return kNames[static_cast<size_t>(base)];
}

class Bench {
 public:
  Bench(const TransportSettings& settings, const std::string& folder)
      : settings_(settings),
        algorithms_(settings.algorithms.empty() ? folder + "/algorithms.json" : settings.algorithms),
        tensors_(settings),
        server_(settings, folder, algorithms_),
        remote_(settings_, tensors_, server_.address()),
        // After the server, whose search has filled the file of algorithms by now.
        local_(settings.engine == "cuda" ? MakeGpuSide(settings_, tensors_, algorithms_) : MakeCpuSide(settings_, tensors_)),
        monitor_(local_->bus_id()),
        figures_(settings.output, local_->machine(), settings.commit) {
    remote_.UseDevice(local_.get());
  }

  // Whether everything was measured and nothing misses what is required of it.
  bool RunAll() {
    std::printf("%s; N=%lld H=%lld V=%lld; %g s warm-up, blocks of %g s, %d rounds\n", local_->machine().c_str(),
                static_cast<long long>(settings_.rows), static_cast<long long>(settings_.hidden_size),
                static_cast<long long>(settings_.vocab_size), settings_.blocks.warmup_seconds, settings_.blocks.block_seconds,
                settings_.blocks.rounds);
    std::printf("%-28s %9s %9s %-10s %7s %6s %7s %7s %9s %5s %5s %3s\n", "case", "ms", "base ms", "base", "ratio", "limit",
                "spread", "burst", "products", "MHz", "W", "C");
    for (const Case& bench_case : AllCases()) {
      if (!IsWanted(bench_case.name) || (bench_case.is_jax && settings_.cases.empty())) continue;
      try {
        RunCase(bench_case);
      } catch (const std::runtime_error& error) {
        // The others may still be measured: a run on a GPU is dear.
        LeaveOut(bench_case, error.what());
        remote_.Reconnect();
      }
    }
    std::printf("%d figures miss what is required, %d could not be taken\n", missed_, left_out_);
    return (missed_ == 0 || settings_.smoke) && left_out_ == 0;
  }

  std::string server_log() const { return server_.log(); }

 private:
  void Say(const char* what) const {
    std::fprintf(stderr, "[%6.1f s] %s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(), what);
  }

  bool IsWanted(const std::string& name) const {
    return settings_.cases.empty() || std::any_of(settings_.cases.begin(), settings_.cases.end(),
                                                  [&](const std::string& part) { return name.find(part) != std::string::npos; });
  }

  void LeaveOut(const Case& bench_case, const std::string& why) {
    std::printf("%-28s not measured: %s\n", bench_case.name.c_str(), why.c_str());
    std::fflush(stdout);
    if (IsExpected(bench_case)) ++left_out_;
  }

  // Whether it is a failure that the case cannot be measured: Liger is not installed everywhere, and much needs a GPU.
  bool IsExpected(const Case& bench_case) const {
    if (bench_case.peer == "liger_fp32") return false;
    const bool needs_gpu =
        bench_case.base == Base::kProducts || bench_case.base == Base::kPeer || bench_case.work.rows == Rows::kDevice;
    return settings_.engine == "cuda" || !needs_gpu;
  }

  void RunCase(const Case& bench_case) {
    Say(bench_case.name.c_str());
    if (bench_case.base == Base::kProducts && !local_->has_products()) return LeaveOut(bench_case, "no products on this engine");
    if (bench_case.base == Base::kPeer && settings_.engine != "cuda") return LeaveOut(bench_case, "peers are measured on a GPU");
    remote_.NewStep();
    if (bench_case.kind != Kind::kEngine) {
      if (const std::string why = remote_.WhyNot(bench_case.work.transport, bench_case.work.rows); !why.empty()) {
        return LeaveOut(bench_case, why);
      }
      CheckAgainstEngine(bench_case);
    }
    std::unique_ptr<Worker> worker = MakeWorker(bench_case);
    if (worker != nullptr && !worker->why_not().empty()) return LeaveOut(bench_case, worker->why_not());
    if (worker == nullptr && NeedsWorker(bench_case)) return LeaveOut(bench_case, "--python is empty");
    times_ = {};
    const BlockTimes times =
        TimeAlternately(BaseWork(bench_case, worker.get()), CandidateWork(bench_case, worker.get()), settings_.blocks, monitor_);
    Report(bench_case, times);
  }

  // The server must compute what the engine does: a fast answer that is wrong is none. One for each kind of path.
  void CheckAgainstEngine(const Case& bench_case) {
    const RemoteSide::Difference difference = remote_.Compare(bench_case.work, *local_);
    // Draws are named by the micro-batch, so gradients with a resolution differ by the noise of two draws.
    const double limit = 1e-2 + 2 * std::sqrt(2 * bench_case.work.engine.resolution);
    if (!(difference.loss < 1e-4 && difference.grad_hidden < limit)) {
      throw std::runtime_error(bench_case.name + ": the server's answer differs from the engine's: loss by " +
                               std::to_string(difference.loss) + ", grad_hidden by " + std::to_string(difference.grad_hidden));
    }
  }

  static bool NeedsWorker(const Case& bench_case) { return bench_case.kind == Kind::kPython || bench_case.base == Base::kPeer; }

  std::unique_ptr<Worker> MakeWorker(const Case& bench_case) {
    if (!NeedsWorker(bench_case) || settings_.python.empty()) return nullptr;
    std::vector<std::string> arguments = {settings_.python};
    const auto shape = [&] {
      arguments.push_back("--rows=" + std::to_string(settings_.rows));
      arguments.push_back("--hidden=" + std::to_string(settings_.hidden_size));
      arguments.push_back("--vocab=" + std::to_string(settings_.vocab_size));
    };
    if (bench_case.kind == Kind::kPython) {
      arguments.push_back(settings_.scripts + (bench_case.is_jax ? "/jax_client.py" : "/python_client.py"));
      shape();
      arguments.push_back("--address=" + server_.address());
      arguments.push_back(std::string("--transport=") + client::TransportName(bench_case.work.transport));
    } else {
      arguments.push_back(settings_.scripts + "/peer_worker.py");
      shape();
      arguments.push_back("--peer=" + bench_case.peer);
    }
    return std::make_unique<Worker>(arguments);
  }

  // The Python client's micro-batches are of the same step, with ids that this process leaves to it.
  void RunPython(Worker& worker, int count) {
    const std::string answer = worker.Ask("submit " + std::to_string(remote_.step()) + " " +
                                          std::to_string(remote_.ReserveIds(count)) + " " + std::to_string(count));
    if (answer != "done") throw std::runtime_error("the Python client said: " + answer);
  }

  Repeat CandidateWork(const Case& bench_case, Worker* worker) {
    switch (bench_case.kind) {
      case Kind::kEngine:
        return [this](int count) { local_->RunEngine(count, {}); };
      case Kind::kManyClients:
        return [this](int count) { remote_.RunManyClients(count); };
      case Kind::kPython:
        return [this, worker](int count) { RunPython(*worker, count); };
      case Kind::kWork:
        break;
    }
    return [this, work = bench_case.work](int count) {
      remote_.TakeTimes();  // the base's, where it is remote too
      remote_.Run(work, count);
      times_ = remote_.TakeTimes();
    };
  }

  Repeat BaseWork(const Case& bench_case, Worker* worker) {
    switch (bench_case.base) {
      case Base::kProducts:
        return [this](int count) { local_->RunProducts(count); };
      case Base::kEngine:
        return [this, work = bench_case.work.engine](int count) { local_->RunEngine(count, work); };
      case Base::kPeer:
        return [worker](int count) { worker->Run(count); };
      case Base::kEager:
      case Base::kCpp:
      case Base::kSameCpp:
      case Base::kGrpc:
        break;
    }
    Work work = bench_case.work;
    if (bench_case.base != Base::kSameCpp) work.is_explicit = work.held = work.replay = false;
    return [this, work](int count) { remote_.Run(work, count); };
  }

  void Report(const Case& bench_case, const BlockTimes& times) {
    // All against the products of the same run: those of the engine's case.
    if (bench_case.base == Base::kProducts) products_ms_ = times.floor_ms;
    const std::string name = (settings_.engine == "cuda" ? "cuda_transport_" : "cpu_transport_") + bench_case.name;
    const std::string unit = std::string("x ") + BaseName(bench_case.base);
    figures_.Add({name + "_ratio", times.ratio, unit, bench_case.at_most});
    figures_.Add({name + "_spread", times.ratio_spread, "(max-min)/median", {}});
    figures_.Add({name + "_ms", times.candidate_ms, "ms", {}});
    figures_.Add({name + "_base_ms", times.floor_ms, "ms", {}});
    if (settings_.blocks.idle_seconds > 0) figures_.Add({name + "_burst_ratio", times.burst_ratio, unit, {}});
    const double of_products = products_ms_ > 0 ? times.candidate_ms / products_ms_ : 0;
    if (products_ms_ > 0) figures_.Add({name + "_of_products", of_products, "x products", {}});
    if (times.candidate_card.sample_count > 0) {
      figures_.Add({name + "_sm_mhz", times.candidate_card.sm_mhz, "MHz", {}});
      figures_.Add({name + "_base_sm_mhz", times.floor_card.sm_mhz, "MHz", {}});
      figures_.Add({name + "_watts", times.candidate_card.watts, "W", {}});
      figures_.Add({name + "_celsius", times.candidate_card.celsius, "degrees", {}});
      figures_.Add({name + "_throttle_reasons", static_cast<double>(times.candidate_card.throttle_reasons), "NVML bits", {}});
    }
    if (times_.engine > 0) {
      figures_.Add({name + "_server_upload_ms", times_.upload, "ms", {}});
      figures_.Add({name + "_server_queue_ms", times_.queue, "ms", {}});
      figures_.Add({name + "_server_engine_ms", times_.engine, "ms", {}});
      figures_.Add({name + "_server_download_ms", times_.download, "ms", {}});
    }
    const bool missed = bench_case.at_most.has_value() && !(times.ratio <= *bench_case.at_most);
    std::printf("%-28s %9.3f %9.3f %-10s %7.4f %6.2f %7.4f %7.4f %9.4f %5.0f %5.0f %3.0f%s\n", bench_case.name.c_str(),
                times.candidate_ms, times.floor_ms, BaseName(bench_case.base), times.ratio, bench_case.at_most.value_or(0),
                times.ratio_spread, times.burst_ratio, of_products, times.candidate_card.sm_mhz, times.candidate_card.watts,
                times.candidate_card.celsius, missed ? "  over what is required" : "");
    if (times_.engine > 0) {
      std::printf("%-28s %9s server: upload %.2f, queue %.2f, engine %.2f, download %.2f ms\n", "", "", times_.upload, times_.queue,
                  times_.engine, times_.download);
    }
    std::fflush(stdout);
    if (missed) ++missed_;
    // After every case: a run that is cut short has kept what it has.
    if (const std::string error = figures_.Write(); !error.empty()) throw std::invalid_argument(error);
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const TransportSettings& settings_;
  const std::string algorithms_;
  const Tensors tensors_;
  BenchServer server_;
  RemoteSide remote_;
  std::unique_ptr<LocalSide> local_;
  CardMonitor monitor_;
  testing::FigureFile figures_;
  RemoteSide::ServerTimes times_;  // of the candidate's last block
  double products_ms_ = 0;
  int missed_ = 0;
  int left_out_ = 0;
};

int Main(const TransportSettings& settings) {
  if (settings.list) {
    for (const Case& bench_case : AllCases()) std::printf("%s\n", bench_case.name.c_str());
    return 0;
  }
  const e2e::TemporaryDirectory folder;
  std::unique_ptr<Bench> bench;
  try {
    bench = std::make_unique<Bench>(settings, folder.path());
    return bench->RunAll() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n%s", error.what(), bench == nullptr ? "" : bench->server_log().c_str());
    return 1;
  }
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) { return headwater::bench::Main(headwater::bench::ParseTransportFlags(argc, argv)); }
