// Rows that come and gradients that leave while a GPU computes. They are in page-locked memory, in device memory of any GPU, and in
// that of another process.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/cuda/cuda_test_environment.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

constexpr int64_t kRows = 4700;
constexpr int64_t kWidth = 512;
constexpr int64_t kVocab = 8000;
constexpr int64_t kRowBytes = kWidth * 2;
constexpr int64_t kBytes = kRows * kRowBytes;
constexpr int kPatienceMs = 60000;

// Reproducible bf16 values in [-1, 1), times `scale`, a power of two.
std::vector<uint16_t> Values(int64_t count, uint32_t seed, float scale) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  uint32_t state = seed;
  for (uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    const float number = (static_cast<float>(state >> 24) / 128.0f - 1.0f) * scale;  // 8 bits: exact
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    value = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

std::vector<float> Decode(const std::vector<uint16_t>& values) {
  std::vector<float> numbers(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = static_cast<uint32_t>(values[i]) << 16;
    std::memcpy(&numbers[i], &bits, sizeof(bits));
  }
  return numbers;
}

const std::vector<uint16_t>& Hidden() {
  static const std::vector<uint16_t> hidden = Values(kRows * kWidth, 1, 1);
  return hidden;
}

Digest ExpectedDigest() {
  DigestBuilder builder;
  builder.AddRows(0, 0, kRows, kRowBytes, Hidden().data());
  return builder.Finish("header");
}

struct Result {
  LossSums sums;
  std::vector<uint16_t> grad_hidden;
  std::vector<float> grad_weight;
};

// An engine with one head.
class FlowEngine {
 public:
  explicit FlowEngine(EngineOptions options = {}, int64_t workspace_bytes = int64_t{1} << 30) {
    options.workspace_bytes = workspace_bytes;
    engine_ = MakeCudaEngine(options);
    const HeadSpec spec = {.vocab_size = kVocab,
                           .hidden_size = kWidth,
                           .data_type = DataType::kBFloat16,
                           .transform = {.valid_vocab_size = kVocab},
                           .trainable = true,
                           .staging_slots = 1};
    head_ = MakeHeadOn(*engine_, spec);
    const std::vector<uint16_t> weight = Values(kVocab * kWidth, 7, 0.125f);
    CheckStatus(head_->WriteTensor(HeadTensor::kWeight, 0, kVocab * kWidth, weight.data()), "WriteTensor");
    for (int64_t i = 0; i < kRows; ++i) {
      const bool ignored = i % 97 < 3 || i > kRows - 9;
      targets_.push_back(ignored ? kDefaultIgnoreIndex : static_cast<int32_t>(i * 7919 % kVocab));
    }
  }

  LossEngine& engine() { return *engine_; }
  EngineHead& head() { return *head_; }

  MicroBatch Make(const void* hidden, MemorySpace hidden_memory, void* grad_hidden, MemorySpace grad_memory) {
    term_.head = head_.get();
    term_.row_count = kRows;
    term_.targets = targets_;
    return {.hidden = {hidden, kRows, kWidth, DataType::kBFloat16, hidden_memory},
            .terms = absl::MakeConstSpan(&term_, 1),
            .backward = true,
            .grad_hidden = {grad_hidden, kRows, kWidth, DataType::kBFloat16, grad_memory},
            .grad_weight = GradWeightMode::kAccumulate};
  }

  // Its first rows only. For the micro-batch made last.
  void Shorten(MicroBatch* micro_batch, int64_t rows) {
    term_.row_count = rows;
    term_.targets = absl::MakeConstSpan(targets_).first(static_cast<size_t>(rows));
    micro_batch->hidden.row_count = micro_batch->grad_hidden.row_count = rows;
  }

  // On an accumulator of 0.
  Result Compute(const MicroBatch& micro_batch) {
    CheckStatus(head_->ZeroGradient(), "ZeroGradient");
    const absl::StatusOr<MicroBatchResult> computed = engine_->Compute(micro_batch);
    CheckStatus(computed.status(), "Compute");
    Result result;
    result.sums = computed->terms[0];
    result.grad_hidden.resize(static_cast<size_t>(kRows * kWidth));
    CopyMemory(result.grad_hidden.data(), micro_batch.grad_hidden.data, kBytes);
    result.grad_weight = ReadGradient();
    return result;
  }
  std::vector<float> ReadGradient() { return ReadFloats(*head_, HeadTensor::kGradWeight); }
  // The expected result: everything in the engine's own memory at once.
  Result Reference() {
    const Buffer hidden(BufferKind::kDevice, kBytes);
    const Buffer grad_hidden(BufferKind::kDevice, kBytes);
    CopyMemory(hidden.as<void>(), Hidden().data(), kBytes);
    return Compute(Make(hidden.as<void>(), MemorySpace::kDevice, grad_hidden.as<void>(), MemorySpace::kDevice));
  }

 private:
  std::unique_ptr<LossEngine> engine_;
  std::unique_ptr<EngineHead> head_;
  std::vector<int32_t> targets_;
  LossTerm term_;
};

// Losses and grad_weight come from the same products wherever the rows are; grad_hidden's may be cut differently.
void ExpectSame(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.sums.loss_sum, expected.sums.loss_sum);
  EXPECT_EQ(actual.sums.valid_token_count, expected.sums.valid_token_count);
  EXPECT_EQ(std::memcmp(actual.grad_weight.data(), expected.grad_weight.data(), expected.grad_weight.size() * 4), 0);
  ASSERT_EQ(actual.grad_hidden.size(), expected.grad_hidden.size());
  EXPECT_LE(RelativeDifference(Decode(actual.grad_hidden), Decode(expected.grad_hidden)), 4e-3);
}

