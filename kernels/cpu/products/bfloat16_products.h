// Matrix products of bf16 operands into fp32 by oneDNN, row-major, on the calling thread.
//
// The library is opened at run time, so that an engine without it still runs. One function of it is called, dnnl_gemm_bf16bf16f32:
// every version exports it, though its headers do not declare it (docs/adr/0029-bfloat16-products.md). It is used only after it has
// computed a few known products right. Operands are read exactly, sums are fp32 and round to nearest; denormal numbers count as 0.
// Results of one call do not depend on alignment or leading dimensions.
#ifndef HEADWATER_KERNELS_CPU_PRODUCTS_BFLOAT16_PRODUCTS_H_
#define HEADWATER_KERNELS_CPU_PRODUCTS_BFLOAT16_PRODUCTS_H_

#include <cstdint>
#include <string>

#include "kernels/cpu/products/blas.h"

namespace headwater::cpu {

struct Bfloat16Library {
  bool is_usable = false;
  std::string name;     // "oneDNN 2.6.3 (avx512_bf16)"
  std::string why_not;  // one clause, if it is not usable
};

// Looks for the library when it is called first, on a processor that multiplies bf16 by itself. Any thread.
const Bfloat16Library& GetBfloat16Library();

// As the functions of blas.h. The library must be usable; the process ends if it has no memory left.
void MultiplyTransposed(int64_t m, int64_t n, int64_t k, Matrix<const uint16_t> a, Matrix<const uint16_t> b, Matrix<float> c);
void Multiply(int64_t m, int64_t n, int64_t k, Matrix<const uint16_t> a, Matrix<const uint16_t> b, float beta, Matrix<float> c);
void MultiplyFirstTransposed(int64_t m, int64_t n, int64_t k, float alpha, Matrix<const uint16_t> a, Matrix<const uint16_t> b,
                             float beta, Matrix<float> c);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_PRODUCTS_BFLOAT16_PRODUCTS_H_
