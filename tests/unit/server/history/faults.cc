#include "faults.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace headwater::history {
namespace {

constexpr const char* kRpcNames[kRpcCount] = {
    "ComputeLoss",       "CommitMicroBatch", "DiscardMicroBatch", "AddGradient",     "SealStep",         "ApplyOptimizerStep",
    "DiscardGradient",   "UploadWeights",    "UploadWeights/new", "DownloadWeights", "DownloadGradient", "GetGradientNorm",
    "GetStep",           "GetHead",          "CreateHead",        "DeleteHead",      "TakeHead",         "SaveCheckpoint",
    "RestoreCheckpoint", "OpenSession",      "KeepAlive",         "CloseSession"};
constexpr const char* kFaultNames[kFaultCount] = {
    "request dropped", "request twice",    "request reordered", "request late", "request cut", "answer dropped", "answer reordered",
    "answer late",     "answer cut",       "deadline passes",   "client dies",  "lease ended", "lease ends",     "crash before",
    "crash within",    "crash unanswered", "power loss",        "disk full",    "engine fails"};

bool IsOneOf(Rpc rpc, std::initializer_list<Rpc> rpcs) { return std::find(rpcs.begin(), rpcs.end(), rpc) != rpcs.end(); }

}  // namespace

const char* NameOf(Rpc rpc) { return kRpcNames[static_cast<size_t>(rpc)]; }
const char* NameOf(Fault fault) { return kFaultNames[static_cast<size_t>(fault)]; }

std::optional<Rpc> RpcOf(const Event& event) {
  static const std::map<Op, Rpc> rpcs = {{Op::kCall, Rpc::kComputeLoss},
                                         {Op::kAnnounce, Rpc::kComputeLoss},
                                         {Op::kRows, Rpc::kComputeLoss},
                                         {Op::kCommit, Rpc::kCommitMicroBatch},
                                         {Op::kDiscard, Rpc::kDiscardMicroBatch},
                                         {Op::kAddGradient, Rpc::kAddGradient},
                                         {Op::kSeal, Rpc::kSealStep},
                                         {Op::kApply, Rpc::kApplyOptimizerStep},
                                         {Op::kDiscardGradient, Rpc::kDiscardGradient},
                                         {Op::kReplace, Rpc::kUploadNewWeights},
                                         {Op::kReadGradient, Rpc::kDownloadGradient},
                                         {Op::kGradientNorm, Rpc::kGetGradientNorm},
                                         {Op::kGetSteps, Rpc::kGetStep},
                                         {Op::kGetHead, Rpc::kGetHead},
                                         {Op::kSetTensors, Rpc::kUploadWeights},
                                         {Op::kReadWeights, Rpc::kDownloadWeights},
                                         {Op::kSave, Rpc::kSaveCheckpoint},
                                         {Op::kRestore, Rpc::kRestoreCheckpoint},
                                         {Op::kTake, Rpc::kTakeHead},
                                         {Op::kCreate, Rpc::kCreateHead},
                                         {Op::kDelete, Rpc::kDeleteHead},
                                         {Op::kOpenSession, Rpc::kOpenSession},
                                         {Op::kRenewSession, Rpc::kKeepAlive},
                                         {Op::kCloseSession, Rpc::kCloseSession}};
  const auto found = rpcs.find(event.op);
  return found == rpcs.end() ? std::nullopt : std::optional<Rpc>(found->second);
}

const char* WhyImpossible(Rpc rpc, Fault fault) {
  const bool takes_rows = IsOneOf(rpc, {Rpc::kComputeLoss, Rpc::kAddGradient, Rpc::kUploadWeights, Rpc::kUploadNewWeights});
  const bool sends_rows = IsOneOf(rpc, {Rpc::kComputeLoss, Rpc::kDownloadWeights, Rpc::kDownloadGradient});
  const bool changes_files = IsOneOf(rpc, {Rpc::kSaveCheckpoint, Rpc::kRestoreCheckpoint, Rpc::kDeleteHead, Rpc::kCreateHead});
  const bool names_session =
      IsOneOf(rpc, {Rpc::kComputeLoss, Rpc::kCommitMicroBatch, Rpc::kDiscardMicroBatch, Rpc::kKeepAlive, Rpc::kCloseSession});
  const bool awaits_nothing =
      IsOneOf(rpc, {Rpc::kDiscardMicroBatch, Rpc::kGetStep, Rpc::kGetHead, Rpc::kOpenSession, Rpc::kKeepAlive, Rpc::kCloseSession});
  switch (fault) {
    case Fault::kRequestCut:
      return takes_rows ? nullptr : "a request of one message comes whole or not at all";
    case Fault::kAnswerCut:
      return sends_rows ? nullptr : "an answer of one message comes whole or not at all";
    case Fault::kLeaseEnded:
      return names_session ? nullptr : "the call names no session";
    case Fault::kLeaseEnds:
      return rpc == Rpc::kComputeLoss ? nullptr : "no rows of a session are awaited and computed in the call";
    case Fault::kCrashWithin:
      return awaits_nothing ? "the call changes what it changes in one critical section, and awaits nothing" : nullptr;
    case Fault::kPowerLoss:
      return changes_files ? nullptr : "the call changes no file";
    case Fault::kDiskFull:
      return rpc == Rpc::kSaveCheckpoint ? nullptr : "the call writes no file";
    case Fault::kEngineFails:
      return awaits_nothing || rpc == Rpc::kDeleteHead ? "the call asks nothing of the engine" : nullptr;
    default:
      return nullptr;
  }
}

