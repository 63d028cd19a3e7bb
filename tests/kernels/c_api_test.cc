// The C ABI, used as a C program would: closed forms, ownership, and errors for everything that a caller can get wrong.
#include "headwater/kernels/c_api.h"

#include <stdlib.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace {

template <typename Struct>
Struct Sized() {
  Struct value;
  std::memset(&value, 0, sizeof(value));
  value.struct_bytes = sizeof(value);
  return value;
}

// Fails the test with the error's text.
void ExpectOk(hw_error* error) {
  EXPECT_EQ(error, nullptr) << hw_error_reason(error) << ": " << hw_error_message(error);
  hw_error_free(error);
}

void ExpectError(hw_error* error, int32_t code, const std::string& reason) {
  ASSERT_NE(error, nullptr) << "expected " << reason;
  EXPECT_EQ(hw_error_code(error), code) << hw_error_message(error);
  EXPECT_EQ(hw_error_reason(error), reason) << hw_error_message(error);
  EXPECT_GT(std::strlen(hw_error_message(error)), 5u);
  hw_error_free(error);
}

constexpr int32_t kInvalidArgument = 3;
constexpr int32_t kResourceExhausted = 8;
constexpr int32_t kWeight = 1, kBias = 2, kGradWeight = 5, kGradBias = 6;

// A head of two classes over one hidden unit: logits (x, 0), so that p_0 = 1 / (1 + e^-x).
class CApi : public ::testing::Test {
 protected:
  void SetUp() override {
    hw_engine_options options = Sized<hw_engine_options>();
    options.engine = "cpu";
    options.shard_count = 2;
    ExpectOk(hw_engine_create(&options, &engine_));
    ExpectOk(hw_head_create(engine_, &spec_, &head_));
    const float weight[] = {1, 0};
    ExpectOk(hw_head_write(head_, kWeight, 0, 2, weight));
    FillMicroBatch();
  }

  // A good micro-batch; tests change it.
  void FillMicroBatch() {
    cross_entropy_ = Sized<hw_cross_entropy>();
    term_ = Sized<hw_loss_term>();
    term_.head = head_;
    term_.row_count = 3;
    term_.targets = targets_;
    term_.ignore_index = -100;
    term_.loss_scale = 2;
    term_.cross_entropy = &cross_entropy_;
    term_.token_loss = token_loss_;
    micro_batch_ = Sized<hw_micro_batch>();
    micro_batch_.hidden = hidden_;
    micro_batch_.row_count = 3;
    micro_batch_.hidden_size = 1;
    micro_batch_.hidden_data_type = 1;
    micro_batch_.backward = 1;
    micro_batch_.terms = &term_;
    micro_batch_.term_count = 1;
    micro_batch_.grad_hidden = grad_hidden_;
    micro_batch_.grad_hidden_data_type = 1;
    micro_batch_.grad_weight = HW_GRAD_WEIGHT_ACCUMULATE;
    micro_batch_.grad_hidden_scale = 1;
  }

  void TearDown() override {
    hw_head_destroy(head_);
    hw_engine_destroy(engine_);
  }

  static hw_head_spec MakeSpec() {
    hw_head_spec spec = Sized<hw_head_spec>();
    spec.vocab_size = 2;
    spec.hidden_size = 1;
    spec.data_type = 1;
    spec.logit_scale = 1;
    spec.trainable = 1;
    spec.staging_slots = 1;
    spec.optimizer.kind = HW_OPTIMIZER_SGD;
    return spec;
  }

  std::vector<float> ReadGradient() {
    std::vector<float> gradient(2);
    ExpectOk(hw_head_read(head_, kGradWeight, 0, 2, gradient.data()));
    return gradient;
  }

  hw_error* Compute() { return hw_compute(engine_, &micro_batch_, &sums_, nullptr); }

