// The memory plan of a head on the CPU: sizes of its tensors by shard, and the layout of its workspace.
//
// Every head has a workspace of its own, mapped when it is created and touched only where it is used. Two forms share it:
//   narrow  fp32 logits, for cross entropy with logits of ordinary size: 4 bytes a logit;
//   wide    fp64 logits of student and teacher and an fp32 gradient, for JSD and for logits that fp32 products do not resolve:
//           20 bytes a logit. A teacher's logits are computed in the teacher head's workspace.
// The number of rows at once follows from EngineOptions::workspace_bytes (default kDefaultWorkspaceBytes). A floor keeps every head
// computable; a ceiling applies because the products gain nothing from more rows.
#ifndef HEADWATER_KERNELS_CPU_HEAD_PLAN_H_
#define HEADWATER_KERNELS_CPU_HEAD_PLAN_H_

#include <cstdint>
#include <vector>

#include "headwater/kernels/engine.h"
#include "kernels/core/shard_layout.h"

namespace headwater::cpu {

inline constexpr int64_t kDefaultWorkspaceBytes = int64_t{48} << 20;
inline constexpr int64_t kMinNarrowRows = 16;
inline constexpr int64_t kMinWideRows = 4;
inline constexpr int64_t kMaxRows = 4096;
inline constexpr int64_t kMaxPanelRows = 512;
// Logits of a shard that may be taken again in fp64, on average over a chunk's rows (logit_refinement.cc).
inline constexpr int64_t kRefinedLogitsPerRow = 256;

// Byte offsets into one shard's workspace.
struct WorkspaceLayout {
  int64_t hidden = 0;            // [narrow_rows, hidden_size] fp32, or bf16 where the products take bf16
  int64_t grad_hidden = 0;       // [narrow_rows, hidden_size] fp32, summed over terms
  int64_t grad_hidden_term = 0;  // [narrow_rows, hidden_size] fp32, of a term whose rows are not contiguous
  int64_t converted = 0;         // thread t's at t * converted_bytes: converted weight rows, or one converted hidden row
  int64_t logits = 0;            // narrow: [narrow_rows, shard rows] fp32; overlaps all that follow
  int64_t student_logits = 0;    // wide: [wide_rows, shard rows] fp64
  int64_t teacher_logits = 0;    // wide: [wide_rows, shard rows] fp64
  int64_t wide_gradient = 0;     // wide: [wide_rows, shard rows] fp32
  int64_t wide_hidden = 0;       // wide: [wide_rows, hidden_size] fp64, as student
  int64_t teacher_hidden = 0;    // wide: [wide_rows, hidden_size] fp64, as teacher
  int64_t exchange = 0;          // wide: [vocab_size] fp64, for teachers whose shards do not match; only with several shards
  int64_t total_bytes = 0;       // includes row state that is kept elsewhere
  int64_t mapped_bytes = 0;
};

struct HeadPlan {
  MemoryPlan memory;
  std::vector<RowRange> shards;  // one for each executor; may be empty
  // Parallelism::kRows in a group, where one executor has all rows: the group's shards, by rank. Else empty.
  std::vector<RowRange> group_shards;
  bool is_replica() const { return !group_shards.empty(); }
  int64_t narrow_rows = 0;
  int64_t wide_rows = 0;
  int64_t panel_rows = 0;       // weight rows a thread works on at once
  int64_t converted_rows = 0;   // those of them that are converted to fp32 at once
  int64_t wide_panel_rows = 0;  // weight rows that a thread works on at once in the wide form, in fp64
  int64_t converted_bytes = 0;
  std::vector<WorkspaceLayout> layouts;  // by shard
};

// `options` with all defaults filled in but workspace_bytes and token_chunk_rows; `spec` valid. The memory is that of the shards
// which such an engine holds: in a group, of its rank's. Saturates.
HeadPlan PlanHeadOnCpu(const HeadSpec& spec, const EngineOptions& options, int32_t threads_per_shard);

}  // namespace headwater::cpu

#endif  // HEADWATER_KERNELS_CPU_HEAD_PLAN_H_