void ExpectSameBits(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.sums.loss_sum, expected.sums.loss_sum);
  EXPECT_TRUE(actual.grad_hidden == expected.grad_hidden);
  EXPECT_TRUE(actual.grad_weight == expected.grad_weight);
}

// Rows come to `hidden` (null: they are there) when they are awaited.
class ArrivingRows final : public RowFlow {
 public:
  ArrivingRows(void* hidden, const void* grad_hidden) : hidden_(hidden), grad_hidden_(grad_hidden) {
    if (hidden != nullptr) CheckCuda(cudaMemset(hidden, 0xFF, kBytes), "cudaMemset");
    CheckCuda(cudaDeviceSynchronize(), "cudaMemset");
    seen_.reserve(static_cast<size_t>(kBytes));
  }
  void FailAtAwait(int call) { failing_ = call; }
  void FailAtDecide() { fails_decide_ = true; }

  absl::Status AwaitRows(int64_t row_end) override {
    EXPECT_GE(row_end, awaited_);
    if (++awaits_ == failing_) return absl::CancelledError("the rows stay away");
    if (hidden_ != nullptr && row_end > awaited_) {
      CheckCuda(cudaMemcpy(static_cast<char*>(hidden_) + awaited_ * kRowBytes,
                           reinterpret_cast<const char*>(Hidden().data()) + awaited_ * kRowBytes,
                           static_cast<size_t>((row_end - awaited_) * kRowBytes), cudaMemcpyDefault),
                "rows that arrive");
      CheckCuda(cudaStreamSynchronize(nullptr), "rows that arrive");  // pageable memory: it may return earlier
    }
    awaited_ = std::max(awaited_, row_end);
    return absl::OkStatus();
  }
  absl::Status Decide(const DigestBuilder* rows) override {
    EXPECT_EQ(awaited_, kRows);
    ++decided_;
    if (rows != nullptr) digest_ = rows->Finish("header");
    return fails_decide_ ? absl::AbortedError("decided otherwise") : absl::OkStatus();
  }
  // On a thread of the driver's, which must not call CUDA.
  void GradHiddenReady(int64_t row_end) override {
    const auto* bytes = static_cast<const uint8_t*>(grad_hidden_);
    EXPECT_GT(row_end, ready_);
    seen_.insert(seen_.end(), bytes + ready_ * kRowBytes, bytes + row_end * kRowBytes);
    ready_ = row_end;
    ++notes_;
  }

