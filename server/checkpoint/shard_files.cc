#include <memory>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/checkpoint/manifest.h"
#include "server/model_files/safetensors.h"
#include "server/model_files/strict_json.h"
#include "server/model_files/xxh3.h"

namespace headwater::checkpoint {
namespace {

using model_files::CorruptError;
using model_files::MakeSafetensorsHeader;
using model_files::ReadSafetensorsHeader;
using model_files::SafetensorsHeader;
using model_files::SafetensorsOutput;
using model_files::SafetensorsType;

// The saved tensors, in the order of restoring: writing the weight sets the master, writing the master sets the weight.
constexpr HeadTensor kSavedTensors[] = {HeadTensor::kWeight,        HeadTensor::kBias,          HeadTensor::kMasterWeight,
                                        HeadTensor::kMasterBias,    HeadTensor::kMoment1Weight, HeadTensor::kMoment1Bias,
                                        HeadTensor::kMoment2Weight, HeadTensor::kMoment2Bias};

// A tensor in a shard's file.
struct SavedTensor {
  HeadTensor tensor;
  DataType data_type;
  int64_t width;  // elements of one vocabulary row
};

// True for 16-bit heads with an optimizer: their fp32 masters are separate from the stored weights.
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
    const bool is_bias = absl::EndsWith(output.name, "bias");
    output.shape = is_bias ? std::vector<int64_t>{row_count} : std::vector<int64_t>{row_count, saved.width};
    output.byte_count = row_count * saved.width * ElementBytes(saved.data_type);
    layout.push_back(std::move(output));
  }
  return layout;
}

absl::StatusOr<std::string> HashFile(const ReadableFile& file) {
  model_files::Xxh3Hasher hasher;
  const auto add = [&](int64_t offset, int64_t count, void* buffer) {
    HEADWATER_RETURN_IF_ERROR(file.ReadAt(offset, count, buffer));
    hasher.Update(buffer, count);
    return absl::OkStatus();
  };
  HEADWATER_RETURN_IF_ERROR(ForEachPiece(0, file.size(), 1, add));
  return hasher.HexDigest();
}

struct VerifiedFile {
  std::unique_ptr<ReadableFile> file;
  SafetensorsHeader header;
};

absl::StatusOr<VerifiedFile> VerifyFile(const FileSystem& files, const std::string& directory, const ManifestFile& expected,
                                        const std::vector<SafetensorsOutput>& layout) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> opened = files.OpenFile(Join(directory, expected.name));
  if (absl::IsNotFound(opened.status())) return CorruptError(absl::StrCat(expected.name, " of the checkpoint is not there"));
  if (!opened.ok()) return opened.status();
  const ReadableFile& file = **opened;
  if (file.size() != expected.bytes) {
    return CorruptError(absl::StrCat(expected.name, " has ", file.size(), " bytes, the manifest says ", expected.bytes));
  }
  HEADWATER_ASSIGN_OR_RETURN(std::string checksum, HashFile(file));
  if (checksum != expected.checksum) {
    return MakeError(ErrorReason::kChecksumMismatch,
                     absl::StrCat("the checksum of ", expected.name, " is ", checksum, ", the manifest says ", expected.checksum),
                     {{"file", expected.name}, {"expected", expected.checksum}, {"actual", checksum}});
  }
  HEADWATER_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(file));
  for (const SafetensorsOutput& output : layout) {
    const auto found = header.tensors.find(output.name);
    if (found == header.tensors.end() || found->second.shape != output.shape || found->second.data_type != output.data_type) {
      return CorruptError(
          absl::StrCat(expected.name, " does not have ", output.name, " of the type and shape that its manifest implies"));
    }
  }
  return VerifiedFile{*std::move(opened), std::move(header)};
}

// Part of the head may have been overwritten: the head is lost for any reason.
absl::Status AfterVerification(const absl::Status& status) {
  if (status.ok() || HasReason(status, ErrorReason::kEngineFailed) || HasReason(status, ErrorReason::kInternal)) return status;
  return MakeError(
      ErrorReason::kInternal,
      absl::StrCat("the checkpoint changed or the head refused it after it had been verified: ", std::string(status.message())));
}

