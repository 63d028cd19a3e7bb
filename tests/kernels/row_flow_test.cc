// Rows that come while their micro-batch is computed, and a gradient that leaves meanwhile. Results equal those with all rows
// there, and nothing is added if the caller ends the computation.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/support/checked_flow.h"
#include "tests/kernels/support/comparison.h"
#include "tests/kernels/support/kernel_suite.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

// Longer than any rows stay away.
constexpr std::chrono::seconds kPatience(60);

// A tensor whose rows come later: memory that holds NaN until they do.
class LateTensor {
 public:
  // Takes the view's place.
  LateTensor(RowsView* view, int64_t row_start)
      : row_start_(row_start),
        row_count_(view->row_count),
        row_bytes_(view->column_count * ElementBytes(view->data_type)),
        source_(static_cast<const uint8_t*>(view->data)),
        memory_(static_cast<size_t>(row_count_ * row_bytes_), 0xFF) {
    view->data = memory_.data();
  }
  // Rows of the micro-batch up to `row_end` come.
  void Arrive(int64_t row_end) {
    const int64_t end = std::clamp<int64_t>(row_end - row_start_, here_, row_count_);
    if (end > here_) {
      std::memcpy(memory_.data() + here_ * row_bytes_, source_ + here_ * row_bytes_,
                  static_cast<size_t>((end - here_) * row_bytes_));
    }
    here_ = end;
  }

 private:
  const int64_t row_start_, row_count_, row_bytes_;
  const uint8_t* const source_;
  std::vector<uint8_t> memory_;
  int64_t here_ = 0;
};

// Lets a prepared micro-batch's rows come as they are awaited.
class TestFlow final : public CheckedFlow {
 public:
  explicit TestFlow(PreparedMicroBatch* prepared) : CheckedFlow(prepared->micro_batch) {
    tensors_.reserve(1 + prepared->terms.size());
    if (prepared->micro_batch.hidden.row_count > 0) tensors_.emplace_back(&prepared->micro_batch.hidden, 0);
    for (LossTerm& term : prepared->terms) {
      if (term.teacher_hidden.data != nullptr) tensors_.emplace_back(&term.teacher_hidden, term.row_start);
    }
    prepared->micro_batch.flow = this;
  }

  // Rows come only when Send() says so.
  void LetRowsBeLate() { late_ = true; }
  void Send(int64_t row_end) {
    std::lock_guard<std::mutex> lock(arrival_mutex_);
    for (LateTensor& tensor : tensors_) tensor.Arrive(row_end);
    here_ = row_end;
    came_.notify_all();
  }

 protected:
  absl::Status Arrive(int64_t, int64_t row_end) override {
    if (!late_) {
      Send(row_end);
      return absl::OkStatus();
    }
    std::unique_lock<std::mutex> lock(arrival_mutex_);
    return came_.wait_for(lock, kPatience, [&] { return here_ >= row_end; }) ? absl::OkStatus()
                                                                             : absl::DeadlineExceededError("no rows came");
  }

 private:
  std::vector<LateTensor> tensors_;
  bool late_ = false;
  std::mutex arrival_mutex_;
  std::condition_variable came_;
  int64_t here_ = 0;
};

struct FlowMode {
  const char* name;
  ComputeOptions options;
};
constexpr FlowMode kModes[] = {
    {"Direct", {}},
    {"Staged", {.grad_weight = GradWeightMode::kStage}},
    {"Forward", {.backward = false, .grad_hidden = false, .grad_weight = GradWeightMode::kNone}},
    {"NoGradWeight", {.token_outputs = false, .grad_weight = GradWeightMode::kNone}},  // the form with few outputs, too
    {"NoGradHidden", {.grad_hidden = false}}};

struct FlowCase {
  std::string name;
  Problem problem;
  EngineOptions engine;
  bool token_outputs = true;
};