  hw_head_spec spec_ = MakeSpec();
  hw_engine* engine_ = nullptr;
  hw_head* head_ = nullptr;
  const float hidden_[3] = {0.5f, -1.0f, 2.0f};
  const int32_t targets_[3] = {0, 1, -100};
  float grad_hidden_[3] = {7, 7, 7};
  float token_loss_[3] = {7, 7, 7};
  hw_cross_entropy cross_entropy_;
  hw_loss_term term_;
  hw_micro_batch micro_batch_;
  hw_loss_sums sums_;
};

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST_F(CApi, ComputesTheClosedForm) {
  EXPECT_EQ(hw_abi_version(), HW_ABI_VERSION);
  ExpectOk(Compute());
  const double loss0 = -std::log(Sigmoid(0.5));
  const double loss1 = -std::log(Sigmoid(1.0));
  EXPECT_LE(std::abs(sums_.loss_sum - (loss0 + loss1)), 1e-6);
  EXPECT_LE(std::abs(sums_.hard_loss_sum - (loss0 + loss1)), 1e-6);
  EXPECT_EQ(sums_.soft_loss_sum, 0);
  EXPECT_EQ(sums_.valid_token_count, 2);
  EXPECT_EQ(sums_.token_weight_sum, 2);
  EXPECT_EQ(sums_.target_weight_sum, 2);
  EXPECT_EQ(sums_.non_finite_row_count, 0);
  EXPECT_LE(std::abs(token_loss_[0] - loss0), 1e-6);
  EXPECT_LE(std::abs(token_loss_[1] - loss1), 1e-6);
  EXPECT_EQ(token_loss_[2], 0.0f);
  // d/dx of the loss is p_0 - [target 0], times the loss scale of 2.
  const double grad0 = 2 * (Sigmoid(0.5) - 1);
  const double grad1 = 2 * Sigmoid(-1.0);
  EXPECT_LE(std::abs(grad_hidden_[0] - grad0), 1e-6);
  EXPECT_LE(std::abs(grad_hidden_[1] - grad1), 1e-6);
  EXPECT_EQ(grad_hidden_[2], 0.0f);
  const std::vector<float> gradient = ReadGradient();
  EXPECT_LE(std::abs(gradient[0] - (0.5 * grad0 - grad1)), 1e-6);
  EXPECT_LE(std::abs(gradient[1] + (0.5 * grad0 - grad1)), 1e-6);
  double norm_squared = 0;
  int64_t non_finite_count = -1;
  ExpectOk(hw_head_gradient_stats(head_, &norm_squared, &non_finite_count));
  EXPECT_LE(std::abs(norm_squared - 2 * gradient[0] * gradient[0]), 1e-6);
  EXPECT_EQ(non_finite_count, 0);
}

TEST_F(CApi, ClassWeightsMayCoverThePadding) {
  hw_head_spec spec = spec_;
  spec.vocab_size = 4;
  spec.valid_vocab_size = 2;
  hw_head* head = nullptr;
  ExpectOk(hw_head_create(engine_, &spec, &head));
  const float weight[] = {1, 0, NAN, NAN};
  ExpectOk(hw_head_write(head, kWeight, 0, 4, weight));
  term_.head = head;
  const float class_weights[] = {0.5f, 3.0f, NAN, NAN};
  cross_entropy_.class_weights = class_weights;
  for (const int64_t count : {2, 4}) {
    cross_entropy_.class_weight_count = count;
    ExpectOk(Compute());
    EXPECT_EQ(sums_.target_weight_sum, 3.5);
    EXPECT_LE(std::abs(sums_.loss_sum + 0.5 * std::log(Sigmoid(0.5)) + 3 * std::log(Sigmoid(1.0))), 1e-6);
  }
  cross_entropy_.class_weight_count = 3;
  ExpectError(Compute(), kInvalidArgument, "SHAPE_MISMATCH");
  hw_head_destroy(head);
}

