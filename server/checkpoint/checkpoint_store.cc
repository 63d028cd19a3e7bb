#include "server/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"
#include "server/checkpoint/manifest.h"
#include "server/model_files/safetensors.h"
#include "server/model_files/strict_json.h"
#include "server/model_files/xxh3.h"
#include "server/observability/logging.h"

namespace headwater::checkpoint {
namespace {

using model_files::CorruptError;
using model_files::FindMember;
using model_files::GetCount;
using model_files::MakeSafetensorsHeader;
using model_files::ReadSafetensorsHeader;
using model_files::ReadStrictJson;
using model_files::SafetensorsHeader;
using model_files::SafetensorsOutput;

// Hidden names, which IsValidCheckpointName() refuses.
constexpr char kTemporaryPrefix[] = ".tmp-";
constexpr char kReplacedPrefix[] = ".old-";
constexpr char kLiveMark[] = ".live";
constexpr char kFirstSequence[] = "first_sequence";
constexpr int64_t kMaxLiveMarkBytes = 4096;
constexpr size_t kMaxNameLength = 128;
constexpr int64_t kPieceBytes = int64_t{8} << 20;
constexpr size_t kMaxStepsBytes = 512;  // errors carry it twice, in headers that are bounded

// The number of the checkpoint after number `last`, which may come from a file.
int64_t NumberAfter(int64_t last) { return last < INT64_MAX ? last + 1 : last; }

// What is saved, in the order in which it is written back: writing the weight sets the master, writing the master the weight.
constexpr HeadTensor kSavedTensors[] = {HeadTensor::kWeight,        HeadTensor::kBias,          HeadTensor::kMasterWeight,
                                        HeadTensor::kMasterBias,    HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias,
                                        HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias};

bool IsAlphanumeric(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

std::string Join(const std::string& directory, const std::string& name) { return absl::StrCat(directory, "/", name); }

// What the names of a series have in common, with # for their numbers.
std::string SeriesOf(const std::string& checkpoint) {
  const size_t number = checkpoint.find_last_not_of("0123456789") + 1;
  return number < checkpoint.size() ? absl::StrCat(checkpoint.substr(0, number), "#") : checkpoint;
}

// `a` was begun after `b`.
bool IsNewer(const CheckpointInfo& a, const CheckpointInfo& b) { return a.sequence > b.sequence; }

// Whether a checkpoint belongs to the run that begins with number `first`; to 0, which stands for a damaged mark, all do. Those of
// older versions do not tell their run.
bool BelongsTo(const CheckpointInfo& info, int64_t first) {
  if (first == 0) return true;
  return info.first_sequence > 0 ? info.first_sequence == first : info.sequence >= first;
}

// Tells apart the temporary directories of calls that run at once.
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
  if (absl::Status status = CheckName(tenant, "tenant"); !status.ok()) return status;
  if (absl::Status status = CheckName(head_id, "head"); !status.ok()) return status;
  return CheckName(checkpoint, "checkpoint");
}

absl::Status AlreadyExists(const std::string& checkpoint) {
  return MakeError(ErrorReason::kCheckpointAlreadyExists, absl::StrCat("checkpoint ", checkpoint, " exists; overwrite replaces it"),
                   {{"checkpoint", checkpoint}});
}

const char* SafetensorsType(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "F32";
    case DataType::kBFloat16:
      return "BF16";
    case DataType::kFloat16:
      return "F16";
  }
  return "";
}

// A tensor as it stands in a shard's file.
struct SavedTensor {
  HeadTensor tensor;
  DataType data_type;
  int64_t width;  // elements of one vocabulary row
};

// fp32 master weights are apart from the stored ones for 16-bit heads with an optimizer; elsewhere they are the same numbers.
bool HasSeparateMaster(const HeadSpec& spec) {
  return spec.data_type != DataType::kFloat32 && !std::holds_alternative<std::monostate>(spec.optimizer);
}

std::vector<SavedTensor> TensorsOf(const EngineHead& head) {
  const HeadSpec& spec = head.spec();
  std::vector<SavedTensor> tensors;
  for (const HeadTensor tensor : kSavedTensors) {
    const bool is_master = tensor == HeadTensor::kMasterWeight || tensor == HeadTensor::kMasterBias;
    const int64_t count = head.ElementCount(tensor);
    if (count == 0 || (is_master && !HasSeparateMaster(spec))) continue;
    tensors.push_back({tensor, head.TensorDataType(tensor), count / spec.vocab_size});
  }
  return tensors;
}

std::vector<SafetensorsOutput> FileLayout(const std::vector<SavedTensor>& tensors, const VocabShard& rows) {
  const int64_t row_count = rows.vocab_end - rows.vocab_start;
  std::vector<SafetensorsOutput> layout;
  for (const SavedTensor& saved : tensors) {
    SafetensorsOutput output;
    output.name = HeadTensorName(saved.tensor);
    output.data_type = SafetensorsType(saved.data_type);
    const bool is_bias = saved.tensor == HeadTensor::kBias || saved.tensor == HeadTensor::kMasterBias ||
                         saved.tensor == HeadTensor::kMoment1Bias || saved.tensor == HeadTensor::kMoment2Bias;
    output.shape = is_bias ? std::vector<int64_t>{row_count} : std::vector<int64_t>{row_count, saved.width};
    output.byte_count = row_count * saved.width * ElementBytes(saved.data_type);
    layout.push_back(std::move(output));
  }
  return layout;
}

// Calls `work(element_start, element_count)` for pieces of at most kPieceBytes of a tensor's rows.
template <typename Work>
absl::Status ForEachPiece(const SavedTensor& saved, const VocabShard& rows, const Work& work) {
  const int64_t piece = kPieceBytes / ElementBytes(saved.data_type);
  const int64_t end = rows.vocab_end * saved.width;
  for (int64_t start = rows.vocab_start * saved.width; start < end; start += piece) {
    if (absl::Status status = work(start, std::min(piece, end - start)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Room for the largest piece of these rows: small heads must not pay for large ones.
absl::StatusOr<PlannedBytes> PieceBuffer(const std::vector<SavedTensor>& tensors, const VocabShard& rows) {
  int64_t bytes = 0;
  for (const SavedTensor& saved : tensors) {
    bytes = std::max(bytes, (rows.vocab_end - rows.vocab_start) * saved.width * ElementBytes(saved.data_type));
  }
  return AllocatePlanned(std::min(bytes, kPieceBytes));
}

// Appends to a file and adds up its checksum.
class HashedFile {
 public:
  explicit HashedFile(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}
  absl::Status Append(const void* data, int64_t byte_count) {
    hasher_.Update(data, byte_count);
    bytes_ += byte_count;
    return file_->Append(data, byte_count);
  }
  absl::Status SyncAndClose() { return file_->SyncAndClose(); }
  int64_t bytes() const { return bytes_; }
  std::string HexDigest() const { return hasher_.HexDigest(); }

 private:
  std::unique_ptr<WritableFile> file_;
  model_files::Xxh3Hasher hasher_;
  int64_t bytes_ = 0;
};

// Creates `path` with these bytes, synced.
absl::Status WriteWholeFile(FileSystem& files, const std::string& path, const std::string& text) {
  absl::StatusOr<std::unique_ptr<WritableFile>> file = files.CreateFile(path);
  if (!file.ok()) return file.status();
  if (absl::Status status = (*file)->Append(text.data(), static_cast<int64_t>(text.size())); !status.ok()) return status;
  return (*file)->SyncAndClose();
}

absl::StatusOr<std::string> HashFile(const ReadableFile& file) {
  model_files::Xxh3Hasher hasher;
  const absl::StatusOr<PlannedBytes> buffer = AllocatePlanned(std::min(file.size(), kPieceBytes));
  if (!buffer.ok()) return buffer.status();
  for (int64_t offset = 0; offset < file.size(); offset += kPieceBytes) {
    const int64_t count = std::min(kPieceBytes, file.size() - offset);
    if (absl::Status status = file.ReadAt(offset, count, buffer->get()); !status.ok()) return status;
    hasher.Update(buffer->get(), count);
  }
  return hasher.HexDigest();
}

// A file that has passed verification.
struct VerifiedFile {
  std::unique_ptr<ReadableFile> file;
  SafetensorsHeader header;
};

absl::StatusOr<VerifiedFile> VerifyFile(const FileSystem& files, const std::string& directory, const ManifestFile& expected,
                                        const std::vector<SafetensorsOutput>& layout) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> opened = files.OpenFile(Join(directory, expected.name));
  if (absl::IsNotFound(opened.status())) return CorruptError(absl::StrCat(expected.name, " of the checkpoint is not there"));
  if (!opened.ok()) return opened.status();
  VerifiedFile verified;
  verified.file = *std::move(opened);
  if (verified.file->size() != expected.bytes) {
    return CorruptError(absl::StrCat(expected.name, " has ", verified.file->size(), " bytes, the manifest says ", expected.bytes));
  }
  absl::StatusOr<std::string> checksum = HashFile(*verified.file);
  if (!checksum.ok()) return checksum.status();
  if (*checksum != expected.checksum) {
    return MakeError(ErrorReason::kChecksumMismatch,
                     absl::StrCat("the checksum of ", expected.name, " is ", *checksum, ", the manifest says ", expected.checksum),
                     {{"file", expected.name}, {"expected", expected.checksum}, {"actual", *checksum}});
  }
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(*verified.file);
  if (!header.ok()) return header.status();
  for (const SafetensorsOutput& output : layout) {
    const auto found = header->tensors.find(output.name);
    if (found == header->tensors.end() || found->second.shape != output.shape || found->second.data_type != output.data_type) {
      return CorruptError(
          absl::StrCat(expected.name, " does not have ", output.name, " of the type and shape that its manifest implies"));
    }
  }
  verified.header = *std::move(header);
  return verified;
}

// Part of the head may have been overwritten: whatever the reason was, the head is lost.
absl::Status AfterVerification(const absl::Status& status) {
  if (status.ok() || HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal)) return status;
  return MakeError(
      ErrorReason::kInternal,
      absl::StrCat("the checkpoint changed or the head refused it after it had been verified: ", std::string(status.message())));
}

// Writes a file's tensors into the head.
absl::Status WriteInto(EngineHead& head, const VerifiedFile& verified, const std::vector<SavedTensor>& tensors,
                       const VocabShard& rows) {
  const bool has_master = HasSeparateMaster(head.spec());
  const absl::StatusOr<PlannedBytes> buffer = PieceBuffer(tensors, rows);
  if (!buffer.ok()) return AfterVerification(buffer.status());
  for (const SavedTensor& saved : tensors) {
    // The stored weight follows from the master.
    if (has_master && (saved.tensor == HeadTensor::kWeight || saved.tensor == HeadTensor::kBias)) continue;
    const int64_t element_bytes = ElementBytes(saved.data_type);
    const int64_t begin = verified.header.tensors.at(HeadTensorName(saved.tensor)).begin;
    const int64_t first = rows.vocab_start * saved.width;
    const auto write = [&](int64_t start, int64_t count) {
      absl::Status status = verified.file->ReadAt(begin + (start - first) * element_bytes, count * element_bytes, buffer->get());
      return status.ok() ? head.WriteTensor(saved.tensor, start, count, buffer->get()) : status;
    };
    if (absl::Status status = ForEachPiece(saved, rows, write); !status.ok()) return AfterVerification(status);
  }
  return absl::OkStatus();
}

}  // namespace

bool IsValidCheckpointName(const std::string& name) {
  if (name.empty() || name.size() > kMaxNameLength || !IsAlphanumeric(name.front()) || !IsAlphanumeric(name.back())) return false;
  return std::all_of(name.begin(), name.end(), [](char c) { return IsAlphanumeric(c) || c == '.' || c == '_' || c == '-'; });
}

// ---- opening, and what crashes left ----------------------------------------------------------------------------------

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
  const auto heads = store->AllHeads();
  if (!heads.ok()) return heads.status();
  for (const auto& [tenant, head_id] : *heads) {
    if (absl::Status status = store->CleanHeadDirectory(store->HeadDirectory(tenant, head_id)); !status.ok()) return status;
  }
  return store;
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> CheckpointStore::AllHeads() const {
  std::vector<std::pair<std::string, std::string>> all;
  absl::StatusOr<std::vector<std::string>> tenants = files_.ListDirectory(root_);
  if (!tenants.ok()) return tenants.status();
  for (const std::string& tenant : *tenants) {
    const std::string tenant_directory = Join(root_, tenant);
    if (!IsValidCheckpointName(tenant) || !files_.IsDirectory(tenant_directory)) continue;
    absl::StatusOr<std::vector<std::string>> heads = files_.ListDirectory(tenant_directory);
    if (!heads.ok()) return heads.status();
    for (const std::string& head_id : *heads) {
      if (IsValidCheckpointName(head_id) && files_.IsDirectory(Join(tenant_directory, head_id))) all.emplace_back(tenant, head_id);
    }
  }
  return all;
}

absl::Status CheckpointStore::CleanHeadDirectory(const std::string& directory) {
  absl::StatusOr<std::vector<std::string>> names = files_.ListDirectory(directory);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
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
      if (absl::Status status = files_.SyncDirectory(parent); !status.ok()) return status;
    }
    parent = directory;
  }
  return absl::OkStatus();
}

