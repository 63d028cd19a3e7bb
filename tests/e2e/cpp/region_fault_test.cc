// Clients that lie about memory, stop in the middle, or trickle: each gets its error, the server serves on for others meanwhile,
// and the accumulator is bitwise as it was.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "headwater/client/client.h"
#include "tests/e2e/cpp/await.h"
#include "tests/e2e/cpp/loss_header.h"
#include "tests/e2e/cpp/raw_wire.h"
#include "tests/e2e/cpp/server_process.h"
#include "tests/e2e/cpp/test_tensors.h"

namespace headwater::e2e {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kVocabSize = 61;
constexpr int64_t kHiddenSize = 16;
constexpr int64_t kRowBytes = kHiddenSize * 4;
constexpr int64_t kRows = 64;
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// A file under /dev/shm, as clients of named regions make it.
class NamedMemory {
 public:
  explicit NamedMemory(int64_t bytes) : name_("headwater-test-" + std::to_string(getpid())) {
    descriptor_ = shm_open(("/" + name_).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor_ < 0 || ftruncate(descriptor_, bytes) != 0) throw std::runtime_error("shm_open");
  }
  NamedMemory(const NamedMemory&) = delete;
  NamedMemory& operator=(const NamedMemory&) = delete;
  ~NamedMemory() {
    close(descriptor_);
    shm_unlink(("/" + name_).c_str());
  }
  const std::string& name() const { return name_; }
  bool Truncate(int64_t bytes) { return ftruncate(descriptor_, bytes) == 0; }
  bool Write(const void* data, size_t bytes) { return pwrite(descriptor_, data, bytes, 0) == static_cast<ssize_t>(bytes); }

 private:
  const std::string name_;
  int descriptor_ = -1;
};

class RegionFault : public testing::Test {
 protected:
  RegionFault()
      : server_({"--stream_idle_timeout=1s", "--max_stripe_wait=2s", "--named_regions"}, /*shares_memory=*/true),
        client_(server_.Connect({.connect_timeout = seconds(20), .transport = client::Transport::kGrpc})),
        wire_(server_.target()) {
    client::HeadSpec spec;
    spec.vocab_size = kVocabSize;
    spec.hidden_size = kHiddenSize;
    spec.trainable = true;
    head_.emplace(Value(client_.CreateHead("student", spec)));
    Value(head_->UploadWeights(client::HeadTensor::kWeight, client::TensorView::Float32(weight_)));
    Good(0);
    before_ = Gradient();
  }

  void Good(int64_t micro_batch) {
    client::MicroBatchOptions options;
    options.step = 0;
    options.micro_batch = micro_batch;
    Value(head_->CrossEntropy(client::RowsView::Float32(rows_, kHiddenSize), targets_, {}, options).Get());
  }

  std::string Gradient() {
    const client::TensorBuffer gradient = Value(head_->Gradient(0));
    return std::string(static_cast<const char*>(gradient.data()), static_cast<size_t>(gradient.bytes()));
  }

  // The fault has added nothing, and the server serves on.
  void ExpectUnharmed() {
    EXPECT_EQ(Gradient(), before_);
    Good(next_id_++);
    before_ = Gradient();
  }

  v1::MicroBatchHeader Header(int64_t micro_batch) const { return CrossEntropyHeader(*head_, 0, micro_batch, targets_); }

  // Registers memory of this process; the region's id.
  std::string RegisterMemory(const std::string& session, const SharedMemory& memory) {
    v1::RegisterSharedMemoryRequest request;
    request.set_session_id(session);
    request.set_descriptor_token(SendDescriptor(server_.descriptor_socket(), memory.descriptor(), memory.bytes()));
    request.set_size_bytes(memory.bytes());
    grpc::Status status;
    const std::string region = wire_.Register(request, &status);
    EXPECT_EQ(ReasonOf(status), "OK");
    return region;
  }

  // A micro-batch whose rows lie in `region` from `offset` on.
  std::string SubmitFrom(const std::string& session, const std::string& region, int64_t offset, int64_t micro_batch) {
    v1::MicroBatchHeader header = Header(micro_batch);
    header.set_session_id(session);
    header.mutable_hidden_rows()->set_region_id(region);
    header.mutable_hidden_rows()->set_offset_bytes(offset);
    return ReasonOf(wire_.Compute(header, ""));
  }

