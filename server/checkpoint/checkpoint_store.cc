#include "server/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/checkpoint/manifest.h"
#include "server/model_files/strict_json.h"
#include "server/observability/logging.h"

namespace headwater::checkpoint {
namespace {

using model_files::CorruptError;
using model_files::GetCount;
using model_files::ReadStrictJson;

// Hidden names, which IsValidCheckpointName() refuses.
constexpr char kTemporaryPrefix[] = ".tmp-";
constexpr char kReplacedPrefix[] = ".old-";
constexpr char kLiveMark[] = ".live";
constexpr char kFirstSequence[] = "first_sequence";
constexpr int64_t kMaxLiveMarkBytes = 4096;
constexpr size_t kMaxNameLength = 128;
constexpr size_t kMaxStepsBytes = 512;  // errors carry it twice, in headers that are bounded

// The number of the checkpoint after number `last`, which may come from a file: saturates.
int64_t NumberAfter(int64_t last) { return last < INT64_MAX ? last + 1 : last; }

// The name of a checkpoint's series: its own name with # for the number.
std::string SeriesOf(const std::string& checkpoint) {
  const size_t number = checkpoint.find_last_not_of("0123456789") + 1;
  return number < checkpoint.size() ? absl::StrCat(checkpoint.substr(0, number), "#") : checkpoint;
}

// `a` was begun after `b`.
bool IsNewer(const CheckpointInfo& a, const CheckpointInfo& b) { return a.sequence > b.sequence; }

// Whether a checkpoint belongs to the run that begins with number `first`. 0 stands for a damaged mark, to which all belong.
// Checkpoints of older versions do not state their run.
bool BelongsTo(const CheckpointInfo& info, int64_t first) {
  if (first == 0) return true;
  return info.first_sequence > 0 ? info.first_sequence == first : info.sequence >= first;
}

// Keeps the temporary directories of concurrent calls apart.
std::string RandomSuffix() {
  std::random_device device;
  return absl::StrFormat("%08x%08x", device(), device());
}

absl::Status CheckName(const std::string& name, const char* field) {
  if (IsValidCheckpointName(name)) return absl::OkStatus();
  return MakeError(
      ErrorReason::kInvalidName,
      absl::StrCat(field, " must have 1 to 128 characters of A-Z a-z 0-9 . _ - and begin and end with a letter or digit; it is '",
                   absl::CHexEscape(name.substr(0, kMaxNameLength)), "'"),
      {{"field", field}, {"actual", absl::CHexEscape(name.substr(0, kMaxNameLength))}});
}

absl::Status CheckNames(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) {
  HEADWATER_RETURN_IF_ERROR(CheckName(tenant, "tenant"));
  HEADWATER_RETURN_IF_ERROR(CheckName(head_id, "head"));
  return CheckName(checkpoint, "checkpoint");
}

absl::Status AlreadyExists(const std::string& checkpoint) {
  return MakeError(ErrorReason::kCheckpointAlreadyExists, absl::StrCat("checkpoint ", checkpoint, " exists; overwrite replaces it"),
                   {{"checkpoint", checkpoint}});
}

}  // namespace

bool IsValidCheckpointName(const std::string& name) {
  const auto is_alphanumeric = [](char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)); };
  if (name.empty() || name.size() > kMaxNameLength || !is_alphanumeric(name.front()) || !is_alphanumeric(name.back())) return false;
  return std::all_of(name.begin(), name.end(), [&](char c) { return is_alphanumeric(c) || c == '.' || c == '_' || c == '-'; });
}