// ---- saving ----------------------------------------------------------------------------------------------------------

absl::StatusOr<int64_t> CheckpointStore::WriteFiles(const std::string& directory, const CheckpointInfo& info,
                                                    const EngineHead& head) {
  const std::vector<SavedTensor> tensors = TensorsOf(head);
  Manifest manifest;
  manifest.info = info;
  int64_t total_bytes = 0;
  for (const VocabShard& rows : head.shards()) {
    ManifestFile& entry = manifest.files.emplace_back();
    entry.name = ShardFileName(manifest.files.size() - 1, head.shards().size());
    entry.rows = rows;
    absl::StatusOr<std::unique_ptr<WritableFile>> created = files_.CreateFile(Join(directory, entry.name));
    if (!created.ok()) return created.status();
    HashedFile file(*std::move(created));
    const std::string header = MakeSafetensorsHeader(FileLayout(tensors, rows));
    if (absl::Status status = file.Append(header.data(), static_cast<int64_t>(header.size())); !status.ok()) return status;
    const absl::StatusOr<PlannedBytes> buffer = PieceBuffer(tensors, rows);
    if (!buffer.ok()) return buffer.status();
    for (const SavedTensor& saved : tensors) {
      const auto append = [&](int64_t start, int64_t count) {
        absl::Status status = head.ReadTensor(saved.tensor, start, count, buffer->get());
        return status.ok() ? file.Append(buffer->get(), count * ElementBytes(saved.data_type)) : status;
      };
      if (absl::Status status = ForEachPiece(saved, rows, append); !status.ok()) return status;
    }
    if (absl::Status status = file.SyncAndClose(); !status.ok()) return status;
    entry.bytes = file.bytes();
    entry.checksum = file.HexDigest();
    total_bytes += entry.bytes;
  }
  const std::string text = FormatManifest(manifest);
  if (absl::Status status = WriteWholeFile(files_, Join(directory, kManifestName), text); !status.ok()) return status;
  if (absl::Status status = files_.SyncDirectory(directory); !status.ok()) return status;
  return total_bytes + static_cast<int64_t>(text.size());
}