  void ExpectSeen(const Result& result) const {
    EXPECT_EQ(ready_, kRows);
    ASSERT_EQ(static_cast<int64_t>(seen_.size()), kBytes);
    EXPECT_EQ(std::memcmp(seen_.data(), result.grad_hidden.data(), seen_.size()), 0) << "rows changed after they were final";
  }
  int awaits() const { return awaits_; }
  int decided() const { return decided_; }
  int notes() const { return notes_; }
  const std::optional<Digest>& digest() const { return digest_; }

 private:
  void* const hidden_;
  const void* const grad_hidden_;
  int failing_ = 0;
  bool fails_decide_ = false;
  int64_t awaited_ = 0;
  int awaits_ = 0;
  int decided_ = 0;
  int64_t ready_ = 0;
  int notes_ = 0;
  std::vector<uint8_t> seen_;
  std::optional<Digest> digest_;
};

// The use of the gradients.
enum class Use { kAdded, kCommitted, kNothingEveryOther };

// Six micro-batches; `waits`: the device is idle before the next one.
std::vector<Result> RunSix(FlowEngine& engine, Use use, bool waits) {
  const Buffer hidden(BufferKind::kPinned, kBytes);
  const Buffer grad_hidden(BufferKind::kPinned, kBytes);
  std::vector<Result> results;
  CheckStatus(engine.head().ZeroGradient(), "ZeroGradient");
  for (uint32_t i = 0; i < 6; ++i) {
    const std::vector<uint16_t> rows = Values(kRows * kWidth, 100 + i, 1);
    std::memcpy(hidden.as<void>(), rows.data(), static_cast<size_t>(kBytes));
    MicroBatch micro_batch = engine.Make(hidden.as<void>(), MemorySpace::kHost, grad_hidden.as<void>(), MemorySpace::kHost);
    // So few lie elsewhere in the workspace, and are kept as rows where that is asked for.
    if (i % 3 == 2) engine.Shorten(&micro_batch, 900);
    if (use == Use::kCommitted) micro_batch.grad_weight = GradWeightMode::kStage;
    if (use == Use::kNothingEveryOther && i % 2 == 1) {
      micro_batch.backward = false;
      micro_batch.grad_weight = GradWeightMode::kNone;
      micro_batch.grad_hidden = {};
    }
    absl::StatusOr<MicroBatchResult> computed = engine.engine().Compute(micro_batch);
    CheckStatus(computed.status(), "Compute");
    if (use == Use::kCommitted) CheckStatus(computed->staged->Commit(0.5 + i), "Commit");
    Result& result = results.emplace_back();
    result.sums = computed->terms[0];
    result.grad_hidden.resize(static_cast<size_t>(kRows * kWidth));
    std::memcpy(result.grad_hidden.data(), grad_hidden.as<void>(), static_cast<size_t>(kBytes));
    if (waits) result.grad_weight = engine.ReadGradient();
  }
  results.back().grad_weight = engine.ReadGradient();
  return results;
}

class CudaRowFlow : public ::testing::TestWithParam<bool> {
 protected:
  FlowEngine MakeEngine(int64_t chunk_rows = 0) const {
    return FlowEngine(EngineOptions{.token_chunk_rows = chunk_rows, .portable_kernels = GetParam()});
  }
};

// Deterministic mode cuts rows alike wherever they lie: with each of these workspaces tensors on the host take the room of some
// hundred rows' exponentials.
TEST(CudaRowFlowPlaces, DoNotAffectDeterministicBits) {
  for (int64_t mebibytes = 24; mebibytes <= 120; mebibytes += 8) {
    SCOPED_TRACE(std::to_string(mebibytes) + " MiB beyond the products' own");
    FlowEngine engine(EngineOptions{.deterministic = true}, (64 + mebibytes) << 20);
    const Result expected = engine.Reference();
    for (const BufferKind kind : {BufferKind::kPinned, BufferKind::kDevice}) {
      // On the device once more, at an address that is a multiple of 16 bytes only.
      const int64_t offset = kind == BufferKind::kDevice ? 16 : 0;
      const Buffer hidden(kind, kBytes + offset);
      const Buffer grad_hidden(kind, kBytes + offset);
      char* const rows = hidden.as<char>() + offset;
      CopyMemory(rows, Hidden().data(), kBytes);
      const MemorySpace memory = kind == BufferKind::kDevice ? MemorySpace::kDevice : MemorySpace::kHost;
      ExpectSameBits(engine.Compute(engine.Make(rows, memory, grad_hidden.as<char>() + offset, memory)), expected);
    }
  }
}