Problem TwoTerms() {
  const ProblemOptions options = {.rows = 29, .bias = true, .jsd = true, .teacher_hidden_size = 16, .staging_slots = 2};
  Problem problem = MakeProblem(options);
  TestTerm& soft = problem.terms[0];
  TestTerm hard = {.head = 0, .row_start = 3, .row_count = 20};
  hard.targets.assign(soft.targets.begin() + 3, soft.targets.begin() + 23);
  hard.loss_scale = 0.25;
  // The teacher's rows are those of rows 5 to 24.
  soft.row_start = 5;
  soft.row_count = 20;
  soft.targets.resize(20);
  soft.teacher_hidden.resize(20 * 16);
  problem.terms.push_back(hard);
  return problem;
}

std::vector<FlowCase> MakeFlowCases() {
  std::vector<FlowCase> cases;
  const auto add = [&](const char* name, ProblemOptions options, EngineOptions engine = {}, bool token_outputs = true) {
    options.staging_slots = options.trainable ? 2 : 0;
    cases.push_back({name, MakeProblem(options), engine, token_outputs});
  };
  const EngineOptions chunks = {.token_chunk_rows = 7};
  const EngineOptions shards = {.shard_count = 3, .thread_count = 3};
  const EngineOptions shards_and_chunks = {.shard_count = 3, .token_chunk_rows = 7, .thread_count = 3};
  const ProblemOptions hard = {.rows = 37, .bias = true, .token_weights = true};
  ProblemOptions soft = hard;
  soft.jsd = true;
  soft.hard_loss_weight = 0.4;
  soft.teacher_hidden_size = 12;
  add("Float32", hard);
  add("BFloat16", WithType(hard, DataType::kBFloat16));
  add("Float16", WithType(hard, DataType::kFloat16));
  add("Chunks", WithType(hard, DataType::kBFloat16), chunks);
  add("Shards", hard, shards);
  add("ShardsAndChunks", WithType(hard, DataType::kBFloat16), shards_and_chunks);
  add("Jsd", soft);
  add("JsdBFloat16", WithType(soft, DataType::kBFloat16));
  add("JsdChunks", WithType(soft, DataType::kBFloat16), chunks);
  cases.push_back({"TwoTerms", TwoTerms(), {}, true});
  cases.push_back({"TwoTermsChunks", TwoTerms(), chunks, true});
  // Few outputs: the form of large micro-batches, in slices.
  ProblemOptions large = WithType({.rows = 4700, .bias = true, .ignored_share = 0.05}, DataType::kBFloat16);
  add("Large", large, {}, /*token_outputs=*/false);
  add("LargeShards", large, {.shard_count = 2}, /*token_outputs=*/false);
  // Every output, and a teacher: slices of the logits.
  add("LargeOutputs", large);
  large.jsd = true;
  large.teacher_hidden_size = 12;
  add("LargeJsd", large);
  const auto with_rows = [](int64_t rows, double ignored_share) {
    return WithType({.rows = rows, .bias = true, .ignored_share = ignored_share}, DataType::kBFloat16);
  };
  add("Medium", with_rows(700, 0.05), {}, /*token_outputs=*/false);
  add("OneRow", with_rows(1, 0));
  add("NoRows", with_rows(0, 0));
  add("AllIgnored", with_rows(21, 1));
  add("Frozen", {.rows = 19, .trainable = false});
  return cases;
}

const std::vector<FlowCase>& FlowCases() {
  static const std::vector<FlowCase> cases = MakeFlowCases();
  return cases;
}

class RowFlowTest : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {
 protected:
  const FlowCase& Case() const { return FlowCases()[std::get<0>(GetParam())]; }
  const Problem& problem() const { return Case().problem; }
  ComputeOptions Options() const {
    ComputeOptions options = kModes[std::get<1>(GetParam())].options;
    if (!Case().token_outputs) options.token_outputs = false;
    return options;
  }
  int32_t FreeSlots(LoadedHeads* heads) const { return heads->head(0).FreeStagingSlots(); }

  // Computes without a flow, or with `flow`, which is made for `prepared`. The contribution is committed.
  static absl::Status Run(LoadedHeads* heads, const PreparedMicroBatch& prepared, Outcome* outcome) {
    absl::StatusOr<MicroBatchResult> result = heads->engine().Compute(prepared.micro_batch);
    if (!result.ok()) return result.status();
    prepared.Collect(*result, outcome);
    if (result->staged != nullptr) {
      EXPECT_TRUE(result->staged->Commit(0.5).ok());
    }
    outcome->gradients = heads->ReadGradients();
    return absl::OkStatus();
  }
};

