// The row kernels for AVX2 and FMA.
#define HEADWATER_ROW_NAMESPACE avx2
#define HEADWATER_ROW_INSTRUCTION_SET "avx2"
#include "kernels/cpu/rows/row_kernels_impl.h"
