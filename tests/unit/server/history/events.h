// Events of a history: what clients, the operator and accidents do to a server, with everything that replaying them needs.
//
// Epochs and sessions are random in the server, so events name them by number: epoch 0 is the first one that appeared in the
// history, and so on. An event is complete in itself: it means something whatever has happened before it, so events can be
// delivered late, twice, or be left out.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_EVENTS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_EVENTS_H_

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "headwater/kernels/error.h"
#include "headwater/kernels/types.h"
#include "server/heads/head.h"
#include "server/heads/head_registry.h"

namespace headwater::history {

// ---- the world that all histories play in ----------------------------------------------------------------------------

inline constexpr int kHeadCount = 6;
inline constexpr const char* kHeadSections[kHeadCount] = {"head 0/", "head 1/", "head 2/", "head 3/", "head 4/", "head 5/"};
inline constexpr int64_t kWidth = 2;           // hidden size of every head
inline constexpr int64_t kMaxVocab = 16;       // of any head
inline constexpr int64_t kMicroBatchIds = 6;   // 0 ... 5
inline constexpr int64_t kMaxStepRecords = 5;  // fewer than ids, so that the limit is met
inline constexpr int kMaxHeldCount = 3;        // contributions that may be held as rows at once
inline constexpr int64_t kMaxSessions = 4;
inline constexpr double kMaxLeaseSeconds = 40.5;  // halves, so that no lease ends at the very second of an event
inline constexpr double kIdleSeconds = 30.5;
inline constexpr int64_t kMaxHeads = 4;
inline constexpr int64_t kMaxHeadsPerTenant = 2;
inline constexpr int64_t kMaxTenantMemoryBytes = 130;

// A name that a head can have, and what it is when it is created: 0 is a plain student, 1 one with bias, AdamW and one slot, 2 one
// without optimizer and slots, 3 a frozen teacher, 4 as 0, 5 as 0 but larger. They belong to three tenants, so that each quota
// (heads and memory of a tenant, heads of the server) is met alone.
heads::HeadName NameOf(int head);
// `other`: the spec that is not the usual one, of another vocabulary.
HeadSpec SpecOf(int head, bool other);

// Rows of a micro-batch. Small whole numbers, but for one payload with an infinity.
struct Payload {
  int row_count = 0;
  std::vector<float> hidden;          // [row_count, kWidth]
  std::vector<float> teacher_hidden;  // [row_count, kWidth]
  std::vector<int32_t> targets;       // [row_count]
  std::vector<float> token_weights;   // [row_count]
};
inline constexpr int kPayloadCount = 12;
inline constexpr int kInfinitePayload = 10;   // has an infinity in a row that counts
inline constexpr int kBadTargetPayload = 11;  // has a target out of every vocabulary
std::vector<Payload> MakePayloads(uint64_t seed);
// Weights that an event sets, or a gradient part that it adds: whole numbers that follow from `number`.
std::vector<float> MakeNumbers(int number, int64_t count);
// Factors of tokens that a commit brings: `variant` 0 none, 1 and 2 as many as rows, 3 one too many, 4 one not finite.
std::vector<float> MakeTokenFactors(int variant, int row_count);

// ---- events ----------------------------------------------------------------------------------------------------------

enum class Op {
  kCall,      // header and rows of a micro-batch
  kAnnounce,  // a header alone: the rows never come, or come later
  kRows,      // the rows of a header that was announced before
  kCommit,
  kDiscard,
  kAddGradient,
  kSeal,
  kApply,
  kDiscardGradient,
  kReplace,
  kReadGradient,
  kGradientNorm,
  kGetSteps,
  kGetHead,
  kCheckEpoch,
  kSetTensors,
  kReadWeights,
  kSave,
  kRestore,
  kDamage,  // a checkpoint's file
  kTake,
  kCreate,
  kDelete,
  kExpireIdle,
  kOpenSession,
  kRenewSession,
  kCloseSession,
  kAdvance,         // the clock
  kExpireSessions,  // after advancing the clock
  kRestart,         // the process; all but the files is gone
};

// When a call's client goes away.
enum class Cancel { kNever, kBefore, kWhileComputing, kAtDecision };

// What happens while the engine computes a call.
enum class Meanwhile {
  kNothing,
  kSameCall,      // the call comes again
  kDiscard,       // its micro-batch is to be discarded
  kCommit,        // its micro-batch is to be committed
  kCloseSession,  // its session is closed
  kLeasePasses,   // its session's lease would end
  kOtherCall,     // another call is computed beside it, see Event::beside
};

// Whether the rows of a call are there when it is submitted.
enum class Flow {
  kComplete,  // all of them
  kFlows,     // they come while it is computed
  kStalls,    // some stay away for so long that the call gives up and comes again, complete
  kBreaks,    // some never come
  kRefused,   // they come, but are not what they should be
};

inline constexpr int kNoEpoch = -2;       // the call carries none
inline constexpr int kForeignEpoch = -1;  // one that no head ever had
inline constexpr int kNoSession = -1;
inline constexpr int kForeignSession = -2;  // one that was never opened

// A loss term of a call; for other operations the head that it is about (head, epoch, step).
struct Target {
  int head = 0;
  int epoch = kNoEpoch;
  std::optional<int64_t> step;
  std::optional<int64_t> version;  // that the call expects
  int teacher = -1;                // none: cross entropy
  int teacher_epoch = kNoEpoch;
  std::optional<int64_t> teacher_version;
  int row_start = 0;
  int row_count = 0;
  int scale = 1;
  bool weighted = false;  // with the payload's token weights
  bool operator==(const Target&) const = default;
};

struct Event {
  const char* kind = "";
  bool late = false;   // delivered after events that were sent later, or a second time
  bool again = false;  // delivered a second time
  Op op = Op::kAdvance;
  std::vector<Target> targets;

