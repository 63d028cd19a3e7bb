#include "tests/fuzz/support/acknowledged.h"

#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {
namespace {

// Valid tokens of each head, over its terms.
std::map<std::string, int64_t> TokensByHead(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary) {
  std::map<std::string, int64_t> tokens;
  for (int i = 0; i < header.terms_size() && i < summary.terms_size(); ++i) {
    tokens[header.terms(i).head().head()] += summary.terms(i).sums().valid_token_count();
  }
  return tokens;
}

}  // namespace

void Acknowledged::Try(const v1::MicroBatchHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::LossTerm& term : header.terms()) tried_[term.head().head()].insert(header.micro_batch());
}

void Acknowledged::Try(const v1::AddGradientHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tried_[header.head().head()].insert(header.micro_batch());
}

void Acknowledged::Computed(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary) {
  FUZZ_CHECK(summary.terms_size() == header.terms_size());
  if (!header.has_micro_batch()) return;
  const std::map<std::string, int64_t> tokens = TokensByHead(header, summary);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::LossTerm& term : header.terms()) {
    if (summary.state() != v1::CONTRIBUTION_STATE_COMMITTED) continue;
    // A repeat adds nothing, even with other rows: what counted before counts.
    const std::optional<int64_t> count =
        summary.replayed() || summary.payload_differs() ? std::nullopt : std::optional(tokens.at(term.head().head()));
    steps_[KeyOf(term.head())].committed.try_emplace(header.micro_batch(), count);
  }
}

void Acknowledged::Committed(const v1::CommitMicroBatchRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::HeadStep& head : request.heads()) {
    // Several attempts may have been staged by now, whose tokens may differ: which it was is not known here.
    steps_[KeyOf(head)].committed.try_emplace(request.micro_batch(), std::nullopt);
  }
}

void Acknowledged::Added(const v1::AddGradientHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  steps_[KeyOf(header.head())].committed.try_emplace(header.micro_batch(), 0);
}

Acknowledged::Contributions Acknowledged::Before(const v1::HeadStep& step) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = steps_.find(KeyOf(step));
  return found == steps_.end() ? Contributions() : found->second;
}

void Acknowledged::CheckTotals(const v1::HeadStep& step, const Contributions& before, const v1::StepTotals& totals) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto tried = tried_.find(step.head());
  const size_t most = tried == tried_.end() ? 0 : tried->second.size();
  int64_t tokens = 0;
  bool all_known = before.committed.size() == most;
  for (const auto& [id, count] : before.committed) {
    tokens += count.value_or(0);
    all_known = all_known && count.has_value();
  }
  const auto committed = static_cast<size_t>(totals.micro_batch_count());
  FUZZ_CHECK(totals.micro_batch_count() >= 0 && committed >= before.committed.size() && committed <= most, totals.DebugString());
  FUZZ_CHECK(totals.valid_token_count() >= tokens, totals.DebugString());
  if (all_known) FUZZ_CHECK(totals.valid_token_count() == tokens, totals.DebugString());
}

void Acknowledged::CheckStep(const v1::HeadStep& head, const v1::Step& step, const Contributions& before) const {
  if (step.step() != head.step()) return;
  std::set<int64_t> committed;
  for (const v1::MicroBatchState& state : step.micro_batches()) {
    if (state.state() == v1::CONTRIBUTION_STATE_COMMITTED) FUZZ_CHECK(committed.insert(state.micro_batch()).second);
  }
  for (const auto& [id, tokens] : before.committed) FUZZ_CHECK(committed.count(id) == 1, step.DebugString());
}

}  // namespace headwater::fuzz