TEST_F(CApi, ComputesJsd) {
  // Teacher logits (0, 0): P = (1/2, 1/2); beta 0 is KL(P||Q).
  hw_head_spec spec = spec_;
  spec.trainable = 0;
  spec.staging_slots = 0;
  spec.optimizer.kind = HW_OPTIMIZER_NONE;
  spec.hidden_size = 2;
  hw_head* teacher = nullptr;
  ExpectOk(hw_head_create(engine_, &spec, &teacher));
  const float teacher_hidden[6] = {1, 2, 3, 4, 5, 6};
  hw_jsd jsd = Sized<hw_jsd>();
  jsd.student_temperature = 1;
  jsd.teacher_temperature = 1;
  term_.cross_entropy = nullptr;
  term_.jsd = &jsd;
  term_.teacher_head = teacher;
  term_.teacher_hidden = teacher_hidden;
  term_.teacher_data_type = 1;
  ExpectOk(Compute());
  const auto divergence = [](double x) { return -std::log(2.0) - 0.5 * std::log(Sigmoid(x)) - 0.5 * std::log(Sigmoid(-x)); };
  EXPECT_LE(std::abs(sums_.soft_loss_sum - divergence(0.5) - divergence(1.0)), 1e-6);
  EXPECT_LE(std::abs(grad_hidden_[0] - 2 * (Sigmoid(0.5) - 0.5)), 1e-6);
  term_.teacher_head = nullptr;
  ExpectError(Compute(), kInvalidArgument, "MISSING_FIELD");
  hw_head_destroy(teacher);
}

TEST_F(CApi, StagedContributionsAreCommittedOrDiscarded) {
  ExpectOk(Compute());
  const std::vector<float> direct = ReadGradient();
  ExpectOk(hw_head_zero_gradient(head_));
  micro_batch_.grad_weight = HW_GRAD_WEIGHT_STAGE;
  ExpectError(Compute(), kInvalidArgument, "MISSING_FIELD");  // no place for the contribution
  hw_staged* staged = nullptr;
  ExpectOk(hw_compute(engine_, &micro_batch_, &sums_, &staged));
  ASSERT_NE(staged, nullptr);
  EXPECT_EQ(hw_head_free_staging_slots(head_), 0);
  hw_staged* second = nullptr;
  ExpectError(hw_compute(engine_, &micro_batch_, &sums_, &second), kResourceExhausted, "STAGING_FULL");
  EXPECT_EQ(second, nullptr);
  EXPECT_EQ(ReadGradient(), (std::vector<float>{0, 0}));
  ExpectOk(hw_staged_commit(staged, 1));
  EXPECT_EQ(ReadGradient(), direct);
  EXPECT_EQ(hw_head_free_staging_slots(head_), 1);
  ExpectOk(hw_compute(engine_, &micro_batch_, &sums_, &staged));
  hw_staged_discard(staged);
  EXPECT_EQ(hw_head_free_staging_slots(head_), 1);
  EXPECT_EQ(ReadGradient(), direct);
}

TEST_F(CApi, AddsACallersGradient) {
  ExpectOk(Compute());
  const std::vector<float> computed = ReadGradient();
  const float in[] = {0.25f, -3.0f};
  ExpectOk(hw_head_add_gradient(head_, kGradWeight, 0, 2, -0.5, in));
  EXPECT_EQ(ReadGradient(), (std::vector<float>{computed[0] - 0.125f, computed[1] + 1.5f}));
  ExpectOk(hw_head_add_gradient(head_, kGradWeight, 1, 1, 1, in));  // across the shards' boundary, one element
  EXPECT_EQ(ReadGradient()[1], computed[1] + 1.5f + 0.25f);
  const std::vector<float> before = ReadGradient();
  ExpectError(hw_head_add_gradient(head_, kGradWeight, 1, 2, 1, in), kInvalidArgument, "CHUNK_OUT_OF_RANGE");
  ExpectError(hw_head_add_gradient(head_, kGradBias, 0, 1, 1, in), kInvalidArgument, "CHUNK_OUT_OF_RANGE");  // it has no bias
  ExpectError(hw_head_add_gradient(head_, kWeight, 0, 1, 1, in), kInvalidArgument, "INVALID_FIELD");
  ExpectError(hw_head_add_gradient(head_, 11, 0, 1, 1, in), kInvalidArgument, "INVALID_FIELD");
  ExpectError(hw_head_add_gradient(head_, kGradWeight, 0, 1, INFINITY, in), kInvalidArgument, "INVALID_FIELD");
  EXPECT_EQ(ReadGradient(), before);
}