  // Micro-batches.
  int64_t micro_batch = 0;
  int64_t attempt = 0;
  bool names_micro_batch = true;
  int payload = 0;
  bool backward = true, is_explicit = false, first_wins = false, refuse = false, late_factors = false, allow_held = false;
  int session = kNoSession;
  Cancel cancel = Cancel::kNever;
  Meanwhile meanwhile = Meanwhile::kNothing;
  Flow flow = Flow::kComplete;
  std::vector<Event> beside;  // one call, for Meanwhile::kOtherCall: neither stages anything, and this one is of attempt 0
  double factor = 1;
  int token_factors = 0;  // variant, see MakeTokenFactors()
  int row_start = 0, row_count = 0;

  // Steps.
  std::optional<heads::ExpectedMicroBatches> expected;
  heads::ApplyArguments apply;
  bool cancel_waiting = false;  // a call for the next step is cancelled while it waits; else its deadline passes at once

  // Weights, checkpoints, heads, sessions, accidents.
  std::vector<HeadTensor> tensors;
  int numbers = 0;  // see MakeNumbers()
  bool wrong_size = false;
  std::optional<int64_t> version;
  std::string checkpoint;
  bool overwrite = false;
  bool disk_full = false;
  bool other_spec = false;
  heads::IfExists if_exists = heads::IfExists::kFail;
  bool force = false;
  bool save_first = false;
  bool deleted_handle = false;  // by a pointer to a head that has been deleted since
  std::vector<int> recovers;    // epochs under which a taker has worked before
  int seconds = 0;
  int disk_left = 0;  // bytes, when the disk is full: fewer than a checkpoint has
  // The process ends at this await point of the call, or, if the call has fewer, when it has done all but answer; 0: it does not.
  int crash_at = 0;
  std::optional<uint64_t> power_loss;  // it ends because the power fails, see MemoryFileSystem::LosePower()
  bool crash_changed = false;          // whether the files had changed by then: the server says, because both are right
  const char* failing_call = nullptr;  // of the engine, see FakeControl::FailNext()
  ErrorReason failure = ErrorReason::kEngineFailed;

  bool is_call() const { return op == Op::kCall || op == Op::kAnnounce || op == Op::kRows; }
};

// What a call's digest covers: rows and canonical header, not attempt, session or expectations.
uint64_t ContentOf(const Event& event);
// For a failure's report.
std::string ToString(const Event& event);

// ---- what is compared ------------------------------------------------------------------------------------------------

// How far a call had come when the process ended.
enum class Crash { kNone, kBefore, kWithin, kUnanswered };

// What a call answered: the reason ("OK" without one), and the numbers of an answer that is OK.
struct Reply {
  std::string reason = "OK";
  std::vector<double> numbers = {};
  std::vector<Reply> beside = {};  // to a call that was computed beside this one
  Crash crash = Crash::kNone;
};

// Where the events of a history come from, one after the other.
class Source {
 public:
  virtual ~Source() = default;
  virtual Event Next() = 0;
  // What the server answered to the event that came last. Says what is wrong with it, empty if nothing is.
  virtual std::string Answered(const Event& event, const Reply& reply) = 0;
};

// Adds numbers of any type, or all that a container has.
template <typename... Values>
void AddNumbers(std::vector<double>& numbers, const Values&... values) {
  [[maybe_unused]] const auto add = [&numbers](const auto& value) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      numbers.push_back(static_cast<double>(value));
    } else {
      numbers.insert(numbers.end(), std::begin(value), std::end(value));
    }
  };
  (add(values), ...);
}
template <typename... Values>
std::vector<double> Numbers(const Values&... values) {
  std::vector<double> numbers;
  AddNumbers(numbers, values...);
  return numbers;
}

// Numbers in named sections: the observable state of everything.
class View {
 public:
  // Begins a section with these numbers; the name must outlive the view.
  template <typename... Values>
  void Section(const char* name, const Values&... values) {
    marks_.push_back({name, values_.size()});
    Add(values...);
  }
  template <typename... Values>
  void Add(const Values&... values) {
    AddNumbers(values_, values...);
  }
  // Empty if equal (a NaN is equal to a NaN), else where and how they differ.
  static std::string Difference(const View& actual, const View& expected);

 private:
  struct Mark {
    const char* name;
    size_t start;
  };
  std::string Print(size_t mark) const;

  std::vector<Mark> marks_;
  std::vector<double> values_;
};

// Equal, or both NaN, one by one.
bool SameNumbers(const std::vector<double>& a, const std::vector<double>& b);
std::string PrintNumbers(const std::vector<double>& numbers);

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_EVENTS_H_