// Poisoned memory until AwaitRows() has returned: nothing is read before. Late rows come from another thread.
TEST_P(RowFlowTest, HasTheResultsOfAllRowsAtOnce) {
  LoadedHeads plain_heads(problem().heads, Case().engine);
  Outcome plain;
  const PreparedMicroBatch all_there(problem(), plain_heads.pointers(), Options());
  ASSERT_TRUE(Run(&plain_heads, all_there, &plain).ok());
  for (const bool late : {false, true}) {
    SCOPED_TRACE(late ? "late rows" : "rows when they are awaited");
    LoadedHeads heads(problem().heads, Case().engine);
    PreparedMicroBatch prepared(problem(), heads.pointers(), Options());
    TestFlow flow(&prepared);
    std::thread sender;
    if (late) {
      flow.LetRowsBeLate();
      sender = std::thread([&] {
        constexpr int64_t kPieces = 5;
        for (int64_t piece = 1; piece <= kPieces; ++piece) {
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
          flow.Send(problem().rows * piece / kPieces);
        }
      });
    }
    Outcome flowing;
    const absl::Status status = Run(&heads, prepared, &flowing);
    if (late) sender.join();
    ASSERT_TRUE(status.ok()) << status;
    flow.ExpectComplete();
    EXPECT_FALSE(flow.digest().has_value()) << "a sum that nobody asked for";
    EXPECT_TRUE(flowing.BitwiseEquals(plain));
  }
}

// A caller's error at any call of the flow comes back. The accumulators and the slots are as before, and the next computation is
// unaffected.
TEST_P(RowFlowTest, AddsNothingIfTheCallerEndsIt) {
  LoadedHeads heads(problem().heads, Case().engine);
  LoadedHeads undisturbed(problem().heads, Case().engine);
  // The accumulators' former content; some engines still owe it to them.
  const ComputeOptions before_options = {
      .grad_hidden = false, .grad_weight = problem().heads[0].spec.trainable ? GradWeightMode::kAccumulate : GradWeightMode::kNone};
  const auto compute_before = [&](LoadedHeads* on) {
    ASSERT_TRUE(on->TryCompute(problem(), before_options).ok());
    ASSERT_TRUE(on->TryCompute(problem(), before_options).ok());
  };
  const int32_t free_slots = FreeSlots(&heads);
  int awaits = 1;
  for (int call = 0; call <= awaits; ++call) {
    const bool at_decide = call == 0;
    SCOPED_TRACE(at_decide ? "Decide()" : "AwaitRows() call " + std::to_string(call));
    compute_before(&heads);
    compute_before(&undisturbed);
    PreparedMicroBatch prepared(problem(), heads.pointers(), Options());
    TestFlow flow(&prepared);
    if (at_decide) flow.FailAtDecide();
    flow.FailAtAwait(call);
    const absl::Status status = heads.engine().Compute(prepared.micro_batch).status();
    EXPECT_EQ(status, at_decide ? absl::AbortedError("decided otherwise") : absl::CancelledError("the rows stay away")) << status;
    if (at_decide) awaits = flow.awaits();
    ASSERT_GE(awaits, 1);
    EXPECT_EQ(flow.awaits(), at_decide ? awaits : call);
    EXPECT_EQ(flow.decided(), at_decide ? 1 : 0);
    EXPECT_TRUE(heads.ReadGradients() == undisturbed.ReadGradients());
    EXPECT_EQ(FreeSlots(&heads), free_slots);
    prepared.ExpectGuardsAndInputsIntact();
  }
  EXPECT_TRUE(heads.engine().health().ok());
  Outcome after, expected;
  PreparedMicroBatch next(problem(), heads.pointers(), Options());
  TestFlow flow(&next);
  ASSERT_TRUE(Run(&heads, next, &after).ok());
  const PreparedMicroBatch plain(problem(), undisturbed.pointers(), Options());
  ASSERT_TRUE(Run(&undisturbed, plain, &expected).ok());
  EXPECT_TRUE(after.BitwiseEquals(expected));
}

