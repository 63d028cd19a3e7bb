// A text of all that fixes the order in which an engine sums up a head's gradient: equal texts and inputs give equal bits.
#ifndef HEADWATER_SERVER_HEADS_WEIGHTS_NUMERICS_H_
#define HEADWATER_SERVER_HEADS_WEIGHTS_NUMERICS_H_

#include <string>

#include "headwater/kernels/engine.h"

namespace headwater::heads {

// Engine and device model, shards of the vocabulary, what the chunk plan follows from, threads, and how algorithms are chosen:
// "engine=cpu; device=...; shards=0-13,13-25,25-37; workspace_bytes=...; ...". Stored in checkpoints.
std::string DescribeNumerics(const LossEngine& engine, const EngineHead& head);

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_WEIGHTS_NUMERICS_H_