  ServerProcess server_;
  client::Client client_;
  RawWire wire_;
  const std::vector<float> weight_ = RandomFloats(1, kVocabSize* kHiddenSize, 0.3F);
  const std::vector<float> rows_ = RandomFloats(2, kRows* kHiddenSize, 1.0F);
  const std::vector<int32_t> targets_ = RandomTargets(3, kRows, kVocabSize);
  std::optional<client::Head> head_;
  std::string before_;
  int64_t next_id_ = 1;
};

TEST_F(RegionFault, RowsInARegionAreTheSameRows) {
  const std::string session = wire_.OpenSession();
  const SharedMemory memory(2 * kRows * kRowBytes);
  std::memcpy(memory.data(), rows_.data(), rows_.size() * 4);
  const std::string region = RegisterMemory(session, memory);
  // The same bytes under the same id as came by gRPC: the server knows the micro-batch again.
  v1::MicroBatchHeader header = Header(0);
  header.set_session_id(session);
  header.mutable_hidden_rows()->set_region_id(region);
  header.mutable_grad_hidden_rows()->set_region_id(region);
  header.mutable_grad_hidden_rows()->set_offset_bytes(kRows * kRowBytes);
  v1::MicroBatchSummary summary;
  EXPECT_EQ(ReasonOf(wire_.Compute(header, "", &summary)), "OK");
  EXPECT_TRUE(summary.replayed());
  EXPECT_EQ(summary.transport(), "shared_memory");
  ExpectUnharmed();
  // grad_hidden was written where it was asked for: some of it is not 0.
  bool written = false;
  for (int64_t i = 0; i < kRows * kRowBytes; ++i) written = written || memory.data()[kRows * kRowBytes + i] != 0;
  EXPECT_TRUE(written);
}

TEST_F(RegionFault, OffsetsThatWrapOrLieOutsideAreRefused) {
  const std::string session = wire_.OpenSession();
  const SharedMemory memory(kRows * kRowBytes);
  const std::string region = RegisterMemory(session, memory);
  for (const int64_t offset : {kMax - 3, kMax - kRows * kRowBytes + 1, int64_t{4}, kRows * kRowBytes, int64_t{-4},
                               std::numeric_limits<int64_t>::min(), int64_t{1}}) {
    EXPECT_EQ(SubmitFrom(session, region, offset, next_id_), "INVALID_FIELD") << offset;
  }
  EXPECT_EQ(SubmitFrom(session, region, 0, next_id_++), "OK");
  before_ = Gradient();
  // A gradient over the rows that it is computed from.
  v1::MicroBatchHeader header = Header(next_id_);
  header.set_session_id(session);
  header.mutable_hidden_rows()->set_region_id(region);
  *header.mutable_grad_hidden_rows() = header.hidden_rows();
  EXPECT_EQ(wire_.Compute(header, "").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ExpectUnharmed();
}

TEST_F(RegionFault, RegionsThatWrapAreNotRegistered) {
  const std::string session = wire_.OpenSession();
  const SharedMemory memory(4096);
  for (const auto& [offset, bytes] :
       {std::pair<int64_t, int64_t>{kMax, 1}, {4096, kMax}, {kMax - 4095, 4096}, {1, 4096}, {-1, 10}, {0, 0}, {0, -1}, {0, 4097}}) {
    v1::RegisterSharedMemoryRequest request;
    request.set_session_id(session);
    request.set_descriptor_token(SendDescriptor(server_.descriptor_socket(), memory.descriptor(), memory.bytes()));
    ASSERT_EQ(request.descriptor_token().size(), 32u);
    request.set_offset_bytes(offset);
    request.set_size_bytes(bytes);
    grpc::Status status;
    EXPECT_EQ(wire_.Register(request, &status), "");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << offset << " + " << bytes << ": " << ReasonOf(status);
  }
  ExpectUnharmed();
}

TEST_F(RegionFault, MemoryThatCouldShrinkIsNotMapped) {
  const std::string session = wire_.OpenSession();
  const SharedMemory open(4096, /*sealed=*/false);
  v1::RegisterSharedMemoryRequest request;
  request.set_session_id(session);
  request.set_descriptor_token(SendDescriptor(server_.descriptor_socket(), open.descriptor(), open.bytes()));
  request.set_size_bytes(4096);
  grpc::Status status;
  // Either the socket gives no token for it, or the registration refuses it.
  EXPECT_EQ(wire_.Register(request, &status), "");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // What is registered can no more be truncated by its owner.
  const SharedMemory sealed(4096);
  RegisterMemory(session, sealed);
  EXPECT_NE(ftruncate(sealed.descriptor(), 0), 0);
  ExpectUnharmed();
}

TEST_F(RegionFault, ANamedRegionThatIsTruncatedIsAnErrorOfItsOwner) {
  const std::string session = wire_.OpenSession();
  NamedMemory memory(kRows * kRowBytes);
  ASSERT_TRUE(memory.Write(rows_.data(), rows_.size() * 4));
  v1::RegisterSharedMemoryRequest request;
  request.set_session_id(session);
  request.set_shared_memory_name(memory.name());
  request.set_size_bytes(kRows * kRowBytes);
  grpc::Status status;
  const std::string region = wire_.Register(request, &status);
  ASSERT_EQ(ReasonOf(status), "OK");
  EXPECT_EQ(SubmitFrom(session, region, 0, next_id_++), "OK");
  before_ = Gradient();
  ASSERT_TRUE(memory.Truncate(kRowBytes));
  EXPECT_EQ(SubmitFrom(session, region, 0, next_id_), "INVALID_FIELD");
  ASSERT_TRUE(memory.Truncate(0));
  EXPECT_EQ(SubmitFrom(session, region, 0, next_id_), "INVALID_FIELD");
  ExpectUnharmed();
}

TEST_F(RegionFault, StaleAndForeignRegionsAreNotFound) {
  const std::string session = wire_.OpenSession();
  const std::string stranger = wire_.OpenSession();
  const SharedMemory memory(kRows * kRowBytes);
  const std::string region = RegisterMemory(session, memory);
  EXPECT_EQ(SubmitFrom(stranger, region, 0, next_id_), "REGION_NOT_FOUND");
  EXPECT_EQ(SubmitFrom(session, region + "x", 0, next_id_), "REGION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(wire_.Unregister(stranger, region)), "REGION_NOT_FOUND");
  EXPECT_EQ(SubmitFrom(session, region, 0, next_id_++), "OK");
  before_ = Gradient();
  EXPECT_EQ(ReasonOf(wire_.Unregister(session, region)), "OK");
  EXPECT_EQ(SubmitFrom(session, region, 0, next_id_), "REGION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(wire_.Unregister(session, region)), "REGION_NOT_FOUND");
  ExpectUnharmed();
  // A region goes with its session.
  const std::string last = RegisterMemory(session, memory);
  {
    grpc::ClientContext context;
    v1::CloseSessionRequest request;
    request.set_session_id(session);
    v1::CloseSessionResponse response;
    ASSERT_TRUE(wire_.sessions().CloseSession(&context, request, &response).ok());
  }
  const std::string reason = SubmitFrom(session, last, 0, next_id_);
  EXPECT_TRUE(reason == "SESSION_NOT_FOUND" || reason == "REGION_NOT_FOUND") << reason;
  ExpectUnharmed();
}

TEST_F(RegionFault, AUsedOrInventedTokenRegistersNothing) {
  const std::string session = wire_.OpenSession();
  const SharedMemory memory(4096);
  v1::RegisterSharedMemoryRequest request;
  request.set_session_id(session);
  request.set_size_bytes(4096);
  request.set_descriptor_token(std::string(32, 'x'));
  grpc::Status status;
  EXPECT_EQ(wire_.Register(request, &status), "");
  EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
  request.set_descriptor_token(SendDescriptor(server_.descriptor_socket(), memory.descriptor(), memory.bytes()));
  EXPECT_NE(wire_.Register(request, &status), "");
  EXPECT_EQ(wire_.Register(request, &status), "");
  EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
  ExpectUnharmed();
}

// ---- streams ------------------------------------------------------------------------------------------------------------------

TEST_F(RegionFault, OneByteAtATimeIsCutOffAndHoldsNobodyUp) {
  std::string message;
  v1::ComputeLossRequest request;
  *request.mutable_header() = Header(50);
  ASSERT_TRUE(request.SerializeToString(&message));
  // One client trickles its header, another its rows.
  TrickledCall header(server_.target(), "/headwater.v1.LossService/ComputeLoss");
  TrickledCall rows(server_.target(), "/headwater.v1.LossService/ComputeLoss");
  TrickledCall stripe(server_.target(), "/headwater.v1.LossService/TransferRows");
  ASSERT_TRUE(rows.Send(TrickledCall::Framed(message)));
  const std::string framed = TrickledCall::Framed(message);
  request.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
  request.mutable_chunk()->set_row_count(kRows);
  request.mutable_chunk()->set_data(rows_.data(), rows_.size() * 4);
  std::string chunk;
  ASSERT_TRUE(request.SerializeToString(&chunk));
  chunk = TrickledCall::Framed(chunk);
  const auto start = steady_clock::now();
  size_t sent = 0;
  int64_t served = 0;
  while (!(header.Ended() && rows.Ended() && stripe.Ended()) && steady_clock::now() - start < seconds(15)) {
    if (!header.Ended()) header.Send(framed.substr(sent, 1));
    if (!rows.Ended()) rows.Send(chunk.substr(sent, 1));
    if (!stripe.Ended()) stripe.Send(std::string(1, '\0'));
    ++sent;
    const auto asked = steady_clock::now();
    Good(next_id_++);
    EXPECT_LE(steady_clock::now() - asked, seconds(5));
    ++served;
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_TRUE(header.Ended());
  EXPECT_TRUE(rows.Ended());
  EXPECT_TRUE(stripe.Ended());
  EXPECT_GE(served, 1);
  EXPECT_LT(sent, framed.size());
  // What trickled is not in the step.
  EXPECT_EQ(Value(head_->GetStep()).open.micro_batches.size(), static_cast<size_t>(next_id_));
}

// A primary stream and a further one of the same micro-batch, each of which has sent a half of the rows.
struct StripedCall {
  StripedCall(v1::LossService::Stub& loss, v1::MicroBatchHeader header, const std::vector<float>& rows, bool second_half) {
    // Each call has an id of its own.
    static int calls = 0;
    header.set_transfer_id("0123456789abcde" + std::string(1, static_cast<char>('0' + calls++)));
    header.set_stripe_count(2);
    primary = loss.ComputeLoss(&primary_context);
    v1::ComputeLossRequest request;
    *request.mutable_header() = header;
    primary->Write(request);
    stripe = loss.TransferRows(&stripe_context);
    v1::TransferRowsRequest transfer;
    transfer.mutable_header()->set_transfer_id(header.transfer_id());
    transfer.mutable_header()->set_stripe_index(1);
    stripe->Write(transfer);
    const size_t half = rows.size() * 2;
    const auto* const bytes = reinterpret_cast<const char*>(rows.data());
    request.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
    request.mutable_chunk()->set_row_count(header.row_count() / 2);
    request.mutable_chunk()->set_data(bytes, half);
    primary->Write(request);
    if (second_half) {
      transfer.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
      transfer.mutable_chunk()->set_row_start(header.row_count() / 2);
      transfer.mutable_chunk()->set_row_count(header.row_count() / 2);
      transfer.mutable_chunk()->set_data(bytes + half, half);
      stripe->Write(transfer);
    }
  }
  // Reads the primary stream to its end.
  grpc::Status Finish(v1::MicroBatchSummary* summary = nullptr) {
    v1::ComputeLossResponse response;
    while (primary->Read(&response)) {
      if (response.has_summary() && summary != nullptr) *summary = response.summary();
    }
    return primary->Finish();
  }

  grpc::ClientContext primary_context, stripe_context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ComputeLossRequest, v1::ComputeLossResponse>> primary;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TransferRowsRequest, v1::TransferRowsResponse>> stripe;
};

TEST_F(RegionFault, AStripeThatBreaksAbortsTheAttempt) {
  {
    StripedCall call(wire_.loss(), Header(next_id_), rows_, /*second_half=*/false);
    std::this_thread::sleep_for(milliseconds(100));
    call.stripe_context.TryCancel();
    EXPECT_EQ(ReasonOf(call.Finish()), "STRIPE_LOST");
  }
  ExpectUnharmed();
  {
    StripedCall call(wire_.loss(), Header(next_id_), rows_, /*second_half=*/false);
    std::this_thread::sleep_for(milliseconds(100));
    call.primary_context.TryCancel();
    EXPECT_EQ(ReasonOf(call.Finish()), "CANCELLED");
    v1::TransferRowsResponse response;
    while (call.stripe->Read(&response)) {
    }
    EXPECT_FALSE(call.stripe->Finish().ok());
  }
  ExpectUnharmed();
  // The two halves together are the micro-batch that is known already.
  StripedCall call(wire_.loss(), Header(0), rows_, /*second_half=*/true);
  v1::MicroBatchSummary summary;
  std::thread reader([&] {
    v1::TransferRowsResponse response;
    while (call.stripe->Read(&response)) {
    }
    EXPECT_EQ(ReasonOf(call.stripe->Finish()), "OK");
  });
  EXPECT_EQ(ReasonOf(call.Finish(&summary)), "OK");
  reader.join();
  EXPECT_TRUE(summary.replayed());
  ExpectUnharmed();
}

TEST_F(RegionFault, AStripeThatNobodyFollowsIsEnded) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(18));
  const auto stripe = wire_.loss().TransferRows(&context);
  v1::TransferRowsRequest transfer;
  transfer.mutable_header()->set_transfer_id("nobody knows it!");
  transfer.mutable_header()->set_stripe_index(1);
  stripe->Write(transfer);
  v1::TransferRowsResponse response;
  while (stripe->Read(&response)) {
  }
  const std::string reason = ReasonOf(stripe->Finish());
  EXPECT_TRUE(reason == "TRANSFER_NOT_FOUND" || reason == "CANCELLED") << reason;
  ExpectUnharmed();
}

TEST_F(RegionFault, AClientThatStopsReadingIsCutOff) {
  // 16 MiB of grad_hidden: far more than flow control lets through unread.
  constexpr int64_t kManyRows = 1 << 18;
  const std::vector<int32_t> targets(kManyRows, 1);
  RawWire own(server_.target());
  grpc::ClientContext context;
  const auto stream = own.loss().ComputeLoss(&context);
  v1::ComputeLossRequest request;
  *request.mutable_header() = CrossEntropyHeader(*head_, 0, 40, targets);
  stream->Write(request);
  constexpr int64_t kChunkRows = 1 << 14;
  for (int64_t row = 0; row < kManyRows; row += kChunkRows) {
    request.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
    request.mutable_chunk()->set_row_start(row);
    request.mutable_chunk()->set_row_count(kChunkRows);
    request.mutable_chunk()->set_data(std::string(kChunkRows * kRowBytes, '\0'));
    ASSERT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  // It was decided before its gradient could be taken, and stays.
  ASSERT_TRUE(Await([&] { return Value(head_->GetStep()).open.totals.micro_batch_count == 2; }));
  // The others are served meanwhile, and the stream is ended by the server: not all of it can be read any more.
  for (int i = 0; i < 5; ++i) Good(next_id_++);
  std::this_thread::sleep_for(seconds(3));
  v1::ComputeLossResponse response;
  int64_t rows = 0;
  bool has_summary = false;
  while (stream->Read(&response)) {
    rows += response.chunk().row_count();
    has_summary = has_summary || response.has_summary();
  }
  EXPECT_FALSE(stream->Finish().ok());
  EXPECT_FALSE(has_summary);
  EXPECT_LT(rows, kManyRows);
  before_ = Gradient();
  ExpectUnharmed();
}

}  // namespace
}  // namespace headwater::e2e
