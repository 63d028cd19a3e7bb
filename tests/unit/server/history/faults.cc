#include "faults.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace headwater::history {
namespace {

constexpr const char* kFaultNames[kFaultCount] = {
    "request dropped", "request twice",    "request reordered", "request late", "request cut", "answer dropped", "answer reordered",
    "answer late",     "answer cut",       "deadline passes",   "client dies",  "lease ended", "lease ends",     "crash before",
    "crash within",    "crash unanswered", "power loss",        "disk full",    "engine fails"};

bool IsOneOf(Op rpc, std::initializer_list<Op> rpcs) { return std::find(rpcs.begin(), rpcs.end(), rpc) != rpcs.end(); }

const char* NameOf(Fault fault) { return kFaultNames[static_cast<size_t>(fault)]; }

}  // namespace

std::optional<Op> RpcOf(const Event& event) {
  if (event.is_call()) return Op::kCall;
  const bool is_rpc = std::any_of(std::begin(kRpcs), std::end(kRpcs), [&event](const Rpc& rpc) { return rpc.op == event.op; });
  return is_rpc ? std::optional(event.op) : std::nullopt;
}

const char* WhyImpossible(Op rpc, Fault fault) {
  const bool takes_rows = IsOneOf(rpc, {Op::kCall, Op::kAddGradient, Op::kSetTensors, Op::kReplace});
  const bool sends_rows = IsOneOf(rpc, {Op::kCall, Op::kReadWeights, Op::kReadGradient});
  const bool changes_files = IsOneOf(rpc, {Op::kSave, Op::kRestore, Op::kDelete, Op::kCreate});
  const bool names_session = IsOneOf(rpc, {Op::kCall, Op::kCommit, Op::kDiscard, Op::kRenewSession, Op::kCloseSession});
  const bool awaits_nothing =
      IsOneOf(rpc, {Op::kDiscard, Op::kGetSteps, Op::kGetHead, Op::kOpenSession, Op::kRenewSession, Op::kCloseSession});
  switch (fault) {
    case Fault::kRequestCut:
      return takes_rows ? nullptr : "a request of one message comes whole or not at all";
    case Fault::kAnswerCut:
      return sends_rows ? nullptr : "an answer of one message comes whole or not at all";
    case Fault::kLeaseEnded:
      return names_session ? nullptr : "the call names no session";
    case Fault::kLeaseEnds:
      return rpc == Op::kCall ? nullptr : "no rows of a session are awaited and computed in the call";
    case Fault::kCrashWithin:
      return awaits_nothing ? "the call changes what it changes in one critical section, and awaits nothing" : nullptr;
    case Fault::kPowerLoss:
      return changes_files ? nullptr : "the call changes no file";
    case Fault::kDiskFull:
      return rpc == Op::kSave ? nullptr : "the call writes no file";
    case Fault::kEngineFails:
      return awaits_nothing || rpc == Op::kDelete ? "the call asks nothing of the engine" : nullptr;
    default:
      return nullptr;
  }
}

void FaultTable::CountIfPossible(const Event& event, Fault fault) {
  const std::optional<Op> rpc = RpcOf(event);
  if (rpc.has_value() && WhyImpossible(*rpc, fault) == nullptr) ++counts_[{*rpc, fault}];
}

void FaultTable::Count(const Event& event, const Reply& reply) {
  const std::optional<Op> rpc = RpcOf(event);
  if (!rpc.has_value()) return;
  const auto count = [this, &rpc](Fault fault) { ++counts_[{*rpc, fault}]; };
  if (event.late) count(event.again ? Fault::kRequestDuplicated : Fault::kRequestReordered);
  const bool is_cut = event.op == Op::kAnnounce || event.flow == Flow::kBreaks || event.cancel != Cancel::kNever;
  if (is_cut) CountIfPossible(event, Fault::kRequestCut);
  const bool had_ended = reply.reason == "SESSION_NOT_FOUND" || (event.op == Op::kCloseSession && reply.numbers[0] == 0);
  if (had_ended && reply.crash == Crash::kNone) CountIfPossible(event, Fault::kLeaseEnded);
  if (event.meanwhile == Meanwhile::kLeasePasses) CountIfPossible(event, Fault::kLeaseEnds);
  if (event.disk_full) CountIfPossible(event, Fault::kDiskFull);
  if (event.failing_call != nullptr && reply.reason == ErrorReasonName(event.failure)) count(Fault::kEngineFails);
  if (reply.crash == Crash::kBefore) count(Fault::kCrashBefore);
  if (reply.crash == Crash::kWithin) count(Fault::kCrashWithin);
  if (reply.crash == Crash::kUnanswered) count(Fault::kCrashUnanswered);
  if (reply.crash != Crash::kNone && event.power_loss.has_value()) CountIfPossible(event, Fault::kPowerLoss);
}

void FaultTable::Add(const FaultTable& other) {
  for (const auto& [pair, count] : other.counts_) counts_[pair] += count;
}

int64_t FaultTable::CountOf(Op rpc, Fault fault) const {
  const auto found = counts_.find({rpc, fault});
  return found == counts_.end() ? 0 : found->second;
}

std::string FaultTable::Problems(int64_t wanted) const {
  std::string text;
  for (const Rpc& rpc : kRpcs) {
    for (int fault = 0; fault < kFaultCount; ++fault) {
      const int64_t number = CountOf(rpc.op, Fault{fault});
      const char* why = WhyImpossible(rpc.op, Fault{fault});
      if (why == nullptr ? number >= wanted : number == 0) continue;
      absl::StrAppend(&text, "  ", rpc.name, ", ", NameOf(Fault{fault}), ": ", number,
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
  for (const Rpc& rpc : kRpcs) {
    absl::StrAppend(&text, absl::StrFormat("%-18s", rpc.name));
    for (int fault = 0; fault < kFaultCount; ++fault) {
      const char* why = WhyImpossible(rpc.op, Fault{fault});
      if (why != nullptr) reasons.insert(absl::StrCat(NameOf(Fault{fault}), ": ", why));
      absl::StrAppend(&text, why != nullptr ? "        -" : absl::StrFormat(" %8d", CountOf(rpc.op, Fault{fault})));
    }
    text += "\n";
  }
  for (const std::string& reason : reasons) absl::StrAppend(&text, "-  ", reason, "\n");
  return text;
}

}  // namespace headwater::history
