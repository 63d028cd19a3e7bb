// One micro-batch over several streams: rows on any of them in any order, stripes that come early, late, twice or never, that
// break, stop reading or hardly send, and rows that stall.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/support/http2_client.h"
#include "tests/integration/support/open_stream.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kRowBytes = kColumns * 4;

v1::RowChunk Chunk(const std::string& rows, int64_t row_start, int64_t row_count) {
  return ChunkOf(rows, kRowBytes, row_start, row_count);
}

// The bytes of grad_hidden, whichever streams its chunks come on.
std::string GradHidden(int64_t row_count, const std::vector<std::vector<v1::RowChunk>>& streams) {
  std::string bytes(static_cast<size_t>(row_count * kRowBytes), '\0');
  int64_t rows = 0;
  for (const std::vector<v1::RowChunk>& chunks : streams) {
    for (const v1::RowChunk& chunk : chunks) {
      EXPECT_EQ(chunk.role(), v1::CHUNK_ROLE_GRAD_HIDDEN);
      EXPECT_EQ(static_cast<int64_t>(chunk.data().size()), chunk.row_count() * kRowBytes);
      bytes.replace(static_cast<size_t>(chunk.row_start() * kRowBytes), chunk.data().size(), chunk.data());
      rows += chunk.row_count();
    }
  }
  EXPECT_EQ(rows, row_count);
  return bytes;
}

// Both on connections of their own.
struct Primary : OpenStream {
  Primary(const WireServer& server, const v1::MicroBatchHeader& header)
      : OpenStream(*v1::LossService::NewStub(server.NewChannel()), header) {}
};

struct Stripe : RowStream<v1::TransferRowsRequest, v1::TransferRowsResponse> {
  Stripe(const WireServer& server, const std::string& transfer_id, int32_t index) {
    stream = v1::LossService::NewStub(server.NewChannel())->TransferRows(&context);
    v1::TransferRowsRequest request;
    request.mutable_header()->set_transfer_id(transfer_id);
    request.mutable_header()->set_stripe_index(index);
    stream->Write(request);
  }
};

std::string Id(char letter) { return std::string(16, letter); }

v1::MicroBatchHeader Striped(v1::MicroBatchHeader header, const std::string& id, int32_t stripe_count) {
  header.set_transfer_id(id);
  header.set_stripe_count(stripe_count);
  return header;
}

// Bytes of tensors that have come ("in") or been handed to streams ("out").
int64_t TensorBytes(const WireServer& server, const std::string& direction) {
  const std::string bytes = server.Metric(absl::StrCat("headwater_bytes_total{direction=\"", direction, "\",transport=\"grpc\"}"));
  return bytes.empty() ? 0 : std::stoll(bytes);
}

class Stripes : public ::testing::Test {
 protected:
  void Start(const ServerSetup& setup) {
    server_ = std::make_unique<WireServer>(setup);
    head_ = server_->MakeHead("h", SmallSpec());
    before_ = server_->Snapshot(head_);
  }
  v1::MicroBatchHeader Header(int64_t micro_batch, int64_t row_count, const std::string& id, int32_t stripe_count) {
    return Striped(CrossEntropyHeader(head_, 0, micro_batch, std::vector<int32_t>(static_cast<size_t>(row_count), 1)), id,
                   stripe_count);
  }
  // Nothing of the failed attempt is left, and the next one is computed.
  void ExpectUnchangedAndServing(int64_t row_count) {
    EXPECT_TRUE(server_->AwaitNothingInFlight());
    EXPECT_TRUE(server_->Snapshot(head_) == before_);
    v1::MicroBatchHeader header = CrossEntropyHeader(head_, 0, 0, std::vector<int32_t>(static_cast<size_t>(row_count), 1));
    header.set_attempt(1);
    EXPECT_EQ(ReasonOf(server_->Compute(header, Rows(row_count)).status), "OK");
  }

  std::unique_ptr<WireServer> server_;
  TestHead head_;
  std::string before_;
};