// ---- opening, and leftovers of crashes --------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(const std::string& root, FileSystem& files, int64_t keep) {
  for (size_t end = root.find('/', 1);; end = root.find('/', end + 1)) {
    const std::string directory = root.substr(0, end);
    if (!files.IsDirectory(directory)) {
      absl::Status status = files.CreateDirectory(directory);
      // A link to a directory exists too.
      if (!status.ok() && !absl::IsAlreadyExists(status)) {
        return MakeError(GetErrorReason(status), absl::StrCat("the checkpoint directory ", directory, ": ", status.message()));
      }
    }
    if (end == std::string::npos) break;
  }
  std::unique_ptr<CheckpointStore> store(new CheckpointStore(root, files, keep));
  auto hold = files.HoldDirectory(root);
  if (absl::IsAlreadyExists(hold.status())) {
    observability::Log(
        observability::LogLevel::kWarning, "checkpoint_directory_shared",
        {{"directory", root},
         {"message",
          "another process has this checkpoint directory open, a second server perhaps: what was left there is not "
          "cleared away, and both would bring back and save the same heads; give each server a directory of its own"}});
    return store;
  }
  if (hold.ok()) store->hold_ = *std::move(hold);
  HEADWATER_ASSIGN_OR_RETURN(const auto heads, store->AllHeads());
  for (const auto& [tenant, head_id] : heads) {
    HEADWATER_RETURN_IF_ERROR(store->CleanHeadDirectory(store->HeadDirectory(tenant, head_id)));
  }
  return store;
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> CheckpointStore::AllHeads() const {
  std::vector<std::pair<std::string, std::string>> all;
  HEADWATER_ASSIGN_OR_RETURN(std::vector<std::string> tenants, files_.ListDirectory(root_));
  for (const std::string& tenant : tenants) {
    const std::string tenant_directory = Join(root_, tenant);
    if (!IsValidCheckpointName(tenant) || !files_.IsDirectory(tenant_directory)) continue;
    HEADWATER_ASSIGN_OR_RETURN(std::vector<std::string> heads, files_.ListDirectory(tenant_directory));
    for (const std::string& head_id : heads) {
      if (IsValidCheckpointName(head_id) && files_.IsDirectory(Join(tenant_directory, head_id))) all.emplace_back(tenant, head_id);
    }
  }
  return all;
}

