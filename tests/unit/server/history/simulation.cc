#include "simulation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace headwater::history {
namespace {

constexpr int kMaxActions = 1000;  // between two events

// An engine's call in an RPC, and how it can fail: for good, or because a shard is not ready, or either.
enum class Failures { kForGood, kForNow, kEither };
struct EngineCall {
  Op rpc;
  const char* name;
  Failures failures;
};
constexpr EngineCall kEngineCalls[] = {{Op::kCall, "Compute", Failures::kEither},
                                       {Op::kCommit, "Commit", Failures::kEither},
                                       {Op::kAddGradient, "AddToGradient", Failures::kEither},
                                       {Op::kSeal, "ComputeGradientStats", Failures::kForNow},
                                       {Op::kApply, "ApplyOptimizer", Failures::kEither},
                                       {Op::kDiscardGradient, "ZeroGradient", Failures::kForGood},
                                       {Op::kSetTensors, "WriteTensor", Failures::kForGood},
                                       {Op::kReplace, "WriteTensor", Failures::kForGood},
                                       {Op::kReadWeights, "ReadTensor", Failures::kForNow},
                                       {Op::kReadGradient, "ReadTensor", Failures::kForNow},
                                       {Op::kGradientNorm, "ComputeGradientStats", Failures::kForNow},
                                       {Op::kCreate, "CreateHead", Failures::kForNow},
                                       {Op::kTake, "ZeroGradient", Failures::kEither},
                                       {Op::kSave, "ReadTensor", Failures::kForNow},
                                       {Op::kRestore, "WriteTensor", Failures::kForGood}};

}  // namespace

Simulation::Simulation(uint64_t seed, FaultTable& faults)
    : random_(seed * 0x9e3779b97f4a7c15 + 1), faults_(faults), payloads_(MakePayloads(seed)) {
  // Of different tenants, so that no quota stands in the way of a head that comes back.
  constexpr int kHeads[2][3] = {{0, 1, 5}, {2, 4, 2}};
  const int job_count = 1 + Pick(2);
  for (int number = 0; number < job_count; ++number) {
    Job& job = jobs_.emplace_back(random_(), kHeads[number][Pick(3)], 1 + Pick(2), payloads_);
    for (int rank = 0; rank < job.trainers(); ++rank) trainers_.emplace_back(rank, job, random_());
  }
}

bool Simulation::OvertakesAnother(const Message& message) const {
  return std::any_of(wire_.begin(), wire_.end(), [&message](const Message& other) {
    return other.is_answer == message.is_answer && other.sent < message.sent;
  });
}

void Simulation::DeliverAnswer(const Message& message) {
  if (!IsAwaited(message)) return Count(message, Fault::kAnswerDelayed);
  if (OvertakesAnother(message)) Count(message, Fault::kAnswerReordered);
  Trainer& trainer = *message.trainer;
  message.answer.reason == "OK" ? trainer.Succeeded(message.answer, life_) : trainer.Failed(message.answer.reason);
}

// The process has ended, and every connection with it.
void Simulation::BreakConnections() {
  std::vector<Message> stragglers;
  for (Message& message : wire_) {
    if (message.is_answer) {
      Count(message, Fault::kAnswerDropped);
    } else if (OneIn(4)) {
      stragglers.push_back(std::move(message));  // a proxy keeps it, and sends it to the new process
    } else if (!message.is_copy) {
      Count(message, Fault::kRequestDropped);
    }
  }
  wire_ = std::move(stragglers);
  for (Trainer& trainer : trainers_) trainer.Failed("");
  ++life_;
  open_.clear();
}

void Simulation::Befall(Event& event) {
  const Op rpc = *RpcOf(event);
  const int draw = Pick(300);
  if (draw < 4) {
    event.crash_at = OneIn(4) ? 1 : 2 + Pick(OneIn(2) ? 2 : 60);
    if (OneIn(2)) event.power_loss = random_();
  } else if (draw < 8) {
    for (const EngineCall& call : kEngineCalls) {
      if (call.rpc != rpc) continue;
      event.failing_call = call.name;
      const bool for_good = call.failures == Failures::kForGood || (call.failures == Failures::kEither && OneIn(3));
      event.failure = for_good ? ErrorReason::kEngineFailed : ErrorReason::kShardNotReady;
    }
  } else if (draw < 14 && rpc == Op::kCall) {
    event.flow = OneIn(2) ? Flow::kBreaks : Flow::kStalls;
  } else if (draw < 17 && rpc == Op::kCall && event.session != kNoSession) {
    event.meanwhile = Meanwhile::kLeasePasses;
  } else if (draw < 20 && rpc == Op::kAddGradient) {
    event.cancel = Cancel::kBefore;
  }
}

