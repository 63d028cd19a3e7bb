// The row kernels for AVX-512.
#define HEADWATER_ROW_NAMESPACE avx512
#define HEADWATER_ROW_INSTRUCTION_SET "avx512"
#include "kernels/cpu/rows/row_kernels_impl.h"
