// The tensors of a head, and their memory.
#ifndef HEADWATER_KERNELS_CORE_HEAD_TENSORS_H_
#define HEADWATER_KERNELS_CORE_HEAD_TENSORS_H_

#include <cstdint>

#include "headwater/kernels/types.h"

namespace headwater {

// True for tensors of [vocab_size, hidden_size], false for those of [vocab_size].
bool IsWeightShaped(HeadTensor tensor);
// True for kMasterWeight and kMasterBias.
bool IsMaster(HeadTensor tensor);
// True if parameters in 16 bits have fp32 masters.
bool HasSeparateMaster(const HeadSpec& spec);
// fp32 tensors of optimizer state: 0, 1 or 2.
int64_t OptimizerStateTensors(const OptimizerSpec& optimizer);
// True if a head of this kind has the tensor; a master that is not separate is the stored tensor itself.
bool HasTensor(const HeadSpec& spec, HeadTensor tensor);
// True if a replica (Parallelism::kRows in a group) has all elements of the tensor: stored tensors, a master that is not separate,
// and the accumulator. A replica has its rank's shard of other tensors.
bool IsWholeInReplica(const HeadSpec& spec, HeadTensor tensor);

// Appends an item and adds it to the total.
void AddPlanItem(const char* purpose, int64_t bytes, MemoryPlan* plan);
// Appends the items of all tensors, weight to staging, in an engine that stores `row_stride` elements (hidden_size or more) for
// each row of a weight. Saturates.
void AddTensorItems(const HeadSpec& spec, int64_t row_stride, MemoryPlan* plan);
// Like AddTensorItems(), for an engine that holds all rows, but masters and optimizer state of `state_rows` rows only.
void AddReplicaItems(const HeadSpec& spec, int64_t row_stride, int64_t state_rows, MemoryPlan* plan);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_HEAD_TENSORS_H_
