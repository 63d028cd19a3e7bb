#include "events.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace headwater::history {

heads::HeadName NameOf(int head) {
  static constexpr const char* kIds[kHeadCount] = {"plain", "adam", "bare", "teacher", "plain", "wide"};
  static constexpr const char* kTenants[kHeadCount] = {heads::kDefaultTenant, heads::kDefaultTenant, "third", "other", "other",
                                                       heads::kDefaultTenant};
  return {kTenants[head], kIds[head]};
}

HeadSpec SpecOf(int head, bool other) {
  HeadSpec spec;
  spec.vocab_size = head == 5 ? (other ? kMaxVocab : 9) : other ? 4 : 3;
  spec.hidden_size = kWidth;
  spec.transform.valid_vocab_size = spec.vocab_size;
  spec.transform.logit_scale = head + 1;  // tells heads of the engine apart
  spec.trainable = head != 3;
  spec.initial_step = spec.trainable ? 10 * head : 0;
  if (head == 0 || head == 4 || head == 5) {
    spec.optimizer = SgdSpec();
    spec.staging_slots = 2;
  } else if (head == 1) {
    spec.optimizer = AdamWSpec();
    spec.staging_slots = 1;
    spec.has_bias = true;
  }
  return spec;
}

std::vector<Payload> MakePayloads(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](int count) { return static_cast<int>(random() % static_cast<uint64_t>(count)); };
  std::vector<Payload> payloads(kPayloadCount);
  for (int number = 0; number < kPayloadCount; ++number) {
    Payload& payload = payloads[static_cast<size_t>(number)];
    payload.row_count = 1 + pick(3);
    for (int row = 0; row < payload.row_count; ++row) {
      payload.targets.push_back(pick(6) == 0 ? kDefaultIgnoreIndex : pick(3));
      payload.token_weights.push_back(static_cast<float>(pick(4) - 1));
      for (int64_t i = 0; i < kWidth; ++i) {
        payload.hidden.push_back(static_cast<float>(pick(7) - 3));
        payload.teacher_hidden.push_back(static_cast<float>(pick(3) - 1));
      }
    }
    if (number == kInfinitePayload) {
      payload.targets[0] = 1;
      payload.hidden[1] = std::numeric_limits<float>::infinity();
    }
    if (number == kBadTargetPayload) payload.targets[0] = 77;
  }
  return payloads;
}

std::vector<float> MakeNumbers(int number, int64_t count) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>((number * 7 + i * 5) % 11 - 4));
  return values;
}

std::vector<float> MakeTokenFactors(int variant, int row_count) {
  std::vector<float> factors;
  if (variant == 0) return factors;
  for (int row = 0; row < row_count; ++row) factors.push_back(static_cast<float>((row + variant) % 3 - 1));
  if (variant == 3) factors.push_back(1);
  if (variant == 4) factors[0] = std::numeric_limits<float>::infinity();
  return factors;
}

