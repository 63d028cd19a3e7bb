// The cost of a head's bookkeeping on the CPU engine. Submit() of an eager micro-batch, which is added in place, is timed
// against LossEngine::Compute() of the same rows. Cross entropy, forward and backward with grad_weight; interleaved in one process.
//
// Prints CSV rows `case,value,unit` to standard output, and the measurements in words to standard error.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "headwater/kernels/engine.h"
#include "server/heads/head.h"
#include "server/heads/steps/submit.h"
#include "tests/bench/common/statistics.h"
#include "tests/bench/engine/bench_support.h"

namespace headwater::bench {
namespace {

// A head of the server's core with the weights of MakeHead().
std::shared_ptr<heads::Head> MakeServedHead(LossEngine& engine, const HeadSpec& spec) {
  const heads::HeadName name = {heads::kDefaultTenant, "bench"};
  const auto sequencer = std::make_shared<scheduler::Sequencer>();
  std::shared_ptr<heads::Head> head = ValueOrFail(heads::Head::Create(name, spec, engine, heads::HeadLimits(), sequencer));
  std::vector<uint8_t> weight(static_cast<size_t>(spec.vocab_size * spec.hidden_size * ElementBytes(spec.data_type)));
  ForEachWeightRow(spec, [&](int64_t start, int64_t count, const void* data) {
    std::memcpy(weight.data() + start * ElementBytes(spec.data_type), data,
                static_cast<size_t>(count * ElementBytes(spec.data_type)));
  });
  const heads::Epoch epoch = head->Describe().epoch;
  Check(head->SetTensor(epoch, HeadTensor::kWeight, spec.data_type, weight.data(), static_cast<int64_t>(weight.size())).status());
  return head;
}

void SubmitEager(LossEngine& engine, const std::shared_ptr<heads::Head>& head, int64_t micro_batch, Rows& rows) {
  heads::Submission submission;
  heads::SubmittedTerm& term = submission.terms.emplace_back();
  term.head = head;
  term.head_epoch = head->Describe().epoch;
  term.step = *head->Describe().open_step;
  term.term = rows.term(nullptr);
  submission.micro_batch = micro_batch;
  submission.backward = true;
  submission.hidden = rows.hidden();
  submission.grad_hidden = rows.grad_hidden();
  std::memcpy(submission.digest.data(), &micro_batch, sizeof(micro_batch));  // rows are hashed before they come here
  Check(heads::CheckSubmission(submission));
  const heads::SubmissionOutcome outcome = ValueOrFail(heads::Submit(submission, engine, [] { return false; }));
  rows.ExpectPlausible(outcome.terms[0]);
  if (outcome.form != heads::ContributionForm::kDirect) Fail("the micro-batch was not added in place");
}

void Measure(const Settings& settings) {
  const std::unique_ptr<LossEngine> engine = ValueOrFail(CreateCpuEngine({}));
  Rows rows(settings, settings.type);
  const HeadSpec spec = SpecOf(settings, settings.type);
  const std::unique_ptr<EngineHead> bare = MakeHead(*engine, spec);
  const std::shared_ptr<heads::Head> served = MakeServedHead(*engine, spec);
  int64_t micro_batch = 0;
  std::vector<Candidate> candidates;
  candidates.push_back({"cpu_engine", [&] { Compute(*engine, *bare, rows); }, {}});
  candidates.push_back({"cpu_direct", [&] { SubmitEager(*engine, served, micro_batch++, rows); }, {}});
  TimeInterleaved(settings.rounds, &candidates);
  for (const Candidate& candidate : candidates) PrintTimes(candidate);
  const double ratio = MedianRatio(candidates[1], candidates[0]);
  std::printf("cpu_direct_over_engine,%.4f,x bare engine call\n", ratio);
  std::fprintf(stderr, "submitted to a head: %.3f s, bare engine call: %.3f s; median ratio of a round %.4f\n",
               Median(candidates[1].seconds), Median(candidates[0].seconds), ratio);
  PrintSettings(settings, engine->options().thread_count);
}

}  // namespace
}  // namespace headwater::bench

int main(int argc, char** argv) {
  headwater::bench::Measure(headwater::bench::ParseFlags(argc, argv, {"direct"}));
  return 0;
}