// ... and whatever other heads there are, whose plans may make the workspace larger.
TEST(CudaRowFlowPlaces, OtherHeadsDoNotAffectDeterministicBits) {
  FlowEngine engine(EngineOptions{.deterministic = true}, (64 + 24) << 20);
  const Result expected = engine.Reference();
  const int64_t planned = engine.engine().planned_bytes();
  const HeadSpec spec = {.vocab_size = 30 * kVocab,
                         .hidden_size = 8,
                         .data_type = DataType::kBFloat16,
                         .transform = {.valid_vocab_size = 30 * kVocab}};
  std::unique_ptr<EngineHead> other = MakeHeadOn(engine.engine(), spec);
  EXPECT_GT(engine.engine().planned_bytes(), planned + 2 * (int64_t{24} << 20)) << "its workspace is no larger";
  for (const char* when : {"beside a larger head", "after it"}) {
    SCOPED_TRACE(when);
    ExpectSameBits(engine.Reference(), expected);
    other.reset();
  }
}

// grad_weight's products may still run when Compute() returns: they need nothing of the caller's.
TEST_P(CudaRowFlow, TensorsAreReleasedWithTheResult) {
  FlowEngine engine = MakeEngine();
  const Result expected = engine.Reference();
  cudaStream_t stream = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const MemorySpace memory : {MemorySpace::kDevice, MemorySpace::kHost}) {
    const BufferKind kind = memory == MemorySpace::kDevice ? BufferKind::kDevice : BufferKind::kPinned;
    const Buffer hidden(kind, kBytes);
    const Buffer grad_hidden(kind, kBytes);
    for (int i = 0; i < 20; ++i) {
      CopyMemory(hidden.as<void>(), Hidden().data(), kBytes);
      CheckStatus(engine.head().ZeroGradient(), "ZeroGradient");
      const MicroBatch micro_batch = engine.Make(hidden.as<void>(), memory, grad_hidden.as<void>(), memory);
      CheckStatus(engine.engine().Compute(micro_batch).status(), "Compute");
      for (const Buffer* mine : {&hidden, &grad_hidden}) {
        if (kind == BufferKind::kPinned) {
          std::memset(mine->as<void>(), 0xFF, static_cast<size_t>(kBytes));
        } else {
          CheckCuda(cudaMemsetAsync(mine->as<void>(), 0xFF, static_cast<size_t>(kBytes), stream), "cudaMemset");
        }
      }
      CheckCuda(cudaStreamSynchronize(stream), "cudaMemset");
      const std::vector<float> gradient = engine.ReadGradient();
      ASSERT_EQ(std::memcmp(gradient.data(), expected.grad_weight.data(), gradient.size() * 4), 0) << "micro-batch " << i;
    }
  }
  CheckCuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_P(CudaRowFlow, BackToBackMicroBatchesHaveTheBitsOfAwaitedOnes) {
  // In one chunk, and in several, each of more than one slice.
  for (const int64_t chunk_rows : {0, 2400}) {
    FlowEngine engine = MakeEngine(chunk_rows);
    for (const Use use : {Use::kAdded, Use::kCommitted, Use::kNothingEveryOther}) {
      SCOPED_TRACE("chunks of " + std::to_string(chunk_rows) + ", use " + std::to_string(static_cast<int>(use)));
      const std::vector<Result> expected = RunSix(engine, use, /*waits=*/true);
      for (int round = 0; round < 5; ++round) {
        const std::vector<Result> actual = RunSix(engine, use, /*waits=*/false);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_EQ(actual[i].sums.loss_sum, expected[i].sums.loss_sum) << i;
          EXPECT_EQ(actual[i].grad_hidden, expected[i].grad_hidden) << i;
        }
        EXPECT_EQ(actual.back().grad_weight, expected.back().grad_weight);
      }
    }
  }
}

