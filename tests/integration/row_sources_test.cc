// Rows that do not come as chunks of the call: in a region of the client's memory, or from a teacher's process. Whatever the way,
// the micro-batch is the same: loss, gradients, digest.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"
#include "tests/unit/transport/descriptor_peer.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::testing {
namespace {

constexpr int64_t kTeacherColumns = 4;

std::string TeacherRows(int64_t row_count) { return Rows(row_count, 9, kTeacherColumns); }

// A file under /dev/shm that is registered by name.
class NamedMemory {
 public:
  explicit NamedMemory(int64_t bytes)
      : name_(absl::StrCat("headwater-test-", getpid(), "-", ++count_)),
        bytes_(bytes),
        file_(shm_open(("/" + name_).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600)) {
    EXPECT_GE(file_, 0);
    EXPECT_EQ(ftruncate(file_, bytes), 0);
  }
  ~NamedMemory() {
    close(file_);
    shm_unlink(("/" + name_).c_str());
  }
  void Put(const std::string& data, int64_t offset) {
    EXPECT_EQ(pwrite(file_, data.data(), data.size(), offset), static_cast<ssize_t>(data.size()));
  }
  std::string Get(int64_t offset, int64_t bytes) {
    std::string data(static_cast<size_t>(bytes), '\0');
    EXPECT_EQ(pread(file_, data.data(), data.size(), offset), bytes);
    return data;
  }
  void Truncate(int64_t bytes) { EXPECT_EQ(ftruncate(file_, bytes), 0); }
  std::string Register(WireServer& server, const std::string& session) {
    v1::RegisterSharedMemoryRequest request;
    request.set_session_id(session);
    request.set_shared_memory_name(name_);
    request.set_size_bytes(bytes_);
    return server.Must(&Sessions::RegisterSharedMemory, request).region_id();
  }

 private:
  static inline std::atomic<int> count_{0};
  const std::string name_;
  const int64_t bytes_;
  const int file_;
};

class RowSources : public ::testing::Test {
 protected:
  void Start(ServerSetup setup = {}) {
    setup.options.named_regions = true;
    server_ = std::make_unique<WireServer>(setup);
    session_ = server_->OpenSession(60000);
    teacher_ = server_->MakeHead("teacher", FrozenSpec(13, kTeacherColumns), 7);
  }
  static v1::MicroBatchHeader Header(const TestHead& head, int64_t micro_batch, int64_t row_count) {
    return CrossEntropyHeader(head, 0, micro_batch, std::vector<int32_t>(static_cast<size_t>(row_count), 1));
  }
  static void Place(v1::SharedRows* rows, const std::string& region, int64_t offset = 0) {
    rows->set_region_id(region);
    rows->set_offset_bytes(offset);
  }
  v1::MicroBatchHeader Jsd(const TestHead& head, int64_t micro_batch, int64_t row_count) {
    v1::MicroBatchHeader header = Header(head, micro_batch, row_count);
    header.mutable_terms(0)->clear_targets();
    SetTeacher(header.mutable_terms(0), teacher_.name());
    return header;
  }
  static v1::StreamTeacherHeader JoinHeader(const std::string& key, int64_t total, const std::vector<int32_t>& indices = {}) {
    v1::StreamTeacherHeader header = TeacherHeader(key, total, kTeacherColumns);
    if (!indices.empty()) *header.mutable_row_indices() = TensorOf(indices);
    return header;
  }
  static v1::RowChunk TeacherChunk(const std::string& rows, int64_t row_start, int64_t row_end) {
    v1::RowChunk chunk = ChunkOf(rows, kTeacherColumns * 4, row_start, row_end - row_start);
    chunk.set_role(v1::CHUNK_ROLE_TEACHER_HIDDEN);
    return chunk;
  }
  grpc::Status StreamChunks(const v1::StreamTeacherHeader& header, const std::vector<v1::RowChunk>& chunks) {
    TeacherStream stream(server_->loss(), header);
    for (const v1::RowChunk& chunk : chunks) stream.Send(chunk);
    return stream.End();
  }
  // In two chunks, the second one first.
  grpc::Status StreamTeacher(const v1::StreamTeacherHeader& header, const std::string& rows) {
    const int64_t count = static_cast<int64_t>(rows.size()) / (kTeacherColumns * 4);
    return StreamChunks(header, {TeacherChunk(rows, count / 2, count), TeacherChunk(rows, 0, count / 2)});
  }
  void ExpectSame(const LossReply& reply, const LossReply& expected, const std::string& grad_hidden) {
    ASSERT_EQ(ReasonOf(reply.status), "OK") << reply.status.error_message();
    ASSERT_EQ(ReasonOf(expected.status), "OK") << expected.status.error_message();
    EXPECT_EQ(reply.summary.terms(0).sums().SerializeAsString(), expected.summary.terms(0).sums().SerializeAsString());
    EXPECT_TRUE(grad_hidden == expected.grad_hidden);
  }