absl::Status CheckpointStore::Publish(const std::string& head_directory, const std::string& temporary,
                                      const std::string& checkpoint, bool overwrite) {
  const std::string place = Join(head_directory, checkpoint);
  absl::MutexLock lock(&publish_mutex_);
  if (!files_.IsDirectory(place)) {
    absl::Status status = files_.Rename(temporary, place);
    if (absl::IsAlreadyExists(status)) return AlreadyExists(checkpoint);
    if (!status.ok()) return status;
    status = files_.SyncDirectory(head_directory);
    // What is not known to be on the disk is not a checkpoint: back, where the caller removes it.
    if (!status.ok()) files_.Rename(place, temporary).IgnoreError();
    return status;
  }
  if (!overwrite) return AlreadyExists(checkpoint);

  absl::Status status = files_.Exchange(temporary, place);
  if (status.ok()) {
    status = files_.SyncDirectory(head_directory);
    if (!status.ok()) files_.Exchange(temporary, place).IgnoreError();
    return status;  // the caller removes what is at `temporary`: the old version
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
  files_.RemoveTree(replaced).IgnoreError();  // else it is removed at the next start
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CheckpointStore::Save(const std::string& tenant, const std::string& head_id, const CheckpointInfo& info,
                                              const EngineHead& head, bool overwrite) {
  if (absl::Status status = CheckNames(tenant, head_id, info.name); !status.ok()) return status;
  if (absl::Status status = MakeHeadDirectory(tenant, head_id); !status.ok()) return status;
  const std::string head_directory = HeadDirectory(tenant, head_id);
  if (!overwrite && files_.IsDirectory(Join(head_directory, info.name))) return AlreadyExists(info.name);
  const absl::StatusOr<Sequences> sequences = NextSequence(tenant, head_id);
  if (!sequences.ok()) return sequences.status();
  CheckpointInfo numbered = info;
  numbered.sequence = sequences->last;
  numbered.first_sequence = sequences->first;
  numbered.save_time_s = absl::ToUnixSeconds(absl::Now());
  // Where fewer are to stay because the disk is full, it would never have room if they went only after this one has been written.
  if (keep_ > 0) Prune(tenant, head_id, info.name, /*is_saved=*/false, sequences->first);

  const std::string temporary = Join(head_directory, absl::StrCat(kTemporaryPrefix, RandomSuffix()));
  if (absl::Status status = files_.CreateDirectory(temporary); !status.ok()) return status;
  absl::StatusOr<int64_t> total_bytes = WriteFiles(temporary, numbered, head);
  // The mark first: a checkpoint that is there after a crash must bring its head back; a mark without one does no harm.
  absl::Status status = total_bytes.ok() ? MarkLive(head_directory, sequences->first) : total_bytes.status();
  if (status.ok()) status = Publish(head_directory, temporary, info.name, overwrite);
  files_.RemoveTree(temporary).IgnoreError();  // what failed, or was replaced; else it is removed at the next start
  if (!status.ok()) return status;
  if (keep_ > 0) Prune(tenant, head_id, info.name, /*is_saved=*/true, sequences->first);
  return total_bytes;
}

// ---- removing --------------------------------------------------------------------------------------------------------

absl::Status CheckpointStore::RemoveCheckpoint(const std::string& head_directory, const std::string& checkpoint) {
  const std::string place = Join(head_directory, checkpoint);
  const std::string temporary = Join(head_directory, absl::StrCat(kTemporaryPrefix, RandomSuffix()));
  absl::MutexLock lock(&publish_mutex_);
  if (absl::Status status = files_.Rename(place, temporary); !status.ok()) return status;
  // Its files must not go before its name has.
  if (absl::Status status = files_.SyncDirectory(head_directory); !status.ok()) {
    files_.Rename(temporary, place).IgnoreError();
    return status;
  }
  return files_.RemoveTree(temporary);  // else it is removed at the next start
}

absl::StatusOr<bool> CheckpointStore::Remove(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) {
  if (absl::Status status = CheckNames(tenant, head_id, checkpoint); !status.ok()) return status;
  if (!files_.IsDirectory(Directory(tenant, head_id, checkpoint))) return false;
  if (absl::Status status = RemoveCheckpoint(HeadDirectory(tenant, head_id), checkpoint); !status.ok()) return status;
  observability::Log(observability::LogLevel::kInfo, "checkpoint_removed",
                     {{"tenant", tenant}, {"head", head_id}, {"checkpoint", checkpoint}});
  return true;
}

void CheckpointStore::Prune(const std::string& tenant, const std::string& head_id, const std::string& checkpoint, bool is_saved,
                            int64_t first_sequence) {
  using observability::Log;
  using observability::LogLevel;
  absl::StatusOr<std::vector<CheckpointInfo>> series = List(tenant, head_id);
  absl::Status status = series.status();
  if (status.ok()) {
    // Those of former heads of this name are not this one's to remove.
    std::erase_if(*series, [&](const CheckpointInfo& info) {
      return (is_saved && info.name == checkpoint) || !BelongsTo(info, first_sequence) ||
             SeriesOf(info.name) != SeriesOf(checkpoint);
    });
    std::stable_sort(series->begin(), series->end(), IsNewer);
    const std::string newest = is_saved || series->empty() ? checkpoint : series->front().name;
    for (size_t index = static_cast<size_t>(keep_) - (is_saved ? 1U : 0U); index < series->size() && status.ok(); ++index) {
      status = RemoveCheckpoint(HeadDirectory(tenant, head_id), (*series)[index].name);
      if (status.ok()) {
        Log(LogLevel::kInfo, "checkpoint_removed",
            {{"tenant", tenant}, {"head", head_id}, {"checkpoint", (*series)[index].name}, {"newest", newest}});
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
    absl::StatusOr<std::vector<CheckpointInfo>> checkpoints = List(tenant, head_id);
    if (!checkpoints.ok()) return checkpoints.status();
    const CheckpointInfo* newest = nullptr;
    for (const CheckpointInfo& info : *checkpoints) {
      if (newest == nullptr || IsNewer(info, *newest)) newest = &info;
    }
    if (newest != nullptr) sequences.last = newest->sequence;
    const std::optional<int64_t> mark = ReadLiveMark(directory);
    if (mark.value_or(0) > 0) {
      sequences.first = *mark;
    } else if (mark.has_value() && newest != nullptr) {
      // The mark is damaged: what came before the newest one's run, or before the newest one, stays.
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

// ---- heads that are to come back -------------------------------------------------------------------------------------

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
    files_.RemoveTree(temporary).IgnoreError();  // else it is removed at the next start
    return status;
  }
  return files_.SyncDirectory(head_directory);
}

absl::StatusOr<CheckpointStore::Comebacks> CheckpointStore::FindComebacks(const std::string& tenant,
                                                                          const std::string& head_id) const {
  Comebacks comebacks;
  if (absl::Status status = CheckNames(tenant, head_id, "any"); !status.ok()) return status;
  const std::optional<int64_t> first_sequence = ReadLiveMark(HeadDirectory(tenant, head_id));
  if (!first_sequence.has_value()) return comebacks;
  absl::StatusOr<std::vector<CheckpointInfo>> checkpoints = List(tenant, head_id, &comebacks.damaged);
  if (!checkpoints.ok()) return checkpoints.status();
  for (CheckpointInfo& info : *checkpoints) {
    if (BelongsTo(info, *first_sequence)) comebacks.newest_first.push_back(std::move(info));
  }
  std::stable_sort(comebacks.newest_first.begin(), comebacks.newest_first.end(), IsNewer);
  return comebacks;
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> CheckpointStore::LiveHeads() const {
  auto heads = AllHeads();
  if (!heads.ok()) return heads;
  std::erase_if(*heads, [this](const auto& head) {
    const absl::StatusOr<Comebacks> comebacks = FindComebacks(head.first, head.second);
    return comebacks.ok() && comebacks->empty();
  });
  return heads;
}

absl::Status CheckpointStore::Forget(const std::string& tenant, const std::string& head_id) {
  if (absl::Status status = CheckNames(tenant, head_id, "any"); !status.ok()) return status;
  const std::string directory = HeadDirectory(tenant, head_id);
  ForgetSequences(directory);
  if (!files_.IsDirectory(directory)) return absl::OkStatus();
  if (absl::Status status = files_.RemoveTree(Join(directory, kLiveMark)); !status.ok()) return status;
  return files_.SyncDirectory(directory);
}

void CheckpointStore::ForgetSequences(const std::string& head_directory) {
  absl::MutexLock lock(&sequence_mutex_);
  sequences_.erase(head_directory);
}

absl::Status CheckpointStore::BeginAnew(const std::string& tenant, const std::string& head_id) {
  if (absl::Status status = CheckNames(tenant, head_id, "any"); !status.ok()) return status;
  const std::string directory = HeadDirectory(tenant, head_id);
  // Nothing is written for a name that has no mark: heads can be made where checkpoints can only be read.
  if (ReadLiveMark(directory).has_value()) return Forget(tenant, head_id);
  ForgetSequences(directory);
  return absl::OkStatus();
}

bool CheckpointStore::Continue(const std::string& tenant, const std::string& head_id, const CheckpointInfo& restored) {
  if (restored.first_sequence == 0) return false;
  // A mark that is there is of a first save that failed, and stands for another run.
  absl::Status status = BeginAnew(tenant, head_id);
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
  if (absl::Status status = CheckNames(tenant, head_id, checkpoint); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = files_.OpenFile(Join(Directory(tenant, head_id, checkpoint), kManifestName));
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

std::string CheckpointStore::Directory(const std::string& tenant, const std::string& head_id, const std::string& checkpoint) const {
  return Join(HeadDirectory(tenant, head_id), checkpoint);
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
  const std::vector<SavedTensor> tensors = TensorsOf(head);
  std::vector<VerifiedFile> verified;  // kept open, so that what is read is what was verified
  for (const ManifestFile& entry : manifest->files) {
    absl::StatusOr<VerifiedFile> file =
        VerifyFile(files_, Directory(tenant, head_id, checkpoint), entry, FileLayout(tensors, entry.rows));
    if (!file.ok()) return file.status();
    verified.push_back(*std::move(file));
  }
  for (size_t index = 0; index < verified.size(); ++index) {
    if (absl::Status status = WriteInto(head, verified[index], tensors, manifest->files[index].rows); !status.ok()) return status;
  }
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
  Catalogue catalogue;
  absl::StatusOr<std::vector<CheckpointInfo>> checkpoints = List(tenant, head_id, &catalogue.damaged);
  if (!checkpoints.ok()) return checkpoints.status();
  std::stable_sort(checkpoints->begin(), checkpoints->end(), IsNewer);
  catalogue.newest_first = *std::move(checkpoints);
  return catalogue;
}

absl::StatusOr<std::vector<CheckpointInfo>> CheckpointStore::List(const std::string& tenant, const std::string& head_id,
                                                                  std::vector<std::string>* damaged) const {
  if (absl::Status status = CheckNames(tenant, head_id, "any"); !status.ok()) return status;
  std::vector<CheckpointInfo> checkpoints;
  const std::string head_directory = HeadDirectory(tenant, head_id);
  absl::StatusOr<std::vector<std::string>> names = files_.ListDirectory(head_directory);
  if (absl::IsNotFound(names.status())) return checkpoints;
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    if (!IsValidCheckpointName(name)) continue;
    absl::StatusOr<CheckpointInfo> info = Read(tenant, head_id, name);
    if (info.ok()) {
      checkpoints.push_back(*std::move(info));
    } else if (damaged != nullptr && files_.IsDirectory(Join(head_directory, name))) {
      damaged->push_back(name);
    }
  }
  return checkpoints;
}

}  // namespace headwater::checkpoint