TEST(RowFlow, HostMemoryIsAlignedAndRegisteredMemoryStaysTheCallers) {
  const std::unique_ptr<LossEngine> engine = MakeSuiteEngine();
  ASSERT_OK_AND_ASSIGN(const auto rows, engine->AllocateHostMemory(4097));
  EXPECT_GE(rows->bytes(), 4097);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(rows->data()) % 64, 0u);
  std::vector<uint8_t> own(1 << 16);
  ASSERT_OK_AND_ASSIGN(auto registered, engine->RegisterHostMemory(own.data(), 1 << 16));
  EXPECT_EQ(registered->data(), own.data());
  EXPECT_EQ(registered->bytes(), 1 << 16);
  registered.reset();
  std::fill(own.begin(), own.end(), static_cast<uint8_t>(1));
}

// The digest of a flow, and that of rows alone, are the sum of the rows.
void ExpectDigests(const Problem& problem, const EngineOptions& engine, const ComputeOptions& options) {
  LoadedHeads heads(problem.heads, engine);
  PreparedMicroBatch prepared(problem, heads.pointers(), options);
  std::vector<RowsView> streams = {prepared.micro_batch.hidden};
  for (const LossTerm& term : prepared.terms) streams.push_back(term.teacher_hidden);
  DigestBuilder builder, alone;
  for (size_t i = 0; i < streams.size(); ++i) {
    const RowsView& rows = streams[i];
    if (rows.data == nullptr) continue;
    builder.AddRows(static_cast<int32_t>(i), 0, rows.row_count, rows.column_count * ElementBytes(rows.data_type), rows.data);
  }
  const std::string expected = DigestToHex(builder.Finish("header"));
  ASSERT_TRUE(heads.engine().DigestRows(streams, nullptr, &alone).ok());
  EXPECT_EQ(DigestToHex(alone.Finish("header")), expected);
  TestFlow flow(&prepared);
  prepared.micro_batch.digest_rows = true;
  ASSERT_TRUE(heads.engine().Compute(prepared.micro_batch).ok());
  prepared.ExpectGuardsAndInputsIntact();
  flow.ExpectComplete();
  ASSERT_TRUE(flow.digest().has_value());
  EXPECT_EQ(DigestToHex(*flow.digest()), expected);
}

TEST_P(RowFlowTest, SumsTheRowsUpForTheDigest) { ExpectDigests(problem(), Case().engine, Options()); }

INSTANTIATE_TEST_SUITE_P(All, RowFlowTest,
                         ::testing::Combine(::testing::Range<size_t>(0, FlowCases().size()),
                                            ::testing::Range<size_t>(0, std::size(kModes))),
                         [](const auto& test) {
                           return FlowCases()[std::get<0>(test.param)].name + kModes[std::get<1>(test.param)].name;
                         });

// A large micro-batch's gradient leaves before all of it is there, where the engine computes it in slices or chunks.
TEST(RowFlow, GradientLeavesByChunks) {
  const Problem problem = MakeProblem({.rows = 40, .ignored_share = 0});
  LoadedHeads heads(problem.heads, EngineOptions{.token_chunk_rows = 8});
  PreparedMicroBatch prepared(problem, heads.pointers(), {});
  TestFlow flow(&prepared);
  ASSERT_TRUE(heads.engine().Compute(prepared.micro_batch).ok());
  flow.ExpectComplete();
  EXPECT_EQ(flow.notes(), 5);
}

// Rows of odd sizes: neither a multiple of a word nor of a block.
TEST(RowFlow, DigestOfOddRows) {
  for (const auto& [hidden_size, type] : {std::pair{1000, DataType::kBFloat16},
                                          {1000, DataType::kFloat32},
                                          {1001, DataType::kFloat16},
                                          {3001, DataType::kBFloat16},
                                          {7, DataType::kFloat16},
                                          {2049, DataType::kBFloat16}}) {
    SCOPED_TRACE(std::to_string(hidden_size) + " of type " + DataTypeName(type));
    ExpectDigests(MakeProblem(WithType({.rows = 11, .vocab_size = 33, .hidden_size = hidden_size}, type)), {}, {});
  }
}

