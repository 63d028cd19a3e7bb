// The manifest of a checkpoint: what the head was, at which step, and which files with which checksums hold it.
//
//   {"checksum": "<XXH3-128 of the dump of `manifest`>",
//    "manifest": {"format": "headwater-checkpoint", "format_version": 1, "spec": {...}, "step": 7, "update_count": 6,
//                 "files": [{"name": "shard-00000-of-00002.safetensors", "bytes": 123, "xxh3_128": "...",
//                            "vocab_start": 0, "vocab_end": 100}, ...]}}
#ifndef HEADWATER_SERVER_CHECKPOINT_MANIFEST_H_
#define HEADWATER_SERVER_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/types.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/file_system.h"

namespace headwater::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 20;
inline constexpr int64_t kMaxCheckpointFiles = 4096;

// One shard's file.
struct ManifestFile {
  std::string name;
  int64_t bytes = 0;
  std::string checksum;  // XXH3-128, hexadecimal
  VocabShard rows;
};

struct Manifest {
  CheckpointInfo info;  // without name and total_bytes
  std::vector<ManifestFile> files;
};

// `shard-00000-of-00002.safetensors`.
std::string ShardFileName(size_t index, size_t count);

std::string FormatManifest(const Manifest& manifest);
// kFileCorrupt unless everything is there, the checksum holds, and the files' rows tile the vocabulary in order.
absl::StatusOr<Manifest> ReadManifest(const ReadableFile& file);

// The first field in which two specs differ, with both values: "vocab_size is 10 and 12". Empty if a checkpoint of one fits the
// other: staging slots do not matter.
std::string DescribeSpecDifference(const HeadSpec& a, const HeadSpec& b);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_MANIFEST_H_