TEST_F(Stripes, CarryAnyRowsInEitherOrderOfArrival) {
  Start({});
  constexpr int64_t kRows = 60;
  const std::string rows = Rows(kRows);
  const TestHead witness = server_->MakeHead("witness", SmallSpec());
  const LossReply expected = server_->MustCompute(CrossEntropyHeader(witness, 0, 0, std::vector<int32_t>(kRows, 1)), rows);
  const std::string gradient = server_->Gradient(witness);
  int64_t micro_batch = 0;
  for (const bool primary_first : {true, false}) {
    SCOPED_TRACE(primary_first);
    const std::string id = Id(primary_first ? 'a' : 'b');
    const v1::MicroBatchHeader header = Header(micro_batch++, kRows, id, 3);
    std::unique_ptr<Primary> primary;
    if (primary_first) primary = std::make_unique<Primary>(*server_, header);
    Stripe one(*server_, id, 1);
    Stripe two(*server_, id, 2);
    for (int64_t row = 40; row < kRows; row += 5) one.Send(Chunk(rows, row, 5));
    two.Send(Chunk(rows, 20, 20));
    one.stream->WritesDone();
    if (!primary_first) primary = std::make_unique<Primary>(*server_, header);
    primary->stream->WritesDone();  // it carries nothing up
    two.Send(Chunk(rows, 0, 20));
    two.stream->WritesDone();
    EXPECT_EQ(ReasonOf(primary->End()), "OK");
    EXPECT_EQ(ReasonOf(one.End()), "OK");
    EXPECT_EQ(ReasonOf(two.End()), "OK");
    EXPECT_TRUE(GradHidden(kRows, {primary->grad_hidden, one.grad_hidden, two.grad_hidden}) == expected.grad_hidden);
    const v1::MicroBatchSummary& summary = primary->summary;
    EXPECT_EQ(summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
    EXPECT_EQ(summary.transport(), "grpc");
    EXPECT_EQ(summary.terms(0).sums().SerializeAsString(), expected.summary.terms(0).sums().SerializeAsString());
    // The same micro-batch over one stream is the same micro-batch.
    v1::MicroBatchHeader plain = header;
    plain.clear_transfer_id();
    plain.clear_stripe_count();
    const LossReply replay = server_->Compute(plain, rows);
    EXPECT_TRUE(replay.summary.replayed());
    EXPECT_EQ(replay.summary.digest(), summary.digest());
    if (primary_first) {
      EXPECT_TRUE(server_->Gradient(head_) == gradient);
    }
  }
  EXPECT_TRUE(server_->AwaitNothingInFlight());
}

TEST_F(Stripes, AreNotNeededWhenTheOthersBringEveryRow) {
  Start({});
  const std::string rows = Rows(6);
  Primary primary(*server_, Header(0, 6, Id('a'), 4));
  Stripe stripe(*server_, Id('a'), 2);
  EXPECT_TRUE(stripe.Send(Chunk(rows, 0, 3)));
  EXPECT_TRUE(primary.Send(Chunk(rows, 3, 3)));  // nobody half-closes, and two stripes never come
  EXPECT_EQ(ReasonOf(primary.End()), "OK");
  EXPECT_EQ(ReasonOf(stripe.End()), "OK");
  GradHidden(6, {primary.grad_hidden, stripe.grad_hidden});
}

TEST_F(Stripes, HaveEachTheirIndex) {
  Start({});
  const std::string rows = Rows(4);
  const int64_t before = TensorBytes(*server_, "in");
  Primary primary(*server_, Header(0, 4, Id('a'), 2));
  Stripe first(*server_, Id('a'), 1);
  ASSERT_TRUE(first.Send(Chunk(rows, 0, 2)));
  ASSERT_TRUE(Await([&] { return TensorBytes(*server_, "in") == before + 2 * kRowBytes; }));  // it is the one that has index 1
  // Both are refused; the transfer goes on.
  for (const int32_t index : {2, 1}) {
    ExpectError(Stripe(*server_, Id('a'), index).End(), "INVALID_FIELD", {{"field", "header.stripe_index"}});
  }
  primary.Send(Chunk(rows, 2, 2));
  EXPECT_EQ(ReasonOf(primary.End()), "OK");
  EXPECT_EQ(ReasonOf(first.End()), "OK");
}

// When a stripe breaks.
enum class Moment { kWaiting, kJoined, kSent, kHalfClosed, kComputing };

class BrokenStripe : public Stripes, public ::testing::WithParamInterface<Moment> {};

INSTANTIATE_TEST_SUITE_P(Moments, BrokenStripe,
                         ::testing::Values(Moment::kWaiting, Moment::kJoined, Moment::kSent, Moment::kHalfClosed,
                                           Moment::kComputing));

TEST_P(BrokenStripe, EndsTheAttemptAndChangesNothing) {
  // A stripe that goes before the primary stream comes leaves no trace: it is waited for in vain.
  Start(GetParam() == Moment::kWaiting ? WithLimit(&service::Limits::max_stripe_wait, absl::Milliseconds(100)) : ServerSetup());
  constexpr int64_t kRows = 3000;  // so many that it may begin early, with nearly all of them
  const std::string rows = Rows(kRows);
  auto stripe = std::make_unique<Stripe>(*server_, Id('a'), 1);
  if (GetParam() == Moment::kWaiting) stripe.reset();
  if (GetParam() == Moment::kComputing) server_->gate().Close();
  Primary primary(*server_, Header(0, kRows, Id('a'), 2));
  primary.Send(Chunk(rows, 0, 2000));
  if (GetParam() >= Moment::kSent) stripe->Send(Chunk(rows, 2000, 990));
  if (GetParam() == Moment::kHalfClosed) stripe->stream->WritesDone();
  if (GetParam() == Moment::kComputing) server_->gate().AwaitWaiting();  // it has begun with the rows that are there
  if (stripe != nullptr) {
    ASSERT_TRUE(server_->AwaitInFlight());
    EXPECT_THAT(stripe->Cancel().error_code(), AnyOf(grpc::StatusCode::CANCELLED, grpc::StatusCode::ABORTED));
  }
  if (GetParam() == Moment::kComputing) server_->gate().Open();
  EXPECT_THAT(ExpectError(primary.End(), "STRIPE_LOST").message, Not(HasSubstr("it had been computed")));
  ExpectUnchangedAndServing(kRows);
}

TEST_F(Stripes, ThePrimarysEndIsTheStripes) {
  Start({});
  Primary primary(*server_, Header(0, 4, Id('a'), 2));
  Stripe stripe(*server_, Id('a'), 1);
  stripe.Send(Chunk(Rows(4), 0, 2));
  ASSERT_TRUE(server_->AwaitInFlight());
  EXPECT_EQ(primary.Cancel().error_code(), grpc::StatusCode::CANCELLED);
  // CANCELLED if its rows come when the transfer has been broken by that: they are refused for the same reason.
  EXPECT_THAT(ReasonOf(stripe.End()), AnyOf("STRIPE_LOST", "TRANSFER_NOT_FOUND", "CANCELLED"));
  ExpectUnchangedAndServing(4);
}

// bad_values_table.cc has what is refused of a chunk, on the primary stream.
TEST_F(Stripes, AChunkThatIsRefusedEndsTheTransfer) {
  const std::string rows = Rows(4);
  v1::RowChunk beyond = Chunk(rows, 3, 1);
  beyond.set_row_count(2);
  v1::RowChunk no_role = Chunk(rows, 2, 1);
  no_role.clear_role();
  v1::RowChunk no_term = Chunk(rows, 2, 1);
  no_term.set_role(v1::CHUNK_ROLE_TEACHER_HIDDEN);
  no_term.set_term_index(1);
  v1::RowChunk short_one = Chunk(rows, 2, 1);
  short_one.mutable_data()->pop_back();
  Start({});
  char letter = 'a';
  for (const auto& [chunk, reason] : {std::pair(Chunk(rows, 0, 2), "CHUNK_OUT_OF_RANGE"),  // which the primary has brought
                                      std::pair(beyond, "CHUNK_OUT_OF_RANGE"), std::pair(no_role, "MISSING_FIELD"),
                                      std::pair(no_term, "INVALID_FIELD"), std::pair(short_one, "DATA_LENGTH_MISMATCH")}) {
    SCOPED_TRACE(chunk.ShortDebugString());
    const std::string id = Id(letter++);
    Primary primary(*server_, Header(0, 4, id, 2));
    Stripe stripe(*server_, id, 1);
    ASSERT_TRUE(primary.Send(Chunk(rows, 0, 2)));
    ASSERT_TRUE(server_->AwaitInFlight());
    stripe.Send(chunk);
    // Whichever of the two brings the rows second is refused.
    EXPECT_THAT(ReasonOf(stripe.End()), AnyOf(reason, "STRIPE_LOST"));
    EXPECT_EQ(ReasonOf(primary.End()), reason);
    EXPECT_TRUE(server_->AwaitNothingInFlight());
  }
  ExpectUnchangedAndServing(4);
}

TEST_F(Stripes, ASecondHeaderOrNoMessageIsRefused) {
  Start({});
  v1::TransferRowsRequest second_header;
  second_header.mutable_header()->set_transfer_id(Id('a'));
  second_header.mutable_header()->set_stripe_index(1);
  for (const auto& [id, message, reason] : {std::tuple(Id('a'), second_header, "PROTOCOL_VIOLATION"),
                                            std::tuple(Id('b'), v1::TransferRowsRequest(), "MISSING_FIELD")}) {
    Primary primary(*server_, Header(0, 4, id, 2));
    Stripe stripe(*server_, id, 1);
    stripe.stream->Write(message);
    EXPECT_EQ(ReasonOf(stripe.End()), reason);
    EXPECT_EQ(ReasonOf(primary.End()), reason);
  }
  ExpectUnchangedAndServing(4);
}

// ---- rows that stay away ---------------------------------------------------------------------------------------------

// With the most of them a micro-batch begins, however slowly they have come: the rest is expected soon.
constexpr int64_t kStalledRows = 3000;
constexpr int64_t kRowsBefore = 2990;

TEST_F(Stripes, ASlowUploaderHoldsNobodyUp) {
  Start(WithOption(&service::ServerOptions::queue_widths, {1, 1}));  // one turn for everybody
  const std::string rows = Rows(kStalledRows);
  const TestHead witness = server_->MakeHead("witness", SmallSpec());
  // Whole with its only chunk, and of two streams, so that no stream's end is waited for: it cannot stall.
  const auto compute_at_once = [&](const TestHead& head, int64_t micro_batch, char letter) {
    const v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, micro_batch, std::vector<int32_t>(kStalledRows, 1));
    return server_->MustCompute(Striped(header, Id(letter), 2), rows, {.chunk_rows = kStalledRows});
  };
  const LossReply expected = compute_at_once(witness, 0, 'w');
  for (const int32_t stripe_count : {1, 2}) {
    SCOPED_TRACE(stripe_count);
    v1::MicroBatchHeader header = Header(stripe_count, kStalledRows, Id('a'), 2);
    if (stripe_count == 1) {
      header.clear_transfer_id();
      header.clear_stripe_count();
    }
    server_->gate().Close();
    Primary slow(*server_, header);
    slow.Send(Chunk(rows, 0, kRowsBefore));
    server_->gate().AwaitWaiting();  // it has begun, without its last rows
    server_->gate().Open();
    // Another one of the same size goes through while the rest stays away, again and again.
    const TestHead other = server_->MakeHead(absl::StrCat("other", stripe_count), SmallSpec());
    for (int64_t id = 0; id < 3; ++id) compute_at_once(other, id, static_cast<char>('b' + 3 * stripe_count + id));
    EXPECT_EQ(server_->Find(head_, stripe_count).state(), v1::CONTRIBUTION_STATE_UNSPECIFIED);
    EXPECT_EQ(server_->Metric("headwater_stalls_total"), absl::StrCat(stripe_count));
    EXPECT_EQ(server_->Metric("headwater_early_starts_total"), absl::StrCat(stripe_count));
    slow.Send(Chunk(rows, kRowsBefore, kStalledRows - kRowsBefore));
    slow.stream->WritesDone();
    EXPECT_EQ(ReasonOf(slow.End()), "OK");
    EXPECT_EQ(slow.summary.state(), v1::CONTRIBUTION_STATE_COMMITTED);
    EXPECT_TRUE(GradHidden(kStalledRows, {slow.grad_hidden}) == expected.grad_hidden);
    EXPECT_EQ(slow.summary.terms(0).sums().SerializeAsString(), expected.summary.terms(0).sums().SerializeAsString());
    if (stripe_count == 1) {
      EXPECT_TRUE(server_->Gradient(head_) == server_->Gradient(witness));
    }
  }
}

