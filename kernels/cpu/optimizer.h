// Optimizer updates of one piece of a head's parameters.
#ifndef HEADWATER_KERNELS_CPU_OPTIMIZER_H_
#define HEADWATER_KERNELS_CPU_OPTIMIZER_H_

#include <cstdint>

#include "headwater/kernels/engine.h"

namespace headwater::cpu {

// fp32 pieces of equal length.
struct ParameterPiece {
  float* parameter = nullptr;  // the fp32 master
  float* gradient = nullptr;   // the accumulator; 0 afterwards
  float* moment1 = nullptr;    // AdamW; SGD with momentum
  float* moment2 = nullptr;    // AdamW
  uint16_t* stored = nullptr;  // the 16-bit tensor that the master belongs to, or null
  DataType stored_type = DataType::kFloat32;
  int64_t count = 0;
};

// One update. Scalars are taken in fp64 and rounded to fp32 once, as PyTorch does.
void UpdateParameters(const OptimizerStep& step, const ParameterPiece& piece);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_OPTIMIZER_H_