// Rows whose logits do not fit the exponentials' offset, in the first slice, in the last one, in both.
TEST(RowFlow, LargeLogits) {
  const Problem plain =
      MakeProblem(WithType({.rows = 4500, .bias = true, .ignored_share = 0, .staging_slots = 1}, DataType::kBFloat16));
  for (const auto& places : {std::vector<int64_t>{3}, {4400}, {1500}, {5, 4499}}) {
    SCOPED_TRACE("first row " + std::to_string(places.front()));
    Problem problem = plain;
    for (const int64_t row : places) {
      for (int64_t h = 0; h < problem.hidden_size; ++h) problem.hidden[static_cast<size_t>(row * problem.hidden_size + h)] *= 100;
      const std::vector<double> logits =
          ProductsOf(problem.heads[0], &problem.hidden[static_cast<size_t>(row * problem.hidden_size)]);
      const auto least = std::min_element(logits.begin(), logits.end());
      problem.terms[0].targets[static_cast<size_t>(row)] = static_cast<int32_t>(least - logits.begin());
    }
    RoundToStorage(&problem);
    ComputeOptions compute = {.token_outputs = false};
    const Expected expected = ComputeExpected(problem);
    for (const GradWeightMode mode : {GradWeightMode::kAccumulate, GradWeightMode::kStage}) {
      compute.grad_weight = mode;
      LoadedHeads heads(problem.heads, {});
      PreparedMicroBatch prepared(problem, heads.pointers(), compute);
      TestFlow flow(&prepared);
      ASSERT_OK_AND_ASSIGN(MicroBatchResult result, heads.engine().Compute(prepared.micro_batch));
      flow.ExpectComplete();
      Outcome outcome;
      prepared.Collect(result, &outcome);
      if (mode == GradWeightMode::kStage) {
        EXPECT_TRUE(result.staged->Commit(1).ok());
      }
      outcome.gradients = heads.ReadGradients();
      ExpectOutcomeMatches(problem, expected, outcome);
    }
  }
}

TEST(RowFlow, RefusesMeaninglessCombinations) {
  const Problem problem = MakeProblem(ProblemOptions());
  LoadedHeads heads(problem.heads, {});
  {
    PreparedMicroBatch prepared(problem, heads.pointers(), {});
    prepared.micro_batch.digest_rows = true;
    const absl::Status status = heads.engine().Compute(prepared.micro_batch).status();
    EXPECT_REASON(status, kInvalidCombination);
    EXPECT_EQ(GetErrorMetadata(status).at("field"), "digest_rows");
    prepared.ExpectOutputsUntouched();
  }
  class ForeignEvent final : public DeviceEvent {};
  const ForeignEvent event;
  PreparedMicroBatch prepared(problem, heads.pointers(), {});
  prepared.micro_batch.after = &event;
  const absl::Status status = heads.engine().Compute(prepared.micro_batch).status();
  EXPECT_REASON(status, kInvalidField);
  EXPECT_EQ(GetErrorMetadata(status).at("field"), "after");
  prepared.ExpectOutputsUntouched();
  DigestBuilder builder;
  EXPECT_REASON(heads.engine().DigestRows({prepared.micro_batch.hidden}, &event, &builder), kInvalidField);
}

// A handle that means nothing here is refused, and the engine continues.
TEST(RowFlow, RefusesForeignHandles) {
  const Problem problem = MakeProblem(ProblemOptions());
  LoadedHeads heads(problem.heads, {});
  const ErrorReason reason = heads.engine().name() == "cpu" ? ErrorReason::kFeatureNotBuilt : ErrorReason::kInvalidField;
  DeviceHandle handle;
  handle.fill(0x5A);
  const absl::Status memory = heads.engine().OpenDeviceMemory(handle, 4096).status();
  EXPECT_TRUE(HasReason(memory, reason)) << memory;
  const absl::Status event = heads.engine().OpenDeviceEvent(handle).status();
  EXPECT_TRUE(HasReason(event, reason)) << event;
  EXPECT_TRUE(heads.engine().health().ok());
  heads.Compute(problem);
}

}  // namespace
}  // namespace headwater::testing
