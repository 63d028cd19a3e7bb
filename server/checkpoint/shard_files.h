// The files of one checkpoint: a shard's tensors in each, and the manifest beside them.
#ifndef HEADWATER_SERVER_CHECKPOINT_SHARD_FILES_H_
#define HEADWATER_SERVER_CHECKPOINT_SHARD_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "server/checkpoint/file_system.h"
#include "server/checkpoint/manifest.h"

namespace headwater::checkpoint {

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

#endif  // HEADWATER_SERVER_CHECKPOINT_SHARD_FILES_H_
