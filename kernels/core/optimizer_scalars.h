// Scalars of an optimizer update in fp32. Alone in this header, without any function: files that are compiled for a particular
// instruction set, and CUDA files, include it.
#ifndef HEADWATER_KERNELS_CORE_OPTIMIZER_SCALARS_H_
#define HEADWATER_KERNELS_CORE_OPTIMIZER_SCALARS_H_

namespace headwater {

struct AdamWScalars {
  float multiplier;
  float decay;  // 1 - lr * weight_decay
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;        // lr / (1 - beta1^t)
  float root_correction;  // sqrt(1 - beta2^t), a divisor
  float epsilon;
};

struct SgdScalars {
  float multiplier;
  float learning_rate;
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  bool first_step;
  bool nesterov;
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_OPTIMIZER_SCALARS_H_
