#include "kernels/cuda/products/products.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "kernels/cuda/products/algorithm_cache.h"
#include "kernels/cuda/status.h"

namespace headwater::cuda {
namespace {

// The end of the workspace holds the two values of beta, for products whose alpha is in device memory: both are there or neither.
constexpr int64_t kConstantsBytes = 256;
constexpr size_t kUsableWorkspaceBytes = static_cast<size_t>(Products::kWorkspaceBytes - kConstantsBytes);

// No algorithm needs more alignment than a vector load or a TMA descriptor does. Reporting no more to the library makes the choice
// depend on the shape alone where pointers are aligned as tensors are.
constexpr int64_t kFullAlignment = 16;

// Plans are kept for this many exact shapes; then all are made again, from the same algorithms.
constexpr size_t kMaxPlans = 8192;

// Algorithms asked for, and of these, timed.
constexpr int kAskedAlgorithms = 32;
constexpr size_t kTimedAlgorithms = 16;
constexpr size_t kFinalists = 3;
// A GPU under a power limit runs faster for the first tenth of a second. A search therefore begins with load, and the finalists
// take turns.
constexpr double kWarmUpMs = 100;
constexpr double kFirstTimingMs = 10;
constexpr double kFinalTimingMs = 25;
// A product that takes longer than kLongMs gets a turn so long that the clock settles where the power limit leaves it for this
// algorithm. In short turns all run at the same clock, and one that needs less power does not show it.
constexpr double kLongMs = 2;
constexpr double kLongFinalTimingMs = 200;
constexpr int kFinalRounds = 2;

// Terms of a sum are split over blocks only where the number of terms is a multiple of this. With split sums, cuBLASLt 12 and 13
// are reported to omit the terms beyond the main loop's last whole step (github.com/facebookexperimental/triton, pull request
// 2767). Steps are 128 terms at most.
constexpr int64_t kSplitMultiple = 128;

absl::Status BlasStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  // A CUDA error says more, and distinguishes a lost device from a product that is not available. It must not show in the next
  // call.
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return CudaStatus(error, what);
  return MakeError(ErrorReason::kEngineFailed, absl::StrCat(what, " failed: ", cublasLtGetStatusName(status)));
}

cudaDataType_t CudaType(Element element) {
  switch (element) {
    case Element::kFloat32:
      return CUDA_R_32F;
    case Element::kBFloat16:
      return CUDA_R_16BF;
    case Element::kFloat16:
      return CUDA_R_16F;
    case Element::kFloat64:
      return CUDA_R_64F;
  }
  return CUDA_R_32F;
}

const char* ElementName(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "fp32";
    case Element::kBFloat16:
      return "bf16";
    case Element::kFloat16:
      return "fp16";
    case Element::kFloat64:
      return "fp64";
  }
  return "?";
}

const char* KindName(ProductKind kind) {
  switch (kind) {
    case ProductKind::kLogits:
      return "logits";
    case ProductKind::kGradHidden:
      return "grad_hidden";
    case ProductKind::kGradWeight:
      return "grad_weight";
  }
  return "?";
}

// A row-major matrix is its transpose in column-major order, so out^T = op(b^T) op(a^T): b is the library's A and a is its B.
struct ColumnMajor {
  bool transpose_a, transpose_b;
  int64_t m, n, k;      // C is m x n, the sums have k terms
  int64_t a_columns;    // A is stored as width x a_columns
  int64_t b_row_count;  // B is stored as b_row_count x rows
};

ColumnMajor ToColumnMajor(const ProductShape& s) {
  switch (s.kind) {
    case ProductKind::kLogits:
      return {true, false, s.vocab, s.rows, s.width, s.vocab, s.width};
    case ProductKind::kGradHidden:
      return {false, false, s.width, s.rows, s.vocab, s.vocab, s.vocab};
    case ProductKind::kGradWeight:
      break;
  }
  return {false, true, s.width, s.vocab, s.rows, s.rows, s.vocab};
}

// The largest power of two up to kFullAlignment at whose multiples every row of a matrix begins.
int32_t AlignmentOf(const void* data, int64_t stride, Element element) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(stride * BytesOf(element)) | kFullAlignment;
  return static_cast<int32_t>(bits & (~bits + 1));
}

