// Regions of shared memory through the wire: how they are registered, who may use them, and what is left of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/transport/file_descriptor.h"
#include "tests/integration/transactions/transaction_fixture.h"
#include "tests/unit/transport/descriptor_peer.h"
#include "tests/unit/transport/region_memory.h"

namespace headwater::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using transport::FileDescriptor;

constexpr int64_t kPage = 4096;

class SharedMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/headwater-memory-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    folder_ = path;
  }
  void TearDown() override {
    server_.reset();
    EXPECT_EQ(rmdir(folder_.c_str()), 0);  // the socket is gone
  }
  void Start(bool named_regions = false, int64_t max_in_flight_bytes = 0) {
    ServerSetup setup;
    if (max_in_flight_bytes > 0) setup.options.limits.max_in_flight_bytes = max_in_flight_bytes;
    setup.options.descriptor_socket = folder_ + "/memory.sock";
    setup.options.named_regions = named_regions;
    setup.options.limits.max_region_bytes = 64 * kPage;
    server_ = std::make_unique<WireServer>(setup);
    session_ = server_->OpenSession(60000);
  }
  v1::ServerInfo Info() {
    v1::ServerInfo info;
    Require(server_->Call(&Sessions::GetServerInfo, {}, &info), "GetServerInfo");
    return info;
  }
  // Passes the descriptor; its token.
  std::string Pass(int memory, int64_t bytes) {
    const FileDescriptor connection = ConnectTo(folder_ + "/memory.sock");
    EXPECT_TRUE(SendDescriptors(connection.get(), DescriptorRequest(static_cast<uint64_t>(bytes)), {memory}));
    const DescriptorAnswer answer = ReadDescriptorAnswer(connection.get());
    EXPECT_EQ(answer.code, 0u) << answer.message;
    return answer.token;
  }
  grpc::Status Register(const v1::RegisterSharedMemoryRequest& request, std::string* id = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::RegisterSharedMemoryResponse response;
    const grpc::Status status = server_->sessions().RegisterSharedMemory(&context, request, &response);
    if (id != nullptr) *id = response.region_id();
    return status;
  }
  v1::RegisterSharedMemoryRequest WithToken(const std::string& token, int64_t bytes) {
    v1::RegisterSharedMemoryRequest request;
    request.set_session_id(session_);
    request.set_descriptor_token(token);
    request.set_size_bytes(bytes);
    return request;
  }
  // A new region of so many bytes; its id.
  std::string MakeRegion(int64_t bytes) {
    const FileDescriptor memory(MakeMemory(bytes));
    std::string id;
    Require(Register(WithToken(Pass(memory.get(), bytes), bytes), &id), "RegisterSharedMemory");
    return id;
  }
  grpc::Status Unregister(const std::string& session, const std::string& id) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::UnregisterSharedMemoryRequest request;
    request.set_session_id(session);
    request.set_region_id(id);
    v1::UnregisterSharedMemoryResponse response;
    return server_->sessions().UnregisterSharedMemory(&context, request, &response);
  }
  std::string SharedRegions() { return server_->MetricLine("headwater_regions{kind=\"shared\"}"); }
  std::string SharedBytes() { return server_->MetricLine("headwater_region_bytes{kind=\"shared\"}"); }

  std::string folder_;
  std::unique_ptr<WireServer> server_;
  std::string session_;
};

TEST_F(SharedMemory, IsOfferedAsTheServerIsSetUp) {
  Start();
  EXPECT_EQ(Info().descriptor_socket(), folder_ + "/memory.sock");
  EXPECT_FALSE(Info().named_regions());
  EXPECT_THAT(Info().features(), Contains("shared_memory"));
  EXPECT_THAT(Info().features(), Not(Contains("cuda_ipc")));
  server_.reset();
  server_ = std::make_unique<WireServer>();
  EXPECT_EQ(Info().descriptor_socket(), "");
  EXPECT_THAT(Info().features(), Not(Contains("shared_memory")));
}