  std::unique_ptr<WireServer> server_;
  std::string session_;
  TestHead teacher_;
};

TEST_F(RowSources, RowsAndGradientInARegionAreTheSameMicroBatch) {
  Start();
  for (const int64_t rows : {int64_t{3}, int64_t{3000}}) {
    SCOPED_TRACE(rows);
    const TestHead head = server_->MakeHead(absl::StrCat("h", rows), SmallSpec());
    const int64_t bytes = rows * kColumns * 4;
    NamedMemory memory(2 * bytes + 128);
    memory.Put(Rows(rows), 64);
    const std::string region = memory.Register(*server_, session_);
    v1::MicroBatchHeader header = Header(head, 0, rows);
    header.set_session_id(session_);
    Place(header.mutable_hidden_rows(), region, 64);
    Place(header.mutable_grad_hidden_rows(), region, 64 + bytes);
    const LossReply shared = server_->MustCompute(header, "");
    EXPECT_EQ(shared.summary.transport(), "shared_memory");
    EXPECT_TRUE(shared.grad_hidden.empty());
    const std::string gradient = server_->Gradient(head);
    // By gRPC it is a repeat: the digest is the same.
    const LossReply repeat = server_->Compute(Header(head, 0, rows), Rows(rows), {.chunk_rows = 1000});
    EXPECT_TRUE(repeat.summary.replayed());
    EXPECT_EQ(repeat.summary.digest(), shared.summary.digest());
    ExpectSame(shared, repeat, memory.Get(64 + bytes, bytes));
    EXPECT_TRUE(server_->Gradient(head) == gradient);
    // And only the gradient, or only the rows, may lie there.
    header.clear_grad_hidden_rows();
    const LossReply half = server_->Compute(header, "");
    ExpectSame(half, repeat, half.grad_hidden);
    EXPECT_TRUE(half.summary.replayed());
  }
  EXPECT_TRUE(server_->AwaitNothingInFlight());
}

TEST_F(RowSources, ATeachersRowsMayLieInARegionToo) {
  Start();
  const TestHead head = server_->MakeHead("h", SmallSpec());
  constexpr int64_t kRows = 2000;
  NamedMemory memory(kRows * kTeacherColumns * 4);
  memory.Put(TeacherRows(kRows), 0);
  v1::MicroBatchHeader header = Jsd(head, 0, kRows);
  header.set_session_id(session_);
  Place(header.mutable_terms(0)->mutable_teacher_hidden()->mutable_rows(), memory.Register(*server_, session_));
  const LossReply mixed = server_->MustCompute(header, Rows(kRows), {.chunk_rows = 500});
  EXPECT_EQ(mixed.summary.transport(), "grpc");  // the hidden states' path
  const SendOptions send = {.chunk_rows = 500, .teacher_rows = {{0, TeacherRows(kRows)}}};
  const LossReply plain = server_->Compute(Jsd(head, 0, kRows), Rows(kRows), send);
  EXPECT_TRUE(plain.summary.replayed());
  EXPECT_EQ(plain.summary.digest(), mixed.summary.digest());
  ExpectSame(mixed, plain, mixed.grad_hidden);
  // Chunks of what lies elsewhere are refused.
  header.set_micro_batch(1);
  EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(kRows), send).status), "PROTOCOL_VIOLATION");
}

