#include "tests/kernels/support/blas_product.h"

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

namespace headwater::testing {
namespace {

void CheckBlas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(what) + ": " + cublasLtGetStatusString(status));
}

}  // namespace

BlasContext::BlasContext() : workspace_(BufferKind::kDevice, kWorkspaceBytes) {
  CheckBlas(cublasLtCreate(&handle_), "cublasLtCreate");
}

BlasContext::~BlasContext() { cublasLtDestroy(handle_); }

BlasProduct::BlasProduct(BlasContext& context, const BlasShape& shape, const void* a, const void* b, void* out)
    : context_(context), shape_(shape), left_(b), right_(a), out_(out) {
  // A row-major matrix is the library's transpose of it, so the library computes out^T = b' a': out^T [m, n], over k.
  const bool is_logits = shape.kind == BlasKind::kLogits;
  const bool is_grad_weight = shape.kind == BlasKind::kGradWeight;
  const int64_t m = is_logits ? shape.vocab : shape.width;
  const int64_t n = is_grad_weight ? shape.vocab : shape.rows;
  const int64_t k = is_logits ? shape.width : is_grad_weight ? shape.rows : shape.vocab;
  const cublasOperation_t left_operation = is_logits ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t right_operation = is_grad_weight ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int64_t right_stride = is_logits ? shape.width : shape.vocab;

  const bool is_double = shape.types == BlasTypes::kFloat64;
  const cudaDataType_t operand_type = is_double ? CUDA_R_64F : CUDA_R_16BF;
  const cudaDataType_t out_type = is_double ? CUDA_R_64F : shape.types == BlasTypes::kBFloat16ToFloat32 ? CUDA_R_32F : CUDA_R_16BF;
  CheckBlas(cublasLtMatmulDescCreate(&operation_, is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                     is_double ? CUDA_R_64F : CUDA_R_32F),
            "cublasLtMatmulDescCreate");
  CheckBlas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &left_operation, sizeof(left_operation)),
            "transposing the left operand");
  CheckBlas(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSB, &right_operation, sizeof(right_operation)),
            "transposing the right operand");
  const auto layout = [](cublasLtMatrixLayout_t* result, cudaDataType_t type, int64_t rows, int64_t columns) {
    CheckBlas(cublasLtMatrixLayoutCreate(result, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows),
              "cublasLtMatrixLayoutCreate");
  };
  layout(&left_layout_, operand_type, shape.width, is_grad_weight ? shape.rows : shape.vocab);
  layout(&right_layout_, operand_type, right_stride, shape.rows);
  layout(&out_layout_, out_type, m, n);

  cublasLtMatmulPreference_t preference = nullptr;
  CheckBlas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const uint64_t workspace_bytes = BlasContext::kWorkspaceBytes;
  CheckBlas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                                 sizeof(workspace_bytes)),
            "cublasLtMatmulPreferenceSetAttribute");
  const cublasStatus_t found =
      cublasLtMatmulAlgoGetHeuristic(context.handle(), operation_, left_layout_, right_layout_, out_layout_, out_layout_,
                                     preference, static_cast<int>(proposals_.size()), proposals_.data(), &proposal_count_);
  cublasLtMatmulPreferenceDestroy(preference);
  CheckBlas(found, "cublasLtMatmulAlgoGetHeuristic");
  if (proposal_count_ == 0) throw std::runtime_error("cuBLASLt has no algorithm for k = " + std::to_string(k));
  const auto known = context.algorithms().find(Key());
  algorithm_ = known == context.algorithms().end() ? proposals_[0].algo : known->second;
}

BlasProduct::~BlasProduct() {
  cublasLtMatrixLayoutDestroy(left_layout_);
  cublasLtMatrixLayoutDestroy(right_layout_);
  cublasLtMatrixLayoutDestroy(out_layout_);
  cublasLtMatmulDescDestroy(operation_);
}