absl::Status CheckpointStore::CleanHeadDirectory(const std::string& directory) {
  HEADWATER_ASSIGN_OR_RETURN(std::vector<std::string> names, files_.ListDirectory(directory));
  for (const std::string& name : names) {
    const std::string path = Join(directory, name);
    absl::Status status;
    if (absl::StartsWith(name, kTemporaryPrefix)) {
      status = files_.RemoveTree(path);
    } else if (absl::StartsWith(name, kReplacedPrefix)) {
      // A crash between the two renames of a replacement: the old version is the complete one.
      const std::string place = Join(directory, name.substr(sizeof(kReplacedPrefix) - 1));
      status = files_.IsDirectory(place) ? files_.RemoveTree(path) : files_.Rename(path, place);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckpointStore::MakeHeadDirectory(const std::string& tenant, const std::string& head_id) {
  std::string parent = root_;
  for (const std::string& name : {tenant, head_id}) {
    const std::string directory = Join(parent, name);
    if (!files_.IsDirectory(directory)) {
      if (absl::Status status = files_.CreateDirectory(directory); !status.ok() && !absl::IsAlreadyExists(status)) return status;
      HEADWATER_RETURN_IF_ERROR(files_.SyncDirectory(parent));
    }
    parent = directory;
  }
  return absl::OkStatus();
}

// ---- saving ----------------------------------------------------------------------------------------------------------

absl::Status CheckpointStore::Publish(const std::string& head_directory, const std::string& temporary,
                                      const std::string& checkpoint, bool overwrite) {
  const std::string place = Join(head_directory, checkpoint);
  absl::MutexLock lock(&publish_mutex_);
  if (!files_.IsDirectory(place)) {
    absl::Status status = files_.Rename(temporary, place);
    if (absl::IsAlreadyExists(status)) return AlreadyExists(checkpoint);
    if (!status.ok()) return status;
    status = files_.SyncDirectory(head_directory);
    // Undoes the renaming: a directory that may not be on the disk is not a checkpoint. The caller removes it.
    if (!status.ok()) files_.Rename(place, temporary).IgnoreError();
    return status;
  }
  if (!overwrite) return AlreadyExists(checkpoint);

  absl::Status status = files_.Exchange(temporary, place);
  if (status.ok()) {
    status = files_.SyncDirectory(head_directory);
    if (!status.ok()) files_.Exchange(temporary, place).IgnoreError();
    return status;  // the caller removes the old version, now at `temporary`
  }
  if (!absl::IsUnimplemented(status)) return status;
  // Two renames. After a crash between them CleanHeadDirectory() brings the old version back.
  const std::string replaced = Join(head_directory, absl::StrCat(kReplacedPrefix, checkpoint));
  if (status = files_.RemoveTree(replaced); !status.ok()) return status;
  if (status = files_.Rename(place, replaced); !status.ok()) return status;
  status = files_.Rename(temporary, place);
  if (!status.ok()) {
    files_.Rename(replaced, place).IgnoreError();
    return status;
  }
  if (status = files_.SyncDirectory(head_directory); !status.ok()) return status;
  files_.RemoveTree(replaced).IgnoreError();  // after a failure it is removed at the next start
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CheckpointStore::Save(const std::string& tenant, const std::string& head_id, const CheckpointInfo& info,
                                              const EngineHead& head, bool overwrite) {
  HEADWATER_RETURN_IF_ERROR(CheckNames(tenant, head_id, info.name));
  HEADWATER_RETURN_IF_ERROR(MakeHeadDirectory(tenant, head_id));
  const std::string head_directory = HeadDirectory(tenant, head_id);
  if (!overwrite && files_.IsDirectory(Join(head_directory, info.name))) return AlreadyExists(info.name);
  HEADWATER_ASSIGN_OR_RETURN(const Sequences sequences, NextSequence(tenant, head_id));
  CheckpointInfo numbered = info;
  numbered.sequence = sequences.last;
  numbered.first_sequence = sequences.first;
  numbered.save_time_s = absl::ToUnixSeconds(absl::Now());
  // Before the writing: on a full disk, a lower `keep` would otherwise never make room.
  if (keep_ > 0) Prune(tenant, head_id, info.name, sequences.first);

  const std::string temporary = Join(head_directory, absl::StrCat(kTemporaryPrefix, RandomSuffix()));
  HEADWATER_RETURN_IF_ERROR(files_.CreateDirectory(temporary));
  absl::StatusOr<int64_t> total_bytes = WriteShardFiles(files_, temporary, numbered, head);
  // The mark comes first: after a crash, a published checkpoint must bring its head back; a mark alone is harmless.
  absl::Status status = total_bytes.ok() ? MarkLive(head_directory, sequences.first) : total_bytes.status();
  if (status.ok()) status = Publish(head_directory, temporary, info.name, overwrite);
  files_.RemoveTree(temporary).IgnoreError();  // the failed or the replaced version; the next start tries again
  if (!status.ok()) return status;
  if (keep_ > 0) Prune(tenant, head_id, info.name, sequences.first);
  return total_bytes;
}

// ---- removing --------------------------------------------------------------------------------------------------------

absl::Status CheckpointStore::RemoveCheckpoint(const std::string& head_directory, const std::string& checkpoint) {
  const std::string place = Join(head_directory, checkpoint);
  const std::string temporary = Join(head_directory, absl::StrCat(kTemporaryPrefix, RandomSuffix()));
  absl::MutexLock lock(&publish_mutex_);
  HEADWATER_RETURN_IF_ERROR(files_.Rename(place, temporary));
  // The name must be gone before the files.
  if (absl::Status status = files_.SyncDirectory(head_directory); !status.ok()) {
    files_.Rename(temporary, place).IgnoreError();
    return status;
  }
  return files_.RemoveTree(temporary);  // after a failure it is removed at the next start
}

absl::StatusOr<bool> CheckpointStore::Remove(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) {
  HEADWATER_RETURN_IF_ERROR(CheckNames(tenant, head_id, checkpoint));
  if (!files_.IsDirectory(Join(HeadDirectory(tenant, head_id), checkpoint))) return false;
  HEADWATER_RETURN_IF_ERROR(RemoveCheckpoint(HeadDirectory(tenant, head_id), checkpoint));
  observability::Log(observability::LogLevel::kInfo, "checkpoint_removed",
                     {{"tenant", tenant}, {"head", head_id}, {"checkpoint", checkpoint}});
  return true;
}

void CheckpointStore::Prune(const std::string& tenant, const std::string& head_id, const std::string& checkpoint,
                            int64_t first_sequence) {
  using observability::Log;
  using observability::LogLevel;
  absl::StatusOr<Catalogue> catalogue = ListNewestFirst(tenant, head_id);
  absl::Status status = catalogue.status();
  if (status.ok()) {
    std::vector<CheckpointInfo>& series = catalogue->newest_first;
    // Checkpoints of former heads of this name stay.
    std::erase_if(series, [&](const CheckpointInfo& info) {
      return !BelongsTo(info, first_sequence) || SeriesOf(info.name) != SeriesOf(checkpoint);
    });
    for (size_t index = static_cast<size_t>(keep_); index < series.size() && status.ok(); ++index) {
      if (series[index].name == checkpoint) continue;  // another save may have numbered higher meanwhile
      status = RemoveCheckpoint(HeadDirectory(tenant, head_id), series[index].name);
      if (status.ok()) {
        Log(LogLevel::kInfo, "checkpoint_removed",
            {{"tenant", tenant}, {"head", head_id}, {"checkpoint", series[index].name}, {"newest", series.front().name}});
      }
    }
  }
  if (!status.ok()) {
    Log(LogLevel::kWarning, "checkpoints_not_removed",
        {{"tenant", tenant}, {"head", head_id}, {"series", SeriesOf(checkpoint)}, {"note", std::string(status.message())}});
  }
}

absl::StatusOr<CheckpointStore::Sequences> CheckpointStore::NextSequence(const std::string& tenant, const std::string& head_id) {
  const std::string directory = HeadDirectory(tenant, head_id);
  absl::MutexLock lock(&sequence_mutex_);
  auto found = sequences_.find(directory);
  if (found == sequences_.end()) {
    Sequences sequences;
    HEADWATER_ASSIGN_OR_RETURN(const Catalogue catalogue, ListNewestFirst(tenant, head_id));
    const CheckpointInfo* const newest = catalogue.newest_first.empty() ? nullptr : &catalogue.newest_first.front();
    if (newest != nullptr) sequences.last = newest->sequence;
    const std::optional<int64_t> mark = ReadLiveMark(directory);
    if (mark.value_or(0) > 0) {
      sequences.first = *mark;
    } else if (mark.has_value() && newest != nullptr) {
      // The mark is damaged. Checkpoints before the newest one's run, or without a run before the newest one, stay.
      sequences.first = std::max<int64_t>(newest->first_sequence > 0 ? newest->first_sequence : newest->sequence, 1);
    } else {
      sequences.first = NumberAfter(sequences.last);
    }
    // Checkpoints may have been removed by hand.
    sequences.last = std::max(sequences.last, sequences.first - 1);
    found = sequences_.emplace(directory, sequences).first;
  }
  found->second.last = NumberAfter(found->second.last);
  return found->second;
}

// ---- heads to bring back ------------------------------------------------------------------------------------------------

std::optional<int64_t> CheckpointStore::ReadLiveMark(const std::string& head_directory) const {
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = files_.OpenFile(Join(head_directory, kLiveMark));
  if (absl::IsNotFound(file.status())) return std::nullopt;
  int64_t first_sequence = 0;
  if (!file.ok()) return first_sequence;
  const absl::StatusOr<nlohmann::json> mark = ReadStrictJson(**file, kMaxLiveMarkBytes, "the mark of a live head");
  if (!mark.ok() || !mark->contains(kFirstSequence) || !GetCount((*mark)[kFirstSequence], &first_sequence)) return 0;
  return first_sequence;
}

absl::Status CheckpointStore::MarkLive(const std::string& head_directory, int64_t first_sequence) {
  absl::MutexLock lock(&publish_mutex_);
  if (ReadLiveMark(head_directory).has_value()) return absl::OkStatus();
  const std::string temporary = Join(head_directory, absl::StrCat(kTemporaryPrefix, RandomSuffix()));
  absl::Status status = WriteWholeFile(files_, temporary, nlohmann::json{{kFirstSequence, first_sequence}}.dump());
  if (status.ok()) status = files_.Rename(temporary, Join(head_directory, kLiveMark));
  if (!status.ok()) {
    files_.RemoveTree(temporary).IgnoreError();  // after a failure it is removed at the next start
    return status;
  }
  return files_.SyncDirectory(head_directory);
}

absl::StatusOr<CheckpointStore::Catalogue> CheckpointStore::FindComebacks(const std::string& tenant,
                                                                          const std::string& head_id) const {
  HEADWATER_RETURN_IF_ERROR(CheckNames(tenant, head_id, "any"));
  const std::optional<int64_t> first_sequence = ReadLiveMark(HeadDirectory(tenant, head_id));
  if (!first_sequence.has_value()) return Catalogue();
  HEADWATER_ASSIGN_OR_RETURN(Catalogue comebacks, ListNewestFirst(tenant, head_id));
  std::erase_if(comebacks.newest_first, [&](const CheckpointInfo& info) { return !BelongsTo(info, *first_sequence); });
  return comebacks;
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> CheckpointStore::LiveHeads() const {
  auto heads = AllHeads();
  if (!heads.ok()) return heads;
  std::erase_if(*heads, [this](const auto& head) {
    const absl::StatusOr<Catalogue> comebacks = FindComebacks(head.first, head.second);
    return comebacks.ok() && comebacks->empty();
  });
  return heads;
}

absl::Status CheckpointStore::Forget(const std::string& tenant, const std::string& head_id) {
  HEADWATER_RETURN_IF_ERROR(CheckNames(tenant, head_id, "any"));
  const std::string directory = HeadDirectory(tenant, head_id);
  {
    absl::MutexLock lock(&sequence_mutex_);
    sequences_.erase(directory);  // the next NextSequence() reads the numbers from the files again
  }
  // Writes nothing for a name without a mark: heads can be made where checkpoints can only be read.
  if (!ReadLiveMark(directory).has_value()) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(files_.RemoveTree(Join(directory, kLiveMark)));
  return files_.SyncDirectory(directory);
}

bool CheckpointStore::Continue(const std::string& tenant, const std::string& head_id, const CheckpointInfo& restored) {
  if (restored.first_sequence == 0) return false;
  // An existing mark is from a first save that failed, and names another run.
  absl::Status status = Forget(tenant, head_id);
  if (status.ok()) status = MarkLive(HeadDirectory(tenant, head_id), restored.first_sequence);
  if (status.ok()) return true;
  observability::Log(
      observability::LogLevel::kWarning, "checkpoints_not_continued",
      {{"tenant", tenant}, {"head", head_id}, {"checkpoint", restored.name}, {"note", std::string(status.message())}});
  return false;
}

// ---- reading ---------------------------------------------------------------------------------------------------------

absl::StatusOr<CheckpointInfo> CheckpointStore::Read(const std::string& tenant, const std::string& head_id,
                                                     const std::string& checkpoint) const {
  absl::StatusOr<Manifest> manifest = OpenManifest(tenant, head_id, checkpoint);
  return manifest.ok() ? absl::StatusOr<CheckpointInfo>(manifest->info) : manifest.status();
}

absl::StatusOr<Manifest> CheckpointStore::OpenManifest(const std::string& tenant, const std::string& head_id,
                                                       const std::string& checkpoint) const {
  HEADWATER_RETURN_IF_ERROR(CheckNames(tenant, head_id, checkpoint));
  absl::StatusOr<std::unique_ptr<ReadableFile>> file =
      files_.OpenFile(Join(Join(HeadDirectory(tenant, head_id), checkpoint), kManifestName));
  if (absl::IsNotFound(file.status())) {
    return MakeError(ErrorReason::kCheckpointNotFound, absl::StrCat("head ", head_id, " has no checkpoint ", checkpoint),
                     {{"checkpoint", checkpoint}, {"head", head_id}});
  }
  if (!file.ok()) return file.status();
  absl::StatusOr<Manifest> manifest = ReadManifest(**file);
  if (!manifest.ok()) {
    return MakeError(GetErrorReason(manifest.status()), absl::StrCat(checkpoint, ": ", std::string(manifest.status().message())),
                     GetErrorMetadata(manifest.status()));
  }
  manifest->info.name = checkpoint;
  manifest->info.total_bytes = (*file)->size();
  for (const ManifestFile& entry : manifest->files) {
    if (__builtin_add_overflow(manifest->info.total_bytes, entry.bytes, &manifest->info.total_bytes)) {
      return CorruptError("the checkpoint's manifest claims more bytes than can be counted");
    }
  }
  return manifest;
}

std::string CheckpointStore::HeadDirectory(const std::string& tenant, const std::string& head_id) const {
  return Join(Join(root_, tenant), head_id);
}

absl::StatusOr<CheckpointInfo> CheckpointStore::Load(const std::string& tenant, const std::string& head_id,
                                                     const std::string& checkpoint, EngineHead& head) const {
  absl::StatusOr<Manifest> manifest = OpenManifest(tenant, head_id, checkpoint);
  if (HasReason(manifest.status(), ErrorReason::kCheckpointNotFound)) {
    const std::string steps = Steps(tenant, head_id);
    ErrorMetadata metadata = GetErrorMetadata(manifest.status());
    metadata["checkpoints"] = steps;
    return MakeError(ErrorReason::kCheckpointNotFound,
                     absl::StrCat(std::string(manifest.status().message()),
                                  steps.empty() ? "; it has none" : "; it has, with their steps, " + steps),
                     std::move(metadata));
  }
  if (!manifest.ok()) return manifest.status();
  if (const auto differences = FindSpecDifferences(manifest->info.spec, head.spec()); !differences.empty()) {
    const std::string text = absl::StrJoin(differences, ", ", [](std::string* out, const SpecDifference& difference) {
      absl::StrAppend(out, difference.field, " is ", difference.first, " and ", difference.second);
    });
    return MakeError(ErrorReason::kCheckpointSpecMismatch,
                     absl::StrCat("checkpoint ", checkpoint, " and head ", head_id, " differ: ", text),
                     {{"checkpoint", checkpoint}, {"difference", text}});
  }
  HEADWATER_RETURN_IF_ERROR(LoadShardFiles(files_, Join(HeadDirectory(tenant, head_id), checkpoint), manifest->files, head));
  return manifest->info;
}

std::string CheckpointStore::Steps(const std::string& tenant, const std::string& head_id) const {
  const absl::StatusOr<Catalogue> checkpoints = ListNewestFirst(tenant, head_id);
  if (!checkpoints.ok()) return "";
  std::string text;
  for (const CheckpointInfo& info : checkpoints->newest_first) {
    const std::string entry = absl::StrCat(text.empty() ? "" : ",", info.name, "=", info.step);
    if (text.size() + entry.size() > kMaxStepsBytes) break;
    text += entry;
  }
  return text;
}

absl::StatusOr<CheckpointStore::Catalogue> CheckpointStore::ListNewestFirst(const std::string& tenant,
                                                                            const std::string& head_id) const {
  HEADWATER_RETURN_IF_ERROR(CheckNames(tenant, head_id, "any"));
  Catalogue catalogue;
  const std::string head_directory = HeadDirectory(tenant, head_id);
  absl::StatusOr<std::vector<std::string>> names = files_.ListDirectory(head_directory);
  if (absl::IsNotFound(names.status())) return catalogue;
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    if (!IsValidCheckpointName(name)) continue;
    absl::StatusOr<CheckpointInfo> info = Read(tenant, head_id, name);
    if (info.ok()) {
      catalogue.newest_first.push_back(*std::move(info));
    } else if (files_.IsDirectory(Join(head_directory, name))) {
      catalogue.damaged.push_back(name);
    }
  }
  std::stable_sort(catalogue.newest_first.begin(), catalogue.newest_first.end(), IsNewer);
  return catalogue;
}

}  // namespace headwater::checkpoint