TEST_P(CudaRowFlow, PageLockedRowsComeSliceBySlice) {
  FlowEngine engine = MakeEngine();
  const Result expected = engine.Reference();
  const auto hidden = engine.engine().AllocateHostMemory(kBytes);
  const auto grad_hidden = engine.engine().AllocateHostMemory(kBytes);
  CheckStatus(hidden.status(), "AllocateHostMemory");
  CheckStatus(grad_hidden.status(), "AllocateHostMemory");
  MicroBatch micro_batch = engine.Make((*hidden)->data(), MemorySpace::kHost, (*grad_hidden)->data(), MemorySpace::kHost);
  for (const bool digest_rows : {false, true}) {
    ArrivingRows flow((*hidden)->data(), (*grad_hidden)->data());
    micro_batch.flow = &flow;
    micro_batch.digest_rows = digest_rows;
    const Result result = engine.Compute(micro_batch);
    ExpectSame(result, expected);
    flow.ExpectSeen(result);
    EXPECT_EQ(flow.decided(), 1);
    EXPECT_EQ(flow.digest().has_value(), digest_rows);
    if (digest_rows) {
      EXPECT_EQ(DigestToHex(*flow.digest()), DigestToHex(ExpectedDigest()));
    }
    if (!GetParam() && GpuCapability() == 90) {
      // The exponential form goes slice by slice.
      EXPECT_EQ(flow.notes(), 3);
      EXPECT_GE(flow.awaits(), 3);
    }
  }
  // Without a flow, and with the bits of one.
  ArrivingRows flow((*hidden)->data(), (*grad_hidden)->data());
  micro_batch.flow = &flow;
  micro_batch.digest_rows = false;
  const Result flowing = engine.Compute(micro_batch);
  micro_batch.flow = nullptr;
  ExpectSameBits(engine.Compute(micro_batch), flowing);
}

TEST_P(CudaRowFlow, AddsNothingIfTheCallerEndsIt) {
  FlowEngine engine = MakeEngine();
  const Result expected = engine.Reference();
  const Buffer hidden(BufferKind::kPinned, kBytes);
  const Buffer grad_hidden(BufferKind::kPinned, kBytes);
  MicroBatch micro_batch = engine.Make(hidden.as<void>(), MemorySpace::kHost, grad_hidden.as<void>(), MemorySpace::kHost);
  int awaits = 1;
  for (int call = 0; call <= awaits; ++call) {
    SCOPED_TRACE(call);
    ArrivingRows flow(hidden.as<void>(), grad_hidden.as<void>());
    if (call == 0) {
      flow.FailAtDecide();
    } else {
      flow.FailAtAwait(call);
    }
    micro_batch.flow = &flow;
    const absl::Status status = engine.engine().Compute(micro_batch).status();
    EXPECT_EQ(status.code(), call == 0 ? absl::StatusCode::kAborted : absl::StatusCode::kCancelled) << status;
    EXPECT_TRUE(engine.ReadGradient() == expected.grad_weight);
    if (call == 0) awaits = flow.awaits();
  }
  EXPECT_TRUE(engine.engine().health().ok());
  ArrivingRows flow(hidden.as<void>(), grad_hidden.as<void>());
  micro_batch.flow = &flow;
  ExpectSame(engine.Compute(micro_batch), expected);
}