struct PlanKey {
  ProductShape shape;
  bool alpha_on_device = false;
  int32_t a_alignment = 0, b_alignment = 0, out_alignment = 0;  // bytes

  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

PlanKey KeyOf(const ProductShape& shape, const void* a, const void* b, const void* out, bool alpha_on_device) {
  return {shape, alpha_on_device, AlignmentOf(a, shape.a_stride, shape.element), AlignmentOf(b, shape.b_stride, shape.element),
          AlignmentOf(out, shape.out_stride, shape.out_element)};
}

struct Hash {
  static void Mix(size_t* hash, uint64_t value) {
    *hash = (*hash ^ value) * 0x9E3779B97F4A7C15ull;
    *hash ^= *hash >> 29;
  }
  size_t operator()(const ProductShape& s) const {
    size_t hash = static_cast<size_t>(s.kind) * 64 + static_cast<size_t>(s.element) * 8 + static_cast<size_t>(s.out_element);
    for (const int64_t value : {s.rows, s.vocab, s.width, s.a_stride, s.b_stride, s.out_stride, int64_t{s.adds}}) {
      Mix(&hash, static_cast<uint64_t>(value));
    }
    return hash;
  }
  size_t operator()(const PlanKey& key) const {
    size_t hash = (*this)(key.shape);
    Mix(&hash, static_cast<uint64_t>(key.a_alignment + 32 * key.b_alignment + 1024 * key.out_alignment) * 2 +
                   (key.alpha_on_device ? 1 : 0));
    return hash;
  }
};

// Key of a product's algorithm: rows in the same bucket, whatever the strides are (M stands with gaps or without). A grad_weight
// product has one algorithm, by the time in which it adds: the first of a step, which overwrites, has the same bits.
ProductShape BucketOf(ProductShape shape) {
  if (shape.kind == ProductKind::kGradWeight) shape.adds = true;
  shape.a_stride = shape.b_stride = shape.out_stride = 0;
  for (const int64_t rows : Products::kRowBuckets) {
    if (shape.rows <= rows) {
      shape.rows = rows;
      return shape;
    }
  }
  shape.rows = *std::rbegin(Products::kRowBuckets);
  return shape;
}

// Descriptors and the algorithm. Made in place and not moved: the library does not say that its descriptors may be. They own
// nothing.
struct Plan {
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, c;
  cublasLtMatmulAlgo_t algorithm;
};

template <typename T>
T Config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, T unknown) {
  T value = unknown;
  size_t written = 0;
  return cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written) == CUBLAS_STATUS_SUCCESS
             ? value
             : unknown;
}

template <typename T>
T Capability(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoCapAttributes_t attribute, T unknown) {
  T value = unknown;
  size_t written = 0;
  return cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, &value, sizeof(value), &written) == CUBLAS_STATUS_SUCCESS
             ? value
             : unknown;
}

// In-place reduction adds to the output in an order that counters keep. The other schemes keep the parts apart and add them up in a
// kernel of their own. By the library's manual ("Results Reproducibility") everything else repeats bit for bit on one stream with a
// workspace of the caller's.
uint32_t AllowedReductions(const ProductShape& shape) {
  if (ToColumnMajor(shape).k % kSplitMultiple != 0) return CUBLASLT_REDUCTION_SCHEME_NONE;
  return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
}

// How an algorithm may compute: fp32 operands neither as TF32 nor as a sum of bf16, 16-bit ones not with 16-bit sums.
uint64_t AllowedNumerics(const ProductShape& shape) {
  uint64_t excluded = CUBLASLT_NUMERICAL_IMPL_FLAGS_ACCUMULATOR_16F;
  if (shape.element == Element::kFloat32) {
    excluded |= CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_TF32 | CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_16BF |
                CUBLASLT_NUMERICAL_IMPL_FLAGS_INPUT_16F;
  }
  return ~excluded;
}

