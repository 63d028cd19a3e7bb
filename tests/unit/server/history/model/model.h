// Model: what a server must answer and hold, said as simply as possible: maps and vectors, one event after the other.
//
// It knows the rules of docs/guarantees.md and of the headers in server/heads, and shares no code with them: epochs and sessions
// are numbers, a contribution is a list of what it adds, a checkpoint is a copy of the head.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_MODEL_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_MODEL_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/server/history/events.h"

namespace headwater::history {

// What the server may answer: one of these reasons ("OK" among them only if it is the only one); with "OK" these numbers.
struct Expected {
  std::vector<std::string> reasons = {"OK"};
  std::vector<double> numbers = {};
  std::vector<Expected> beside = {};  // of a call that is computed beside this one
};

struct ModelCounts {
  double valid_tokens = 0, loss = 0, token_weight = 0, non_finite_rows = 0;
};

struct ModelRecord {
  char state = 'N';  // 'N' only announced, 'S' undecided, 'C' committed, 'D' discarded
  int64_t attempt = 0;
  int form = 0;  // ContributionForm
  uint64_t content = 0;
  ModelCounts counts;
  double factor = 1;
  int token_factors = 0;
  int64_t tombstone = -1;
  int64_t fence = 0;
  int contribution = -1;  // while 'S'

  bool is_present() const { return state == 'S' || state == 'C'; }
};

struct ModelStep {
  int64_t number = 0;
  char state = 'O';  // 'O' open, 'S' sealed, 'A' applied, 'D' discarded, 'R' replaced
  std::map<int64_t, ModelRecord> records;
};

struct ModelTensors {
  std::vector<float> weight, bias, moment1, moment1_bias, moment2, moment2_bias;
};

struct ModelHead {
  HeadSpec spec;
  int epoch = -1;    // -1: new, seen at the next comparison
  char state = 'L';  // 'L' loading, 'R' ready, 'X' lost, 'B' back from a checkpoint
  bool has_weight = false, has_bias = false;
  int64_t version = 0;
  int64_t update_count = 0;
  bool has_checksum = false;
  std::string restored_checkpoint;
  std::vector<int> recovers;  // what the taker named who has made the epoch
  double last_use = 0;
  ModelStep open;
  std::optional<ModelStep> closed;
  ModelTensors tensors;
  std::vector<float> gradient, gradient_bias;
  // What closed the last closed step.
  heads::ApplyArguments applied;
  std::optional<heads::ExpectedMicroBatches> applied_expectation;
  std::vector<double> applied_reply;
  std::map<HeadTensor, std::vector<float>> shadow, replaced;
};

// A teacher as it was when a contribution was computed: its part in a row's value, and whether it is still the same.
struct ModelTeacher {
  float value = 0;
  int64_t version = 0;
  int life = 0;
};

// An undecided contribution.
struct ModelContribution {
  Event call;
  std::set<int> heads;
  int64_t attempt = 0;
  int session = kNoSession;
  bool held = false;
  std::vector<ModelTeacher> teachers;  // one for each term
};

struct ModelSession {
  double lease = 0;
  double lease_end = 0;
};

struct ModelCheckpoint {
  HeadSpec spec;
  int64_t sequence = 0;
  int64_t step = 0;
  int64_t update_count = 0;
  ModelTensors tensors;
  bool damaged = false;
  int64_t first = 0;  // the first checkpoint of its run
};

class Model {
 public:
  explicit Model(std::vector<Payload> payloads) : payloads_(std::move(payloads)) {}

  // Carries the event out and says what the server must answer.
  Expected Run(const Event& event);
  // The observable state; new epochs get their numbers here.
  View Observe();

  // For choosing events.
  const std::map<int, ModelHead>& heads() const { return heads_; }
  const std::map<int, ModelContribution>& contributions() const { return contributions_; }
  const std::map<int, ModelSession>& sessions() const { return sessions_; }
  const std::map<int, std::map<std::string, ModelCheckpoint>>& checkpoints() const { return checkpoints_; }
  const std::set<int>& deleted() const { return deleted_; }
  int epoch_count() const { return epoch_count_; }
  int session_count() const { return session_count_; }
  int held_count() const;
  int FreeSlots(int head) const;
  double now() const { return now_; }
  const std::vector<Payload>& payloads() const { return payloads_; }

 private:
  using Reasons = std::vector<std::string>;
  static Expected Refuse(const std::string& reason) { return {{reason}}; }
  static Expected Refuse(const Reasons& reasons) { return {reasons}; }
  static Expected Answer(const std::vector<double>& numbers) { return {{"OK"}, numbers}; }