// ---- clients that hang -----------------------------------------------------------------------------------------------

TEST_F(Stripes, AStripeThatTakesNothingIsCutOff) {
  // Less than that between any two chunks that the test sends.
  server_ = std::make_unique<WireServer>(WithOption(&service::ServerOptions::stream_idle_timeout, absl::Seconds(2)));
  const TestHead head = server_->MakeHead("h", SmallSpec(13, 64));
  constexpr int64_t kRows = 1 << 17;  // 32 MiB of grad_hidden: far more than flow control lets through unread
  constexpr int64_t kChunkRows = 1 << 13;
  Stripe stripe(*server_, Id('a'), 1);
  Primary primary(*server_, Striped(CrossEntropyHeader(head, 0, 0, std::vector<int32_t>(kRows, 1)), Id('a'), 2));
  v1::RowChunk chunk = HiddenChunk(std::string(kChunkRows * 256, '\0'), 0, kChunkRows);
  for (int64_t row = 0; row < kRows; row += kChunkRows) {
    chunk.set_row_start(row);
    ASSERT_TRUE(row / kChunkRows % 2 == 0 ? primary.Send(chunk) : stripe.Send(chunk));
  }
  // Both have a piece, which is more than flow control lets through unread. From now on the primary stream reads all that it gets,
  // the stripe nothing: rows that were handed to it are lost, and that is said.
  int64_t before = 0;
  ASSERT_TRUE(Await([&] {  // until nothing moves: on a busy machine one stream may take its second piece before the other its first
    const int64_t out = TensorBytes(*server_, "out");
    if (out >= 2 * (int64_t{2} << 20) && out == before) return true;
    before = out;
    absl::SleepFor(absl::Milliseconds(200));
    return false;
  }));
  EXPECT_THAT(ExpectError(primary.End(), "STRIPE_LOST").message,
              HasSubstr("; it had been computed: GetStep tells whether its micro-batch is in"));
  EXPECT_TRUE(server_->AwaitNothingInFlight());
  // It was committed before: the client finds it in the step.
  EXPECT_EQ(server_->Find(head, 0).state(), v1::CONTRIBUTION_STATE_COMMITTED);
}