// True if a request has come to the server.
bool Simulation::ActOn(size_t index) {
  Message message = wire_[index];
  const auto take = [this, index] { wire_.erase(wire_.begin() + static_cast<std::ptrdiff_t>(index)); };
  const int draw = Pick(100);
  if (draw < 3) {  // lost, with its connection
    take();
    if (message.is_copy) return false;
    const Fault dropped = message.is_answer ? Fault::kAnswerDropped : Fault::kRequestDropped;
    const Fault cut = message.is_answer ? Fault::kAnswerCut : Fault::kRequestCut;
    // A stream that is cut while an upload comes never reaches the head; nor does a part of a download help its client.
    Count(message, WhyImpossible(*RpcOf(message.request), cut) == nullptr && OneIn(2) ? cut : dropped);
    if (IsAwaited(message)) message.trainer->Failed("");
    return false;
  }
  if (draw < 5 && !message.is_copy && IsAwaited(message)) {  // the client gives up, and the message goes on
    Count(message, Fault::kDeadline);
    message.trainer->Failed("DEADLINE");
    return false;
  }
  if (draw < 6 && !message.is_copy && IsAwaited(message)) {
    Count(message, Fault::kClientDies);
    message.trainer->Die();
    return false;
  }
  if (draw < 12) return false;  // it stays away a while longer
  if (message.is_answer) {
    take();
    DeliverAnswer(message);
    return false;
  }
  const bool is_again = message.is_copy;
  if (!is_again && OneIn(20)) {
    wire_[index].is_copy = true;  // and comes once more
  } else {
    take();
  }
  if (is_again) {
    Count(message, Fault::kRequestDuplicated);
  } else if (!IsAwaited(message)) {
    Count(message, Fault::kRequestDelayed);
  }
  if (OvertakesAnother(message)) Count(message, Fault::kRequestReordered);
  Befall(message.request);
  current_ = std::make_unique<Message>(std::move(message));
  return true;
}

bool Simulation::Act() {
  const size_t choice = static_cast<size_t>(Pick(static_cast<int>(trainers_.size() + 2 * wire_.size())));
  if (choice >= trainers_.size()) return ActOn((choice - trainers_.size()) / 2);
  Trainer& trainer = trainers_[choice];
  if (std::optional<Event> call = trainer.Next(); call.has_value()) {
    wire_.push_back({.trainer = &trainer, .call = ++attempts_[&trainer], .sent = ++sent_, .request = *std::move(call)});
  }
  return false;
}

// The clock, and whoever runs the server.
Event Simulation::Operate() {
  Event event;
  event.kind = "operator";
  switch (Pick(8)) {
    case 0:
      event.op = Op::kRestart;
      break;
    case 1:
    case 2:
      event.op = Op::kExpireSessions;
      event.seconds = Pick(10);
      break;
    default:
      event.op = Op::kAdvance;
      event.seconds = 1 + Pick(OneIn(4) ? 30 : 5);
  }
  return event;
}

Event Simulation::Next() {
  current_.reset();
  if (OneIn(25)) return Operate();
  for (int action = 0; action < kMaxActions; ++action) {
    if (Act()) return current_->request;
  }
  Event event;
  event.kind = "nobody acts";
  event.op = Op::kAdvance;
  event.seconds = 1;
  return event;
}

std::string Simulation::Check(const Event& event, const Reply& reply) {
  if (event.targets.empty() || reply.reason != "OK") return "";
  const Target& target = event.targets[0];
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [&target](const Job& it) { return it.head() == target.head; });
  if (event.op == Op::kGetHead || event.op == Op::kCreate || event.op == Op::kTake || event.op == Op::kRestore ||
      event.op == Op::kSetTensors) {
    life_of_.emplace(static_cast<int>(reply.numbers[0]), life_);
    // Weights that are set anew are those of the first step alone.
    const int64_t open_step = static_cast<int64_t>(reply.numbers[2]);
    const bool knows = event.op != Op::kSetTensors || open_step == job->first_step();
    if (!knows) open_.erase(target.head);
    if (knows && event.op != Op::kGetHead && reply.numbers[1] == 'R') open_[target.head] = open_step;
  }
  if (target.epoch != kNoEpoch) {
    if (const auto life = life_of_.find(target.epoch); life == life_of_.end() || life->second != life_) {
      return "  a call succeeded with an epoch of an earlier life\n";
    }
  }
  if (event.op == Op::kReadWeights && open_.contains(target.head)) {
    const std::vector<double> numbers = Numbers(job->WeightsAt(open_.at(target.head)));
    if (reply.numbers == numbers) return "";
    return absl::StrCat("  the weights are ", PrintNumbers(reply.numbers), ", the script's at step ", open_.at(target.head), " ",
                        PrintNumbers(numbers), "\n");
  }
  if (target.epoch == kNoEpoch || !target.step.has_value()) return "";
  if (event.op == Op::kApply || event.op == Op::kDiscardGradient || event.op == Op::kReplace) {
    if (const auto open = open_.find(target.head); open != open_.end() && open->second == *target.step) ++open->second;
  }
  switch (event.op) {
    case Op::kCall:
      return job->CheckAnswer(*target.step, event.micro_batch, reply.numbers);
    case Op::kApply:
    case Op::kSeal: {
      const size_t counts = event.op == Op::kApply ? 6 : 3;
      const size_t expected = job->Committed(*target.step).size();
      if (reply.numbers[counts] == static_cast<double>(expected)) return "";
      return absl::StrCat("  the step has ", reply.numbers[counts], " micro-batches, ", expected, " count\n");
    }
    case Op::kReadGradient: {
      // Complete once all trainers are ready: only then is it asked for.
      const std::vector<double> numbers = Numbers(job->GradientOf(*target.step));
      if (reply.numbers == numbers) return "";
      return absl::StrCat("  the gradient is ", PrintNumbers(reply.numbers), ", the script's ", PrintNumbers(numbers), "\n");
    }
    default:
      return "";
  }
}

std::string Simulation::Answered(const Event& event, const Reply& reply) {
  if (event.op == Op::kRestart || reply.crash != Crash::kNone) {
    BreakConnections();
    return "";
  }
  if (current_ == nullptr) return "";
  std::string problem = Check(event, reply);
  Message answer = *std::exchange(current_, nullptr);
  if (!answer.is_copy) {
    answer.is_answer = true;
    answer.sent = ++sent_;
    answer.answer = reply;
    wire_.push_back(std::move(answer));
  }
  for (Trainer& trainer : trainers_) problem += trainer.TakeProblem();
  return problem;
}

}  // namespace headwater::history
