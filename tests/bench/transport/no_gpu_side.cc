// The GPU's part of local_side.h, where the program is built without CUDA.
#include <stdexcept>

#include "tests/bench/transport/local_side.h"

namespace headwater::bench {

std::unique_ptr<LocalSide> MakeGpuSide(const TransportSettings&, const Tensors&, const std::string&) {
  throw std::runtime_error("this program was built without CUDA: --engine=cpu is what it can measure");
}

}  // namespace headwater::bench
