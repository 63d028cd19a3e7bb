#include "tests/bench/common/cuda_floor.h"

#include "tests/kernels/cuda/cuda_fp64.h"

namespace headwater::bench {

using testing::BlasKind;
using testing::BlasProduct;
using testing::BlasTypes;
using testing::Buffer;
using testing::BufferKind;
using testing::CheckCuda;

Floor::Floor(testing::BlasContext& context, const FloorInputs& inputs)
    : logits_(BufferKind::kDevice, inputs.rows * inputs.vocab * 2),
      operand_(BufferKind::kDevice, inputs.rows * inputs.vocab * 2),
      grad_hidden_(BufferKind::kDevice, inputs.rows * inputs.width * 2),
      grad_weight_(BufferKind::kDevice, inputs.vocab * inputs.width * 4) {
  CheckCuda(cudaMemset(grad_weight_.as<void>(), 0, static_cast<size_t>(grad_weight_.bytes())), "cudaMemset");
  const auto add = [&](BlasKind kind, BlasTypes types, int64_t width, bool adds, const Buffer& a, const Buffer& b,
                       const Buffer& out) {
    products_.push_back(std::make_unique<BlasProduct>(context,
                                                      testing::BlasShape{kind, types, inputs.rows, width, inputs.vocab, adds},
                                                      a.as<void>(), b.as<void>(), out.as<void>()));
  };
  const Buffer* grad_weight_hidden = inputs.hidden;
  if (inputs.teacher_width > 0) {
    // The operand needs both sides' logits at once; later runs of this product overwrite its own results only.
    Buffer teacher_logits(BufferKind::kDevice, logits_.bytes());
    add(BlasKind::kLogits, BlasTypes::kBFloat16ToBFloat16, inputs.teacher_width, false, *inputs.teacher_hidden,
        *inputs.teacher_weight, teacher_logits);
    add(BlasKind::kLogits, BlasTypes::kBFloat16ToBFloat16, inputs.width, false, *inputs.hidden, *inputs.weight, logits_);
    for (const auto& product : products_) product->Enqueue(nullptr);
    CheckCuda(testing::DivergenceOperand(logits_.as<uint16_t>(), teacher_logits.as<uint16_t>(), inputs.rows, inputs.vocab,
                                         operand_.as<uint16_t>()),
              "DivergenceOperand");
    CheckCuda(cudaDeviceSynchronize(), "the operand");
    products_.erase(products_.begin());
    add(BlasKind::kLogits, BlasTypes::kBFloat16ToBFloat16, inputs.teacher_width, false, *inputs.teacher_hidden,
        *inputs.teacher_weight, logits_);
  } else {
    scaled_hidden_ = Buffer(BufferKind::kDevice, inputs.rows * inputs.width * 2);
    grad_weight_hidden = &scaled_hidden_;
    add(BlasKind::kLogits, BlasTypes::kBFloat16ToBFloat16, inputs.width, false, *inputs.hidden, *inputs.weight, logits_);
    products_[0]->Enqueue(nullptr);
    CheckCuda(testing::ExponentialOperand(logits_.as<uint16_t>(), inputs.rows, inputs.vocab, inputs.targets->as<int32_t>(),
                                          operand_.as<uint16_t>(), inputs.hidden->as<uint16_t>(), inputs.width,
                                          0.37 / static_cast<double>(inputs.rows), scaled_hidden_.as<uint16_t>()),
              "ExponentialOperand");
    CheckCuda(cudaDeviceSynchronize(), "the operand");
  }
  add(BlasKind::kGradHidden, BlasTypes::kBFloat16ToBFloat16, inputs.width, false, operand_, *inputs.weight, grad_hidden_);
  add(BlasKind::kGradWeight, BlasTypes::kBFloat16ToFloat32, inputs.width, true, operand_, *grad_weight_hidden, grad_weight_);
  for (const auto& product : products_) product->Search(nullptr);
}

void Floor::Enqueue(cudaStream_t stream) const {
  for (const auto& product : products_) product->Enqueue(stream);
}

double Floor::flop() const {
  double sum = 0;
  for (const auto& product : products_) sum += product->flop();
  return sum;
}

}  // namespace headwater::bench