void FaultTable::Count(const Event& event, const Reply& reply) {
  const std::optional<Rpc> rpc = RpcOf(event);
  if (!rpc.has_value()) return;
  const auto count = [this, &rpc](Fault fault) {
    if (WhyImpossible(*rpc, fault) == nullptr) Count(*rpc, fault);
  };
  if (event.late) Count(*rpc, event.again ? Fault::kRequestDuplicated : Fault::kRequestReordered);
  const bool is_cut = event.op == Op::kAnnounce || event.flow == Flow::kBreaks || event.cancel != Cancel::kNever;
  if (is_cut) count(Fault::kRequestCut);
  const bool had_ended = reply.reason == "SESSION_NOT_FOUND" || (event.op == Op::kCloseSession && reply.numbers[0] == 0);
  if (had_ended && reply.crash == Crash::kNone) count(Fault::kLeaseEnded);
  if (event.meanwhile == Meanwhile::kLeasePasses) count(Fault::kLeaseEnds);
  if (event.disk_full) count(Fault::kDiskFull);
  if (event.failing_call != nullptr && reply.reason == ErrorReasonName(event.failure)) Count(*rpc, Fault::kEngineFails);
  if (reply.crash == Crash::kBefore) Count(*rpc, Fault::kCrashBefore);
  if (reply.crash == Crash::kWithin) Count(*rpc, Fault::kCrashWithin);
  if (reply.crash == Crash::kUnanswered) Count(*rpc, Fault::kCrashUnanswered);
  if (reply.crash != Crash::kNone && event.power_loss.has_value()) count(Fault::kPowerLoss);
}

void FaultTable::Add(const FaultTable& other) {
  for (size_t rpc = 0; rpc < counts_.size(); ++rpc) {
    for (size_t fault = 0; fault < counts_[rpc].size(); ++fault) counts_[rpc][fault] += other.counts_[rpc][fault];
  }
}

int64_t FaultTable::least() const {
  int64_t least = INT64_MAX;
  for (int rpc = 0; rpc < kRpcCount; ++rpc) {
    for (int fault = 0; fault < kFaultCount; ++fault) {
      if (WhyImpossible(Rpc{rpc}, Fault{fault}) == nullptr) least = std::min(least, count(Rpc{rpc}, Fault{fault}));
    }
  }
  return least;
}

std::string FaultTable::Problems(int64_t wanted) const {
  std::string text;
  for (int rpc = 0; rpc < kRpcCount; ++rpc) {
    for (int fault = 0; fault < kFaultCount; ++fault) {
      const int64_t number = count(Rpc{rpc}, Fault{fault});
      const char* why = WhyImpossible(Rpc{rpc}, Fault{fault});
      if (why == nullptr && number >= wanted) continue;
      if (why != nullptr && number == 0) continue;
      absl::StrAppend(&text, "  ", NameOf(Rpc{rpc}), ", ", NameOf(Fault{fault}), ": ", number,
                      why == nullptr ? " times" : absl::StrCat(" times, though ", why), "\n");
    }
  }
  return text;
}

std::string FaultTable::ToString() const {
  std::string text;
  std::set<std::string> reasons;
  for (int fault = 0; fault < kFaultCount; ++fault) {
    absl::StrAppend(&text, absl::StrFormat("%20s", ""), std::string(static_cast<size_t>(fault) * 9, ' '), NameOf(Fault{fault}),
                    "\n");
  }
  for (int rpc = 0; rpc < kRpcCount; ++rpc) {
    absl::StrAppend(&text, absl::StrFormat("%-18s", NameOf(Rpc{rpc})));
    for (int fault = 0; fault < kFaultCount; ++fault) {
      const char* why = WhyImpossible(Rpc{rpc}, Fault{fault});
      if (why != nullptr) reasons.insert(absl::StrCat(NameOf(Fault{fault}), ": ", why));
      absl::StrAppend(&text, why != nullptr ? "        -" : absl::StrFormat(" %8d", count(Rpc{rpc}, Fault{fault})));
    }
    text += "\n";
  }
  for (const std::string& reason : reasons) absl::StrAppend(&text, "-  ", reason, "\n");
  return text;
}

}  // namespace headwater::history