class Preference {
 public:
  Preference() { static_cast<void>(cublasLtMatmulPreferenceCreate(&preference_)); }
  ~Preference() { static_cast<void>(cublasLtMatmulPreferenceDestroy(preference_)); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  template <typename T>
  void Set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    if (status_ == CUBLAS_STATUS_SUCCESS) {
      status_ = preference_ == nullptr ? CUBLAS_STATUS_ALLOC_FAILED
                                       : cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof(value));
    }
  }
  cublasLtMatmulPreference_t get() const { return preference_; }
  cublasStatus_t status() const { return status_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

// A pair of events around enqueued work.
class Stopwatch {
 public:
  Stopwatch() : error_(cudaEventCreate(&start_)) {
    if (error_ == cudaSuccess) error_ = cudaEventCreate(&stop_);
  }
  ~Stopwatch() {
    if (start_ != nullptr) static_cast<void>(cudaEventDestroy(start_));
    if (stop_ != nullptr) static_cast<void>(cudaEventDestroy(stop_));
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  cudaError_t error() const { return error_; }
  cudaError_t Start(cudaStream_t stream) { return cudaEventRecord(start_, stream); }
  // Waits for the work.
  cudaError_t Stop(cudaStream_t stream, float* ms) {
    cudaError_t error = cudaEventRecord(stop_, stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(stop_);
    return error == cudaSuccess ? cudaEventElapsedTime(ms, start_, stop_) : error;
  }

 private:
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
  cudaError_t error_;
};

// Operands of one product.
struct Operands {
  const void* a;
  const void* b;
  void* out;
};

class LtProducts final : public Products {
 public:
  LtProducts(void* workspace, const std::string& cache_path)
      : workspace_(workspace),
        constants_(reinterpret_cast<float*>(static_cast<char*>(workspace) + kUsableWorkspaceBytes)),
        cache_(cache_path) {}
  ~LtProducts() override {
    if (handle_ != nullptr) static_cast<void>(cublasLtDestroy(handle_));
  }

  absl::Status Open() {
    int device = 0;
    HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "asking for the device"));
    cudaDeviceProp properties;
    HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, device), "asking for the device's properties"));
    HEADWATER_RETURN_IF_ERROR(BlasStatus(cublasLtCreate(&handle_), "opening cuBLASLt"));
    machine_ = absl::StrCat(properties.name, ", ", properties.multiProcessorCount, " SMs, cuBLASLt ", cublasLtGetVersion(), ", ");
    const float zero_and_one[] = {0, 1};
    cudaError_t error = cudaMemcpy(constants_, zero_and_one, sizeof(zero_and_one), cudaMemcpyHostToDevice);
    // A copy out of pageable memory may end on its way; streams that do not wait for the default stream would not see it.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    return CudaStatus(error, "writing the products' constants");
  }

  absl::Status Run(const ProductShape& shape, const void* a, const void* b, void* out, double alpha, const float* alpha_device,
                   cudaStream_t stream) override {
    const ColumnMajor size = ToColumnMajor(shape);
    if (size.m == 0 || size.n == 0) return absl::OkStatus();
    if (size.k == 0) {
      if (shape.adds) return absl::OkStatus();
      const size_t element = static_cast<size_t>(BytesOf(shape.out_element));
      return CudaStatus(cudaMemset2DAsync(out, static_cast<size_t>(shape.out_stride) * element, 0,
                                          static_cast<size_t>(size.m) * element, static_cast<size_t>(size.n), stream),
                        "clearing an empty product");
    }
    const PlanKey key = KeyOf(shape, a, b, out, alpha_device != nullptr);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      auto plan = std::make_unique<Plan>();
      HEADWATER_RETURN_IF_ERROR(MakePlan(key, plan.get()));
      if (plans_.size() >= kMaxPlans) plans_.clear();
      found = plans_.emplace(key, std::move(plan)).first;
    }
    Plan& plan = *found->second;
    return BlasStatus(Enqueue(plan, plan.algorithm, shape, {a, b, out}, alpha, alpha_device, stream), "a matrix product");
  }

  absl::Status Search(const ProductShape& shape, const void* a, const void* b, void* out, cudaStream_t stream) override {
    if (2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.vocab) * static_cast<double>(shape.width) <
        kMinSearchedFlops) {
      return absl::OkStatus();
    }
    const ProductShape bucket = BucketOf(shape);
    if (buckets_.contains(bucket)) return absl::OkStatus();
    const PlanKey key = KeyOf(shape, a, b, out, /*alpha_on_device=*/false);
    Plan plan;
    HEADWATER_RETURN_IF_ERROR(Describe(key, &plan));
    const std::string cache_key = CacheKey(bucket);
    if (const std::optional<AlgorithmWords> words = cache_.Find(cache_key); words.has_value()) {
      cublasLtMatmulAlgo_t algorithm;
      static_assert(sizeof(algorithm) == sizeof(*words), "the cache keeps all of an algorithm");
      std::memcpy(&algorithm, words->data(), sizeof(algorithm));
      if (CanRun(key, plan, algorithm)) {
        buckets_.emplace(bucket, algorithm);
        return absl::OkStatus();
      }
    }
    absl::StatusOr<std::vector<cublasLtMatmulAlgo_t>> candidates = Candidates(key, plan);
    if (!candidates.ok()) return candidates.status();
    if (candidates->size() > kTimedAlgorithms) candidates->resize(kTimedAlgorithms);
    absl::StatusOr<cublasLtMatmulAlgo_t> best = Fastest(plan, *candidates, shape, {a, b, out}, stream);
    if (!best.ok()) return best.status();
    buckets_.emplace(bucket, *best);
    AlgorithmWords words;
    std::memcpy(words.data(), &*best, sizeof(*best));
    // A file that cannot be written costs the next start a search, nothing else.
    static_cast<void>(cache_.Put(cache_key, words));
    return absl::OkStatus();
  }

 private:
  std::string CacheKey(const ProductShape& s) const {
    return absl::StrCat(machine_, KindName(s.kind), s.adds ? " adding " : " ", ElementName(s.element), " to ",
                        ElementName(s.out_element), ", rows ", s.rows, ", vocab ", s.vocab, ", width ", s.width);
  }

  // Fills in everything but the algorithm.
  static absl::Status Describe(const PlanKey& key, Plan* plan) {
    const ProductShape& s = key.shape;
    const bool wide = s.element == Element::kFloat64;
    if ((s.out_element == Element::kFloat64) != wide || (s.out_element != Element::kFloat32 && !wide) ||
        (wide && key.alpha_on_device)) {
      return MakeError(ErrorReason::kInternal,
                       absl::StrCat("no product of ", ElementName(s.element), " operands into ", ElementName(s.out_element),
                                    key.alpha_on_device ? " with a factor in device memory" : ""));
    }
    const ColumnMajor size = ToColumnMajor(s);
    const cublasOperation_t transpose_a = size.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t transpose_b = size.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t pointer_mode = key.alpha_on_device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    cublasStatus_t status =
        cublasLtMatmulDescInit(&plan->operation, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, wide ? CUDA_R_64F : CUDA_R_32F);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulDescSetAttribute(&plan->operation, attribute, &value, sizeof(value));
      }
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b);
    set(CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode);
    const auto lay_out = [&](cublasLtMatrixLayoutOpaque_t* layout, Element element, int64_t rows, int64_t columns, int64_t stride) {
      if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatrixLayoutInit(layout, CudaType(element), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                          stride);
      }
    };
    lay_out(&plan->a, s.element, s.width, size.a_columns, s.b_stride);
    lay_out(&plan->b, s.element, size.b_row_count, s.rows, s.a_stride);
    lay_out(&plan->c, s.out_element, size.m, size.n, s.out_stride);
    return BlasStatus(status, "describing a matrix product");
  }

  // True if the library takes the algorithm for this product, and it is one that we take.
  bool CanRun(const PlanKey& key, Plan& plan, const cublasLtMatmulAlgo_t& algorithm) const {
    cublasLtMatmulHeuristicResult_t result = {};
    if (cublasLtMatmulAlgoCheck(handle_, &plan.operation, &plan.a, &plan.b, &plan.c, &plan.c, &algorithm, &result) !=
            CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > kUsableWorkspaceBytes) {
      return false;
    }
    const uint32_t reductions = AllowedReductions(key.shape);
    const auto scheme = Config<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, CUBLASLT_REDUCTION_SCHEME_NONE);
    if ((scheme & ~reductions) != 0) return false;
    if (reductions == CUBLASLT_REDUCTION_SCHEME_NONE && Config<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 1) > 1) {
      return false;
    }
    if ((Capability<uint64_t>(algorithm, CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS, 0) & ~AllowedNumerics(key.shape)) != 0) {
      return false;
    }
    const uint32_t mode = key.alpha_on_device ? CUBLASLT_POINTER_MODE_MASK_DEVICE : CUBLASLT_POINTER_MODE_MASK_HOST;
    if ((Capability(algorithm, CUBLASLT_ALGO_CAP_POINTER_MODE_MASK, mode) & mode) == 0) return false;
    // The check above does not know where the operands lie.
    const auto aligned = [&](cublasLtMatmulAlgoCapAttributes_t attribute, int32_t alignment) {
      return Capability<uint32_t>(algorithm, attribute, 1) <= static_cast<uint32_t>(alignment);
    };
    return aligned(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES, key.b_alignment) &&
           aligned(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES, key.a_alignment) &&
           aligned(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES, key.out_alignment) &&
           aligned(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES, key.out_alignment);
  }

  // The algorithms that the library proposes and that can run, the most promising first; at least one.
  absl::StatusOr<std::vector<cublasLtMatmulAlgo_t>> Candidates(const PlanKey& key, Plan& plan) const {
    Preference preference;
    preference.Set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kUsableWorkspaceBytes});
    preference.Set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, AllowedReductions(key.shape));
    preference.Set(CUBLASLT_MATMUL_PREF_IMPL_MASK, AllowedNumerics(key.shape));
    preference.Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.b_alignment));
    preference.Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.a_alignment));
    preference.Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.out_alignment));
    preference.Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.out_alignment));
    HEADWATER_RETURN_IF_ERROR(BlasStatus(preference.status(), "describing which algorithms are wanted"));
    std::array<cublasLtMatmulHeuristicResult_t, kAskedAlgorithms> results = {};
    int count = 0;
    HEADWATER_RETURN_IF_ERROR(
        BlasStatus(cublasLtMatmulAlgoGetHeuristic(handle_, &plan.operation, &plan.a, &plan.b, &plan.c, &plan.c, preference.get(),
                                                  kAskedAlgorithms, results.data(), &count),
                   "asking for a product's algorithms"));
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < count; ++i) {
      const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
      if (result.state == CUBLAS_STATUS_SUCCESS && CanRun(key, plan, result.algo)) algorithms.push_back(result.algo);
    }
    if (algorithms.empty()) {
      return MakeError(ErrorReason::kEngineFailed, absl::StrCat("cuBLASLt has no algorithm for ", CacheKey(key.shape)));
    }
    // Where there is a choice, one algorithm is to serve alpha on the host and on the device.
    const auto end = std::stable_partition(algorithms.begin(), algorithms.end(), [](const cublasLtMatmulAlgo_t& algorithm) {
      constexpr uint32_t kBoth = CUBLASLT_POINTER_MODE_MASK_HOST | CUBLASLT_POINTER_MODE_MASK_DEVICE;
      return (Capability(algorithm, CUBLASLT_ALGO_CAP_POINTER_MODE_MASK, kBoth) & kBoth) == kBoth;
    });
    if (end != algorithms.begin()) algorithms.erase(end, algorithms.end());
    return algorithms;
  }

  absl::Status MakePlan(const PlanKey& key, Plan* plan) {
    HEADWATER_RETURN_IF_ERROR(Describe(key, plan));
    // From the first run on the bucket stays as it is.
    const std::optional<cublasLtMatmulAlgo_t>& searched = buckets_.try_emplace(BucketOf(key.shape)).first->second;
    if (searched.has_value() && CanRun(key, *plan, *searched)) {
      plan->algorithm = *searched;
      return absl::OkStatus();
    }
    // Proposals are requested as if alpha were on the host, so that its place does not matter, unless none of them supports that.
    PlanKey host_key = key;
    host_key.alpha_on_device = false;
    Plan host_plan;
    HEADWATER_RETURN_IF_ERROR(Describe(host_key, &host_plan));
    absl::StatusOr<std::vector<cublasLtMatmulAlgo_t>> candidates = Candidates(host_key, host_plan);
    if (!candidates.ok()) return candidates.status();
    auto first = std::find_if(candidates->begin(), candidates->end(),
                              [&](const cublasLtMatmulAlgo_t& algorithm) { return CanRun(key, *plan, algorithm); });
    if (first == candidates->end()) {
      candidates = Candidates(key, *plan);
      if (!candidates.ok()) return candidates.status();
      first = candidates->begin();
    }
    plan->algorithm = *first;
    return absl::OkStatus();
  }

  cublasStatus_t Enqueue(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const ProductShape& shape, const Operands& operands,
                         double alpha, const float* alpha_device, cudaStream_t stream) const {
    const double beta = shape.adds ? 1 : 0;
    const float alpha_float = static_cast<float>(alpha), beta_float = static_cast<float>(beta);
    const void* factors[2] = {&alpha_float, &beta_float};
    if (alpha_device != nullptr) {
      factors[0] = alpha_device;
      factors[1] = constants_ + (shape.adds ? 1 : 0);
    } else if (shape.element == Element::kFloat64) {
      factors[0] = &alpha;
      factors[1] = &beta;
    }
    return cublasLtMatmul(handle_, &plan.operation, factors[0], operands.b, &plan.a, operands.a, &plan.b, factors[1], operands.out,
                          &plan.c, operands.out, &plan.c, &algorithm, workspace_, kUsableWorkspaceBytes, stream);
  }

  // Milliseconds of one call, mean over `repeats`; infinite if the library refuses the algorithm after all.
  absl::StatusOr<double> Time(Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const ProductShape& shape,
                              const Operands& operands, int repeats, Stopwatch& watch, cudaStream_t stream) const {
    constexpr const char* kWhat = "timing a product's algorithms";
    HEADWATER_RETURN_IF_ERROR(CudaStatus(watch.Start(stream), kWhat));
    bool refused = false;
    for (int i = 0; i < repeats && !refused; ++i) {
      refused = Enqueue(plan, algorithm, shape, operands, 1.0, nullptr, stream) != CUBLAS_STATUS_SUCCESS;
    }
    // The error that a refusal leaves must not show in the next call; a lasting error comes back from the events.
    if (refused) static_cast<void>(cudaGetLastError());
    float ms = 0;
    HEADWATER_RETURN_IF_ERROR(CudaStatus(watch.Stop(stream, &ms), kWhat));
    return refused ? std::numeric_limits<double>::infinity() : static_cast<double>(ms) / repeats;
  }

  absl::StatusOr<cublasLtMatmulAlgo_t> Fastest(Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& candidates,
                                               const ProductShape& shape, const Operands& operands, cudaStream_t stream) const {
    if (candidates.size() == 1) return candidates[0];
    Stopwatch watch;
    HEADWATER_RETURN_IF_ERROR(CudaStatus(watch.error(), "timing a product's algorithms"));
    const auto repeats_for = [](double milliseconds, double of_one) {
      return static_cast<int>(std::clamp(milliseconds / std::max(of_one, 1e-3), 2.0, 1000.0));
    };
    // The library's first choice: to load it, to learn about how long it takes, and as load. If it is refused, a guess will do.
    absl::StatusOr<double> typical_ms = 1.0;
    for (const double load_ms : {0.0, 0.0, kWarmUpMs}) {
      typical_ms = Time(plan, candidates[0], shape, operands, repeats_for(load_ms, *typical_ms), watch, stream);
      if (!typical_ms.ok()) return typical_ms.status();
      if (!std::isfinite(*typical_ms)) typical_ms = 1.0;
    }
    std::vector<std::pair<double, size_t>> ranking;  // milliseconds, candidate
    for (size_t i = 0; i < candidates.size(); ++i) {
      double ms = 0;
      for (const int repeats : {1, repeats_for(kFirstTimingMs, *typical_ms)}) {  // the first loads the kernel
        const absl::StatusOr<double> time = Time(plan, candidates[i], shape, operands, repeats, watch, stream);
        if (!time.ok()) return time.status();
        ms = *time;
      }
      if (std::isfinite(ms)) ranking.emplace_back(ms, i);
    }
    if (ranking.empty()) {
      return MakeError(ErrorReason::kEngineFailed, absl::StrCat("cuBLASLt refuses every algorithm for ", CacheKey(shape)));
    }
    std::sort(ranking.begin(), ranking.end());
    ranking.resize(std::min(ranking.size(), kFinalists));
    const double final_ms = *typical_ms > kLongMs ? kLongFinalTimingMs : kFinalTimingMs;
    for (auto& [ms, index] : ranking) ms = 0;
    for (int round = 0; round < kFinalRounds; ++round) {
      for (auto& [ms, index] : ranking) {
        const absl::StatusOr<double> time =
            Time(plan, candidates[index], shape, operands, repeats_for(final_ms, *typical_ms), watch, stream);
        if (!time.ok()) return time.status();
        ms += *time;
      }
    }
    return candidates[std::min_element(ranking.begin(), ranking.end())->second];
  }

  void* const workspace_;
  float* const constants_;  // 0, 1
  cublasLtHandle_t handle_ = nullptr;
  std::string machine_;  // the machine's properties that an algorithm depends on beside the shape
  AlgorithmCache cache_;
  // By the shape with its bucket's rows: the searched algorithm, or none for a bucket that was run before any search.
  std::unordered_map<ProductShape, std::optional<cublasLtMatmulAlgo_t>, Hash> buckets_;
  std::unordered_map<PlanKey, std::unique_ptr<Plan>, Hash> plans_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Products>> Products::Create(void* workspace, const std::string& cache_path) {
  auto products = std::make_unique<LtProducts>(workspace, cache_path);
  HEADWATER_RETURN_IF_ERROR(products->Open());
  return std::unique_ptr<Products>(std::move(products));
}

}  // namespace headwater::cuda