absl::Status WriteInto(EngineHead& head, const VerifiedFile& verified, const std::vector<SavedTensor>& tensors,
                       const VocabShard& rows) {
  const bool has_master = HasSeparateMaster(head.spec());
  for (const SavedTensor& saved : tensors) {
    // The stored weight follows from the master.
    if (has_master && (saved.tensor == HeadTensor::kWeight || saved.tensor == HeadTensor::kBias)) continue;
    const int64_t element_bytes = ElementBytes(saved.data_type);
    const int64_t begin = verified.header.tensors.at(HeadTensorName(saved.tensor)).begin;
    const int64_t first = rows.vocab_start * saved.width;
    const auto write = [&](int64_t start, int64_t count, void* buffer) {
      HEADWATER_RETURN_IF_ERROR(verified.file->ReadAt(begin + (start - first) * element_bytes, count * element_bytes, buffer));
      return head.WriteTensor(saved.tensor, start, count, buffer);
    };
    HEADWATER_RETURN_IF_ERROR(ForEachPiece(first, rows.vocab_end * saved.width, element_bytes, write));
  }
  return absl::OkStatus();
}

}  // namespace

std::string Join(const std::string& directory, const std::string& name) { return absl::StrCat(directory, "/", name); }

absl::Status WriteWholeFile(FileSystem& files, const std::string& path, const std::string& text) {
  HEADWATER_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files.CreateFile(path));
  HEADWATER_RETURN_IF_ERROR(file->Append(text.data(), static_cast<int64_t>(text.size())));
  return file->SyncAndClose();
}

absl::StatusOr<int64_t> WriteShardFiles(FileSystem& files, const std::string& directory, const CheckpointInfo& info,
                                        const EngineHead& head) {
  const std::vector<SavedTensor> tensors = TensorsOf(head);
  Manifest manifest;
  manifest.info = info;
  int64_t total_bytes = 0;
  for (const VocabShard& rows : head.shards()) {
    ManifestFile& entry = manifest.files.emplace_back();
    entry.name = ShardFileName(manifest.files.size() - 1, head.shards().size());
    entry.rows = rows;
    HEADWATER_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, files.CreateFile(Join(directory, entry.name)));
    model_files::Xxh3Hasher hasher;
    const auto append = [&](const void* data, int64_t byte_count) {
      hasher.Update(data, byte_count);
      entry.bytes += byte_count;
      return file->Append(data, byte_count);
    };
    const std::string header = MakeSafetensorsHeader(FileLayout(tensors, rows));
    HEADWATER_RETURN_IF_ERROR(append(header.data(), static_cast<int64_t>(header.size())));
    for (const SavedTensor& saved : tensors) {
      const int64_t element_bytes = ElementBytes(saved.data_type);
      const auto copy = [&](int64_t start, int64_t count, void* buffer) {
        HEADWATER_RETURN_IF_ERROR(head.ReadTensor(saved.tensor, start, count, buffer));
        return append(buffer, count * element_bytes);
      };
      HEADWATER_RETURN_IF_ERROR(ForEachPiece(rows.vocab_start * saved.width, rows.vocab_end * saved.width, element_bytes, copy));
    }
    HEADWATER_RETURN_IF_ERROR(file->SyncAndClose());
    entry.checksum = hasher.HexDigest();
    total_bytes += entry.bytes;
  }
  const std::string text = FormatManifest(manifest);
  HEADWATER_RETURN_IF_ERROR(WriteWholeFile(files, Join(directory, kManifestName), text));
  HEADWATER_RETURN_IF_ERROR(files.SyncDirectory(directory));
  return total_bytes + static_cast<int64_t>(text.size());
}

absl::Status LoadShardFiles(const FileSystem& files, const std::string& directory, const std::vector<ManifestFile>& entries,
                            EngineHead& head) {
  const std::vector<SavedTensor> tensors = TensorsOf(head);
  std::vector<VerifiedFile> verified;  // kept open: the bytes read are the bytes verified
  for (const ManifestFile& entry : entries) {
    HEADWATER_ASSIGN_OR_RETURN(VerifiedFile file, VerifyFile(files, directory, entry, FileLayout(tensors, entry.rows)));
    verified.push_back(std::move(file));
  }
  for (size_t index = 0; index < verified.size(); ++index) {
    HEADWATER_RETURN_IF_ERROR(AfterVerification(WriteInto(head, verified[index], tensors, entries[index].rows)));
  }
  return absl::OkStatus();
}

}  // namespace headwater::checkpoint
