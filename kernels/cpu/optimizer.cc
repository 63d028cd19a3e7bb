#include "kernels/cpu/optimizer.h"

#include <algorithm>
#include <variant>

#include "kernels/core/optimizer_step.h"
#include "kernels/cpu/rows/convert.h"
#include "kernels/cpu/rows/row_kernels.h"

namespace headwater::cpu {
namespace {

// Elements updated and then rounded to storage while they are in the cache.
constexpr int64_t kBlock = 4096;

}  // namespace

void UpdateParameters(const OptimizerStep& step, const ParameterPiece& piece) {
  const RowKernels& kernels = GetRowKernels();
  const auto* adamw = std::get_if<AdamWSpec>(&step.settings);
  const auto* sgd = std::get_if<SgdSpec>(&step.settings);
  for (int64_t start = 0; start < piece.count; start += kBlock) {
    const int64_t count = std::min(kBlock, piece.count - start);
    if (adamw != nullptr) {
      kernels.adamw(MakeAdamWScalars(step, *adamw), count, piece.parameter + start, piece.gradient + start, piece.moment1 + start,
                    piece.moment2 + start);
    } else {
      // Without momentum there is no buffer to keep.
      float* buffer = sgd->momentum > 0 ? piece.moment1 + start : nullptr;
      kernels.sgd(MakeSgdScalars(step, *sgd), count, piece.parameter + start, piece.gradient + start, buffer);
    }
    if (piece.stored != nullptr) FromFloat(piece.parameter + start, count, piece.stored_type, piece.stored + start);
  }
}

}  // namespace headwater::cpu