namespace {

class Fnv {
 public:
  void Add(int64_t value) { hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x100000001b3; }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace

uint64_t ContentOf(const Event& event) {
  Fnv hash;
  hash.Add(event.op == Op::kAddGradient);
  hash.Add(event.payload);
  hash.Add(event.micro_batch);
  hash.Add(event.is_explicit);
  hash.Add(event.refuse);
  hash.Add(event.op == Op::kAddGradient ? event.row_start * 100 + event.row_count : 0);
  hash.Add(event.op == Op::kAddGradient ? static_cast<int64_t>(event.factor) : 0);
  hash.Add(event.numbers);
  for (const Target& target : event.targets) {
    hash.Add(target.head);
    hash.Add(target.step.value_or(-1));
    hash.Add(target.epoch);
    hash.Add(target.teacher);
    hash.Add(target.row_start * 100 + target.row_count);
    hash.Add(target.scale);
    hash.Add(target.weighted);
  }
  return hash.value();
}

std::string ToString(const Event& event) {
  std::string text = event.late ? absl::StrCat("late: ", event.kind) : event.kind;
  const auto add = [&text](const char* name, int64_t value) { absl::StrAppend(&text, " ", name, "=", value); };
  const auto flag = [&text](const char* name, bool value) {
    if (value) absl::StrAppend(&text, " ", name);
  };
  for (const Target& target : event.targets) {
    absl::StrAppend(&text, " {", NameOf(target.head).tenant, "/", NameOf(target.head).head, " epoch=", target.epoch);
    if (target.step.has_value()) add("step", *target.step);
    if (target.version.has_value()) add("version", *target.version);
    if (event.is_call()) absl::StrAppend(&text, " rows=", target.row_start, "+", target.row_count, " scale=", target.scale);
    flag("weighted", target.weighted);
    if (target.teacher >= 0) absl::StrAppend(&text, " teacher=", NameOf(target.teacher).head, " epoch=", target.teacher_epoch);
    if (target.teacher_version.has_value()) add("version", *target.teacher_version);
    text += "}";
  }
  const bool is_micro_batch =
      event.is_call() || event.op == Op::kCommit || event.op == Op::kDiscard || event.op == Op::kAddGradient;
  if (is_micro_batch) {
    if (event.names_micro_batch) add("micro_batch", event.micro_batch);
    add("attempt", event.attempt);
    add("payload", event.payload);
    add("factor", static_cast<int64_t>(event.factor));
    add("token_factors", event.token_factors);
  }
  flag("forward_only", event.is_call() && !event.backward);
  flag("explicit", event.is_explicit);
  flag("first_wins", event.first_wins);
  flag("refuse", event.refuse);
  flag("late_factors", event.late_factors);
  flag("allow_held", event.allow_held);
  if (event.session != kNoSession) add("session", event.session);
  if (event.cancel != Cancel::kNever) add("cancel", static_cast<int>(event.cancel));
  if (event.meanwhile != Meanwhile::kNothing) add("meanwhile", static_cast<int>(event.meanwhile));
  if (event.flow != Flow::kComplete) add("flow", static_cast<int>(event.flow));
  for (const Event& other : event.beside) absl::StrAppend(&text, " beside (", ToString(other), ")");
  if (event.row_count > 0) absl::StrAppend(&text, " rows=", event.row_start, "+", event.row_count);
  if (event.expected.has_value()) {
    const int64_t* count = std::get_if<int64_t>(&*event.expected);
    absl::StrAppend(&text, " expected=",
                    count != nullptr ? absl::StrCat(*count)
                                     : absl::StrCat("[", absl::StrJoin(std::get<std::vector<int64_t>>(*event.expected), ","), "]"));
  }
  if (event.op == Op::kApply) {
    absl::StrAppend(&text, " learning_rate=", event.apply.learning_rate, " gradient_factor=", event.apply.gradient_factor);
    if (event.apply.max_grad_norm.has_value()) absl::StrAppend(&text, " max_grad_norm=", *event.apply.max_grad_norm);
  }
  flag("cancel_waiting", event.cancel_waiting);
  for (const HeadTensor tensor : event.tensors) absl::StrAppend(&text, " ", HeadTensorName(tensor));
  if (event.numbers != 0) add("numbers", event.numbers);
  flag("wrong_size", event.wrong_size);
  if (event.version.has_value()) add("version", *event.version);
  if (!event.checkpoint.empty()) absl::StrAppend(&text, " checkpoint=", event.checkpoint);
  flag("overwrite", event.overwrite);
  flag("disk_full", event.disk_full);
  flag("other_spec", event.other_spec);
  flag("attach", event.if_exists == heads::IfExists::kAttachIfSameSpec);
  flag("force", event.force);
  flag("save_first", event.save_first);
  flag("deleted_handle", event.deleted_handle);
  if (!event.recovers.empty()) absl::StrAppend(&text, " recovers=[", absl::StrJoin(event.recovers, ","), "]");
  if (event.seconds != 0) add("seconds", event.seconds);
  if (event.crash_at != 0) add("the process ends at await point", event.crash_at);
  if (event.power_loss.has_value()) add("power fails", static_cast<int64_t>(*event.power_loss));
  if (event.failing_call != nullptr) absl::StrAppend(&text, " ", event.failing_call, " fails: ", ErrorReasonName(event.failure));
  return text;
}

// ---- what is compared ------------------------------------------------------------------------------------------------

namespace {

bool Same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

bool SameNumbers(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), Same);
}

std::string PrintNumbers(const std::vector<double>& numbers) { return absl::StrCat("[", absl::StrJoin(numbers, " "), "]"); }

std::string View::Print(size_t mark) const {
  const size_t end = mark + 1 < marks_.size() ? marks_[mark + 1].start : values_.size();
  std::vector<double> values(values_.begin() + static_cast<std::ptrdiff_t>(marks_[mark].start),
                             values_.begin() + static_cast<std::ptrdiff_t>(end));
  return PrintNumbers(values);
}

std::string View::Difference(const View& actual, const View& expected) {
  const bool same_marks = std::equal(
      actual.marks_.begin(), actual.marks_.end(), expected.marks_.begin(), expected.marks_.end(),
      [](const Mark& a, const Mark& b) { return a.start == b.start && (a.name == b.name || std::strcmp(a.name, b.name) == 0); });
  if (same_marks && SameNumbers(actual.values_, expected.values_)) return "";
  std::string text;
  const char* head = "";
  for (size_t mark = 0; mark < std::max(actual.marks_.size(), expected.marks_.size()); ++mark) {
    const char* actual_name = mark < actual.marks_.size() ? actual.marks_[mark].name : "nothing";
    const char* expected_name = mark < expected.marks_.size() ? expected.marks_[mark].name : "nothing";
    if (std::strcmp(actual_name, expected_name) != 0) {
      return absl::StrCat(text, "  after ", head, ": ", actual_name, " is there, ", expected_name, " was expected\n");
    }
    if (std::strchr(actual_name, '/') != nullptr) head = actual_name;
    const std::string is = actual.Print(mark);
    const std::string should_be = expected.Print(mark);
    if (is != should_be) absl::StrAppend(&text, "  ", head, " ", actual_name, ": is ", is, ", expected ", should_be, "\n");
  }
  return text;
}

}  // namespace headwater::history