TEST_F(RowSources, WhatIsHeldOutlivesTheRegion) {
  Start();
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const TestHead witness = server_->MakeHead("witness", SmallSpec());
  constexpr int64_t kRows = 3;
  server_->MustCompute(Header(witness, 0, kRows), Rows(kRows));
  NamedMemory memory(kRows * kColumns * 4);
  memory.Put(Rows(kRows), 0);
  v1::MicroBatchHeader header = Header(head, 0, kRows);
  header.set_session_id(session_);
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  header.set_late_token_factors(true);
  Place(header.mutable_hidden_rows(), memory.Register(*server_, session_));
  const LossReply held = server_->MustCompute(header, "");
  EXPECT_EQ(held.summary.form(), v1::CONTRIBUTION_FORM_HELD);
  memory.Put(std::string(kRows * kColumns * 4, '\1'), 0);  // the client's again
  EXPECT_EQ(ReasonOf(server_->Commit(head, {.id = 0, .session = session_})), "OK");
  EXPECT_TRUE(server_->Gradient(head) == server_->Gradient(witness));
}

// A client's memory, passed by its descriptor. It stays mapped for the call whose client dies, and leaves nothing behind.
TEST_F(RowSources, APassedRegionGoesWithItsSessionAndItsCalls) {
  const TemporaryDirectory folder;
  ServerSetup setup;
  setup.options.descriptor_socket = folder.path() + "/memory.sock";
  setup.options.limits.max_in_flight_bytes = 3 * kColumns * 4 - 1;
  Start(setup);
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const int before = OpenDescriptors();
  const transport::FileDescriptor memory(MakeMemory(4096));
  v1::RegisterSharedMemoryRequest request;
  request.set_session_id(session_);
  request.set_size_bytes(4096);
  {
    const transport::FileDescriptor connection = ConnectTo(setup.options.descriptor_socket);
    ASSERT_TRUE(SendDescriptors(connection.get(), DescriptorRequest(4096), {memory.get()}));
    const DescriptorAnswer answer = ReadDescriptorAnswer(connection.get());
    EXPECT_EQ(answer.code, 0u) << answer.message;
    request.set_descriptor_token(answer.token);
  }
  const std::string region = server_->Must(&Sessions::RegisterSharedMemory, request).region_id();
  EXPECT_EQ(server_->Metric("headwater_region_bytes{kind=\"shared\"}"), "4096");
  v1::MicroBatchHeader header = Header(head, 0, 3);
  header.set_session_id(session_);
  Place(header.mutable_hidden_rows(), region);
  Place(header.mutable_grad_hidden_rows(), region, 64);
  // Rows in a region take none of the server's memory, but the copies of those that will be held do.
  v1::MicroBatchHeader held = header;
  held.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  held.set_late_token_factors(true);
  ExpectError(server_->Compute(held, "").status, "LIMIT_EXCEEDED", {{"limit", "max_in_flight_bytes"}, {"actual", "60"}});

  server_->gate().Close();
  std::thread call([&] { server_->Compute(header, ""); });
  server_->gate().AwaitWaiting();
  std::thread close([&] { EXPECT_EQ(ReasonOf(server_->CloseSession(session_)), "OK"); });  // waits for the head, which computes
  v1::KeepAliveRequest alive;
  alive.set_session_id(session_);
  EXPECT_TRUE(Await([&] { return ReasonOf(server_->Call(&Sessions::KeepAlive, alive)) == "SESSION_NOT_FOUND"; }));
  EXPECT_EQ(server_->Metric("headwater_regions{kind=\"shared\"}"), "1");  // in use
  server_->gate().Open();
  call.join();
  close.join();
  EXPECT_TRUE(server_->AwaitMetric("headwater_regions{kind=\"shared\"}", 0));
  EXPECT_TRUE(server_->AwaitNothingInFlight());
  EXPECT_TRUE(Await([&] { return OpenDescriptors() <= before + 1; }));  // the test's own
}

