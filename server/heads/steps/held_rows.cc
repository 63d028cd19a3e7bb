#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/heads/head.h"
#include "server/heads/steps/pending_contribution.h"

namespace headwater::heads {
namespace {

// Begins the reason why a held micro-batch cannot be committed.
constexpr char kNeedsTeacher[] =
    "a held micro-batch is computed at its commit, and needs its teacher's head until then; discard it, or keep the head: ";

// The rows of one term with factors of their own.
std::vector<float> ScaledWeights(const LossTerm& term, const std::vector<float>& token_factors) {
  const auto first = token_factors.begin() + term.row_start;
  std::vector<float> weights(first, first + term.row_count);
  std::transform(term.token_weights.begin(), term.token_weights.end(), weights.begin(), weights.begin(), std::multiplies<>());
  return weights;
}

}  // namespace

absl::Status CheckCommit(const CommitArguments& arguments, const HeldRows& held) {
  const int64_t count = static_cast<int64_t>(arguments.token_factors.size());
  if (count != 0 && count != held.hidden.row_count) {
    return FieldError(ErrorReason::kShapeMismatch, "token_factors", absl::StrCat(held.hidden.row_count), absl::StrCat(count));
  }
  const auto not_finite = [](const char* field, const std::string& what) {
    return FieldError(ErrorReason::kInvalidField, field, "finite products", what);
  };
  for (const LossTerm& term : held.terms) {
    if (const double scale = term.loss_scale * arguments.factor; !std::isfinite(static_cast<float>(scale))) {
      return not_finite("factor", absl::StrCat("a loss_scale of ", term.loss_scale, " times ", arguments.factor));
    }
    if (count == 0) continue;
    if (!term.entropy_factors.empty() || !term.lse_factors.empty()) {
      return FieldError(ErrorReason::kInvalidCombination, "token_factors", "nothing", "factors of entropy or lse");
    }
    const std::vector<float> weights = ScaledWeights(term, arguments.token_factors);
    const auto wrong = std::find_if_not(weights.begin(), weights.end(), [](float weight) { return std::isfinite(weight); });
    if (wrong == weights.end()) continue;
    const auto row = static_cast<size_t>(wrong - weights.begin());
    return not_finite("token_factors",
                      absl::StrCat("a token weight of ", term.token_weights.empty() ? 1.0F : term.token_weights[row], " times ",
                                   arguments.token_factors[static_cast<size_t>(term.row_start) + row], " at row ",
                                   term.row_start + static_cast<int64_t>(row)));
  }
  return absl::OkStatus();
}

absl::Status AddHeld(HeldRows held, const CommitArguments& arguments, LossEngine& engine, const DeviceEvent* after) {
  std::vector<std::vector<float>> weights;
  weights.reserve(held.terms.size());
  for (LossTerm& term : held.terms) {
    term.loss_scale *= arguments.factor;
    if (arguments.token_factors.empty()) continue;
    weights.push_back(ScaledWeights(term, arguments.token_factors));
    term.token_weights = weights.back();
  }
  MicroBatch micro_batch;
  micro_batch.hidden = held.hidden;
  micro_batch.terms = held.terms;
  micro_batch.backward = true;
  micro_batch.grad_weight = GradWeightMode::kAccumulate;
  micro_batch.after = after;
  return engine.Compute(micro_batch).status();
}

// ---- teachers --------------------------------------------------------------------------------------------------------

void HeldTeachers::Find(const HeldRows& held, scheduler::Needs& needs) {
  for (auto& [head, version] : std::exchange(heads_, {})) Turn::Free(std::move(head));
  for (const HeldRows::Teacher& teacher : held.teachers) {
    const std::shared_ptr<Head>& head = heads_.emplace_back(teacher.head.lock(), teacher.weight_version).first;
    if (head != nullptr) head->AddNeed(head->reads(), needs);
  }
}

absl::Status HeldTeachers::Check() const {
  for (const auto& [teacher, held_version] : heads_) {
    if (teacher == nullptr) {
      return MakeError(ErrorReason::kHeadNotFound, absl::StrCat(kNeedsTeacher, "it has been deleted"));
    }
    if (absl::Status status = teacher->Check(std::nullopt, Need::kReady, false); !status.ok()) {
      return MakeError(GetErrorReason(status), absl::StrCat(kNeedsTeacher, std::string(status.message())),
                       GetErrorMetadata(status));
    }
    const int64_t version = teacher->weights.version();
    if (version == held_version) continue;
    const std::string name = teacher->name().ToString();
    return MakeError(ErrorReason::kWeightVersionMismatch,
                     absl::StrCat("the micro-batch is held, and was computed with version ", held_version, " of the weights of ",
                                  name, ", they are of version ", version, " now; discard it and submit it again"),
                     {{"head", name}, {"expected", absl::StrCat(held_version)}, {"actual", absl::StrCat(version)}});
  }
  return absl::OkStatus();
}

// ---- additions in order ----------------------------------------------------------------------------------------------

absl::Status AddInOrder(Head& head, const WaitLimits& limits, bool yields) {
  if (!head.steps.in_order()) return absl::OkStatus();
  while (true) {
    std::shared_ptr<const WaitingAddition> next;
    HeldTeachers teachers;
    const auto needs = [&]() -> absl::StatusOr<scheduler::Needs> {
      scheduler::Needs needed;
      Turn::Free(std::exchange(next, head.NextInOrder()));
      if (next != nullptr && yields && scheduler::Sequencer::IsWritten(*head.record)) Turn::Free(std::exchange(next, nullptr));
      if (next == nullptr) return needed;
      head.AddNeed(kChangesGradient, needed);
      teachers.Find(next->rows, needed);
      return needed;
    };
    HEADWATER_ASSIGN_OR_RETURN(const scheduler::Admission admission, head.sequencer.Acquire(needs, limits, kWaitsForHead));
    if (next == nullptr) return absl::OkStatus();
    absl::Status teacher;
    {
      const Turn turn(head.sequencer);
      teacher = teachers.Check();
    }
    if (!teacher.ok()) {
      // It was committed, but its addition can no longer be computed.
      return head.AfterChange(MakeError(ErrorReason::kEngineFailed, absl::StrCat("micro-batch ", next->micro_batch,
                                                                                 " was committed and waited for its turn, but ",
                                                                                 std::string(teacher.message()))));
    }
    HEADWATER_RETURN_IF_ERROR(head.AfterChange(AddHeld(next->rows, next->arguments, head.engine)));
    const Turn turn(head.sequencer);
    head.steps.MarkAdded(next->micro_batch);
  }
}

absl::Status AddInOrder(const std::vector<Head*>& heads, const WaitLimits& limits) {
  for (Head* head : heads) {
    absl::Status status = AddInOrder(*head, limits, /*yields=*/true);
    if (IsEngineFailure(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace headwater::heads
