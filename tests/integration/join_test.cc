// Teachers of another process: StreamTeacher and ComputeLoss meet by join_key, in either order, through the wire.
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/transport/pinned_pool.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

constexpr int64_t kWidth = 5, kTeacherWidth = 4;
constexpr char kNothingKept[] = "headwater_join_bytes 0";

class Join : public ::testing::Test {
 protected:
  static ServerSetup MakeSetup() {
    ServerSetup setup;
    setup.options.max_threads = 8;
    setup.options.limits.max_join_bytes = 16 * (kTeacherWidth * 4 + 128);
    setup.options.limits.max_join_wait = absl::Seconds(20);
    return setup;
  }
  static v1::HeadSpec Frozen() { return FrozenSpec(13, kTeacherWidth); }
  // JSD of three rows against the joined teacher's rows `indices`.
  v1::MicroBatchHeader Header(const TestHead& student, int64_t micro_batch, const std::vector<int32_t>& indices,
                              const std::string& key = "key", int64_t total = 8) {
    v1::MicroBatchHeader header = Direct(student, micro_batch);
    v1::JoinedTeacher* const joined = header.mutable_terms(0)->mutable_joined_teacher();
    joined->set_head(teacher_.name());
    joined->set_join_key(key);
    joined->set_total_row_count(total);
    joined->set_data_type(v1::DATA_TYPE_FLOAT32);
    if (!indices.empty()) *joined->mutable_row_indices() = Int32Tensor(indices);
    return header;
  }
  // The same with the teacher's rows in the stream.
  v1::MicroBatchHeader Direct(const TestHead& student, int64_t micro_batch) {
    v1::MicroBatchHeader header = CrossEntropyHeader(student, 0, micro_batch, {1, 2, 3});
    v1::LossTerm* const term = header.mutable_terms(0);
    term->mutable_jensen_shannon()->set_beta(0.5);
    term->mutable_teacher_hidden()->set_head(teacher_.name());
    term->mutable_teacher_hidden()->set_data_type(v1::DATA_TYPE_FLOAT32);
    return header;
  }
  static std::string HiddenRows(int64_t micro_batch) {
    return Bytes(Random(3 * kWidth, 100 + static_cast<uint32_t>(micro_batch), 1));
  }
  // Row `index` of the set, as the teacher of `version` computed it.
  static std::string TeacherRow(int32_t index, uint32_t version = 0) {
    return Bytes(Random(kTeacherWidth, 1000 * version + static_cast<uint32_t>(index), 2));
  }
  static std::string TeacherRows(const std::vector<int32_t>& indices, uint32_t version = 0) {
    std::string rows;
    for (const int32_t index : indices) rows += TeacherRow(index, version);
    return rows;
  }
  static v1::StreamTeacherHeader StreamHeader(const std::vector<int32_t>& indices, const std::string& key = "key",
                                              int64_t total = 8) {
    v1::StreamTeacherHeader header;
    header.set_tenant("tenants/default");
    header.set_join_key(key);
    header.set_total_row_count(total);
    header.set_data_type(v1::DATA_TYPE_FLOAT32);
    header.set_hidden_size(kTeacherWidth);
    if (!indices.empty()) *header.mutable_row_indices() = Int32Tensor(indices);
    return header;
  }
  // Streams rows, two in a chunk, the last chunk first.
  grpc::Status Stream(const v1::StreamTeacherHeader& header, const std::string& rows,
                      v1::StreamTeacherResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::StreamTeacherResponse ignored;
    auto writer = server_.loss().StreamTeacher(&context, response != nullptr ? response : &ignored);
    v1::StreamTeacherRequest request;
    *request.mutable_header() = header;
    bool open = writer->Write(request);
    constexpr int64_t kRowBytes = kTeacherWidth * 4;
    const int64_t count = static_cast<int64_t>(rows.size()) / kRowBytes;
    for (int64_t start = (count - 1) / 2 * 2; open && start >= 0; start -= 2) {
      open = writer->Write(Chunk(start, rows.substr(static_cast<size_t>(start * kRowBytes), 2 * kRowBytes)));
    }
    writer->WritesDone();
    return writer->Finish();
  }
  static v1::StreamTeacherRequest Chunk(int64_t row_start, const std::string& rows) {
    v1::StreamTeacherRequest request;
    v1::RowChunk* const chunk = request.mutable_chunk();
    chunk->set_role(v1::CHUNK_ROLE_TEACHER_HIDDEN);
    chunk->set_row_start(row_start);
    chunk->set_row_count(static_cast<int64_t>(rows.size()) / (kTeacherWidth * 4));
    chunk->set_data(rows);
    return request;
  }
  grpc::Status Stream(const std::vector<int32_t>& indices, uint32_t version = 0) {
    return Stream(StreamHeader(indices), TeacherRows(indices, version));
  }
  LossReply ComputeJoined(const TestHead& student, int64_t micro_batch, const std::vector<int32_t>& indices,
                          const SendOptions& send = {}) {
    return server_.Compute(Header(student, micro_batch, indices), HiddenRows(micro_batch), "", send);
  }
  // Until so many micro-batches that join have claimed their rows; then they get memory for hidden rows, the teacher's and a
  // gradient.
  void AwaitClaims(int64_t count) {
    const std::string name = "headwater_row_memory_bytes{state=\"used\"}";
    const int64_t bytes = count * 3 * transport::PinnedPool::kLeastBytes;
    EXPECT_TRUE(Await([&] { return server_.MetricLine(name) == absl::StrCat(name, " ", bytes); })) << server_.MetricLine(name);
  }
  void ExpectSame(const LossReply& joined, const LossReply& direct) {
    ASSERT_EQ(ReasonOf(joined.status), "OK") << joined.status.error_message();
    ASSERT_EQ(ReasonOf(direct.status), "OK") << direct.status.error_message();
    EXPECT_EQ(joined.grad_hidden, direct.grad_hidden);
    EXPECT_EQ(joined.summary.terms(0).sums().SerializeAsString(), direct.summary.terms(0).sums().SerializeAsString());
  }

