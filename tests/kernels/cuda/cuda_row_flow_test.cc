// Rows that come and gradients that leave while a GPU computes. They are in page-locked memory, or in device memory of any GPU;
// e2e_cuda_ipc_test has that of another process.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "headwater/kernels/digest.h"
#include "headwater/kernels/error.h"
#include "kernels/reference/storage.h"
#include "tests/kernels/cuda/cuda_fp64.h"
#include "tests/kernels/cuda/cuda_problem.h"
#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/cuda/cuda_test_environment.h"
#include "tests/kernels/support/checked_flow.h"
#include "tests/unit/expect_status.h"

namespace headwater::testing {
namespace {

const bool kSkipsWithoutGpu = SkipTestsWithoutGpu();

const ProblemShape kShape = {"", 4700, 512, 8000};
constexpr int64_t kRows = 4700;
constexpr int64_t kRowBytes = 512 * 2;
constexpr int64_t kBytes = kRows * kRowBytes;

// Some rows are ignored, the last ones too.
const DeviceProblem& Problem() {
  static const DeviceProblem problem = [] {
    DeviceProblem made = MakeCrossEntropyProblem(kShape, Regime::kFlat);
    for (size_t i = 0; i < made.targets.size(); ++i) {
      if (i % 97 < 3 || i > made.targets.size() - 9) made.targets[i] = kDefaultIgnoreIndex;
    }
    return made;
  }();
  return problem;
}

std::vector<uint16_t> OnHost(const Buffer& rows) {
  std::vector<uint16_t> values(static_cast<size_t>(rows.bytes() / 2));
  CopyMemory(values.data(), rows.as<void>(), rows.bytes());
  return values;
}

// The problem's rows.
const std::vector<uint16_t>& Hidden() {
  static const std::vector<uint16_t> hidden = OnHost(Problem().hidden);
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

// An engine with the problem's head, for all of its rows or the first of them.
class FlowEngine : public DeviceEngine {
 public:
  explicit FlowEngine(EngineOptions options = {}, int64_t workspace_bytes = int64_t{1} << 30)
      : DeviceEngine(Problem(), WithWorkspace(std::move(options), workspace_bytes), /*staging_slots=*/1) {}

  MicroBatch Make(const void* hidden, MemorySpace hidden_memory, void* grad_hidden, MemorySpace grad_memory, int64_t rows = kRows) {
    return DeviceEngine::Make(hidden, hidden_memory, grad_hidden, grad_memory, 0, rows);
  }
  // On an accumulator of 0.
  Result Compute(const MicroBatch& micro_batch) {
    CheckStatus(head().ZeroGradient(), "ZeroGradient");
    const absl::StatusOr<MicroBatchResult> computed = engine().Compute(micro_batch);
    CheckStatus(computed.status(), "Compute");
    Result result;
    result.sums = computed->terms[0];
    result.grad_hidden.resize(static_cast<size_t>(kBytes / 2));
    CopyMemory(result.grad_hidden.data(), micro_batch.grad_hidden.data, kBytes);
    result.grad_weight = ReadGradient();
    return result;
  }
  // The expected result: everything in the engine's own memory at once.
  Result Reference() {
    const Buffer grad_hidden(BufferKind::kDevice, kBytes);
    return Compute(Make(Problem().hidden.as<void>(), MemorySpace::kDevice, grad_hidden.as<void>(), MemorySpace::kDevice));
  }

 private:
  static EngineOptions WithWorkspace(EngineOptions options, int64_t bytes) {
    options.workspace_bytes = bytes;
    return options;
  }
};

// Losses and grad_weight come from the same products wherever the rows are; grad_hidden's may be cut differently.
void ExpectSame(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.sums.loss_sum, expected.sums.loss_sum);
  EXPECT_EQ(actual.sums.valid_token_count, expected.sums.valid_token_count);
  EXPECT_EQ(std::memcmp(actual.grad_weight.data(), expected.grad_weight.data(), expected.grad_weight.size() * 4), 0);
  ASSERT_EQ(actual.grad_hidden.size(), expected.grad_hidden.size());
  const auto decode = [](const std::vector<uint16_t>& values) {
    return reference::Decode(DataType::kBFloat16, values.data(), static_cast<int64_t>(values.size()));
  };
  EXPECT_LE(RelativeDifference(decode(actual.grad_hidden), decode(expected.grad_hidden)), 4e-3);
}

void ExpectSameBits(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.sums.loss_sum, expected.sums.loss_sum);
  EXPECT_TRUE(actual.grad_hidden == expected.grad_hidden);
  EXPECT_TRUE(actual.grad_weight == expected.grad_weight);
}

// The rows of a micro-batch, poison so far, come when they are awaited.
class ArrivingRows final : public CheckedFlow {
 public:
  explicit ArrivingRows(MicroBatch* micro_batch)
      : CheckedFlow(*micro_batch), hidden_(static_cast<char*>(const_cast<void*>(micro_batch->hidden.data))) {
    CheckCuda(cudaMemset(hidden_, 0xFF, kBytes), "cudaMemset");
    CheckCuda(cudaDeviceSynchronize(), "cudaMemset");
    micro_batch->flow = this;
  }

