// TensorUpdate: one tensor that a call sets, read from its source in pieces.
#ifndef HEADWATER_SERVER_HEADS_WEIGHTS_TENSOR_UPDATE_H_
#define HEADWATER_SERVER_HEADS_WEIGHTS_TENSOR_UPDATE_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"

namespace headwater::heads {

// Brings elements [element_start, element_start + element_count) of a tensor. Called in ascending order, without gaps; may restart
// from element 0.
using TensorSource = std::function<absl::Status(int64_t element_start, int64_t element_count, void* out)>;

// One tensor that SetTensors() sets.
struct TensorUpdate {
  HeadTensor tensor = HeadTensor::kWeight;  // kWeight or kBias
  DataType data_type = DataType::kFloat32;  // of what `source` brings: the storage type or fp32
  TensorSource source;
  bool in_memory = false;  // `source` cannot fail: it need not be read through before
};

// The largest piece in which tensors are read from a source or a checkpoint.
inline constexpr int64_t kTensorPieceBytes = int64_t{8} << 20;

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_WEIGHTS_TENSOR_UPDATE_H_