  WireServer server_{MakeSetup()};
  TestHead teacher_ = server_.MakeHead("teacher", Frozen(), 7);
  TestHead student_ = server_.MakeHead("student", SmallSpec(), 3);
  TestHead other_ = server_.MakeHead("other", SmallSpec(), 3);  // the same weights
};

TEST_F(Join, SeveralTrainersShareASet) {
  std::vector<LossReply> replies(4);
  std::vector<std::thread> threads;
  const std::vector<std::vector<int32_t>> parts = {{0, 1, 2}, {5, 4, 3}};
  for (size_t i = 0; i < 4; ++i) {
    // Two students, each with two micro-batches; the two of them use the same rows.
    threads.emplace_back(
        [&, i] { replies[i] = ComputeJoined(i < 2 ? student_ : other_, static_cast<int64_t>(i % 2), parts[i % 2]); });
  }
  AwaitClaims(4);
  EXPECT_EQ(ReasonOf(Stream({1, 3, 5})), "OK");
  EXPECT_EQ(ReasonOf(Stream({0, 2, 4, 6, 7})), "OK");
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < 2; ++i) ExpectSame(replies[i], replies[i + 2]);
  EXPECT_EQ(server_.Gradient(student_), server_.Gradient(other_));
}

TEST_F(Join, RowsGoWithTheirSession) {
  const std::string session = server_.OpenSession(600000);
  v1::StreamTeacherHeader header = StreamHeader({0, 1, 2});
  header.set_session_id(session);
  ASSERT_EQ(ReasonOf(Stream(header, TeacherRows({0, 1, 2}))), "OK");
  EXPECT_NE(server_.MetricLine("headwater_join_bytes"), kNothingKept);
  v1::CloseSessionRequest close;
  close.set_session_id(session);
  ASSERT_EQ(ReasonOf(server_.Call(&Sessions::CloseSession, close)), "OK");
  EXPECT_EQ(server_.MetricLine("headwater_join_bytes"), kNothingKept);
  EXPECT_EQ(ReasonOf(Stream(header, TeacherRows({0, 1, 2}))), "SESSION_NOT_FOUND");
}