// region_registry_test.cc has ranges and truncated files.
TEST_F(RowSources, RangesThatCannotBeUsedAreRefused) {
  Start();
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const std::string before = server_->Snapshot(head);
  NamedMemory memory(128);
  memory.Put(Rows(3), 0);
  const std::string region = memory.Register(*server_, session_);
  const auto refusal = [&](const std::string& session, int64_t offset, int64_t grad_offset) {
    v1::MicroBatchHeader header = Header(head, 0, 3);
    header.set_session_id(session);
    Place(header.mutable_hidden_rows(), region, offset);
    Place(header.mutable_grad_hidden_rows(), region, grad_offset);
    const WireError error = DecodeError(server_->Compute(header, "").status);
    return error.reason + " " + error.at("field");
  };
  EXPECT_EQ(refusal(server_->OpenSession(60000), 0, 64), "REGION_NOT_FOUND ");  // another session's
  EXPECT_EQ(refusal(session_, INT64_MAX - 3, 64), "INVALID_FIELD header.hidden_rows.offset_bytes");
  EXPECT_EQ(refusal(session_, 0, 56), "INVALID_FIELD header.grad_hidden_rows");               // over the rows
  EXPECT_EQ(refusal(session_, 0, 72), "INVALID_FIELD header.grad_hidden_rows.offset_bytes");  // beyond the end
  memory.Truncate(10);
  EXPECT_THAT(refusal(session_, 0, 64), ::testing::StartsWith("INVALID_FIELD"));
  EXPECT_TRUE(server_->AwaitNothingInFlight());
  EXPECT_TRUE(server_->Snapshot(head) == before);
}

TEST_F(RowSources, ATeachersRowsGoWithTheirSession) {
  Start();
  v1::StreamTeacherHeader header = JoinHeader("key", 8, {0, 1, 2});
  header.set_session_id(session_);
  ASSERT_EQ(ReasonOf(StreamTeacher(header, TeacherRows(3))), "OK");
  EXPECT_NE(server_->Metric("headwater_join_bytes"), "0");
  ASSERT_EQ(ReasonOf(server_->CloseSession(session_)), "OK");
  EXPECT_EQ(server_->Metric("headwater_join_bytes"), "0");
  EXPECT_EQ(ReasonOf(StreamTeacher(header, TeacherRows(3))), "SESSION_NOT_FOUND");
}

TEST_F(RowSources, ATeachersRowsThatDoNotFitAreRefused) {
  Start(WithLimit(&service::Limits::max_join_bytes, 16 * (kTeacherColumns * 4 + 128)));
  const std::string rows = TeacherRows(2);
  ASSERT_EQ(ReasonOf(StreamTeacher(JoinHeader("key", 8, {0, 1}), rows)), "OK");  // of 16 rows 14 may still come
  EXPECT_EQ(ExpectError(StreamTeacher(JoinHeader("large", 15), ""), "IN_FLIGHT_BYTES_EXCEEDED").retry_ms, 50);
  const v1::StreamTeacherHeader header = JoinHeader("key", 8, {2, 3});
  v1::RowChunk chunk = TeacherChunk(rows, 0, 2);
  chunk.set_role(v1::CHUNK_ROLE_HIDDEN);
  EXPECT_EQ(ReasonOf(StreamChunks(header, {chunk})), "INVALID_FIELD");
  chunk = TeacherChunk(rows, 0, 2);
  chunk.set_term_index(1);
  EXPECT_EQ(ReasonOf(StreamChunks(header, {chunk})), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(StreamTeacher(header, rows)), "OK");  // none of that left anything
}

// Twice as many streams as threads.
TEST_F(RowSources, TeachersThatWaitHoldNoThread) {
  constexpr int kRowBytes = kTeacherColumns * 4 + 128;
  ServerSetup setup = WithLimit(&service::Limits::max_join_bytes, 16 * kRowBytes);
  setup.options.max_threads = 8;
  Start(setup);
  std::deque<TeacherStream> teachers;
  for (int i = 0; i < 16; ++i) teachers.emplace_back(server_->loss(), JoinHeader(absl::StrCat("key", i), 1));
  ASSERT_TRUE(server_->AwaitMetric("headwater_join_bytes", 16 * kRowBytes));
  // A cancelled stream withdraws its rows.
  for (size_t i = 0; i < 8; ++i) {
    teachers[i].context.TryCancel();
    EXPECT_EQ(teachers[i].writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(server_->AwaitMetric("headwater_join_bytes", 8 * kRowBytes));
  EXPECT_TRUE(server_->AwaitMetric("headwater_requests_total{code=\"CANCELLED\",method=\"StreamTeacher\"}", 8));
  for (size_t i = 8; i < teachers.size(); ++i) {
    EXPECT_TRUE(teachers[i].Send(TeacherChunk(TeacherRows(1), 0, 1)));
    EXPECT_EQ(ReasonOf(teachers[i].End()), "OK");
    EXPECT_EQ(teachers[i].response.row_count(), 1);
  }
}

}  // namespace
}  // namespace headwater::testing
