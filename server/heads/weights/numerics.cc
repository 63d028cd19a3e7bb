#include "server/heads/weights/numerics.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace headwater::heads {

std::string DescribeNumerics(const LossEngine& engine, const EngineHead& head) {
  const EngineOptions& options = engine.options();
  const auto append_shard = [](std::string* out, const VocabShard& shard) {
    absl::StrAppend(out, shard.vocab_start, "-", shard.vocab_end);
  };
  const auto append_model = [](std::string* out, const EngineDevice& device) { absl::StrAppend(out, device.model); };
  const bool is_cpu = engine.name() == "cpu";
  const bool uses_onednn = options.bfloat16_products == Bfloat16Products::kOneDnn && head.spec().data_type == DataType::kBFloat16;
  return absl::StrCat("engine=", engine.name(), "; device=", absl::StrJoin(engine.devices(), ",", append_model),
                      "; shards=", absl::StrJoin(head.shards(), ",", append_shard), "; workspace_bytes=", options.workspace_bytes,
                      "; token_chunk_rows=", options.token_chunk_rows,
                      is_cpu ? absl::StrCat("; threads=", options.thread_count, uses_onednn ? "; bf16_products=onednn" : "")
                             : absl::StrCat("; algorithms=", options.timed_search ? "timed" : "proposed",
                                            "; portable_kernels=", options.portable_kernels ? "yes" : "no"),
                      "; deterministic=", options.deterministic ? "yes" : "no",
                      head.spec().parallelism == Parallelism::kRows ? "; parallelism=rows" : "");
}

}  // namespace headwater::heads
