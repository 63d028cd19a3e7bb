// Faults: what can go wrong with a call, and how often it did.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_FAULTS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_FAULTS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "events.h"

namespace headwater::history {

// The RPCs that reach the transaction code, each by the operation that is its call, of which kAnnounce and kRows are parts. The
// others have no part in it: TransferRows and the shared memory bring rows of ComputeLoss, StreamTeacher those of a teacher;
// LoadWeights ends as UploadWeights does; ListHeads and GetServerInfo change nothing and wait for nothing.
struct Rpc {
  Op op;
  const char* name;
};
inline constexpr Rpc kRpcs[] = {
    {Op::kCall, "ComputeLoss"},
    {Op::kCommit, "CommitMicroBatch"},
    {Op::kDiscard, "DiscardMicroBatch"},
    {Op::kAddGradient, "AddGradient"},
    {Op::kSeal, "SealStep"},
    {Op::kApply, "ApplyOptimizerStep"},
    {Op::kDiscardGradient, "DiscardGradient"},
    {Op::kSetTensors, "UploadWeights"},
    {Op::kReplace, "UploadWeights/new"},  // that closes a step
    {Op::kReadWeights, "DownloadWeights"},
    {Op::kReadGradient, "DownloadGradient"},
    {Op::kGradientNorm, "GetGradientNorm"},
    {Op::kGetSteps, "GetStep"},
    {Op::kGetHead, "GetHead"},
    {Op::kCreate, "CreateHead"},
    {Op::kDelete, "DeleteHead"},
    {Op::kTake, "TakeHead"},
    {Op::kSave, "SaveCheckpoint"},
    {Op::kRestore, "RestoreCheckpoint"},
    {Op::kOpenSession, "OpenSession"},
    {Op::kRenewSession, "KeepAlive"},
    {Op::kCloseSession, "CloseSession"},
};

enum class Fault {
  kRequestDropped,     // it never comes; the client finds its connection broken
  kRequestDuplicated,  // it comes a second time, any time later
  kRequestReordered,   // it comes before another one that was sent earlier
  kRequestDelayed,     // it comes when its client no longer waits for it
  kRequestCut,         // a part of it comes
  kAnswerDropped,
  kAnswerReordered,
  kAnswerDelayed,  // the client no longer waits for it
  kAnswerCut,
  kDeadline,         // passes while the call is under way, or waits for its step
  kClientDies,       // while the call is under way
  kLeaseEnded,       // before the call comes
  kLeaseEnds,        // while the call is computed
  kCrashBefore,      // the process ends when the call has come
  kCrashWithin,      // at one of the call's await points
  kCrashUnanswered,  // when the call is done, and not answered yet
  kPowerLoss,        // with the process, and what was not synced is torn or gone
  kDiskFull,
  kEngineFails,
};
inline constexpr int kFaultCount = static_cast<int>(Fault::kEngineFails) + 1;

// The RPC's call; absent for what is no RPC.
std::optional<Op> RpcOf(const Event& event);
// Why such a call cannot meet the fault; null if it can.
const char* WhyImpossible(Op rpc, Fault fault);

// How often each call met each fault.
class FaultTable {
 public:
  void CountIfPossible(const Event& event, Fault fault);
  // What an event, and the answer to it, show of their faults.
  void Count(const Event& event, const Reply& reply);
  void Add(const FaultTable& other);
  // A line for each pair that is possible and has fewer than `wanted`, and for each that is impossible and was counted.
  std::string Problems(int64_t wanted) const;
  // A table with a line for each call, `-` for what is impossible, and below it why that is so.
  std::string ToString() const;

 private:
  int64_t CountOf(Op rpc, Fault fault) const;

  std::map<std::pair<Op, Fault>, int64_t> counts_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_FAULTS_H_