// Rows in the memory of each GPU there is; grad_hidden there, and on the host.
TEST_P(CudaRowFlow, RowsOfAnyDevice) {
  FlowEngine engine = MakeEngine();
  const Result expected = engine.Reference();
  const Buffer pinned(BufferKind::kPinned, kBytes);
  int devices = 0;
  CheckCuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  for (int device = 0; device < devices; ++device) {
    SCOPED_TRACE("device " + std::to_string(device));
    CheckCuda(cudaSetDevice(device), "cudaSetDevice");
    const Buffer hidden(BufferKind::kDevice, kBytes);
    const Buffer grad_hidden(BufferKind::kDevice, kBytes);
    for (const bool to_host : {false, true}) {
      SCOPED_TRACE(to_host ? "grad_hidden on the host" : "grad_hidden on the device");
      CheckCuda(cudaSetDevice(device), "cudaSetDevice");
      void* out = to_host ? pinned.as<void>() : grad_hidden.as<void>();
      CheckCuda(cudaMemset(grad_hidden.as<void>(), 0xFF, kBytes), "cudaMemset");
      std::memset(pinned.as<void>(), 0xFF, kBytes);
      MicroBatch micro_batch =
          engine.Make(hidden.as<void>(), MemorySpace::kDevice, out, to_host ? MemorySpace::kHost : MemorySpace::kDevice);
      ArrivingRows flow(hidden.as<void>(), out);
      micro_batch.flow = &flow;
      micro_batch.digest_rows = true;
      const Result result = engine.Compute(micro_batch);
      ExpectSame(result, expected);
      EXPECT_EQ(DigestToHex(*flow.digest()), DigestToHex(ExpectedDigest()));
      if (to_host) {
        flow.ExpectSeen(result);
      } else {
        EXPECT_EQ(flow.notes(), 0);
      }
      DigestBuilder alone;
      ASSERT_TRUE(engine.engine().DigestRows({micro_batch.hidden}, nullptr, &alone).ok());
      EXPECT_EQ(DigestToHex(alone.Finish("header")), DigestToHex(ExpectedDigest()));
    }
  }
  CheckCuda(cudaSetDevice(0), "cudaSetDevice");
}

TEST_P(CudaRowFlow, MismatchedMemorySpacesAreRefused) {
  FlowEngine engine = MakeEngine();
  const Buffer on_device(BufferKind::kDevice, kBytes);
  const Buffer pinned(BufferKind::kPinned, kBytes);
  std::vector<uint8_t> pageable(static_cast<size_t>(kBytes));
  const auto refused = [&](const MicroBatch& micro_batch, const std::string& field) {
    const absl::Status status = engine.engine().Compute(micro_batch).status();
    EXPECT_REASON(status, kInvalidField);
    EXPECT_EQ(GetErrorMetadata(status).at("field"), field + ".memory");
  };
  refused(engine.Make(pageable.data(), MemorySpace::kDevice, pinned.as<void>(), MemorySpace::kHost), "hidden");
  refused(engine.Make(pinned.as<void>(), MemorySpace::kDevice, pinned.as<void>(), MemorySpace::kHost), "hidden");
  refused(engine.Make(on_device.as<void>(), MemorySpace::kHost, pinned.as<void>(), MemorySpace::kHost), "hidden");
  refused(engine.Make(on_device.as<void>(), MemorySpace::kDevice, pageable.data(), MemorySpace::kDevice), "grad_hidden");
  EXPECT_TRUE(engine.engine().health().ok());
}

// Sums of rows are taken while something is computed, and are none the worse for it.
TEST_P(CudaRowFlow, DigestsBesideComputations) {
  FlowEngine engine = MakeEngine();
  const Buffer hidden(BufferKind::kDevice, kBytes);
  const Buffer grad_hidden(BufferKind::kDevice, kBytes);
  CopyMemory(hidden.as<void>(), Hidden().data(), kBytes);
  const MicroBatch micro_batch = engine.Make(hidden.as<void>(), MemorySpace::kDevice, grad_hidden.as<void>(), MemorySpace::kDevice);
  const std::string expected = DigestToHex(ExpectedDigest());
  std::thread computing([&] {
    for (int round = 0; round < 20; ++round) EXPECT_TRUE(engine.engine().Compute(micro_batch).ok());
  });
  for (int round = 0; round < 50; ++round) {
    DigestBuilder builder;
    EXPECT_TRUE(engine.engine().DigestRows({micro_batch.hidden}, nullptr, &builder).ok());
    EXPECT_EQ(DigestToHex(builder.Finish("header")), expected);
  }
  computing.join();
}

INSTANTIATE_TEST_SUITE_P(All, CudaRowFlow, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "PortableKernels" : "OwnKernels"; });

