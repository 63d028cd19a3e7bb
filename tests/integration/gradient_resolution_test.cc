// gradient_resolution through the wire: whichever way a micro-batch takes into its step, its draws are the same; other steps,
// micro-batches, terms and heads draw otherwise.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

constexpr double kResolution = 0.125;
constexpr int64_t kVocabSize = 400;
constexpr int64_t kHiddenSize = 12;
const std::vector<int32_t> kTargets = {3, 17, -100, 399, 0, 250, 8, 100};

// What is left of a micro-batch in its step, and what it answered.
struct Trace {
  std::string gradient, grad_hidden;
  v1::GradientDither dither;
  bool operator==(const Trace& other) const { return gradient == other.gradient && grad_hidden == other.grad_hidden; }
};

class GradientResolution : public ::testing::Test {
 protected:
  using Change = std::function<void(v1::MicroBatchHeader*)>;
  using Commit = std::function<void(WireServer*, const TestHead&)>;

  static std::string Rows() { return Bytes(Random(kTargets.size() * kHiddenSize, 5, 2)); }

  // One micro-batch on a server of its own, as after a restart.
  static Trace Run(const std::string& name, int32_t slots, const Change& change, const Commit& commit = nullptr, int64_t step = 0) {
    WireServer server;
    v1::HeadSpec spec = SmallSpec(kVocabSize, kHiddenSize);
    spec.set_staging_slots(slots);
    const TestHead head = server.MakeHead(name, spec);
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, 4, kTargets);
    header.mutable_terms(0)->set_gradient_resolution(kResolution);
    change(&header);
    const LossReply reply = server.Compute(header, Rows());
    Require(reply.status, "ComputeLoss");
    if (commit != nullptr) commit(&server, head);
    return {server.Gradient(head, step), reply.grad_hidden, reply.summary.terms(0).dither()};
  }
  static Trace Direct(const Change& change = [](auto*) {}) { return Run("h", 1, change); }
};

TEST_F(GradientResolution, FormsRestartsAndAttemptsDrawAlike) {
  const Trace direct = Direct();
  EXPECT_GT(direct.dither.entry_count(), static_cast<int64_t>(kTargets.size() - 1) * kVocabSize / 2);
  EXPECT_GT(direct.dither.squared_error(), 0);
  EXPECT_LT(direct.dither.squared_error(), direct.dither.squared_norm());
  EXPECT_TRUE(Direct() == direct);
  EXPECT_TRUE(Direct([](auto* header) { header->set_attempt(5); }) == direct);
  const auto explicit_commit = [](v1::MicroBatchHeader* header) {
    header->set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
    header->set_allow_held(true);
  };
  const Commit commit = [](WireServer* server, const TestHead& head) { Require(server->Commit(head, 0, 4, 1), "Commit"); };
  EXPECT_TRUE(Run("h", 1, explicit_commit, commit) == direct) << "STAGED";
  EXPECT_TRUE(Run("h", 0, explicit_commit, commit) == direct) << "HELD";
  // Factors by row at commit are token weights that come late.
  const auto late = [&](v1::MicroBatchHeader* header) {
    explicit_commit(header);
    header->set_late_token_factors(true);
  };
  const std::vector<float> factors = {1, 2, 1, 0.5F, -1, 3, 1, 4};
  const Trace held = Run("h", 0, late, [&](WireServer* server, const TestHead& head) {
    v1::CommitMicroBatchRequest request;
    *request.add_heads() = server->At(head, 0);
    request.set_micro_batch(4);
    *request.mutable_token_factors() = FloatTensor(factors);
    Require(server->Commit(request), "Commit");
  });
  const Trace weighted = Direct([&](auto* header) { *header->mutable_terms(0)->mutable_token_weights() = FloatTensor(factors); });
  EXPECT_EQ(held.gradient, weighted.gradient);
}

TEST_F(GradientResolution, StepsMicroBatchesTermsAndHeadsDrawOtherwise) {
  const Trace direct = Direct();
  EXPECT_FALSE(Direct([](auto* header) { header->set_micro_batch(5); }) == direct);
  EXPECT_FALSE(Run("other", 1, [](auto*) {}) == direct);
  EXPECT_FALSE(Direct([](auto* header) { header->mutable_terms(0)->set_gradient_resolution(kResolution / 2); }) == direct);
  // A first term that adds nothing.
  EXPECT_FALSE(Direct([](v1::MicroBatchHeader* header) {
                 *header->add_terms() = header->terms(0);
                 *header->mutable_terms(0)->mutable_token_weights() = FloatTensor(std::vector<float>(kTargets.size()));
               }) == direct);
  // The same micro-batch of the next step, whose weights have not moved.
  const Trace next = Run(
      "h", 1, [](auto*) {},
      [](WireServer* server, const TestHead& head) {
        v1::ApplyOptimizerStepRequest apply;
        *apply.mutable_head() = server->At(head, 0);
        apply.mutable_expected()->mutable_ids()->add_ids(4);
        apply.set_learning_rate(0);
        Require(server->Apply(apply), "ApplyOptimizerStep");
        v1::MicroBatchHeader header = CrossEntropyHeader(head, 1, 4, kTargets);
        header.mutable_terms(0)->set_gradient_resolution(kResolution);
        Require(server->Compute(header, Rows()).status, "ComputeLoss");
      },
      1);
  EXPECT_NE(next.gradient, direct.gradient);
}

}  // namespace
}  // namespace headwater::testing