// Two trainable heads under three terms, one of them with two row ranges: in place, staged, and each term by itself agree.
TEST_F(CApi, SeveralTermsOverSeveralHeads) {
  hw_head* second = nullptr;
  ExpectOk(hw_head_create(engine_, &spec_, &second));
  const float weight[] = {-0.5f, 2};
  ExpectOk(hw_head_write(second, kWeight, 0, 2, weight));
  const int32_t targets[] = {1, 0, 1};
  hw_loss_term terms[3] = {term_, term_, term_};
  terms[0].row_count = 2;
  terms[1].head = second;
  terms[1].targets = targets;
  terms[1].token_loss = nullptr;
  terms[2].row_start = 1;
  terms[2].row_count = 2;
  terms[2].targets = targets;
  terms[2].loss_scale = -0.5;
  terms[2].token_loss = nullptr;
  micro_batch_.terms = terms;
  hw_loss_sums sums[3];
  const auto read = [](hw_head* head) {
    std::vector<float> gradient(2);
    ExpectOk(hw_head_read(head, kGradWeight, 0, 2, gradient.data()));
    ExpectOk(hw_head_zero_gradient(head));
    return gradient;
  };

  // By itself.
  std::vector<double> grad_hidden(3);
  for (const hw_loss_term& term : terms) {
    hw_micro_batch single = micro_batch_;
    single.terms = &term;
    ExpectOk(hw_compute(engine_, &single, sums, nullptr));
    for (int row = 0; row < 3; ++row) grad_hidden[static_cast<size_t>(row)] += static_cast<double>(grad_hidden_[row]);
  }
  const std::vector<float> first_alone = read(head_);
  const std::vector<float> second_alone = read(second);

  micro_batch_.term_count = 3;
  const auto expect_grad_hidden = [&] {
    for (int row = 0; row < 3; ++row) {
      EXPECT_LE(std::abs(static_cast<double>(grad_hidden_[row]) - grad_hidden[static_cast<size_t>(row)]), 1e-6);
    }
  };
  ExpectOk(hw_compute(engine_, &micro_batch_, sums, nullptr));
  expect_grad_hidden();
  EXPECT_EQ(sums[0].valid_token_count, 2);
  EXPECT_EQ(sums[1].valid_token_count, 3);
  EXPECT_EQ(read(head_), first_alone);
  EXPECT_EQ(read(second), second_alone);

  micro_batch_.grad_weight = HW_GRAD_WEIGHT_STAGE;
  hw_staged* staged = nullptr;
  ExpectOk(hw_compute(engine_, &micro_batch_, sums, &staged));
  expect_grad_hidden();
  EXPECT_EQ(hw_head_free_staging_slots(head_) + hw_head_free_staging_slots(second), 0);
  EXPECT_EQ(read(head_), (std::vector<float>{0, 0}));
  ExpectOk(hw_staged_commit(staged, 1));
  EXPECT_EQ(read(head_), first_alone);
  EXPECT_EQ(read(second), second_alone);

  // One slot missing: nothing of the others is kept.
  ExpectOk(hw_compute(engine_, &micro_batch_, sums, &staged));
  hw_staged* refused = nullptr;
  ExpectError(hw_compute(engine_, &micro_batch_, sums, &refused), kResourceExhausted, "STAGING_FULL");
  hw_staged_discard(staged);
  EXPECT_EQ(read(head_), (std::vector<float>{0, 0}));
  EXPECT_EQ(read(second), (std::vector<float>{0, 0}));
  EXPECT_EQ(hw_head_free_staging_slots(head_) + hw_head_free_staging_slots(second), 2);
  hw_head_destroy(second);
}

TEST_F(CApi, AppliesTheOptimizer) {
  ExpectOk(Compute());
  const std::vector<float> gradient = ReadGradient();
  hw_optimizer_step step = Sized<hw_optimizer_step>();
  step.learning_rate = 0.5;
  step.gradient_multiplier = 0.25;
  step.update_count = 1;
  step.settings.kind = HW_OPTIMIZER_SGD;
  ExpectOk(hw_head_apply_optimizer(head_, &step));
  std::vector<float> weight(2);
  ExpectOk(hw_head_read(head_, kWeight, 0, 2, weight.data()));
  EXPECT_LE(std::abs(weight[0] - (1 - 0.125 * gradient[0])), 1e-6);
  EXPECT_LE(std::abs(weight[1] + 0.125 * gradient[1]), 1e-6);
  EXPECT_EQ(ReadGradient(), (std::vector<float>{0, 0}));
  step.settings.kind = HW_OPTIMIZER_ADAMW;
  ExpectError(hw_head_apply_optimizer(head_, &step), kInvalidArgument, "INVALID_COMBINATION");
  step.settings.kind = 9;
  ExpectError(hw_head_apply_optimizer(head_, &step), kInvalidArgument, "INVALID_FIELD");
}