// A gRPC message: its length before it.
std::string Framed(const std::string& message) {
  std::string framed(1, '\0');
  for (const int shift : {24, 16, 8, 0}) framed.push_back(static_cast<char>(message.size() >> shift));
  return framed + message;
}

TEST_F(Stripes, AByteNowAndThenIsNotEnough) {
  ServerSetup setup;
  setup.options.stream_idle_timeout = absl::Milliseconds(200);
  setup.options.listen_addresses = {"127.0.0.1:0"};
  Start(setup);
  v1::ComputeLossRequest header;
  *header.mutable_header() = CrossEntropyHeader(head_, 0, 0, {1, 2, 3});
  v1::ComputeLossRequest chunk;
  *chunk.mutable_chunk() = Chunk(Rows(3), 0, 3);
  for (const auto& [method, with_header] : {std::pair<std::string, bool>{"ComputeLoss", false},
                                            {"ComputeLoss", true},
                                            {"TransferRows", false},
                                            {"StreamTeacher", false}}) {
    SCOPED_TRACE(absl::StrCat(method, with_header ? " with its header" : ""));
    const std::string ended = absl::StrCat("headwater_requests_total{code=\"CANCELLED\",method=\"", method, "\"}");
    const std::string ends_before = server_->Metric(ended);
    Http2Client client(server_->tcp_port());
    ASSERT_TRUE(client.Send(Http2Start() + Http2Frame{kHeadersFrame, kEndHeaders, 1, CallHeaders(method)}.Encode()));
    const auto send = [&client](const std::string& bytes) { client.Send(Http2Frame{kDataFrame, 0, 1, bytes}.Encode()); };
    if (with_header) send(Framed(header.SerializeAsString()));
    const std::string slowly = Framed((with_header ? chunk : header).SerializeAsString());
    // Each byte long before the timeout; the message would take five times as long.
    bool cut = false;
    for (size_t i = 0; i < slowly.size() && !cut; ++i) {
      send(slowly.substr(i, 1));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      cut = server_->Metric(ended) != ends_before;
    }
    EXPECT_TRUE(cut);
    EXPECT_TRUE(server_->AwaitNothingInFlight());
  }
  ExpectUnchangedAndServing(3);
}

}  // namespace
}  // namespace headwater::testing
