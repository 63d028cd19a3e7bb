#include "job.h"

#include "absl/strings/str_cat.h"

namespace headwater::history {

Job::Job(uint64_t seed, int head, int trainers, const std::vector<Payload>& payloads)
    : step(SpecOf(head, false).initial_step),
      seed_(seed),
      head_(head),
      spec_(SpecOf(head, false)),
      trainers_(trainers),
      payloads_(payloads) {
  weights_[first_step()] = MakeNumbers(initial_numbers(), spec_.vocab_size * kWidth);
}

// splitmix64
uint64_t Job::Draw(int64_t at, int64_t what) const {
  uint64_t x = seed_ + 0x9e3779b97f4a7c15 * (static_cast<uint64_t>(at) * 64 + static_cast<uint64_t>(what) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

Job::Kind Job::KindOf(int64_t at, int64_t micro_batch) const {
  constexpr Kind kKinds[] = {Kind::kEager, Kind::kEager, Kind::kCommitted, Kind::kCommitted, Kind::kDiscarded, Kind::kAdded};
  return kKinds[Draw(at, micro_batch) % 6];
}

Job::End Job::EndOf(int64_t at) const {
  const uint64_t draw = Draw(at, 60) % 8;
  const bool can_apply = !std::holds_alternative<std::monostate>(spec_.optimizer);
  if (draw == 0) return End::kDiscard;
  if (!can_apply || (draw == 1 && !spec_.has_bias)) return End::kReplace;
  return draw < 4 ? End::kSealAndApply : End::kApply;
}

Event Job::Compute(int64_t at, int64_t micro_batch) const {
  const Kind kind = KindOf(at, micro_batch);
  const uint64_t draw = Draw(at, micro_batch + 10);
  if (kind == Kind::kAdded) {
    Event event = OnStep(Op::kAddGradient, at);
    event.micro_batch = micro_batch;
    event.row_start = static_cast<int>(draw % 3);
    event.row_count = 1 + static_cast<int>(draw / 3 % static_cast<uint64_t>(3 - event.row_start));
    event.numbers = 1 + static_cast<int>(draw / 9 % 6);
    event.factor = 1 + static_cast<double>(draw / 54 % 3);
    return event;
  }
  Event event = OnStep(Op::kCall, at);
  event.micro_batch = micro_batch;
  event.payload = static_cast<int>(draw % kInfinitePayload);
  event.targets[0].row_count = payloads_[static_cast<size_t>(event.payload)].row_count;
  event.targets[0].scale = 1 + static_cast<int>(draw / 16 % 3);
  event.targets[0].weighted = draw / 64 % 2 == 1;
  event.is_explicit = kind != Kind::kEager;
  event.allow_held = event.is_explicit;
  event.flow = draw / 128 % 2 == 1 ? Flow::kFlows : Flow::kComplete;
  return event;
}

Event Job::Decide(int64_t at, int64_t micro_batch) const {
  Event event = OnStep(KindOf(at, micro_batch) == Kind::kDiscarded ? Op::kDiscard : Op::kCommit, at);
  event.micro_batch = micro_batch;
  event.payload = Compute(at, micro_batch).payload;
  event.factor = 1 + static_cast<double>(Draw(at, micro_batch + 20) % 3);
  return event;
}

std::vector<int64_t> Job::Committed(int64_t at) const {
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < kMicroBatches; ++id) {
    if (KindOf(at, id) != Kind::kDiscarded) ids.push_back(id);
  }
  return ids;
}

Event Job::Seal(int64_t at) const {
  Event event = OnStep(Op::kSeal, at);
  event.expected = Committed(at);
  return event;
}

Event Job::Close(int64_t at, bool sealed) const {
  switch (EndOf(at)) {
    case End::kDiscard:
      return OnStep(Op::kDiscardGradient, at);
    case End::kReplace: {
      Event event = OnStep(Op::kReplace, at);
      event.tensors = {HeadTensor::kWeight};
      event.numbers = 1 + static_cast<int>(Draw(at, 61) % 9);
      return event;
    }
    case End::kApply:
    case End::kSealAndApply:
      break;
  }
  Event event = OnStep(Op::kApply, at);
  if (!sealed) event.expected = Committed(at);
  event.apply.learning_rate = static_cast<double>(Draw(at, 62) % 2);
  event.apply.gradient_factor = Draw(at, 63) % 2 == 1 ? 1 : -1;
  return event;
}

std::vector<float> Job::GradientOf(int64_t at) const {
  std::vector<float> gradient(static_cast<size_t>(spec_.vocab_size * kWidth));
  for (const int64_t id : Committed(at)) {
    const Event call = Compute(at, id);
    if (call.op == Op::kAddGradient) {
      const std::vector<float> part = MakeNumbers(call.numbers, call.row_count * kWidth);
      for (size_t i = 0; i < part.size(); ++i) {
        gradient[static_cast<size_t>(call.row_start * kWidth) + i] += static_cast<float>(call.factor) * part[i];
      }
      continue;
    }
    const Payload& payload = payloads_[static_cast<size_t>(call.payload)];
    for (size_t row = 0; row < static_cast<size_t>(payload.row_count); ++row) {
      if (payload.targets[row] == kDefaultIgnoreIndex) continue;
      double scale = call.targets[0].scale * (call.is_explicit ? Decide(at, id).factor : 1);
      if (call.targets[0].weighted) scale *= payload.token_weights[row];
      for (size_t i = 0; i < kWidth; ++i) {
        gradient[static_cast<size_t>(payload.targets[row]) * kWidth + i] +=
            static_cast<float>(scale) * payload.hidden[row * kWidth + i];
      }
    }
  }
  return gradient;
}

const std::vector<float>& Job::WeightsAt(int64_t at) {
  if (const auto known = weights_.find(at); known != weights_.end()) return known->second;
  std::vector<float> weights = WeightsAt(at - 1);
  const Event close = Close(at - 1, false);
  if (close.op == Op::kReplace) {
    weights = MakeNumbers(close.numbers, spec_.vocab_size * kWidth);
  } else if (close.op == Op::kApply) {
    const std::vector<float> gradient = GradientOf(at - 1);
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] -= static_cast<float>(close.apply.learning_rate * close.apply.gradient_factor) * gradient[i];
    }
  }
  return weights_[at] = weights;
}

void Job::GoBackTo(int64_t to) {
  step = to;
  ++round;
  ready.clear();
}

void Job::GoOn() {
  ++step;
  ready.clear();
}

std::string Job::CheckAnswer(int64_t at, int64_t micro_batch, const std::vector<double>& numbers) {
  // Sums; without the versions, which count in each life of the server anew; then all rows' numbers, without what became of it.
  std::vector<double> answer(numbers.begin(), numbers.begin() + 4);
  answer.insert(answer.end(), numbers.begin() + 6, numbers.end() - 5);
  const auto [first, is_first] = answers_.emplace(std::pair(at, micro_batch), answer);
  if (is_first || first->second == answer) return "";
  return absl::StrCat("  micro-batch ", micro_batch, " of step ", at, " was answered ", PrintNumbers(answer), ", and before ",
                      PrintNumbers(first->second), "\n");
}

}  // namespace headwater::history
