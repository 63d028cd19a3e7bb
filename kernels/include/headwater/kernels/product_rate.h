// Speed of this machine's processors, for the choice between libraries and for utilisation.
#ifndef HEADWATER_KERNELS_PRODUCT_RATE_H_
#define HEADWATER_KERNELS_PRODUCT_RATE_H_

#include <cstdint>
#include <string>

#include "headwater/kernels/engine.h"

namespace headwater {

// Floating point operations a second (a multiply-add is two) of `thread_count` (>= 1) threads together, with bare matrix products
// of the CPU engine. It is the best of a few rounds of a few milliseconds each. kOpenBlas: in fp32; kOneDnn: of bf16 operands, 0
// where oneDNN cannot be used. Each thread counts its own processor time, so that the rate is the machine's also while other
// processes take the processors. It is at most that of ProcessorLimit(). Starts and joins threads of its own.
double MeasureCpuProductRate(int32_t thread_count, Bfloat16Products products = Bfloat16Products::kOpenBlas);

// The library for the CPU engine's products of bf16 rows with bf16 weights under `options`. It is never kAuto, which means oneDNN
// where it can be used and is the faster one. The first call measures that. Deterministic engines and ranks of a group take oneDNN
// without a measurement, whose result may differ from process to process.
Bfloat16Products ChooseBfloat16Products(const EngineOptions& options);

// One clause for people: "fp32 products by OpenBLAS (Cooperlake), bf16 products by oneDNN 2.6.3 (avx512_bf16)"; or why not by
// oneDNN. `asked` is EngineOptions::bfloat16_products, and `chosen` the choice of ChooseBfloat16Products() for it.
std::string DescribeCpuProducts(Bfloat16Products chosen, Bfloat16Products asked = Bfloat16Products::kAuto);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_PRODUCT_RATE_H_