// --- another process ---

constexpr char kFromChild[] = "HEADWATER_TEST_FROM_CHILD";
constexpr char kToChild[] = "HEADWATER_TEST_TO_CHILD";

struct Handles {
  DeviceHandle memory;
  DeviceHandle event;
};

void WriteAll(int fd, const void* data, size_t bytes) {
  if (write(fd, data, bytes) != static_cast<ssize_t>(bytes)) throw std::runtime_error("the other process is gone");
}

// Fails the test rather than waiting forever.
void ReadAll(int fd, void* data, size_t bytes) {
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    pollfd waited = {fd, POLLIN, 0};
    if (poll(&waited, 1, kPatienceMs) != 1) throw std::runtime_error("the other process does not answer");
    const ssize_t got = read(fd, next, bytes);
    if (got <= 0) throw std::runtime_error("the other process is gone");
    next += got;
    bytes -= static_cast<size_t>(got);
  }
}

// This program again, as the process whose memory is read and written: rows, and behind them grad_hidden.
class Child {
 public:
  Child() {
    int from[2];
    int to[2];
    if (pipe(from) != 0 || pipe(to) != 0) throw std::runtime_error("no pipe");
    for (const int own : {from[0], to[1]}) fcntl(own, F_SETFD, FD_CLOEXEC);
    const std::string from_text = std::string(kFromChild) + "=" + std::to_string(from[1]);
    const std::string to_text = std::string(kToChild) + "=" + std::to_string(to[0]);
    std::vector<char*> environment;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      // The figures' file is this process's.
      if (std::string(*variable).rfind("HEADWATER_FIGURES", 0) != 0) environment.push_back(*variable);
    }
    environment.push_back(const_cast<char*>(from_text.c_str()));
    environment.push_back(const_cast<char*>(to_text.c_str()));
    environment.push_back(nullptr);
    char program[] = "/proc/self/exe";
    char filter[] = "--gtest_filter=OtherProcess.DISABLED_ChildLends";
    char disabled[] = "--gtest_also_run_disabled_tests";
    char output[] = "--gtest_output=";
    char* arguments[] = {program, filter, disabled, output, nullptr};
    if (posix_spawn(&process_, program, nullptr, nullptr, arguments, environment.data()) != 0) {
      throw std::runtime_error("the program cannot be started again");
    }
    close(from[1]);
    close(to[0]);
    from_ = from[0];
    to_ = to[1];
  }
  ~Child() {
    close(to_);  // it ends by that at the latest
    if (process_ > 0) End(SIGKILL);
    close(from_);
  }

  Handles ReadHandles() {
    Handles handles;
    ReadAll(from_, &handles, sizeof(handles));
    return handles;
  }
  // The digest of its grad_hidden; then it ends.
  Digest ReadDigest() {
    const char go = 1;
    WriteAll(to_, &go, 1);
    Digest digest;
    ReadAll(from_, digest.data(), digest.size());
    return digest;
  }
  // Its exit status after the signal, or after it has ended by itself (0).
  int End(int signal) {
    if (signal != 0) kill(process_, signal);
    int status = 0;
    waitpid(process_, &status, 0);
    process_ = 0;
    return status;
  }

 private:
  pid_t process_ = 0;
  int from_ = -1;
  int to_ = -1;
};

