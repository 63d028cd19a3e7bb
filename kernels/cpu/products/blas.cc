#include "kernels/cpu/products/blas.h"

#include <cblas.h>

#include <algorithm>
#include <mutex>

namespace headwater::cpu {
namespace {

std::mutex g_threads_mutex;
int g_users = 0;
int g_former_threads = 1;

blasint Int(int64_t value) { return static_cast<blasint>(value); }

// BLAS refuses leading dimensions of 0 even for matrices of one row or column.
blasint Stride(int64_t value) { return static_cast<blasint>(std::max<int64_t>(value, 1)); }

}  // namespace

SingleThreadedBlas::SingleThreadedBlas() {
  std::lock_guard<std::mutex> lock(g_threads_mutex);
  if (g_users++ > 0) return;
  g_former_threads = openblas_get_num_threads();
  if (g_former_threads != 1) openblas_set_num_threads(1);
}

SingleThreadedBlas::~SingleThreadedBlas() {
  std::lock_guard<std::mutex> lock(g_threads_mutex);
  if (--g_users > 0) return;
  if (g_former_threads != 1) openblas_set_num_threads(g_former_threads);
}

std::string BlasKernels() { return openblas_get_corename(); }

void MultiplyTransposed(int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b, Matrix<float> c) {
  if (m == 0 || n == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, Int(m), Int(n), Int(k), 1, a.data, Stride(a.stride), b.data,
              Stride(b.stride), 0, c.data, Stride(c.stride));
}

void MultiplyTransposed(int64_t m, int64_t n, int64_t k, Matrix<const double> a, Matrix<const double> b, Matrix<double> c) {
  if (m == 0 || n == 0) return;
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, Int(m), Int(n), Int(k), 1, a.data, Stride(a.stride), b.data,
              Stride(b.stride), 0, c.data, Stride(c.stride));
}

void Multiply(int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b, float beta, Matrix<float> c) {
  if (m == 0 || n == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, Int(m), Int(n), Int(k), 1, a.data, Stride(a.stride), b.data,
              Stride(b.stride), beta, c.data, Stride(c.stride));
}

void MultiplyFirstTransposed(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const float> a, Matrix<const float> b, float beta,
                             Matrix<float> c) {
  if (m == 0 || n == 0) return;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, Int(m), Int(n), Int(k), alpha, a.data, Stride(a.stride), b.data,
              Stride(b.stride), beta, c.data, Stride(c.stride));
}

}  // namespace headwater::cpu
