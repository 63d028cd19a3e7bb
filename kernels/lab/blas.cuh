// The floor: one cuBLASLt matrix product, its algorithm chosen by timing what the heuristics offer at the steady state of the card.

#ifndef HEADWATER_KERNELS_LAB_BLAS_CUH_
#define HEADWATER_KERNELS_LAB_BLAS_CUH_

#include <cublasLt.h>

#include "bench.cuh"

#define LAB_BLAS(expression)                                                                                                \
  do {                                                                                                                      \
    const cublasStatus_t lab_status = (expression);                                                                         \
    if (lab_status != CUBLAS_STATUS_SUCCESS) {                                                                              \
      std::fprintf(stderr, "%s:%d: %s: cuBLAS status %d\n", __FILE__, __LINE__, #expression, static_cast<int>(lab_status)); \
      std::exit(1);                                                                                                         \
    }                                                                                                                       \
  } while (0)

namespace headwater::lab {

struct BlasContext {
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;
  cublasLtHandle_t handle = nullptr;
  DeviceArray<uint8_t> workspace{static_cast<int64_t>(kWorkspaceBytes)};
  BlasContext() { LAB_BLAS(cublasLtCreate(&handle)); }
};

// C (m x n) = op(A) op(B) + beta C, column-major as cuBLASLt has it, bf16 operands, fp32 accumulation.
class BlasProduct {
 public:
  BlasProduct(BlasContext& context, bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
              int64_t ldc, cudaDataType_t output_type, float beta, const __nv_bfloat16* a, const __nv_bfloat16* b, void* c)
      : context_(context), m_(m), n_(n), k_(k), beta_(beta), a_(a), b_(b), c_(c) {
    LAB_BLAS(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_a = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    LAB_BLAS(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    LAB_BLAS(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    LAB_BLAS(cublasLtMatrixLayoutCreate(&layout_a_, CUDA_R_16BF, transpose_a ? k : m, transpose_a ? m : k, lda));
    LAB_BLAS(cublasLtMatrixLayoutCreate(&layout_b_, CUDA_R_16BF, transpose_b ? n : k, transpose_b ? k : n, ldb));
    LAB_BLAS(cublasLtMatrixLayoutCreate(&layout_c_, output_type, m, n, ldc));
  }
  BlasProduct(const BlasProduct&) = delete;
  BlasProduct& operator=(const BlasProduct&) = delete;

  // Of row-major matrices: logits [rows, vocab] = hidden [rows, width] * weight [vocab, width]^T
  static BlasProduct Logits(BlasContext& context, int64_t rows, int64_t width, int64_t vocab, const __nv_bfloat16* hidden,
                            const __nv_bfloat16* weight, void* logits, cudaDataType_t output_type) {
    return BlasProduct(context, true, false, vocab, rows, width, width, width, vocab, output_type, 0.0f, weight, hidden, logits);
  }

  // Times up to 32 heuristic algorithms on a warm card (60 ms each), then the best five again (250 ms each), and keeps the best.
  void Search(Bench& bench, const std::string& name) {
    const std::vector<cublasLtMatmulHeuristicResult_t> found = Heuristics(name);
    const int count = static_cast<int>(found.size());
    algorithm_ = found[0].algo;
    bench.WarmUp(AsCandidate(name), 0.7);
    const double first_ms = bench.TimeCalls(AsCandidate(name), 4);
    std::vector<std::pair<double, int>> ranked;
    for (int i = 0; i < count; ++i) {
      algorithm_ = found[i].algo;
      bench.TimeCalls(AsCandidate(name), 1);
      ranked.emplace_back(bench.TimeCalls(AsCandidate(name), std::max(2, static_cast<int>(60.0 / first_ms))), i);
    }
    std::sort(ranked.begin(), ranked.end());
    ranked.resize(std::min<size_t>(ranked.size(), 5));
    for (auto& [ms, index] : ranked) {
      algorithm_ = found[index].algo;
      ms = bench.TimeCalls(AsCandidate(name), std::max(2, static_cast<int>(250.0 / first_ms)));
    }
    std::sort(ranked.begin(), ranked.end());
    algorithm_ = found[ranked[0].second].algo;
    std::printf("search %-40s %2d algorithms: heuristic's first %.3f ms, best (number %d) %.3f ms\n", name.c_str(), count, first_ms,
                ranked[0].second, ranked[0].first);
    std::fflush(stdout);
  }

  void Enqueue(cudaStream_t stream) const {
    const float alpha = 1.0f;
    LAB_BLAS(cublasLtMatmul(context_.handle, operation_, &alpha, a_, layout_a_, b_, layout_b_, &beta_, c_, layout_c_, c_, layout_c_,
                            &algorithm_, context_.workspace.get(), BlasContext::kWorkspaceBytes, stream));
  }

  Candidate AsCandidate(const std::string& name) const {
    return Candidate{name, [this](cudaStream_t stream) { Enqueue(stream); }, flops(), 0.0};
  }
  double flops() const { return 2.0 * static_cast<double>(m_) * static_cast<double>(n_) * static_cast<double>(k_); }

 private:
  // Up to 32 algorithms, the most promising first; at least one.
  std::vector<cublasLtMatmulHeuristicResult_t> Heuristics(const std::string& name) const {
    cublasLtMatmulPreference_t preference;
    LAB_BLAS(cublasLtMatmulPreferenceCreate(&preference));
    const size_t workspace_bytes = BlasContext::kWorkspaceBytes;
    LAB_BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                                  sizeof(workspace_bytes)));
    std::vector<cublasLtMatmulHeuristicResult_t> found(32);
    int count = 0;
    LAB_BLAS(cublasLtMatmulAlgoGetHeuristic(context_.handle, operation_, layout_a_, layout_b_, layout_c_, layout_c_, preference, 32,
                                            found.data(), &count));
    LAB_BLAS(cublasLtMatmulPreferenceDestroy(preference));
    if (count == 0) {
      std::fprintf(stderr, "%s: no cuBLASLt algorithm\n", name.c_str());
      std::exit(1);
    }
    found.resize(static_cast<size_t>(count));
    return found;
  }

  BlasContext& context_;
  int64_t m_, n_, k_;
  float beta_;
  const __nv_bfloat16* a_;
  const __nv_bfloat16* b_;
  void* c_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t layout_a_ = nullptr, layout_b_ = nullptr, layout_c_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_BLAS_CUH_
