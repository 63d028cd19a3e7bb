// Faults: what can go wrong with a call, and how often it did.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_FAULTS_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_FAULTS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "events.h"

namespace headwater::history {

// The RPCs that reach the transaction code. The others have no part in it: TransferRows and the shared memory bring rows of
// ComputeLoss, StreamTeacher those of a teacher; LoadWeights ends as UploadWeights does; ListHeads and GetServerInfo change nothing
// and wait for nothing.
enum class Rpc {
  kComputeLoss,
  kCommitMicroBatch,
  kDiscardMicroBatch,
  kAddGradient,
  kSealStep,
  kApplyOptimizerStep,
  kDiscardGradient,
  kUploadWeights,
  kUploadNewWeights,  // UploadWeights that closes a step
  kDownloadWeights,
  kDownloadGradient,
  kGetGradientNorm,
  kGetStep,
  kGetHead,
  kCreateHead,
  kDeleteHead,
  kTakeHead,
  kSaveCheckpoint,
  kRestoreCheckpoint,
  kOpenSession,
  kKeepAlive,
  kCloseSession,
};
inline constexpr int kRpcCount = static_cast<int>(Rpc::kCloseSession) + 1;

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

// Absent for what is no RPC.
std::optional<Rpc> RpcOf(const Event& event);
const char* NameOf(Rpc rpc);
const char* NameOf(Fault fault);
// Why such a call cannot meet the fault; null if it can.
const char* WhyImpossible(Rpc rpc, Fault fault);

// How often each call met each fault.
class FaultTable {
 public:
  void Count(Rpc rpc, Fault fault) { ++counts_[static_cast<size_t>(rpc)][static_cast<size_t>(fault)]; }
  // What an event, and the answer to it, show of their faults.
  void Count(const Event& event, const Reply& reply);
  void Add(const FaultTable& other);
  int64_t count(Rpc rpc, Fault fault) const { return counts_[static_cast<size_t>(rpc)][static_cast<size_t>(fault)]; }
  // The least count of a pair that is possible.
  int64_t least() const;
  // A line for each pair that is possible and has fewer than `wanted`, and for each that is impossible and was counted.
  std::string Problems(int64_t wanted) const;
  // A table with a line for each call, `-` for what is impossible, and below it why that is so.
  std::string ToString() const;

 private:
  std::array<std::array<int64_t, kFaultCount>, kRpcCount> counts_{};
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_FAULTS_H_