TEST_F(Join, WhatDoesNotFitIsRefused) {
  ASSERT_EQ(ReasonOf(Stream({0, 1})), "OK");
  WireError error = DecodeError(Stream({2, 1}));
  EXPECT_EQ(error.reason, "CHUNK_OUT_OF_RANGE");
  EXPECT_EQ(error.at("row"), "1");
  error = DecodeError(Stream(StreamHeader({2}, "key", 9), TeacherRows({2})));
  EXPECT_EQ(error.reason, "JOIN_INCOMPLETE");
  EXPECT_EQ(error.at("field"), "total_row_count");
  error = DecodeError(server_.Compute(Header(student_, 0, {0, 1, 2}, "key", 9), HiddenRows(0)).status);
  EXPECT_EQ(error.reason, "JOIN_INCOMPLETE");
  error = DecodeError(Stream(StreamHeader({}, "large", 15), ""));
  EXPECT_EQ(error.reason, "IN_FLIGHT_BYTES_EXCEEDED");
  EXPECT_EQ(error.at("limit"), "max_join_bytes");
  EXPECT_EQ(error.retry_ms, 50);
  // More than there will ever be room for: not to be tried again.
  error = DecodeError(Stream(StreamHeader({}, "larger", 17), ""));
  EXPECT_EQ(error.code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(error.at("field"), "header.total_row_count");
  EXPECT_EQ(error.at("limit"), "max_join_bytes");
  EXPECT_EQ(error.at("maximum"), absl::StrCat(16 * (kTeacherWidth * 4 + 128)));
  EXPECT_EQ(error.at("actual"), absl::StrCat(17 * (kTeacherWidth * 4 + 128)));
  EXPECT_FALSE(error.retry_ms.has_value());
  EXPECT_EQ(ReasonOf(Stream(StreamHeader({2, 3}), TeacherRows({2}))), "PROTOCOL_VIOLATION");
  // Chunks.
  const auto with_chunk = [&](const v1::StreamTeacherRequest& chunk) {
    grpc::ClientContext context;
    v1::StreamTeacherResponse response;
    auto writer = server_.loss().StreamTeacher(&context, &response);
    v1::StreamTeacherRequest request;
    *request.mutable_header() = StreamHeader({2, 3});
    writer->Write(request);
    writer->Write(chunk);
    writer->WritesDone();
    return ReasonOf(writer->Finish());
  };
  EXPECT_EQ(with_chunk(Chunk(1, TeacherRows({2, 3}))), "CHUNK_OUT_OF_RANGE");
  v1::StreamTeacherRequest chunk = Chunk(0, TeacherRows({2, 3}));
  chunk.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
  EXPECT_EQ(with_chunk(chunk), "INVALID_FIELD");
  chunk = Chunk(0, TeacherRows({2, 3}));
  chunk.mutable_chunk()->set_term_index(1);
  EXPECT_EQ(with_chunk(chunk), "INVALID_FIELD");
  chunk.mutable_chunk()->set_term_index(0);
  chunk.mutable_chunk()->mutable_data()->pop_back();
  EXPECT_EQ(with_chunk(chunk), "DATA_LENGTH_MISMATCH");
  // None of that left anything.
  EXPECT_EQ(ReasonOf(Stream({2, 3})), "OK");
}

// Twice as many streams as threads.
TEST_F(Join, TeachersThatWaitHoldNoThread) {
  struct Teacher {
    grpc::ClientContext context;
    v1::StreamTeacherResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::StreamTeacherRequest>> writer;
  };
  constexpr int kRowBytes = kTeacherWidth * 4 + 128;
  std::deque<Teacher> teachers(16);
  for (size_t i = 0; i < teachers.size(); ++i) {
    Teacher& teacher = teachers[i];
    teacher.writer = server_.loss().StreamTeacher(&teacher.context, &teacher.response);
    v1::StreamTeacherRequest request;
    *request.mutable_header() = StreamHeader({}, absl::StrCat("key", i), 1);
    ASSERT_TRUE(teacher.writer->Write(request));
  }
  ASSERT_TRUE(server_.AwaitMetric("headwater_join_bytes", 16 * kRowBytes));
  // A cancelled stream withdraws its rows.
  for (size_t i = 0; i < 8; ++i) {
    teachers[i].context.TryCancel();
    EXPECT_EQ(teachers[i].writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(server_.AwaitMetric("headwater_join_bytes", 8 * kRowBytes));
  EXPECT_TRUE(server_.AwaitMetric("headwater_requests_total{code=\"CANCELLED\",method=\"StreamTeacher\"}", 8));
  for (size_t i = 8; i < teachers.size(); ++i) {
    Teacher& teacher = teachers[i];
    EXPECT_TRUE(teacher.writer->Write(Chunk(0, TeacherRow(0))));
    teacher.writer->WritesDone();
    EXPECT_EQ(ReasonOf(teacher.writer->Finish()), "OK");
    EXPECT_EQ(teacher.response.row_count(), 1);
  }
}

}  // namespace
}  // namespace headwater::testing
