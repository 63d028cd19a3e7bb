// ModelFolder: the tensors of a model, by name, across its files.
#ifndef HEADWATER_SERVER_MODEL_FILES_MODEL_FOLDER_H_
#define HEADWATER_SERVER_MODEL_FILES_MODEL_FOLDER_H_

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model_files/file_source.h"
#include "server/model_files/safetensors.h"

namespace headwater::model_files {

// A tensor of a model, with the open file that has its bytes.
struct ModelTensor {
  std::string name;
  std::string path;  // of the file
  SafetensorsTensor entry;
  std::shared_ptr<ReadableFile> file;
};

// Not thread-safe: files are opened when their tensors are requested.
class ModelFolder {
 public:
  // `path` is a safetensors file, or a folder in the form of Hugging Face's transformers. As in transformers, a folder's
  // `model.safetensors` comes first; without it `model.safetensors.index.json` says which file has which tensor. `files` must
  // outlive the result.
  //
  // Errors: kWeightsNotFound (no such file or folder, with the files that the folder has instead), kFileCorrupt, kLimitExceeded
  // (see ReadSafetensorsHeader() and ReadLenientJson()), kInvalidField (see FilesUnder()). Messages name the file.
  static absl::StatusOr<ModelFolder> Open(const FileSource& files, const std::string& path);

  const std::string& path() const { return path_; }
  bool Has(const std::string& name) const { return path_of_.contains(name); }
  // All names, sorted.
  std::vector<std::string> Names() const;
  // kWeightsNotFound if the index names a missing file, or a file without the tensor; else as Open().
  absl::StatusOr<ModelTensor> Find(const std::string& name);

  // True if Open()'s path is one file of a model that is split: "model-00001-of-00004.safetensors".
  bool is_part() const { return is_part_; }
  // The config.json beside the files. absl::NotFoundError if it is missing; else as Open().
  absl::StatusOr<nlohmann::json> ReadConfig() const;

 private:
  struct OpenFile {
    std::shared_ptr<ReadableFile> file;
    SafetensorsHeader header;
  };
  ModelFolder(const FileSource& files, const std::string& path) : files_(&files), path_(path) {}
  absl::StatusOr<OpenFile> OpenPath(const std::string& path) const;
  absl::Status TakeFile(const std::string& path);
  absl::Status ReadIndex(const ReadableFile& file);
  absl::Status NothingThere() const;

  const FileSource* files_;
  std::string path_;
  std::string folder_;  // with a slash at its end; empty: where a relative path begins
  bool is_part_ = false;
  std::map<std::string, std::string> path_of_;  // a tensor's file
  std::map<std::string, OpenFile> open_;        // by path
};

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_MODEL_FOLDER_H_