// The other process. Its rows are still on their way when it says that they are there.
TEST(OtherProcess, DISABLED_ChildLends) {
  ASSERT_NE(std::getenv(kFromChild), nullptr) << "only as another test's child";
  const int to_parent = std::atoi(std::getenv(kFromChild));
  const int from_parent = std::atoi(std::getenv(kToChild));
  const Buffer memory(BufferKind::kDevice, 2 * kBytes);
  const Buffer rows(BufferKind::kPinned, kBytes);
  const Buffer other(BufferKind::kDevice, int64_t{1} << 30);
  CopyMemory(rows.as<void>(), Hidden().data(), kBytes);
  CheckCuda(cudaMemset(memory.as<void>(), 0xFF, 2 * kBytes), "cudaMemset");
  CheckCuda(cudaDeviceSynchronize(), "cudaMemset");
  cudaStream_t stream;
  cudaEvent_t event;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess), "cudaEventCreate");
  Handles handles;
  cudaIpcMemHandle_t memory_handle;
  cudaIpcEventHandle_t event_handle;
  CheckCuda(cudaIpcGetMemHandle(&memory_handle, memory.as<void>()), "cudaIpcGetMemHandle");
  CheckCuda(cudaIpcGetEventHandle(&event_handle, event), "cudaIpcGetEventHandle");
  std::memcpy(handles.memory.data(), &memory_handle, sizeof(memory_handle));
  std::memcpy(handles.event.data(), &event_handle, sizeof(event_handle));
  // About a tenth of a second.
  for (int i = 0; i < 300; ++i) CheckCuda(cudaMemsetAsync(other.as<void>(), i, size_t{1} << 30, stream), "cudaMemsetAsync");
  CheckCuda(cudaMemcpyAsync(memory.as<void>(), rows.as<void>(), kBytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  CheckCuda(cudaEventRecord(event, stream), "cudaEventRecord");
  WriteAll(to_parent, &handles, sizeof(handles));
  char go;
  ReadAll(from_parent, &go, 1);
  std::vector<uint8_t> gradient(static_cast<size_t>(kBytes));
  CopyMemory(gradient.data(), memory.as<char>() + kBytes, kBytes);
  DigestBuilder builder;
  builder.AddRows(0, 0, kRows, kRowBytes, gradient.data());
  const Digest digest = builder.Finish("");
  WriteAll(to_parent, digest.data(), digest.size());
}

TEST(OtherProcess, ItsMemoryIsReadAndWrittenInPlace) {
  FlowEngine engine;
  const Result expected = engine.Reference();
  Child child;
  const Handles handles = child.ReadHandles();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceEvent> event, engine.engine().OpenDeviceEvent(handles.event));
  {
    const absl::Status too_large = engine.engine().OpenDeviceMemory(handles.memory, int64_t{1} << 40).status();
    EXPECT_REASON(too_large, kInvalidField);
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceRegion> region, engine.engine().OpenDeviceMemory(handles.memory, 2 * kBytes));
    EXPECT_EQ(region->bytes(), 2 * kBytes);
    char* rows = static_cast<char*>(region->data());
    MicroBatch micro_batch = engine.Make(rows, MemorySpace::kDevice, rows + kBytes, MemorySpace::kDevice);
    micro_batch.after = event.get();
    const Result result = engine.Compute(micro_batch);
    ExpectSame(result, expected);
    EXPECT_TRUE(result.grad_hidden == expected.grad_hidden);
    DigestBuilder sum;
    ASSERT_TRUE(engine.engine().DigestRows({micro_batch.hidden}, event.get(), &sum).ok());
    EXPECT_EQ(DigestToHex(sum.Finish("header")), DigestToHex(ExpectedDigest()));
    DigestBuilder gradient;
    gradient.AddRows(0, 0, kRows, kRowBytes, result.grad_hidden.data());
    EXPECT_EQ(DigestToHex(child.ReadDigest()), DigestToHex(gradient.Finish("")));
  }
  EXPECT_EQ(child.End(0), 0);
  EXPECT_TRUE(engine.engine().health().ok());
}

// A region whose process has died is given back, its handle refused, and everything else continues.
TEST(OtherProcess, DeathIsSurvived) {
  FlowEngine engine;
  const Result expected = engine.Reference();
  Handles handles;
  {
    Child child;
    handles = child.ReadHandles();
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DeviceRegion> region, engine.engine().OpenDeviceMemory(handles.memory, kBytes));
    EXPECT_NE(child.End(SIGKILL), 0);
  }
  const absl::Status stale = engine.engine().OpenDeviceMemory(handles.memory, kBytes).status();
  EXPECT_REASON(stale, kInvalidField);
  EXPECT_TRUE(engine.engine().health().ok());
  ExpectSame(engine.Reference(), expected);
}

}  // namespace
}  // namespace headwater::testing
