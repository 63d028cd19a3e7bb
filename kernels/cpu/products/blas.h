// Matrix products by OpenBLAS, row-major, single-threaded.
//
// The engine splits products over its own threads by fixed ranges and calls BLAS once a range. Results then do not depend on BLAS's
// scheduling, and a thread's panels stay in its cache. Shards can also run at the same time, whereas OpenBLAS runs one
// multi-threaded product at a time. Results of one call do not depend on alignment or leading dimensions.
#ifndef HEADWATER_KERNELS_CPU_PRODUCTS_BLAS_H_
#define HEADWATER_KERNELS_CPU_PRODUCTS_BLAS_H_

#include <cstdint>
#include <string>

namespace headwater::cpu {

// While one lives, OpenBLAS of this process runs each product on its caller's thread. The former setting comes back with the last.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas();
  ~SingleThreadedBlas();
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;
};

// The processor whose kernels OpenBLAS runs, by its name for it: "Cooperlake".
std::string BlasKernels();

// A matrix: element (i, j) is data[i * stride + j].
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
};

// c [m, n] = a [m, k] . b [n, k]^T.
void MultiplyTransposed(int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b, Matrix<float> c);
void MultiplyTransposed(int64_t m, int64_t n, int64_t k, Matrix<const double> a, Matrix<const double> b, Matrix<double> c);
// c [m, n] = a [m, k] . b [k, n] + beta c. With beta 0, c may hold anything.
void Multiply(int64_t m, int64_t n, int64_t k, Matrix<const float> a, Matrix<const float> b, float beta, Matrix<float> c);
// c [m, n] = alpha a [k, m]^T . b [k, n] + beta c.
void MultiplyFirstTransposed(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const float> a, Matrix<const float> b, float beta,
                             Matrix<float> c);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_PRODUCTS_BLAS_H_
