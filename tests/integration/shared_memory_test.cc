// Regions of shared memory through the wire: how they are registered, who may use them, and what is left of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/transport/file_descriptor.h"
#include "tests/integration/transaction_fixture.h"
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
  void Start(bool named_regions = false, int64_t max_session_regions = 64) {
    ServerSetup setup;
    setup.options.descriptor_socket = folder_ + "/memory.sock";
    setup.options.named_regions = named_regions;
    setup.options.limits.max_session_regions = max_session_regions;
    setup.options.limits.max_region_bytes = 64 * kPage;
    server_ = std::make_unique<WireServer>(setup);
    session_ = server_->OpenSession(60000);
  }
  v1::ServerInfo Info() {
    grpc::ClientContext context;
    v1::ServerInfo info;
    Require(server_->sessions().GetServerInfo(&context, {}, &info), "GetServerInfo");
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
  v1::RegisterSharedMemoryRequest WithToken(const std::string& token, int64_t bytes, int64_t offset = 0) {
    v1::RegisterSharedMemoryRequest request;
    request.set_session_id(session_);
    request.set_descriptor_token(token);
    request.set_size_bytes(bytes);
    request.set_offset_bytes(offset);
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

TEST_F(SharedMemory, TokensAreGoodOnceAndOnlyHere) {
  Start();
  const FileDescriptor memory(MakeMemory(kPage));
  const std::string token = Pass(memory.get(), kPage);
  EXPECT_EQ(ReasonOf(Register(WithToken(token, kPage))), "OK");
  const grpc::Status again = Register(WithToken(token, kPage));
  EXPECT_EQ(ReasonOf(again), "INVALID_FIELD");
  const grpc::Status never = Register(WithToken(std::string(32, 't'), kPage));
  EXPECT_EQ(again.error_message(), never.error_message());
  // A token whose registration fails is used up too, and its memory given back.
  const int before = OpenDescriptors();
  const std::string other = Pass(memory.get(), kPage);
  EXPECT_EQ(ReasonOf(Register(WithToken(other, 2 * kPage))), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(Register(WithToken(other, kPage))), "INVALID_FIELD");
  EXPECT_TRUE(Await([&] { return OpenDescriptors() <= before; }));
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 1");
}

TEST_F(SharedMemory, SizesAndOffsetsAreCheckedWithoutOverflow) {
  Start();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const FileDescriptor memory(MakeMemory(4 * kPage));
  const std::vector<std::pair<int64_t, int64_t>> ranges = {{-1, kPage},         {0, 0},         {0, -1},
                                                           {kPage, 4 * kPage},  {4 * kPage, 1}, {kMost - 63, 64},
                                                           {kMost - 63, kMost}, {64, kMost},    {8, 64}};
  for (const auto& [offset, bytes] : ranges) {
    const WireError error = DecodeError(Register(WithToken(Pass(memory.get(), 4 * kPage), bytes, offset)));
    EXPECT_EQ(error.reason, "INVALID_FIELD") << offset << " " << bytes;
    EXPECT_FALSE(error.at("field").empty());
  }
  const FileDescriptor large(MakeMemory(65 * kPage));
  const WireError error = DecodeError(Register(WithToken(Pass(large.get(), 65 * kPage), 65 * kPage)));
  EXPECT_EQ(error.reason, "LIMIT_EXCEEDED");
  EXPECT_EQ(error.at("limit"), "max_region_bytes");
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 0");
  EXPECT_EQ(ReasonOf(Register(WithToken(Pass(memory.get(), 4 * kPage), 3 * kPage, kPage))), "OK");
}

TEST_F(SharedMemory, CannotBeTruncatedOnceItWasTaken) {
  Start();
  const FileDescriptor memory(MakeMemory(kPage));
  Require(Register(WithToken(Pass(memory.get(), kPage), kPage)), "RegisterSharedMemory");
  EXPECT_NE(ftruncate(memory.get(), 0), 0);
  EXPECT_NE(ftruncate(memory.get(), 1), 0);
  struct stat status {};
  ASSERT_EQ(fstat(memory.get(), &status), 0);
  EXPECT_EQ(status.st_size, kPage);
}

TEST_F(SharedMemory, RegionsBelongToOneSession) {
  Start();
  const std::string id = MakeRegion(kPage);
  const std::string other = server_->OpenSession(60000);
  const grpc::Status foreign = Unregister(other, id);
  const grpc::Status never = Unregister(other, "0123456789abcdef0123456789abcdef");
  EXPECT_EQ(ReasonOf(foreign), "REGION_NOT_FOUND");
  EXPECT_EQ(foreign.error_message(), never.error_message());
  EXPECT_EQ(foreign.error_details(), never.error_details());
  EXPECT_EQ(ReasonOf(Unregister(std::string(32, 's'), id)), "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(Unregister(session_, id)), "OK");
}

TEST_F(SharedMemory, RegionsOfASessionAreBounded) {
  Start(false, 2);
  const std::string id = MakeRegion(kPage);
  MakeRegion(kPage);
  const FileDescriptor memory(MakeMemory(kPage));
  const WireError error = DecodeError(Register(WithToken(Pass(memory.get(), kPage), kPage)));
  EXPECT_EQ(error.reason, "QUOTA_EXCEEDED");
  EXPECT_EQ(error.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(error.at("limit"), "max_session_regions");
  Require(Unregister(session_, id), "UnregisterSharedMemory");
  MakeRegion(kPage);
}

TEST_F(SharedMemory, AClientThatDiesGivesEverythingBack) {
  Start();
  const int before = OpenDescriptors();
  const std::string dying = server_->OpenSession(200);
  session_ = dying;
  for (int i = 0; i < 5; ++i) MakeRegion((i + 1) * kPage);
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 5");
  EXPECT_TRUE(Await([&] { return SharedRegions() == "headwater_regions{kind=\"shared\"} 0"; }));
  EXPECT_EQ(SharedBytes(), "headwater_region_bytes{kind=\"shared\"} 0");
  EXPECT_TRUE(Await([&] { return OpenDescriptors() <= before; }));
}

TEST_F(SharedMemory, AClosedSessionGivesItsRegionsBack) {
  Start();
  MakeRegion(kPage);
  grpc::ClientContext context;
  v1::CloseSessionRequest request;
  request.set_session_id(session_);
  v1::CloseSessionResponse response;
  Require(server_->sessions().CloseSession(&context, request, &response), "CloseSession");
  EXPECT_EQ(SharedRegions(), "headwater_regions{kind=\"shared\"} 0");
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

}  // namespace
}  // namespace headwater::testing
