#include "kernels/core/loss/top_k.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "headwater/kernels/error.h"
#include "headwater/kernels/top_k.h"
#include "kernels/core/loss/row_loss.h"

namespace headwater {
namespace {

// Largest excess of a log-probability over 0, and of a row's sum over 1: the teacher's rounding.
constexpr double kExcess = 1e-3;

absl::Status BadEntry(ErrorReason reason, const std::string& field, const std::string& expected, const std::string& actual) {
  return MakeError(reason, field + " must be " + expected + ", got " + actual,
                   {{"field", field}, {"expected", expected}, {"actual", actual}});
}

}  // namespace

absl::Status CheckTopKRows(const std::string& field, const std::string& suffix, const TopKSpec& spec, int64_t valid_vocab_size) {
  const size_t k = static_cast<size_t>(spec.k);
  // The row that last had an id, counted from 1: one access an entry instead of a row's sorting.
  std::vector<uint32_t> last_row(static_cast<size_t>(valid_vocab_size), 0);
  for (size_t first = 0; first < spec.ids.size(); first += k) {
    const auto row = static_cast<uint32_t>(first / k);
    double sum = 0;
    for (size_t i = first; i < first + k; ++i) {
      const int32_t id = spec.ids[i];
      if (id == -1) continue;
      if (id < -1 || id >= valid_vocab_size) {
        return BadEntry(ErrorReason::kTargetOutOfVocab, field + ".ids" + suffix,
                        "ids in [0, " + std::to_string(valid_vocab_size) + "), or -1 for an entry that is not used",
                        std::to_string(id) + " at index " + std::to_string(i));
      }
      uint32_t& last = last_row[static_cast<size_t>(id)];
      if (last == row + 1) {
        return BadEntry(ErrorReason::kInvalidField, field + ".ids" + suffix, "each id at most once in a row",
                        std::to_string(id) + " twice, the second time at index " + std::to_string(i));
      }
      last = row + 1;
      const float log_probability = spec.log_probs[i];
      if (!std::isfinite(log_probability) || log_probability > kExcess) {
        return BadEntry(ErrorReason::kInvalidField, field + ".log_probs" + suffix, "finite natural logarithms of at most 0.001",
                        std::to_string(log_probability) + " at index " + std::to_string(i));
      }
      sum += static_cast<double>(std::exp(log_probability));
    }
    if (sum > 1 + kExcess) {
      return BadEntry(ErrorReason::kInvalidField, field + ".log_probs" + suffix, "probabilities that add up to at most 1 in a row",
                      std::to_string(sum) + " of row " + std::to_string(row));
    }
  }
  return absl::OkStatus();
}

TopKRow TopKRowOf(const TopKSpec& spec, int64_t row) {
  TopKRow result;
  result.entries.reserve(static_cast<size_t>(spec.k));
  double sum = 0;
  for (int64_t i = row * spec.k; i < (row + 1) * spec.k; ++i) {
    const int32_t id = spec.ids[static_cast<size_t>(i)];
    if (id < 0) continue;
    const double log_probability = spec.log_probs[static_cast<size_t>(i)];
    result.entries.push_back({id, log_probability, std::exp(log_probability)});
    sum += result.entries.back().probability;
  }
  std::sort(result.entries.begin(), result.entries.end(),
            [](const TopKEntry& a, const TopKEntry& b) { return a.column < b.column; });
  result.rest = 1 - sum < kLeastRestMass ? 0 : 1 - sum;
  result.mass = sum + result.rest;
  return result;
}

TopKLoss FinishTopK(const TopKRow& row, const PieceStats& others, absl::Span<const double> logits) {
  TopKLoss result;
  result.max = others.max == -kRowInfinity ? 0 : others.max;
  double largest = others.max;
  for (const double logit : logits) largest = std::max(largest, logit);
  const double others_sum = others.max == -kRowInfinity ? others.sum : others.sum * std::exp(others.max - largest);
  double sum = others_sum;
  for (const double logit : logits) sum += std::exp(logit - largest);
  result.lse = largest + std::log(sum);
  for (size_t i = 0; i < logits.size(); ++i) {
    const TopKEntry& entry = row.entries[i];
    result.loss += Weighted(entry.probability, entry.log_probability - (logits[i] - result.lse));
  }
  if (row.rest > 0) result.loss += row.rest * (std::log(row.rest) - (LogSumExp(others) - result.lse));
  // Without other columns there is nothing that the factor would multiply; a NaN among them stays.
  if (others.sum != 0) result.rest_factor = (row.mass * (others_sum / sum) - row.rest) / others.sum;
  return result;
}

}  // namespace headwater