std::array<int64_t, 6> BlasProduct::Key() const {
  return {
      static_cast<int64_t>(shape_.kind), static_cast<int64_t>(shape_.types), shape_.rows, shape_.width, shape_.vocab, shape_.adds};
}

void BlasProduct::Enqueue(cudaStream_t stream) const {
  const double one = 1, beta = shape_.adds ? 1 : 0;
  const float one_float = 1, beta_float = shape_.adds ? 1 : 0;
  const bool is_double = shape_.types == BlasTypes::kFloat64;
  CheckBlas(cublasLtMatmul(context_.handle(), operation_, is_double ? static_cast<const void*>(&one) : &one_float, left_,
                           left_layout_, right_, right_layout_, is_double ? static_cast<const void*>(&beta) : &beta_float, out_,
                           out_layout_, out_, out_layout_, &algorithm_, context_.workspace(), BlasContext::kWorkspaceBytes, stream),
            "cublasLtMatmul");
}

double BlasProduct::Milliseconds(cudaStream_t stream, int repeats) const {
  cudaEvent_t start = nullptr, stop = nullptr;
  CheckCuda(cudaEventCreate(&start), "cudaEventCreate");
  CheckCuda(cudaEventCreate(&stop), "cudaEventCreate");
  CheckCuda(cudaEventRecord(start, stream), "cudaEventRecord");
  for (int i = 0; i < repeats; ++i) Enqueue(stream);
  CheckCuda(cudaEventRecord(stop, stream), "cudaEventRecord");
  CheckCuda(cudaEventSynchronize(stop), "a product");
  float ms = 0;
  CheckCuda(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return static_cast<double>(ms) / repeats;
}

void BlasProduct::Search(cudaStream_t stream) {
  constexpr double kWarmUpMs = 300, kRoundMs = 40, kFinalMs = 200;
  constexpr size_t kFinalists = 4;
  constexpr int kFinalRounds = 3;
  if (const auto known = context_.algorithms().find(Key()); known != context_.algorithms().end()) {
    algorithm_ = known->second;
    return;
  }
  const auto repeats = [](double total_ms, double one_ms) { return std::clamp(static_cast<int>(total_ms / one_ms), 2, 2000); };
  Milliseconds(stream, 1);
  Milliseconds(stream, repeats(kWarmUpMs, Milliseconds(stream, 2)));
  // A single call shows which are worth a longer look.
  std::vector<std::pair<double, int>> ranked;
  for (int i = 0; i < proposal_count_; ++i) {
    algorithm_ = proposals_[static_cast<size_t>(i)].algo;
    Milliseconds(stream, 1);
    ranked.emplace_back(Milliseconds(stream, 1), i);
  }
  std::sort(ranked.begin(), ranked.end());
  const double limit = 1.4 * ranked[0].first;
  ranked.erase(std::find_if(ranked.begin(), ranked.end(), [&](const auto& entry) { return entry.first > limit; }), ranked.end());
  for (auto& [ms, index] : ranked) {
    algorithm_ = proposals_[static_cast<size_t>(index)].algo;
    ms = Milliseconds(stream, repeats(kRoundMs, ms));
  }
  std::sort(ranked.begin(), ranked.end());
  ranked.resize(std::min(ranked.size(), kFinalists));
  // In turns, each so long that the clock settles where the power limit leaves it for this algorithm. A turn of 120 ms chose others
  // from process to process, and a divergence's products took 2.7 % more or less time.
  const double typical_ms = ranked[0].first;
  for (auto& [ms, index] : ranked) ms = 0;
  for (int round = 0; round < kFinalRounds; ++round) {
    for (auto& [ms, index] : ranked) {
      algorithm_ = proposals_[static_cast<size_t>(index)].algo;
      ms += Milliseconds(stream, repeats(kFinalMs, typical_ms));
    }
  }
  std::sort(ranked.begin(), ranked.end());
  algorithm_ = proposals_[static_cast<size_t>(ranked[0].second)].algo;
  context_.algorithms()[Key()] = algorithm_;
}

}  // namespace headwater::testing