TEST_F(SharedMemory, IsRegisteredAndGivenBack) {
  Start();
  const std::string first = MakeRegion(kPage);
  const std::string second = MakeRegion(2 * kPage);
  EXPECT_NE(first, second);
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 2");
  EXPECT_EQ(SharedBytes(), absl::StrCat("headwater_region_bytes{kind=\"shared\"} ", 3 * kPage));
  EXPECT_EQ(ReasonOf(Unregister(session_, first)), "OK");
  EXPECT_EQ(SharedBytes(), absl::StrCat("headwater_region_bytes{kind=\"shared\"} ", 2 * kPage));
  EXPECT_EQ(ReasonOf(Unregister(session_, first)), "REGION_NOT_FOUND");
}

TEST_F(SharedMemory, AClientThatDiesGivesEverythingBack) {
  Start();
  const int before = OpenDescriptors();
  const std::string dying = server_->OpenSession(1000);
  session_ = dying;
  for (int i = 0; i < 5; ++i) MakeRegion((i + 1) * kPage);
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 5");
  EXPECT_TRUE(Await([&] { return SharedRegions() == "headwater_regions{kind=\"shared\"} 0"; }));
  EXPECT_EQ(SharedBytes(), "headwater_region_bytes{kind=\"shared\"} 0");
  EXPECT_TRUE(Await([&] { return OpenDescriptors() <= before; }));
}