TEST_F(CApi, TensorsAndPlan) {
  EXPECT_EQ(hw_head_element_count(head_, kWeight), 2);
  EXPECT_EQ(hw_head_tensor_data_type(head_, kWeight), 1);
  EXPECT_EQ(hw_head_element_count(head_, kBias), 0);
  EXPECT_EQ(hw_head_tensor_data_type(head_, kBias), 0);
  for (const int32_t tensor : {0, 11, -1}) {
    EXPECT_EQ(hw_head_element_count(head_, tensor), 0);
    float element = 0;
    ExpectError(hw_head_read(head_, tensor, 0, 1, &element), kInvalidArgument, "INVALID_FIELD");
    ExpectError(hw_head_write(head_, tensor, 0, 1, &element), kInvalidArgument, "INVALID_FIELD");
  }
  int64_t total_bytes = 0;
  int64_t token_chunk_rows = 0;
  ExpectOk(hw_head_plan(head_, &total_bytes, &token_chunk_rows));
  EXPECT_GT(total_bytes, 0);
  EXPECT_GE(token_chunk_rows, 1);
  ExpectOk(hw_head_reset_optimizer_state(head_));
}

TEST_F(CApi, ErrorsCarryMetadata) {
  float element = 0;
  hw_error* error = hw_head_read(head_, 0, 0, 1, &element);
  ASSERT_NE(error, nullptr);
  ASSERT_EQ(hw_error_metadata_count(error), 3);
  EXPECT_STREQ(hw_error_metadata_key(error, 0), "actual");
  EXPECT_STREQ(hw_error_metadata_value(error, 0), "0");
  EXPECT_STREQ(hw_error_metadata_key(error, 2), "field");
  EXPECT_EQ(hw_error_metadata_key(error, 3), nullptr);
  EXPECT_EQ(hw_error_metadata_value(error, -1), nullptr);
  hw_error_free(error);
}

