#include "server/heads/steps/commit_arguments.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"

namespace headwater::heads {
namespace {

// The beginning of the digest of token factors; math.md, "Digest".
constexpr char kTokenFactorsHeader[] = "headwater.token_factors.1";

// The rows of one term with factors of their own.
std::vector<float> ScaledWeights(const LossTerm& term, const std::vector<float>& token_factors) {
  std::vector<float> weights(static_cast<size_t>(term.row_count));
  for (size_t i = 0; i < weights.size(); ++i) {
    const float weight = term.token_weights.empty() ? 1.0F : term.token_weights[i];
    weights[i] = weight * token_factors[static_cast<size_t>(term.row_start) + i];
  }
  return weights;
}

}  // namespace

absl::StatusOr<CommitFactor> ToCommitFactor(const CommitArguments& arguments) {
  CommitFactor factor;
  factor.factor = arguments.factor;
  if (arguments.token_factors.empty()) return factor;
  const auto begin = arguments.token_factors.begin(), end = arguments.token_factors.end();
  if (const auto wrong = std::find_if_not(begin, end, [](float x) { return std::isfinite(x); }); wrong != end) {
    const std::string actual = absl::StrCat(*wrong, " at index ", wrong - begin);
    return MakeError(ErrorReason::kInvalidField, absl::StrCat("token_factors must be finite, there is ", actual),
                     {{"field", "token_factors"}, {"expected", "finite"}, {"actual", actual}});
  }
  DigestBuilder digest;
  // A row for each factor: within a row, zeros at the end would not count.
  digest.AddRows(0, 0, static_cast<int64_t>(arguments.token_factors.size()), sizeof(float), arguments.token_factors.data());
  factor.token_factors = digest.Finish(kTokenFactorsHeader);
  return factor;
}

absl::Status CheckCommit(const CommitArguments& arguments, const HeldRows& held) {
  const int64_t count = static_cast<int64_t>(arguments.token_factors.size());
  if (count != 0 && count != held.hidden.row_count) {
    const std::string expected = absl::StrCat(held.hidden.row_count), actual = absl::StrCat(count);
    return MakeError(ErrorReason::kShapeMismatch,
                     absl::StrCat("token_factors has ", actual, " entries, the micro-batch has ", expected, " rows"),
                     {{"field", "token_factors"}, {"expected", expected}, {"actual", actual}});
  }
  const auto not_finite = [](const char* field, const std::string& what) {
    return MakeError(ErrorReason::kInvalidField, absl::StrCat(field, " makes ", what, ", which must stay finite"),
                     {{"field", field}, {"expected", "finite products"}, {"actual", what}});
  };
  for (const LossTerm& term : held.terms) {
    if (const double scale = term.loss_scale * arguments.factor; !std::isfinite(static_cast<float>(scale))) {
      return not_finite("factor", absl::StrCat("a loss_scale of ", term.loss_scale, " times ", arguments.factor));
    }
    if (count == 0) continue;
    if (!term.entropy_factors.empty() || !term.lse_factors.empty()) {
      return MakeError(ErrorReason::kInvalidCombination, "token_factors are for token weights alone: the micro-batch has factors",
                       {{"field", "token_factors"}, {"expected", "nothing"}, {"actual", "factors of entropy or lse"}});
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

absl::Status AddHeld(HeldRows held, const CommitArguments& arguments, LossEngine& engine) {
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
  return engine.Compute(micro_batch).status();
}

absl::Status AddPending(const PendingContribution& pending, const CommitArguments& arguments, LossEngine& engine) {
  if (!pending.is_held()) return pending.staged()->Commit(arguments.factor);
  HeldRows held = pending.held();
  if (absl::Status status = CheckCommit(arguments, held); !status.ok()) return status;
  return AddHeld(std::move(held), arguments, engine);
}

}  // namespace headwater::heads