// A file under /dev/shm that goes away with the test.
class NamedFile {
 public:
  explicit NamedFile(const std::string& name, int64_t bytes) : path_("/dev/shm/" + name) {
    const FileDescriptor file(open(path_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
    if (!file.valid() || ftruncate(file.get(), bytes) != 0) throw std::runtime_error("/dev/shm");
  }
  ~NamedFile() { unlink(path_.c_str()); }
  NamedFile(const NamedFile&) = delete;
  NamedFile& operator=(const NamedFile&) = delete;

 private:
  const std::string path_;
};

TEST_F(SharedMemory, NamesAreTakenOnlyWhereTheOperatorAllowsThem) {
  const std::string name = absl::StrCat("headwater-test-", getpid());
  const NamedFile file(name, kPage);
  v1::RegisterSharedMemoryRequest request;
  request.set_shared_memory_name(name);
  request.set_size_bytes(kPage);
  Start();
  request.set_session_id(session_);
  EXPECT_EQ(ReasonOf(Register(request)), "STORAGE_NOT_CONFIGURED");
  server_.reset();
  Start(true);
  request.set_session_id(session_);
  EXPECT_TRUE(Info().named_regions());
  EXPECT_EQ(ReasonOf(Register(request)), "OK");
  EXPECT_EQ(server_->MetricLine("headwater_regions{kind=\"named\"}"), "headwater_regions{kind=\"named\"} 1");
  request.set_size_bytes(kPage + 1);
  const WireError error = DecodeError(Register(request));
  EXPECT_EQ(error.reason, "INVALID_FIELD");
  EXPECT_THAT(error.message, Not(HasSubstr("/dev/shm/")));
  request.set_shared_memory_name(name + "-none");
  EXPECT_EQ(ReasonOf(Register(request)), "INVALID_FIELD");
}

TEST_F(SharedMemory, DeviceMemoryNeedsADevice) {
  Start();
  v1::RegisterSharedMemoryRequest request;
  request.set_session_id(session_);
  request.set_cuda_ipc_handle(std::string(64, 'h'));
  request.set_size_bytes(kPage);
  const WireError error = DecodeError(Register(request));
  EXPECT_EQ(error.reason, "FEATURE_NOT_BUILT");
  EXPECT_EQ(error.at("feature"), "cuda_ipc");
}

// ---- calls that name regions

// A region of the test's, mapped here.
class MappedRegion {
 public:
  explicit MappedRegion(int64_t bytes) : memory_(MakeMemory(bytes)), bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap");
  }
  ~MappedRegion() { munmap(data_, bytes_); }
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  int fd() const { return memory_.get(); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  char* data() const { return static_cast<char*>(data_); }

 private:
  const FileDescriptor memory_;
  const size_t bytes_;
  void* data_;
};

// Micro-batches of three rows, 60 bytes: hidden states at 0, the gradient at kGrad.
class SharedRows : public SharedMemory {
 protected:
  static constexpr int64_t kGrad = 64;
  static constexpr size_t kRowsBytes = static_cast<size_t>(kRows * kColumns) * sizeof(float);

  std::string Add(const MappedRegion& region) {
    std::string id;
    Require(Register(WithToken(Pass(region.fd(), region.bytes()), region.bytes()), &id), "RegisterSharedMemory");
    return id;
  }
  v1::MicroBatchHeader Header(const TestHead& head, int64_t micro_batch, const std::string& id, const std::string& session) {
    v1::MicroBatchHeader header = CrossEntropyHeader(head, 0, micro_batch, {1, 2, 3});
    header.set_session_id(session);
    header.mutable_hidden_rows()->set_region_id(id);
    header.mutable_grad_hidden_rows()->set_region_id(id);
    header.mutable_grad_hidden_rows()->set_offset_bytes(kGrad);
    return header;
  }
};

// Rows in a region take none of the server's memory, but the copies of those that will be held do.
TEST_F(SharedRows, ThatWillBeHeldCountWhileTheyAreCopied) {
  Start(false, kRowsBytes - 1);
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const MappedRegion region(kPage);
  const std::string id = Add(region);
  EXPECT_EQ(ReasonOf(server_->Compute(Header(head, 0, id, session_), "").status), "OK");
  v1::MicroBatchHeader header = Header(head, 1, id, session_);
  header.set_commit_mode(v1::COMMIT_MODE_EXPLICIT);
  header.set_late_token_factors(true);
  const WireError error = DecodeError(server_->Compute(header, "").status);
  EXPECT_EQ(error.at("limit"), "max_in_flight_bytes");
  EXPECT_EQ(error.at("actual"), std::to_string(kRowsBytes));
}

TEST_F(SharedRows, StayMappedForTheCallWhoseClientDies) {
  Start();
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const MappedRegion region(kPage);
  const std::string id = Add(region);
  const std::string rows = Rows(5);
  std::memcpy(region.data(), rows.data(), rows.size());
  const std::string before = server_->Gradient(head);
  server_->gate().Close();
  LossReply reply;
  std::thread call([&] { reply = server_->Compute(Header(head, 0, id, session_), ""); });
  server_->gate().AwaitWaiting();
  std::thread close([&] {  // waits for the head, which computes
    v1::CloseSessionRequest request;
    request.set_session_id(session_);
    EXPECT_EQ(ReasonOf(server_->Call(&Sessions::CloseSession, request)), "OK");
  });
  EXPECT_TRUE(Await([&] { return ReasonOf(Unregister(session_, "none")) == "SESSION_NOT_FOUND"; }));
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 1");  // in use
  server_->gate().Open();
  call.join();
  close.join();
  EXPECT_TRUE(Await([&] { return SharedRegions() == "headwater_regions{kind=\"shared\"} 0"; }));
  EXPECT_TRUE(reply.status.ok() ? server_->Gradient(head) != before : server_->Gradient(head) == before);
  Require(server_->Compute(CrossEntropyHeader(head, 0, 1, {1, 2, 3}), Rows(6)).status, "ComputeLoss afterwards");
}

TEST_F(SharedRows, LeaveNothingBehind) {
  Start();
  const TestHead head = server_->MakeHead("h", SmallSpec());
  const MappedRegion region(kPage);
  const std::string id = Add(region);
  const int before = OpenDescriptors();
  for (int64_t micro_batch = 0; micro_batch < 200; ++micro_batch) {
    v1::MicroBatchHeader header = Header(head, micro_batch, id, session_);
    if (micro_batch % 4 == 1) header.mutable_hidden_rows()->set_offset_bytes(kPage);   // outside
    if (micro_batch % 4 == 2) header.mutable_grad_hidden_rows()->set_offset_bytes(8);  // over the rows
    if (micro_batch % 4 == 3) header.mutable_hidden_rows()->set_region_id("none");
    EXPECT_EQ(server_->Compute(header, "").status.ok(), micro_batch % 4 == 0);
  }
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 1");
  EXPECT_TRUE(server_->AwaitNothingInFlight());
  EXPECT_LE(OpenDescriptors(), before);
  EXPECT_EQ(ReasonOf(Unregister(session_, id)), "OK");
}

}  // namespace
}  // namespace headwater::testing
