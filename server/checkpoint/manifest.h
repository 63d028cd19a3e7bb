// The manifest of a checkpoint: the head's spec and step, and the files that hold it, with their checksums. Members of `manifest`
// that older versions did not write may be missing: they are 0, "vocabulary", false or empty then.
//
//   {"checksum": "<XXH3-128 of the dump of `manifest`>",
//    "manifest": {"format": "headwater-checkpoint", "format_version": 1, "spec": {...}, "staging_slots": 2, "parallelism": "rows",
//                 "int8_teacher": false, "step": 7, "update_count": 6, "sequence": 12, "first_sequence": 3,
//                 "save_time_s": 1767225600, "numerics": "...", "files": [{"name": "shard-00000-of-00002.safetensors",
//                 "bytes": 123, "xxh3_128": "...", "vocab_start": 0, "vocab_end": 100}, ...]}}
#ifndef HEADWATER_SERVER_CHECKPOINT_MANIFEST_H_
#define HEADWATER_SERVER_CHECKPOINT_MANIFEST_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/planned_bytes.h"
#include "headwater/kernels/return_if_error.h"
#include "headwater/kernels/types.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/file_system.h"

namespace headwater::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 20;
inline constexpr int64_t kMaxCheckpointFiles = 4096;

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
// kFileCorrupt unless it is complete, the checksum matches, and the files' rows tile the vocabulary in order.
absl::StatusOr<Manifest> ReadManifest(const ReadableFile& file);

// A field in which two specs differ, with both values as JSON.
struct SpecDifference {
  std::string field;
  std::string first, second;
};
// All differences, in the order of their names. Empty if a checkpoint of one spec fits the other: staging slots and the initial
// step do not matter.
std::vector<SpecDifference> FindSpecDifferences(const HeadSpec& a, const HeadSpec& b);

// The most bytes of a tensor that are moved at once.
inline constexpr int64_t kPieceBytes = int64_t{8} << 20;
// Calls `work(start, count, buffer)` for elements [start, end), in pieces of at most kPieceBytes. `buffer` has room for a piece.
template <typename Work>
absl::Status ForEachPiece(int64_t start, int64_t end, int64_t element_bytes, const Work& work) {
  const int64_t piece = std::min(kPieceBytes / element_bytes, end - start);
  HEADWATER_ASSIGN_OR_RETURN(const PlannedBytes buffer, AllocatePlanned(piece * element_bytes));
  for (; start < end; start += piece) HEADWATER_RETURN_IF_ERROR(work(start, std::min(piece, end - start), buffer.get()));
  return absl::OkStatus();
}

// DIRECTORY/NAME.
std::string Join(const std::string& directory, const std::string& name);
// Creates `path` with these bytes, synced.
absl::Status WriteWholeFile(FileSystem& files, const std::string& path, const std::string& text);

// Writes the shard files of `head` and the manifest into `directory`, synced. Returns the bytes written.
absl::StatusOr<int64_t> WriteShardFiles(FileSystem& files, const std::string& directory, const CheckpointInfo& info,
                                        const EngineHead& head);
// Verifies all files of a manifest, then writes their tensors into `head`. Errors as CheckpointStore::Load().
absl::Status LoadShardFiles(const FileSystem& files, const std::string& directory, const std::vector<ManifestFile>& entries,
                            EngineHead& head);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_MANIFEST_H_
