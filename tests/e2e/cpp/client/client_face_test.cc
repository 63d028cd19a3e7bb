// The typed C++ client: extreme and invalid arguments, targets, a micro-batch of several terms, and servers that break off, refuse,
// stall or answer nonsense; and contributions that a caller has abandoned, which the core discards before their step is sealed.
// tests/e2e/protocol has retries, sessions and recovery.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/call/retry.h"
#include "client/core/core.h"
#include "headwater/client/client.h"
#include "headwater/client/error.h"
#include "headwater/client/future.h"
#include "tests/e2e/cpp/support/scripted_server.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using namespace client;
using namespace client::internal;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kHiddenSize = 4;

ClientOptions Quick(int max_attempts) {
  return {.retry = {.max_attempts = max_attempts, .initial_backoff = milliseconds(2), .max_backoff = milliseconds(4)}};
}

grpc::Status Unavailable() { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"); }

class ClientFace : public testing::Test {
 protected:
  void Connect(const ClientOptions& options) {
    client_.emplace(Value(Client::Connect(server_.target(), options)));
    head_.emplace(Value(client_->OpenHead("h")));
  }

  static MicroBatchOptions Options(int64_t micro_batch, CommitMode commit = CommitMode::kEager) {
    return {.step = 0, .micro_batch = micro_batch, .commit = commit, .return_grad_hidden = false};
  }
  Future<LossResult> Submit(const MicroBatchOptions& options, const CallOptions& call = {}) {
    return head_->CrossEntropy(RowsView::Float32(rows_, kHiddenSize), targets_, {}, options, call);
  }

  ScriptedServer server_;
  std::optional<Client> client_;
  std::optional<Head> head_;
  const std::vector<float> rows_ = std::vector<float>(2 * kHiddenSize, 0.5F);
  const std::vector<int32_t> targets_ = {1, 2};
};

TEST_F(ClientFace, LongestTimeoutsDoNotOverflow) {
  std::promise<void> answer;
  server_.compute_loss = [&answer](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ScriptedServer::ReadAll(stream).header;
    answer.get_future().wait();
    return ScriptedServer::Answer(stream, header);
  };
  ClientOptions options = Quick(1);
  options.timeout = options.connect_timeout = milliseconds::max();
  Connect(options);
  Future<LossResult> future = Submit(Options(0), {.timeout = milliseconds::max()});
  std::thread answering([&answer] {
    std::this_thread::sleep_for(milliseconds(50));
    answer.set_value();
  });
  EXPECT_TRUE(future.WaitFor(std::chrono::nanoseconds::max()));
  answering.join();
  EXPECT_TRUE(future.Get().ok());
}

TEST_F(ClientFace, LongestBackOffsDoNotOverflow) {
  const absl::Status gone = absl::UnavailableError("gone");
  // No test waits for them: this is what a call would wait for.
  const auto never = std::chrono::system_clock::now() + 3 * kLongestTimeout;
  for (const milliseconds longest : {milliseconds::max(), milliseconds::max() / 2, milliseconds(kLongestTimeout)}) {
    for (const milliseconds initial : {longest, milliseconds(1)}) {
      SCOPED_TRACE(testing::Message() << initial.count() << " to " << longest.count());
      RetryState state({.max_attempts = 99, .initial_backoff = initial, .max_backoff = longest}, never, Repeat::kSafe);
      std::chrono::nanoseconds least = std::min<milliseconds>(initial, milliseconds(kLongestTimeout));
      for (int i = 0; i < 80; ++i) {
        const auto delay = state.AfterFailure(gone);
        ASSERT_TRUE(delay.has_value());
        EXPECT_GE(*delay, least / 2);
        EXPECT_LE(*delay, kLongestTimeout);
        least = std::min<std::chrono::nanoseconds>(2 * least, kLongestTimeout);
      }
    }
  }

  // Beyond the deadline there is no second attempt, instead of all of them at once.
  ClientOptions options = {
      .retry = {.max_attempts = 5, .initial_backoff = milliseconds::max(), .max_backoff = milliseconds::max()}};
  Connect(options);
  server_.unary_status = Unavailable();
  EXPECT_FALSE(head_->Commit(0, 0).Get().ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
  EXPECT_FALSE(head_->Seal(0, 1).ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
  Connect(Quick(5));
  server_.unary_status = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", std::numeric_limits<int64_t>::max());
  EXPECT_FALSE(head_->Seal(0, 1).ok());
  EXPECT_EQ(server_.calls.exchange(0), 1);
}

TEST_F(ClientFace, SixteenMicroBatchesAreUnderWayAndOtherCallsDoNotWaitForThem) {
  std::atomic<bool> held = true;
  std::atomic<int> under_way = 0, most = 0;
  server_.compute_loss = [&](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    const v1::MicroBatchHeader header = ScriptedServer::ReadAll(stream).header;
    const int now = ++under_way;
    for (int known = most; now > known && !most.compare_exchange_weak(known, now);) {
    }
    while (held) std::this_thread::sleep_for(milliseconds(1));
    --under_way;
    return ScriptedServer::Answer(stream, header);
  };
  Connect(Quick(2));
  std::vector<Future<LossResult>> losses;
  for (int64_t i = 0; i < 40; ++i) losses.push_back(Submit(Options(i)));
  while (under_way < 16) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(head_->Seal(0, 1).ok());
  // A micro-batch that waits is cancelled without having been sent.
  losses[39].Cancel();
  EXPECT_EQ(losses[39].Get().status().code(), absl::StatusCode::kCancelled);
  held = false;
  for (size_t i = 0; i < 39; ++i) EXPECT_TRUE(losses[i].Get().ok()) << i;
  EXPECT_EQ(most, 16);
  EXPECT_EQ(server_.PeersOf("ComputeLoss").size(), 39U);
}

TEST_F(ClientFace, SeveralTermsUploadTheRowsOnce) {
  Connect(Quick(1));
  Head other = Value(client_->OpenHead("other"));
  Head teacher = Value(client_->OpenHead("teacher"));
  v1::CommitMicroBatchRequest commit;
  server_.commit = [&commit](const v1::CommitMicroBatchRequest& request) {
    commit = request;
    return grpc::Status::OK;
  };
  const std::vector<float> teacher_rows(kHiddenSize, 1.0F);
  std::vector<LossTerm> terms = {{.targets = targets_},
                                 {.loss = JsdOptions{.beta = 0.25},
                                  .head = other,
                                  .step = 3,
                                  .row_start = 1,
                                  .row_count = 1,
                                  .teacher = teacher,
                                  .teacher_hidden = RowsView::Float32(teacher_rows, kHiddenSize)},
                                 {.targets = targets_, .loss_scale = 0.5}};
  MicroBatchOptions options = Options(4, CommitMode::kExplicit);
  options.late_token_factors = true;
  options.allow_held = true;
  const MultiResult result = Value(head_->Multi(RowsView::Float32(rows_, kHiddenSize), terms, options).Get());
  EXPECT_EQ(result.terms.size(), 3u);
  const auto& [header, rows] = server_.last();
  EXPECT_THAT(rows, testing::UnorderedElementsAre(
                        testing::Pair(testing::Pair(v1::CHUNK_ROLE_HIDDEN, 0), testing::SizeIs(rows_.size() * sizeof(float))),
                        testing::Pair(testing::Pair(v1::CHUNK_ROLE_TEACHER_HIDDEN, 1),
                                      testing::SizeIs(teacher_rows.size() * sizeof(float)))));
  EXPECT_TRUE(header.late_token_factors());
  EXPECT_TRUE(header.allow_held());
  ASSERT_EQ(header.terms_size(), 3);
  EXPECT_EQ(header.terms(0).head().step(), 0);
  EXPECT_EQ(header.terms(1).head().head(), "tenants/default/heads/other");
  EXPECT_EQ(header.terms(1).head().step(), 3);
  EXPECT_EQ(header.terms(1).row_start(), 1);
  EXPECT_EQ(header.terms(1).row_count(), 1);
  EXPECT_EQ(header.terms(1).teacher_hidden().head(), "tenants/default/heads/teacher");
  EXPECT_EQ(header.terms(1).teacher_hidden().head_epoch(), teacher.epoch());
  EXPECT_EQ(header.terms(2).loss_scale(), 0.5);

  ASSERT_TRUE(result.contribution.has_value());
  const std::vector<float> factors = {2.0F, -1.0F};
  Value(result.contribution->Commit({.factor = 3.0, .token_factors = factors}).Get());
  ASSERT_EQ(commit.heads_size(), 2);  // once each, without the teacher
  EXPECT_EQ(commit.heads(0).head(), "tenants/default/heads/h");
  EXPECT_EQ(commit.heads(1).head(), "tenants/default/heads/other");
  EXPECT_EQ(commit.heads(1).step(), 3);
  EXPECT_EQ(commit.token_factors().data(), std::string(reinterpret_cast<const char*>(factors.data()), 8));

  Client stranger = Value(Client::Connect(server_.target(), Quick(1)));
  terms[1].head = Value(stranger.OpenHead("other"));
  EXPECT_EQ(ErrorReason(head_->Multi(RowsView::Float32(rows_, kHiddenSize), terms, options).Get().status()), "INVALID_COMBINATION");
}

TEST_F(ClientFace, TopKTeacherArrives) {
  Connect(Quick(1));
  const std::vector<int32_t> ids = {4, 1, 7, -1, 0, 2};
  const std::vector<float> log_probs = {-1, -2, -3, 0, -1, -2};
  const RowsView rows = RowsView::Float32(rows_, kHiddenSize);
  Value(
      head_->Jsd(rows, {.k = 3, .ids = ids, .log_probs = log_probs}, {}, {.beta = 0, .student_temperature = 2}, Options(0)).Get());
  const v1::MicroBatchHeader header = server_.last().header;
  ASSERT_EQ(header.terms_size(), 1);
  const v1::LossTerm& term = header.terms(0);
  EXPECT_TRUE(term.jensen_shannon().has_beta());
  EXPECT_EQ(term.jensen_shannon().beta(), 0);
  EXPECT_EQ(term.jensen_shannon().student_temperature(), 2);
  EXPECT_FALSE(term.has_targets());
  const v1::TopKTeacher& teacher = term.top_k_teacher();
  EXPECT_EQ(teacher.k(), 3);
  EXPECT_EQ(teacher.ids().data(), std::string(reinterpret_cast<const char*>(ids.data()), 24));
  EXPECT_EQ(teacher.log_probs().data(), std::string(reinterpret_cast<const char*>(log_probs.data()), 24));
  for (const v1::Tensor* const tensor : {&teacher.ids(), &teacher.log_probs()}) {
    ASSERT_EQ(tensor->shape_size(), 2);
    EXPECT_EQ(tensor->shape(0), 2);
    EXPECT_EQ(tensor->shape(1), 3);
  }
  const TopKTeacher top_k = {.k = 3, .ids = ids, .log_probs = log_probs};
  const JsdOptions forward = {.beta = 0}, versioned = {.beta = 0, .expected_teacher_weight_version = 1};
  for (LossTerm two_teachers : std::vector<LossTerm>{{.loss = forward, .teacher = *head_, .top_k_teacher = top_k},
                                                     {.loss = forward, .teacher_hidden = rows, .top_k_teacher = top_k},
                                                     {.loss = versioned, .top_k_teacher = top_k}}) {
    EXPECT_EQ(ErrorReason(head_->Multi(rows, {&two_teachers, 1}, Options(1)).Get().status()), "INVALID_COMBINATION");
  }
}

TEST_F(ClientFace, FactorsAndOptionsOfACrossEntropyArriveAndItsOutputsReturn) {
  v1::MicroBatchHeader header;
  server_.compute_loss = [&header](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
    header = ScriptedServer::ReadAll(stream).header;
    v1::ComputeLossResponse response;
    v1::LossTermResult& term = *response.mutable_summary()->add_terms();
    for (auto [tensor, value] : {std::pair(term.mutable_mean_logits(), 0.5F), {term.mutable_log_sum_sq_probs(), -2.0F}}) {
      const std::vector<float> values = {value, value + 1};
      tensor->set_data_type(v1::DATA_TYPE_FLOAT32);
      tensor->add_shape(2);
      tensor->set_data(values.data(), sizeof(float) * values.size());
    }
    term.mutable_dither()->set_entry_count(7);
    term.mutable_dither()->set_squared_error(0.25);
    term.mutable_dither()->set_squared_norm(4);
    stream->Write(response);
    return grpc::Status::OK;
  };
  Connect(Quick(1));
  const std::vector<float> entropy_factors = {1.0F, -2.0F}, lse_factors = {0.25F, 3.0F};
  MicroBatchOptions options = Options(0);
  options.entropy_factors = entropy_factors;
  options.lse_factors = lse_factors;
  options.gradient_resolution = 0.125;
  options.outputs = {.mean_logits = true, .log_sum_sq_probs = true};
  const RowsView rows = RowsView::Float32(rows_, kHiddenSize);
  const LossResult result = Value(head_->CrossEntropy(rows, targets_, {.temperature = 0.5, .token_scaling = true}, options).Get());
  EXPECT_EQ(result.mean_logits, (std::vector<float>{0.5F, 1.5F}));
  EXPECT_EQ(result.log_sum_sq_probs, (std::vector<float>{-2.0F, -1.0F}));
  EXPECT_EQ(result.dither.entry_count, 7);
  EXPECT_EQ(result.dither.squared_error, 0.25);
  EXPECT_EQ(result.dither.squared_norm, 4);
  ASSERT_EQ(header.terms_size(), 1);
  const v1::LossTerm& term = header.terms(0);
  EXPECT_EQ(term.gradient_resolution(), 0.125);
  EXPECT_EQ(term.cross_entropy().temperature(), 0.5);
  EXPECT_TRUE(term.cross_entropy().token_scaling());
  EXPECT_EQ(term.entropy_factors().data(), std::string(reinterpret_cast<const char*>(entropy_factors.data()), 8));
  EXPECT_EQ(term.lse_factors().data(), std::string(reinterpret_cast<const char*>(lse_factors.data()), 8));
  ASSERT_EQ(header.outputs_size(), 2);
  EXPECT_EQ(header.outputs(0), v1::TOKEN_OUTPUT_MEAN_LOGITS);
  EXPECT_EQ(header.outputs(1), v1::TOKEN_OUTPUT_LOG_SUM_SQ_PROBS);

  // Absent where they say what absence says: a server that does not know them computes the same.
  Value(Submit(Options(1)).Get());
  EXPECT_FALSE(header.terms(0).cross_entropy().has_temperature());
  EXPECT_FALSE(header.terms(0).has_entropy_factors());
  EXPECT_FALSE(header.terms(0).has_lse_factors());
  EXPECT_EQ(header.terms(0).gradient_resolution(), 0);
}

// Of those that the program in C does not try.
TEST_F(ClientFace, InvalidOptionsFailToConnect) {
  std::vector<ClientOptions> wrong = {{.session_lease = milliseconds::max()}, {.client_name = std::string(129, 'n')}};
  for (const int64_t bytes : {int64_t{0}, int64_t{1} << 40}) {
    wrong.push_back({.chunk_bytes = bytes});
    wrong.push_back({.max_message_bytes = bytes});
  }
  for (const ClientOptions& options : wrong) {
    EXPECT_EQ(ErrorReason(Client::Connect(server_.target(), options).status()), "INVALID_FIELD");
  }
}

TEST_F(ClientFace, InvalidTargetsFailBeforeConnecting) {
  const std::string long_name(108, 'x');
  for (const std::string& target : std::vector<std::string>{
           "", "localhost", "localhost:", "localhost:0", "localhost:65536", "localhost:https", ":50051", "host name:1", "::1:50051",
           "[::1]", "http://localhost:50051", "dns:///localhost", "a:1,b:2", "unix:", "unix-abstract:", "unix://tmp/s.sock",
           "unix:" + long_name, "unix-abstract:" + long_name}) {
    const absl::Status status = Client::Connect(target).status();
    EXPECT_EQ(ErrorReason(status), "INVALID_FIELD") << target;
    EXPECT_NE(std::string(status.message()).find("got \"" + target + "\""), std::string::npos) << status;
  }
  ClientOptions hasty = {.connect_timeout = milliseconds(20)};
  for (const std::string target : {"127.0.0.1:1", "localhost:1", "head_water.example.invalid:1", "[::1]:1", "dns:localhost:1",
                                   "dns:///localhost:1", "dns:///[::1]:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1",
                                   "unix:/nobody/is here", "unix:nobody", "unix:///nobody", "unix-abstract:headwater-nobody"}) {
    EXPECT_EQ(Client::Connect(target, hasty).status().code(), absl::StatusCode::kUnavailable) << target;
  }
}

TEST_F(ClientFace, ANameThatCannotBeResolvedIsReportedBeforeTheTimeIsOver) {
  // Whatever resolver there is: a part of more than 63 bytes. A quarter of the time is for it.
  const ClientOptions options = {.connect_timeout = seconds(8)};
  const auto begin = steady_clock::now();
  const absl::Status unresolved = Client::Connect(std::string(64, 'x') + ":1", options).status();
  EXPECT_LT(steady_clock::now() - begin, seconds(6));
  EXPECT_EQ(unresolved.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(unresolved.message()).find("DNS resolution failed"), std::string::npos) << unresolved;
}

TEST_F(ClientFace, WhatCannotBeSentIsRefusedBeforeSending) {
  Connect(Quick(1));
  TensorView nothing = {.element_count = 12};
  EXPECT_EQ(ErrorReason(head_->UploadWeights(HeadTensor::kWeight, nothing).status()), "INVALID_FIELD");
  EXPECT_EQ(ErrorReason(head_->ReplaceWeights(0, nothing).status()), "INVALID_FIELD");
  const std::vector<float> some(12);
  TensorView less = TensorView::Float32(some);
  less.element_count = -1;
  EXPECT_EQ(ErrorReason(head_->UploadWeights(HeadTensor::kWeight, less).status()), "INVALID_FIELD");
  RowsView on_device = RowsView::Float32(some, head_->spec().hidden_size);
  on_device.memory = Memory::kCuda;
  EXPECT_EQ(ErrorReason(head_->AddGradient(0, 0, on_device).status()), "INVALID_FIELD");
  EXPECT_EQ(ErrorReason(head_->AddGradient(0, 0, RowsView::Float32(some, 1)).status()), "SHAPE_MISMATCH");
  const std::vector<uint16_t> half(kHiddenSize);
  EXPECT_EQ(ErrorReason(head_->AddGradient(0, 0, RowsView::BFloat16(half, kHiddenSize)).status()), "DATA_TYPE_MISMATCH");
  const TensorView weight = TensorView::Float32(some);
  EXPECT_EQ(ErrorReason(head_->ReplaceWeights(0, weight, weight).status()), "INVALID_COMBINATION");
  for (const ExpectedMicroBatches& none : {ExpectedMicroBatches(int64_t{0}), ExpectedMicroBatches(std::vector<int64_t>())}) {
    const absl::Status empty = head_->Apply(0, {.learning_rate = 0.1, .expected = none}).status();
    EXPECT_EQ(ErrorReason(empty), "INVALID_COMBINATION");
    EXPECT_EQ(ErrorMetadata(empty)["field"], "allow_empty");
  }
  const auto submit = [this](const RowsView& rows, const MicroBatchOptions& options) {
    return ErrorReason(head_->CrossEntropy(rows, targets_, {}, options).Get().status());
  };
  RowsView rows = RowsView::Float32(rows_, kHiddenSize);
  rows.data = nullptr;
  EXPECT_EQ(submit(rows, Options(0)), "INVALID_FIELD");
  rows.data = rows_.data();
  rows.row_count = int64_t{1} << 62;
  EXPECT_EQ(submit(rows, Options(0)), "INVALID_FIELD");
  unsigned char small[8];
  MicroBatchOptions too_small = Options(0);
  too_small.return_grad_hidden = true;
  too_small.grad_hidden = small;
  EXPECT_EQ(submit(RowsView::Float32(rows_, kHiddenSize), too_small), "DATA_LENGTH_MISMATCH");
  EXPECT_EQ(server_.calls.load(), 0);
}

TEST_F(ClientFace, NegativeTimeoutsFailAtOnce) {
  Connect(Quick(5));
  EXPECT_EQ(head_->Commit(0, 0, 1.0, {.timeout = milliseconds(-1)}).Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(head_->Seal(0, 1, {}, {.timeout = milliseconds(-1)}).status().code(), absl::StatusCode::kDeadlineExceeded);
}

// ---- servers that break off, refuse, stall or answer nonsense --------------------------------------------------------

class ClientProtocol : public ClientFace {
 protected:
  ClientProtocol() {
    ClientOptions options = Quick(3);
    options.chunk_bytes = 16;
    Connect(options);
  }

  Future<LossResult> Submit(const std::vector<float>& hidden, const CallOptions& options = {}) {
    const std::vector<int32_t> targets(hidden.size() / kHiddenSize, 1);
    MicroBatchOptions micro_batch = {.step = 0, .micro_batch = 0};
    return head_->CrossEntropy(RowsView::Float32(hidden, kHiddenSize), targets, {}, micro_batch, options);
  }

  // What a server with the two rows of `rows_` answers; tests bend it.
  static v1::ComputeLossResponse GradRows(int64_t row_start, int64_t row_count) {
    v1::ComputeLossResponse response;
    v1::RowChunk* chunk = response.mutable_chunk();
    chunk->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
    chunk->set_row_start(row_start);
    chunk->set_row_count(row_count);
    chunk->set_data(std::string(static_cast<size_t>(row_count) * kHiddenSize * 4, '\1'));
    return response;
  }
  static v1::ComputeLossResponse Summary() {
    v1::ComputeLossResponse response;
    response.mutable_summary()->add_terms();
    return response;
  }
  void AnswerWith(std::vector<v1::ComputeLossResponse> responses) {
    server_.compute_loss = [responses](grpc::ServerContext*, ScriptedServer::LossStream* stream) {
      ScriptedServer::ReadAll(stream);
      for (const v1::ComputeLossResponse& response : responses) stream->Write(response);
      return grpc::Status::OK;
    };
  }
};

TEST_F(ClientProtocol, ReasonMetadataAndDelayAreDecoded) {
  server_.unary_status = ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 250);
  const absl::Status status = head_->Commit(0, 0).Get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "scripted");
  EXPECT_EQ(ErrorReason(status), "QUEUE_FULL");
  EXPECT_EQ(ErrorMetadata(status)["field"], "value");
  EXPECT_EQ(RetryDelay(status), milliseconds(250));
  server_.unary_status = grpc::Status(grpc::StatusCode::INTERNAL, "no details", "\xff garbage");
  const absl::Status plain = head_->Commit(0, 0).Get().status();
  EXPECT_EQ(ErrorReason(plain), "");
  EXPECT_TRUE(ErrorMetadata(plain).empty());
  EXPECT_EQ(RetryDelay(plain), std::nullopt);
}

TEST_F(ClientProtocol, NonsenseIsAnErrorAndNeverWrittenOutOfBounds) {
  v1::ComputeLossResponse short_data = GradRows(0, 2);
  short_data.mutable_chunk()->mutable_data()->pop_back();
  v1::ComputeLossResponse wrong_role = GradRows(0, 2);
  wrong_role.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
  v1::ComputeLossResponse huge = GradRows(0, 2);
  huge.mutable_chunk()->set_row_count(int64_t{1} << 60);
  v1::ComputeLossResponse bad_output = Summary();
  bad_output.mutable_summary()->mutable_terms(0)->mutable_token_loss()->set_data("123");
  v1::ComputeLossResponse no_terms;
  no_terms.mutable_summary();
  for (const std::vector<v1::ComputeLossResponse>& responses :
       std::vector<std::vector<v1::ComputeLossResponse>>{{},                           // nothing
                                                         {GradRows(0, 2)},             // no summary
                                                         {Summary()},                  // no gradient
                                                         {GradRows(0, 1), Summary()},  // half a gradient
                                                         {GradRows(1, 1), Summary()},  // not from the beginning
                                                         {GradRows(0, 3), Summary()},  // too many rows
                                                         {GradRows(0, 2), GradRows(0, 1), Summary()},
                                                         {short_data, Summary()},
                                                         {wrong_role, Summary()},
                                                         {huge, Summary()},
                                                         {GradRows(0, 2), Summary(), Summary()},
                                                         {GradRows(0, 2), bad_output},
                                                         {GradRows(0, 2), no_terms},
                                                         {v1::ComputeLossResponse(), Summary()}}) {
    AnswerWith(responses);
    const absl::Status status = Submit(rows_).Get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(ErrorReason(status), "INTERNAL");
  }
}

TEST_F(ClientProtocol, ServerThatRefusesWithoutReadingEndsALongUpload) {
  server_.compute_loss = [](grpc::ServerContext*, ScriptedServer::LossStream*) {
    return ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "STEP_SEALED");
  };
  Client client = Value(Client::Connect(server_.target()));
  head_.emplace(Value(client.OpenHead("h")));
  const std::vector<float> hidden(8 << 20, 0.5F);  // 32 MiB
  EXPECT_EQ(ErrorReason(Submit(hidden).Get().status()), "STEP_SEALED");
}

TEST_F(ClientProtocol, UploadResumesUnderTheSameId) {
  const std::vector<float> weight = RandomFloats(3, 32, 1.0F);
  std::string upload_id;
  std::string received;
  server_.upload_weights = [&](ScriptedServer::UploadStream* stream) {
    v1::UploadWeightsRequest request;
    if (!stream->Read(&request) || !request.has_header()) return grpc::Status(grpc::StatusCode::INTERNAL, "no header");
    EXPECT_TRUE(upload_id.empty() || request.header().upload_id() == upload_id);
    upload_id = request.header().upload_id();
    EXPECT_EQ(request.header().total_bytes(), 128);
    EXPECT_EQ(request.header().checksum().size(), 16u);
    v1::UploadWeightsResponse response;
    response.set_resume_offset_bytes(static_cast<int64_t>(received.size()));
    stream->Write(response);
    const bool break_off = received.size() < 96;  // twice: at 48 and at 96 bytes
    const size_t stop = received.size() + 48;
    while (stream->Read(&request)) {
      EXPECT_EQ(request.chunk().offset_bytes(), static_cast<int64_t>(received.size()));
      received += request.chunk().data();
      if (break_off && received.size() >= stop) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
    }
    response.mutable_head()->set_open_step(1);
    stream->Write(response);
    return grpc::Status::OK;
  };
  // Weights that close a step are repeated even when their last byte may have been on its way.
  EXPECT_TRUE(head_->ReplaceWeights(0, TensorView::Float32(weight)).ok());
  EXPECT_EQ(server_.calls, 3);
  EXPECT_EQ(received, std::string(reinterpret_cast<const char*>(weight.data()), 128));
}

TEST_F(ClientProtocol, UploadThatIsToResumeBeyondItsEndFails) {
  const std::vector<float> weight(32);
  server_.upload_weights = [](ScriptedServer::UploadStream* stream) {
    v1::UploadWeightsResponse response;
    response.set_resume_offset_bytes(1000);
    stream->Write(response);
    v1::UploadWeightsRequest request;
    while (stream->Read(&request)) {
    }
    return grpc::Status::OK;
  };
  EXPECT_EQ(head_->UploadWeights(HeadTensor::kWeight, TensorView::Float32(weight)).status().code(), absl::StatusCode::kInternal);
}

TEST_F(ClientProtocol, AllPagesOfHeadsAreListed) {
  server_.list_heads = [](const v1::ListHeadsRequest& request, v1::ListHeadsResponse* response) {
    response->add_heads()->set_name("page" + request.page_token());
    if (request.page_token() != "2") response->set_next_page_token(request.page_token().empty() ? "1" : "2");
    return grpc::Status::OK;
  };
  const std::vector<HeadInfo> heads = Value(client_->ListHeads());
  ASSERT_EQ(heads.size(), 3u);
  EXPECT_EQ(heads[2].name, "page2");
}

TEST_F(ClientProtocol, PagesWithoutEndEndAtTheDeadline) {
  // So long only that a client which goes on and on ends, too.
  const auto end = steady_clock::now() + seconds(5);
  server_.list_heads = [end](const v1::ListHeadsRequest&, v1::ListHeadsResponse* response) {
    if (steady_clock::now() < end) response->set_next_page_token("more");
    return grpc::Status::OK;
  };
  EXPECT_EQ(ErrorReason(client_->ListHeads({.timeout = milliseconds(200)}).status()), "DEADLINE_EXCEEDED");
}

TEST_F(ClientProtocol, HeadOfImpossibleSizesIsAnError) {
  // The server's heads have eight rows: of the last two the bytes, in float32, or the elements are more than can be counted.
  for (const int64_t hidden_size : {int64_t{0}, int64_t{-4}, int64_t{1} << 58, int64_t{1} << 60}) {
    SCOPED_TRACE(hidden_size);
    server_.WithState([hidden_size](ScriptedServer::State& state) { state.hidden_size = hidden_size; });
    EXPECT_EQ(ErrorReason(client_->OpenHead("h").status()), "INTERNAL");
    EXPECT_EQ(ErrorReason(client_->CreateHead("h", HeadSpec()).status()), "INTERNAL");
    EXPECT_EQ(ErrorReason(client_->AttachHead("h", HeadSpec()).status()), "INTERNAL");
  }
}

// ---- what the core does beside its typed faces: contributions that a caller has abandoned --------------------------------

// A core, and a server that notes what it is asked to do.
class ClientCore : public testing::Test {
 protected:
  ClientCore() {
    server_.discard = [this](const v1::DiscardMicroBatchRequest& request) {
      std::lock_guard<std::mutex> lock(mutex_);
      noted_.push_back("discard " + std::to_string(request.micro_batch()));
      return discard_status_;
    };
    server_.seal = [this](const v1::SealStepRequest&) {
      std::lock_guard<std::mutex> lock(mutex_);
      noted_.push_back("seal");
      return grpc::Status::OK;
    };
    core_ = *Core::Open(server_.target(), Quick(2));
  }

  static v1::HeadStep Step() {
    v1::HeadStep step;
    step.set_head("tenants/default/heads/h");
    step.set_head_epoch(std::string(16, 'e'));
    step.set_step(0);
    return step;
  }
  static v1::DiscardMicroBatchRequest Discard(int64_t micro_batch) {
    v1::DiscardMicroBatchRequest request;
    *request.add_heads() = Step();
    request.set_micro_batch(micro_batch);
    return request;
  }
  absl::Status Seal() {
    auto request = std::make_unique<v1::SealStepRequest>();
    *request->mutable_head() = Step();
    const auto state = std::make_shared<FutureState<Answer>>();
    const auto call = core_->NewCall(core_->MakeRequest(std::move(request), {}, DeadlineIn(seconds(20))),
                                     [state](absl::StatusOr<Answer> answer) { state->Set(std::move(answer)); });
    call->Start();
    return state->Take().status();
  }
  void AnswerDiscards(const grpc::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    discard_status_ = status;
  }
  std::vector<std::string> noted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return noted_;
  }

  ScriptedServer server_;
  std::mutex mutex_;
  grpc::Status discard_status_;
  std::vector<std::string> noted_;
  std::shared_ptr<Core> core_;
};

TEST_F(ClientCore, ASealWaitsUntilWhatWasAbandonedIsDiscarded) {
  core_->abandoned().Add(Discard(3));
  core_->abandoned().Add(Discard(4));
  EXPECT_TRUE(Seal().ok());
  EXPECT_THAT(noted(), testing::ElementsAre("discard 3", "discard 4", "seal"));
}

TEST_F(ClientCore, WhatCouldNotBeDiscardedIsTriedOnceMoreByWhoWaitsForIt) {
  AnswerDiscards(ErrorWithReason(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"));
  core_->abandoned().Add(Discard(3));
  while (noted().empty() || core_->abandoned().Mark(Discard(3)) == 1) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_TRUE(Seal().ok());
  EXPECT_EQ(noted().back(), "seal");
  EXPECT_GE(noted().size(), 3U);
  // What is gone by itself is not tried again.
  AnswerDiscards(ErrorWithReason(grpc::StatusCode::FAILED_PRECONDITION, "STEP_MISMATCH"));
  EXPECT_TRUE(Seal().ok());
  EXPECT_EQ(core_->abandoned().Mark(Discard(3)), -1);
}

}  // namespace
}  // namespace headwater::e2e