  // ---- what calls begin with (model.cc); empty: nothing is wrong
  std::string UseSession(int session);
  std::string FindHeads(const Event& event);
  std::string CheckHead(int head, int epoch, bool names_step, char need) const;
  std::string CheckKey(const Target& target) const;
  std::string AwaitStep(const Event& event) const;
  // A call on heads that have been found, and whose step is open.
  Expected OnHeads(const Event& event);
  bool Fails(const Event& event, const char* call) const;
  // The engine's call has failed; one that may have begun loses these heads.
  Expected Fail(const Event& event, const std::set<int>& heads = {});
  ModelHead& At(int head) { return heads_.at(head); }

  // ---- micro-batches (model_micro_batch.cc)
  std::string CheckBegin(const ModelHead& head, int64_t step, int64_t micro_batch, int64_t attempt) const;
  Reasons CheckCall(const Event& event) const;
  void Announce(const Event& event);
  Expected Call(const Event& event);
  Expected Compute(const Event& event);
  // The call beside this one, while this one is in progress in `targets`. True if it lost one of them.
  bool CallBeside(const Event& event, const std::set<int>& targets);
  std::vector<double> AnswerOf(const Event& event) const;
  // Adds factor x what the contribution's call adds to its heads' accumulators.
  void AddContribution(const ModelContribution& contribution, double factor, int token_factors);
  std::map<int, ModelCounts> CountsOf(const Event& call) const;
  // Element `i` of a row's value: its hidden state, and what the teacher adds to it.
  static float ValueOf(const Payload& payload, float teacher_value, size_t row, size_t i);
  // The teacher's part in a row's value, for each row; 0 without teacher.
  float TeacherValueOf(const Target& target) const;
  std::set<int> TrainableHeads(const Event& event) const;
  Reasons CheckDecision(const Event& event, std::set<int>& contributions) const;
  Expected Commit(const Event& event);
  Expected Discard(const Event& event);
  Expected AddGradient(const Event& event);
  // An undecided contribution goes; a tombstone stays in the heads that are not in `without`.
  void Drop(int contribution, const std::set<int>& without = {});
  void DropAll(int head);
  void DropSession(int session);
  static void Bury(ModelRecord& record, int64_t attempt);

  // ---- steps (model_steps.cc)
  std::string CheckExpectation(const ModelStep& step, const heads::ExpectedMicroBatches& expected) const;
  Expected Seal(const Event& event);
  std::string CheckApply(const ModelHead& head, const heads::ApplyArguments& arguments) const;
  Expected Apply(const Event& event);
  Expected DiscardGradient(const Event& event);
  Expected Replace(const Event& event);
  Expected ReadGradient(const Event& event);
  Expected Take(const Event& event);
  static void OpenStep(ModelHead& head, int64_t step);
  void CloseStep(int head, char how);
  void Reset(int head, int64_t step);
  void StartAgain(int head, int64_t step);
  void Lose(int head);
  static double NormSquared(const ModelHead& head);
  // How many micro-batches count, and their sums.
  static std::vector<double> TotalsOf(const ModelStep& step);

  // ---- weights, checkpoints, heads, sessions (model_server.cc)
  Expected SetTensors(const Event& event);
  Expected ReadWeights(const Event& event);
  Expected Save(const Event& event);
  Expected Restore(const Event& event);
  void LoadInto(ModelHead& head, const ModelCheckpoint& checkpoint);
  void SaveAs(int head, const std::string& name);
  Expected Create(const Event& event);
  Expected Delete(const Event& event);
  void Remove(int head);
  bool InUse(const ModelHead& head) const;
  bool HasRoom(int head, const HeadSpec& spec) const;
  Expected ExpireIdle(const Event& event);
  Expected Restart();
  Expected CrashIn(const Event& event);
  // What a client is told of a head; a new epoch gets its number here.
  std::vector<double> HeadNumbers(int head);
  void ExpireSessions();
  ModelHead NewHead(const HeadSpec& spec) const;

  void ObserveStep(View& view, const ModelStep& step) const;

  const std::vector<Payload> payloads_;
  double now_ = 0;
  std::map<int, ModelHead> heads_;  // by name
  std::map<int, ModelContribution> contributions_;
  int next_contribution_ = 0;
  std::map<int, ModelSession> sessions_;
  std::map<int, std::map<std::string, ModelCheckpoint>> checkpoints_;  // by head
  std::map<int, int64_t> saved_;                                       // checkpoints of each name so far
  std::map<int, int64_t> live_;  // heads that come back after a restart, with the first checkpoint of their run
  std::set<int> deleted_;        // names whose head has been deleted in this life of the server
  std::map<int, int> lives_;
  int epoch_count_ = 0;
  int session_count_ = 0;
  std::vector<Expected> beside_;  // of the call that is computed
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_MODEL_MODEL_H_
