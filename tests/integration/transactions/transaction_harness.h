// Rows of transaction tables: each tells a story over the wire and names the state that must be left, to the bit.
//
// A row's `story` runs against one server, with all its failures. Its `undisturbed` calls run against another server, with the
// same shards, heads and weights: they are the ones that alone should have counted. CompareStates() then wants the same step, step
// state, totals, accumulator and weights of every head, bitwise, and the micro-batches that the row lists. What the undisturbed
// calls themselves add is for tests/e2e/python, which compares it with fp64.
#ifndef HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_HARNESS_H_
#define HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_HARNESS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {

// Answers are strings: "OK", "OK replayed", "OK dropped", of ComputeLoss "COMMITTED DIRECT" (state and form, then ` replayed` or
// ` differs`), or the reason of the error.

// A micro-batch of 3 rows: cross entropy.
struct Batch {
  int64_t id = 0;
  int64_t step = 0;
  uint32_t seed = 0;  // of the rows; 0: 100 + id
  std::string head = "student";
  int64_t attempt = 0;
  bool explicit_commit = false;
  bool allow_held = false;
  bool late_token_factors = false;
  bool first_wins = false;
  bool refuse_non_finite = false;
  bool has_nan = false;
  std::string session = {};
};

// CommitMicroBatch or DiscardMicroBatch.
struct Decision {
  int64_t id = 0;
  int64_t step = 0;
  int64_t attempt = 0;
  double factor = 1;
  std::string session = {};
};

// AddGradient, of 4 rows.
struct Part {
  int64_t id = 0;
  int64_t step = 0;
  uint32_t seed = 0;  // of the rows; 0: 100 + id
  int64_t row_start = 2;
  double factor = 1;
  int64_t attempt = 0;
};

// SealStep, ApplyOptimizerStep.
struct StepEnd {
  int64_t step = 0;
  std::vector<int64_t> ids = {};  // expected
  bool wait = false;
  double learning_rate = 0.01;
};

// Makes shards fail, or wait, at the beginning of a phase of work that changes a head. Thread-safe.
class ShardFault {
 public:
  void Fail(ShardPhase phase, int32_t rank);
  // Whoever comes to the phase waits there until Clear().
  void Hold(ShardPhase phase);
  void AwaitHeld();
  void Clear();
  absl::Status Probe(ShardPhase phase, int32_t rank);

 private:
  enum class What { kNothing, kFail, kHold };
  absl::Mutex mutex_;
  What what_ ABSL_GUARDED_BY(mutex_) = What::kNothing;
  ShardPhase phase_ ABSL_GUARDED_BY(mutex_) = ShardPhase::kPrepare;
  int32_t rank_ ABSL_GUARDED_BY(mutex_) = 0;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
};

// How a row's servers differ from the default.
struct TrialSetup {
  std::function<void(ServerSetup&)> adjust = nullptr;
  std::map<std::string, v1::HeadSpec> specs = {};  // heads that are not SmallSpec()
  bool checkpoints = false;
};

// A ComputeLoss stream that a story holds in its hands. Sends the header and the first `sent_rows` of the 3 rows; with all of them,
// half-closes.
class OpenCall : public OpenStream {
 public:
  OpenCall(WireServer& server, const v1::MicroBatchHeader& header, const std::string& rows, int64_t sent_rows);
  ~OpenCall() { context.TryCancel(); }
  void SendRest();
  // Reads to the end.
  std::string Answer();

 private:
  const std::string rows_;
  const int64_t sent_rows_;
};

// One server, and what a trainer believes of its heads.
class Trial {
 public:
  Trial(const TrialSetup& setup, int shard_count);
  ~Trial();

  WireServer& server() { return *server_; }
  ShardFault& fault() { return *fault_; }
  const std::string& directory() const { return folder_.path(); }  // of checkpoints, and the load root
  int32_t last_rank() const { return shard_count_ - 1; }
  // The head of this id as the trainer knows it; made, with weights that follow from the id, when it is first asked for.
  TestHead& Head(const std::string& id = "student");
  std::vector<std::string> HeadIds() const;
  // The server dies and another comes up on the same checkpoints. The trainer's beliefs stay.
  void Restart();
  // Learns the epoch that is current now.
  void Refresh() { Head().head = server_->Get(Head().name()); }

