// Job: a training run that a few simulated trainers share, and what it must come to.
//
// A step's micro-batches, its end and so its weights follow from the job's seed and the step's number alone. So a trainer that
// finds the server at an earlier step goes on from there, as one does that loads its own checkpoint of that name; and what the
// server computes can be told beforehand, by adding up each micro-batch that counts once: the job knows nothing of the model.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_JOB_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_JOB_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "events.h"

namespace headwater::history {

// A trainer's call on a head.
inline Event TrainerEvent(Op op, int head, std::optional<int64_t> step = std::nullopt) {
  Event event;
  event.kind = "trainer";
  event.op = op;
  Target& target = event.targets.emplace_back();
  target.head = head;
  target.step = step;
  return event;
}

class Job {
 public:
  enum class Kind { kEager, kCommitted, kDiscarded, kAdded };  // a micro-batch; kAdded by AddGradient
  enum class End { kApply, kSealAndApply, kDiscard, kReplace };

  // `trainers`: how many share it.
  Job(uint64_t seed, int head, int trainers, const std::vector<Payload>& payloads);

  int head() const { return head_; }
  const HeadSpec& spec() const { return spec_; }
  int trainers() const { return trainers_; }
  int64_t first_step() const { return spec_.initial_step; }
  static constexpr int64_t kMicroBatches = 4;  // of a step

  // ---- the script
  Kind KindOf(int64_t step, int64_t micro_batch) const;
  End EndOf(int64_t step) const;
  // The micro-batch's call, without epoch, attempt and session.
  Event Compute(int64_t step, int64_t micro_batch) const;
  // Its commit or discard, likewise.
  Event Decide(int64_t step, int64_t micro_batch) const;
  // The call that ends the step; `sealed`: a Seal came before.
  Event Close(int64_t step, bool sealed) const;
  Event Seal(int64_t step) const;
  // Those whose micro-batch counts.
  std::vector<int64_t> Committed(int64_t step) const;
  // What the head must hold when all micro-batches of the step are decided, and when the step opens.
  std::vector<float> GradientOf(int64_t step) const;
  const std::vector<float>& WeightsAt(int64_t step);
  int initial_numbers() const { return 1 + head_; }

  // ---- where it stands
  int64_t step = 0;          // that the trainers work on
  int64_t round = 0;         // counts how often they went back to a step's beginning
  std::set<int> ready;       // trainers that are done with their micro-batches
  std::set<int64_t> saved;   // steps of which a checkpoint was acknowledged
  int epoch = kNoEpoch;      // that the trainers work at
  int life = -1;             // of the server, that has that epoch
  std::set<int> own_epochs;  // that trainers have brought about
  void GoBackTo(int64_t to);
  void GoOn();

  // What every answer that computed a micro-batch of a step said, which never changes. Says what is wrong with `numbers`.
  std::string CheckAnswer(int64_t at, int64_t micro_batch, const std::vector<double>& numbers);

 private:
  uint64_t Draw(int64_t at, int64_t what) const;
  Event OnStep(Op op, int64_t at) const { return TrainerEvent(op, head_, at); }

  const uint64_t seed_;
  const int head_;
  const HeadSpec spec_;
  const int trainers_;
  const std::vector<Payload>& payloads_;
  std::map<int64_t, std::vector<float>> weights_;
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> answers_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_JOB_H_
