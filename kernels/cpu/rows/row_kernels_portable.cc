// The row kernels for the compiler's baseline; on every machine.
#define HEADWATER_ROW_NAMESPACE portable
#define HEADWATER_ROW_INSTRUCTION_SET "portable"
#include "kernels/cpu/rows/row_kernels_impl.h"