  // ---- calls
  v1::MicroBatchHeader HeaderOf(const Batch& batch);
  static std::string RowsOf(const Batch& batch);
  LossReply Compute(const Batch& batch, SendOptions send = {});
  std::string Submit(const Batch& batch);
  // As Submit(), with `edit` applied to the header.
  std::string SubmitEdited(const Batch& batch, const std::function<void(v1::MicroBatchHeader&)>& edit);
  std::unique_ptr<OpenCall> Open(const Batch& batch, int64_t sent_rows);
  // Cancels. The server learns of it a moment later: await what it shows then.
  void Cancel(OpenCall& call);
  // The same for a call that the engine is held up with: returns when the server knows that the call's client has gone.
  void CancelHeld(OpenCall& call);
  std::string Commit(const Decision& decision);
  std::string Discard(const Decision& decision);
  std::string AddPart(const Part& part);
  std::string Seal(const StepEnd& end);
  std::string Apply(const StepEnd& end);
  std::string DiscardGradient(int64_t step = 0);
  // New weights that close a sealed step.
  std::string Replace(int64_t step = 0, uint32_t seed = 77);
  std::string Norm(int64_t step);
  std::string Download(int64_t step);
  std::string GetStep();
  // The trainer adopts the new epoch.
  std::string Take();
  std::string Save(const std::string& checkpoint);
  std::string Restore(const std::string& checkpoint, const std::string& id = "student");
  // The trainer does not know the head any more: Head() makes it anew.
  void Forget(const std::string& id);
  std::string OpenSession(int64_t lease_ms = 20000) { return server_->OpenSession(lease_ms); }
  std::string KeepAlive(const std::string& session);
  std::string CloseSession(const std::string& session);
  // The answer of a call that was made by hand: remembered, like all others, by last_error().
  std::string Tell(const grpc::Status& status) { return Answer(status); }
  // Remembers an earlier error again; returns `answer`.
  std::string Tell(const WireError& error, const std::string& answer);
  // The error of the last call that failed.
  WireError last_error() const;

  // Of each call but AddPart() and Replace(). A call that should not have waited fails its row, not the whole run.
  static constexpr int kDeadlineMs = 25000;
  std::atomic<int> deadline_ms{kDeadlineMs};

  // ---- what can be seen
  // True once the metric's value is `value`; false if it does not become that.
  bool AwaitMetric(const std::string& name, int64_t value) const { return server_->AwaitMetric(name, value); }
  bool NothingInFlight() { return AwaitMetric("headwater_in_flight_bytes", 0); }
  std::string Gradient(const std::string& id = "student");
  // "0 COMMITTED DIRECT", "1 DISCARDED", with ` @2` behind it for attempt 2; those of heads other than the student begin with
  // "id: ".
  std::vector<std::string> MicroBatches();
  std::string MicroBatch(int64_t id) { return Line(server_->Find(Head(), id)); }

 private:
  static std::string Line(const v1::MicroBatchState& state);
  v1::HeadStep At(int64_t step) { return server_->At(Head(), step); }
  std::string Answer(const grpc::Status& status, const std::string& detail = "OK");
  // A unary call: the answer, with what the response says of itself.
  template <typename Stub, typename Request, typename Response>
  std::string Ask(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*), const Request& request,
                  Response* response);

  const TrialSetup setup_;
  const int32_t shard_count_;
  const TemporaryDirectory folder_;
  std::shared_ptr<ShardFault> fault_;
  std::unique_ptr<WireServer> server_;
  mutable absl::Mutex state_mutex_;  // a story may make calls on several threads; what it does to one head it does in turn
  std::map<std::string, TestHead> heads_ ABSL_GUARDED_BY(state_mutex_);
  mutable absl::Mutex error_mutex_;
  WireError last_error_ ABSL_GUARDED_BY(error_mutex_);
};

// How most stories begin: micro-batch 0, eager, and the line that MicroBatches() has for it.
inline constexpr char kEagerLine[] = "0 COMMITTED DIRECT";
void SubmitFirst(Trial& t);

struct TransactionRow {
  std::string name;       // PascalCase
  std::string statement;  // of the design
  std::function<void(Trial&)> story;
  std::function<void(Trial&)> undisturbed = SubmitFirst;
  std::vector<std::string> micro_batches = {kEagerLine};  // Trial::MicroBatches() at the end
  TrialSetup setup = {};
};
inline void PrintTo(const TransactionRow& row, std::ostream* out) { *out << row.name; }

// Step, step state, totals, accumulator and weights of every head are the same, bitwise.
void CompareStates(Trial& actual, Trial& expected);

// For SubmitEdited(): a call that carries no step and no micro-batch.
void MakeForwardOnly(v1::MicroBatchHeader& header);

// A call that works on a step of the student: the answer.
struct StepCall {
  std::string name;  // of the RPC
  std::function<std::string(Trial& trial, int64_t step)> call;
  std::string answer;  // in an open step that knows nothing
};
const std::vector<StepCall>& StepCalls();

// The rows, by subject.
std::vector<TransactionRow> CallRows();  // how calls wait and end; shards that fail
std::vector<TransactionRow> HeadRows();  // what heads keep: contributions, sessions, steps, epochs

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_TRANSACTIONS_TRANSACTION_HARNESS_H_