TEST_F(CApi, NullsAreRefused) {
  hw_engine_options options = Sized<hw_engine_options>();
  hw_engine* engine = nullptr;
  hw_head* head = nullptr;
  float element = 0;
  ExpectError(hw_engine_create(nullptr, &engine), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_engine_create(&options, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_create(nullptr, &spec_, &head), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_create(engine_, nullptr, &head), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_create(engine_, &spec_, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_read(nullptr, kWeight, 0, 1, &element), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_read(head_, kWeight, 0, 1, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_write(head_, kWeight, 0, 1, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_zero_gradient(nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_add_gradient(nullptr, kGradWeight, 0, 1, 1, &element), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_add_gradient(head_, kGradWeight, 0, 1, 1, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_reset_optimizer_state(nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_apply_optimizer(head_, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_head_plan(nullptr, nullptr, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_compute(nullptr, &micro_batch_, &sums_, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_compute(engine_, nullptr, &sums_, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_compute(engine_, &micro_batch_, nullptr, nullptr), kInvalidArgument, "MISSING_FIELD");
  ExpectError(hw_staged_commit(nullptr, 1), kInvalidArgument, "MISSING_FIELD");
  micro_batch_.terms = nullptr;
  ExpectError(Compute(), kInvalidArgument, "MISSING_FIELD");
  hw_error_free(nullptr);
  hw_staged_discard(nullptr);
  hw_head_destroy(nullptr);
  hw_engine_destroy(nullptr);
  EXPECT_EQ(hw_head_free_staging_slots(nullptr), 0);
}

TEST_F(CApi, WrongValuesAreRefused) {
  hw_engine* engine = nullptr;
  hw_engine_options options = Sized<hw_engine_options>();
  options.engine = "abacus";
  ExpectError(hw_engine_create(&options, &engine), kInvalidArgument, "INVALID_FIELD");
  options.engine = nullptr;
  options.shard_count = -2;
  const int64_t shard_weights[] = {1, 2};
  options.shard_weights = shard_weights;
  ExpectError(hw_engine_create(&options, &engine), kInvalidArgument, "INVALID_FIELD");
  EXPECT_EQ(engine, nullptr);

  const auto expect_refused = [this](const char* what, const char* reason) {
    SCOPED_TRACE(what);
    ExpectError(Compute(), kInvalidArgument, reason);
    FillMicroBatch();
  };
  micro_batch_.hidden_data_type = 4;
  expect_refused("hidden_data_type", "INVALID_FIELD");
  micro_batch_.grad_hidden_data_type = 0;
  expect_refused("grad_hidden_data_type", "INVALID_FIELD");
  micro_batch_.grad_weight = 3;
  expect_refused("grad_weight", "INVALID_FIELD");
  micro_batch_.term_count = -1;
  expect_refused("term_count", "INVALID_FIELD");
  micro_batch_.term_count = 0;
  expect_refused("no terms", "MISSING_FIELD");
  term_.row_count = -1;
  expect_refused("row_count", "INVALID_FIELD");
  term_.cross_entropy = nullptr;
  expect_refused("no loss", "INVALID_COMBINATION");
  term_.head = nullptr;
  expect_refused("no head", "MISSING_FIELD");
  cross_entropy_.class_weight_count = 2;
  expect_refused("class weights without a pointer", "INVALID_FIELD");
  ExpectOk(Compute());
}

TEST_F(CApi, TheCudaEngineThatIsNotThereIsRefusedWithItsReason) {
  const char* const before = std::getenv("HEADWATER_CUDA_MODULE");
  const std::string kept = before != nullptr ? before : "";
  setenv("HEADWATER_CUDA_MODULE", "/nonexistent-folder/module.so", 1);
  hw_engine_options options = Sized<hw_engine_options>();
  options.engine = "cuda";
  options.algorithm_cache_path = "/nonexistent-folder/algorithms.json";
  hw_engine* engine = nullptr;
  constexpr int32_t kUnimplemented = 12;
  ExpectError(hw_engine_create(&options, &engine), kUnimplemented, "FEATURE_NOT_BUILT");
  EXPECT_EQ(engine, nullptr);
  if (before != nullptr) {
    setenv("HEADWATER_CUDA_MODULE", kept.c_str(), 1);
  } else {
    unsetenv("HEADWATER_CUDA_MODULE");
  }
}

// Sizes of structs: too small, of a later version with and without anything in the part that is unknown here.
TEST_F(CApi, StructSizesAreChecked) {
  spec_.struct_bytes -= 8;
  hw_head* head = nullptr;
  ExpectError(hw_head_create(engine_, &spec_, &head), kInvalidArgument, "INVALID_FIELD");
  term_.struct_bytes = 0;
  ExpectError(Compute(), kInvalidArgument, "INVALID_FIELD");
  term_.struct_bytes = std::numeric_limits<int64_t>::max();
  ExpectError(Compute(), kInvalidArgument, "INVALID_FIELD");

  struct LaterTerm {
    hw_loss_term term;
    int64_t appended;
  };
  term_.struct_bytes = sizeof(LaterTerm);
  LaterTerm later[2] = {{term_, 0}, {term_, 0}};
  micro_batch_.terms = &later[0].term;
  micro_batch_.term_count = 2;
  hw_loss_sums sums[2];
  ExpectOk(hw_compute(engine_, &micro_batch_, sums, nullptr));
  EXPECT_EQ(sums[1].valid_token_count, 2);
  later[1].appended = 1;
  ExpectError(hw_compute(engine_, &micro_batch_, sums, nullptr), kInvalidArgument, "INVALID_FIELD");
}

// A count that no memory can hold makes std::vector throw inside: an error comes out, not an exception.
TEST_F(CApi, ExceptionsStayInside) {
  micro_batch_.term_count = int64_t{1} << 60;
  hw_error* error = Compute();
  ASSERT_NE(error, nullptr);
  EXPECT_TRUE(hw_error_code(error) == 13 || hw_error_code(error) == kResourceExhausted) << hw_error_message(error);
  hw_error_free(error);
}

}  // namespace
