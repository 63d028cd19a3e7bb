// The measurements of the server: headwaterd in its own process, and this process as its trainer.
#ifndef HEADWATER_TESTS_BENCH_TRANSPORT_REMOTE_SIDE_H_
#define HEADWATER_TESTS_BENCH_TRANSPORT_REMOTE_SIDE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "headwater/client/client.h"
#include "tests/bench/transport/local_side.h"
#include "tests/bench/transport/settings.h"
#include "tests/e2e/cpp/support/child_process.h"

namespace headwater::bench {

// headwaterd with its defaults, on loopback TCP. Throws std::runtime_error if it does not start.
class BenchServer {
 public:
  // `folder` is for its files.
  BenchServer(const TransportSettings& settings, const std::string& folder, const std::string& algorithms);

  // host:port.
  const std::string& address() const { return address_; }
  std::string log() const;

 private:
  std::string folder_;
  std::string address_;
  std::unique_ptr<e2e::ChildProcess> process_;
};

// How a trainer hands its rows over.
enum class Rows {
  kOwn,     // ordinary memory of its own
  kShared,  // Client::AllocateRows()
  kDevice,  // the GPU's
};

// How one micro-batch after the other is submitted.
struct Work {
  client::Transport transport = client::Transport::kGrpc;
  Rows rows = Rows::kOwn;
  int in_flight = 1;
  EngineWork engine;
  bool is_explicit = false;  // then committed, with factor 1
  bool held = false;         // only with is_explicit: as an upstream gradient for each token needs it
  bool replay = false;       // the client keeps a copy of the open step's rows
};

// Trainers of two heads of the server, `student` (trainable) and `frozen`, with the benchmark's weight. One thread. Functions throw
// std::runtime_error if a call fails, or took another path or form than wanted.
class RemoteSide {
 public:
  // Makes the heads. All arguments must outlive the object but `server`'s process, whose end makes everything fail.
  RemoteSide(const TransportSettings& settings, const Tensors& tensors, const std::string& address);
  ~RemoteSide();

  // Lets rows lie in the GPU's memory. `local` must outlive the object.
  void UseDevice(LocalSide* local) { local_ = local; }

  // Why a path cannot be taken here; empty if it can. Tries it once.
  std::string WhyNot(client::Transport transport, Rows rows);

  // Submits `count` micro-batches of all rows.
  void Run(const Work& work, int count);
  // Where the server's time went in the micro-batches of Run() since the last TakeTimes(), in ms; medians, all 0 without any.
  struct ServerTimes {
    double upload = 0, queue = 0, engine = 0, download = 0;
  };
  ServerTimes TakeTimes();
  // One client for each part of the rows, all at once, over gRPC: each submits its part `count` times.
  void RunManyClients(int count);
  // Empties the open step: a case begins with it.
  void NewStep();

  // Drops all connections, of which one may be broken; they are made again when they are needed.
  void Reconnect();

  // Compares one micro-batch, gradient included, with the engine's result in this process. It gives the relative error of the loss,
  // and that of grad_hidden (the norm of the difference over the norm).
  struct Difference {
    double loss = 0;
    double grad_hidden = 0;
  };
  Difference Compare(const Work& work, LocalSide& local);

  // The open step of `student`.
  int64_t step() const { return step_; }
  // `count` ids of micro-batches that are unused in this step, for a trainer in another process.
  int64_t ReserveIds(int64_t count);

 private:
  struct Trainer;
  Trainer& TrainerOf(client::Transport transport, bool replay = false);
  client::RowsView HiddenOf(Trainer& trainer, Rows rows);
  void GradHiddenOf(Trainer& trainer, Rows rows, int slot, client::MicroBatchOptions* options);
  client::Future<client::LossResult> Submit(Trainer& trainer, const Work& work, int slot);
  client::LossResult Finish(client::Future<client::LossResult> future, const Work& work);
  // The server answers before it has added the last micro-batch's grad_weight: one row is computed behind that, and its time
  // counted.
  void AwaitLastProducts();

  const TransportSettings& settings_;
  const Tensors& tensors_;
  const std::string address_;
  LocalSide* local_ = nullptr;
  std::map<std::pair<client::Transport, bool>, std::unique_ptr<Trainer>> trainers_;  // and whether they have a replay log
  std::vector<std::unique_ptr<Trainer>> many_;
  std::vector<client::Timing> times_;
  int64_t step_ = 0;
  int64_t next_id_ = 0;
};

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_TRANSPORT_REMOTE_SIDE_H_