 protected:
  absl::Status Arrive(int64_t row_start, int64_t row_end) override {
    const size_t bytes = static_cast<size_t>((row_end - row_start) * kRowBytes);
    const auto* rows = reinterpret_cast<const char*>(Hidden().data());
    CheckCuda(cudaMemcpy(hidden_ + row_start * kRowBytes, rows + row_start * kRowBytes, bytes, cudaMemcpyDefault),
              "rows that arrive");
    CheckCuda(cudaStreamSynchronize(nullptr), "rows that arrive");  // pageable memory: it may return earlier
    return absl::OkStatus();
  }

 private:
  char* const hidden_;
};

// The use of the gradients.
enum class Use { kAdded, kCommitted, kNothingEveryOther };

// The rows of six micro-batches, made before any of them is computed: making them waits for the device.
const std::vector<std::vector<uint16_t>>& SixHidden() {
  static const std::vector<std::vector<uint16_t>> all = [] {
    std::vector<std::vector<uint16_t>> made;
    const Buffer rows(BufferKind::kDevice, kBytes);
    for (uint64_t i = 0; i < 6; ++i) {
      CheckCuda(FillNormal(rows.as<uint16_t>(), kBytes / 2, 100 + i, 1), "FillNormal");
      made.push_back(OnHost(rows));
    }
    return made;
  }();
  return all;
}

// Six micro-batches; `waits`: the device is idle before the next one.
std::vector<Result> RunSix(FlowEngine& engine, Use use, bool waits) {
  const Buffer hidden(BufferKind::kPinned, kBytes);
  const Buffer grad_hidden(BufferKind::kPinned, kBytes);
  std::vector<Result> results;
  CheckStatus(engine.head().ZeroGradient(), "ZeroGradient");
  for (uint32_t i = 0; i < 6; ++i) {
    std::memcpy(hidden.as<void>(), SixHidden()[i].data(), static_cast<size_t>(kBytes));
    // So few lie elsewhere in the workspace, and are kept as rows where that is asked for.
    const int64_t rows = i % 3 == 2 ? 900 : kRows;
    MicroBatch micro_batch = engine.Make(hidden.as<void>(), MemorySpace::kHost, grad_hidden.as<void>(), MemorySpace::kHost, rows);
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
    result.grad_hidden.resize(static_cast<size_t>(kBytes / 2));
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
  std::unique_ptr<EngineHead> other = MakeHeadOn(engine.engine(), BFloat16Head({"", 0, 8, 30 * kShape.vocab}, /*trainable=*/false));
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
    ArrivingRows flow(&micro_batch);
    micro_batch.digest_rows = digest_rows;
    ExpectSame(engine.Compute(micro_batch), expected);
    flow.ExpectComplete();
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
  ArrivingRows flow(&micro_batch);
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
    ArrivingRows flow(&micro_batch);
    if (call == 0) flow.FailAtDecide();
    flow.FailAtAwait(call);
    const absl::Status status = engine.engine().Compute(micro_batch).status();
    EXPECT_EQ(status.code(), call == 0 ? absl::StatusCode::kAborted : absl::StatusCode::kCancelled) << status;
    EXPECT_TRUE(engine.ReadGradient() == expected.grad_weight);
    if (call == 0) awaits = flow.awaits();
  }
  EXPECT_TRUE(engine.engine().health().ok());
  ArrivingRows flow(&micro_batch);
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
      ArrivingRows flow(&micro_batch);
      micro_batch.digest_rows = true;
      ExpectSame(engine.Compute(micro_batch), expected);
      EXPECT_EQ(DigestToHex(*flow.digest()), DigestToHex(ExpectedDigest()));
      if (to_host) {
        flow.ExpectComplete();
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
  const Buffer grad_hidden(BufferKind::kDevice, kBytes);
  const MicroBatch micro_batch =
      engine.Make(Problem().hidden.as<void>(), MemorySpace::kDevice, grad_hidden.as<void>(), MemorySpace::kDevice);
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

}  // namespace
}  // namespace headwater::testing
