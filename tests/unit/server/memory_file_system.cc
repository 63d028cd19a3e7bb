#include "memory_file_system.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::testing {
namespace {

absl::Status NotThere(const std::string& operation) {
  return absl::NotFoundError(absl::StrCat(operation, " failed: it is not there"));
}
absl::Status IsThere(const std::string& operation) {
  return absl::AlreadyExistsError(absl::StrCat(operation, " failed: it exists"));
}

}  // namespace

class MemoryFileSystem::Writer : public checkpoint::WritableFile {
 public:
  Writer(MemoryFileSystem& files, Node node) : files_(files), node_(std::move(node)) {}
  absl::Status Append(const void* data, int64_t byte_count) override {
    absl::MutexLock lock(&files_.mutex_);
    // The sum only where it matters: it costs a walk over all files.
    if (files_.capacity_bytes_ != INT64_MAX && files_.StoredBytes() > files_.capacity_bytes_ - byte_count) {
      return MakeError(ErrorReason::kDiskFull, "writing a file failed: no space left");
    }
    node_->append(static_cast<const char*>(data), static_cast<size_t>(byte_count));
    return absl::OkStatus();
  }
  absl::Status SyncAndClose() override {
    absl::MutexLock lock(&files_.mutex_);
    std::erase(files_.unsynced_, node_);
    return absl::OkStatus();
  }

 private:
  MemoryFileSystem& files_;
  const Node node_;
};

class MemoryFileSystem::Reader : public checkpoint::ReadableFile {
 public:
  Reader(const MemoryFileSystem& files, Node node, int64_t size) : files_(files), node_(std::move(node)), size_(size) {}
  int64_t size() const override { return size_; }
  absl::Status ReadAt(int64_t offset, int64_t byte_count, void* out) const override {
    absl::MutexLock lock(&files_.mutex_);
    const int64_t available = static_cast<int64_t>(node_->size()) - offset;
    if (byte_count > available) {
      return MakeError(ErrorReason::kFileCorrupt, absl::StrCat("the file ends before byte ", offset + byte_count));
    }
    if (byte_count > 0) std::memcpy(out, node_->data() + offset, static_cast<size_t>(byte_count));
    return absl::OkStatus();
  }

 private:
  const MemoryFileSystem& files_;
  const Node node_;
  const int64_t size_;
};

absl::Status MemoryFileSystem::CheckParent(const std::string& path) const {
  const size_t end = path.rfind('/');
  if (end == std::string::npos || end == 0) return absl::OkStatus();
  const auto parent = nodes_.find(path.substr(0, end));
  if (parent == nodes_.end()) return NotThere("looking for a directory");
  return parent->second == nullptr ? absl::OkStatus() : MakeError(ErrorReason::kInternal, "a directory was expected");
}

std::map<std::string, MemoryFileSystem::Node> MemoryFileSystem::TakeTree(const std::string& path) {
  std::map<std::string, Node> tree;
  const std::string below = path + "/";
  if (const auto top = nodes_.find(path); top != nodes_.end()) {
    tree.emplace("", std::move(top->second));
    nodes_.erase(top);
  }
  for (auto entry = nodes_.lower_bound(below); entry != nodes_.end() && absl::StartsWith(entry->first, below);) {
    tree.emplace(entry->first.substr(path.size()), std::move(entry->second));
    entry = nodes_.erase(entry);
  }
  return tree;
}

void MemoryFileSystem::PutTree(const std::string& path, std::map<std::string, Node> tree) {
  for (auto& [rest, node] : tree) nodes_[path + rest] = std::move(node);
}

int64_t MemoryFileSystem::StoredBytes() const {
  int64_t bytes = 0;
  for (const auto& [path, node] : nodes_) bytes += node != nullptr ? static_cast<int64_t>(node->size()) : 0;
  return bytes;
}

absl::Status MemoryFileSystem::CreateDirectory(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckParent(path); !status.ok()) return status;
  if (nodes_.contains(path)) return IsThere("making a directory");
  Note(path);
  nodes_.emplace(path, nullptr);
  return absl::OkStatus();
}

absl::Status MemoryFileSystem::SyncDirectory(const std::string& path) {
  if (!IsDirectory(path)) return NotThere("opening a directory");
  absl::MutexLock lock(&mutex_);
  // The journal up to the last change in this directory.
  const auto last =
      std::find_if(changes_.rbegin(), changes_.rend(), [&path](const Change& change) { return change.directory == path; });
  changes_.erase(changes_.begin(), last.base());
  return absl::OkStatus();
}

void MemoryFileSystem::Note(const std::string& path) {
  if (watches_) changes_.push_back({path.substr(0, path.rfind('/')), nodes_});
}

void MemoryFileSystem::WatchSyncs(bool watch) {
  absl::MutexLock lock(&mutex_);
  watches_ = watch;
  changes_.clear();
  unsynced_.clear();
}

void MemoryFileSystem::LosePower(uint64_t choice) {
  absl::MutexLock lock(&mutex_);
  const size_t kept = choice % (changes_.size() + 1);
  if (kept < changes_.size()) nodes_ = changes_[kept].before;
  for (const Node& file : unsynced_) file->resize((choice / 64) % (file->size() + 1));
  watches_ = false;
  changes_.clear();
  unsynced_.clear();
}

int64_t MemoryFileSystem::stored_bytes() const {
  absl::MutexLock lock(&mutex_);
  return StoredBytes();
}

absl::StatusOr<std::vector<std::string>> MemoryFileSystem::ListDirectory(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  const auto directory = nodes_.find(path);
  if (directory == nodes_.end() || directory->second != nullptr) return NotThere("listing a directory");
  std::vector<std::string> names;
  const std::string below = path + "/";
  for (auto entry = nodes_.lower_bound(below); entry != nodes_.end() && absl::StartsWith(entry->first, below); ++entry) {
    if (entry->first.find('/', below.size()) == std::string::npos) names.push_back(entry->first.substr(below.size()));
  }
  return names;
}

bool MemoryFileSystem::IsDirectory(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  const auto found = nodes_.find(path);
  return found != nodes_.end() && found->second == nullptr;
}

absl::StatusOr<std::unique_ptr<checkpoint::WritableFile>> MemoryFileSystem::CreateFile(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckParent(path); !status.ok()) return status;
  if (nodes_.contains(path)) return IsThere("creating a file");
  Note(path);
  const Node& file = nodes_[path] = std::make_shared<std::string>();
  if (watches_) unsynced_.push_back(file);
  return std::make_unique<Writer>(*this, file);
}

absl::StatusOr<std::unique_ptr<checkpoint::ReadableFile>> MemoryFileSystem::OpenFile(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  const auto found = nodes_.find(path);
  if (found == nodes_.end()) return NotThere("opening a file");
  if (found->second == nullptr) return MakeError(ErrorReason::kFileCorrupt, "a regular file was expected");
  return std::make_unique<Reader>(*this, found->second, static_cast<int64_t>(found->second->size()));
}

absl::Status MemoryFileSystem::Rename(const std::string& from, const std::string& to) {
  absl::MutexLock lock(&mutex_);
  if (!nodes_.contains(from)) return NotThere("renaming");
  if (absl::Status status = CheckParent(to); !status.ok()) return status;
  if (nodes_.contains(to)) return IsThere("renaming");
  Note(to);
  PutTree(to, TakeTree(from));
  return absl::OkStatus();
}

absl::Status MemoryFileSystem::Exchange(const std::string& a, const std::string& b) {
  absl::MutexLock lock(&mutex_);
  if (!nodes_.contains(a) || !nodes_.contains(b)) return NotThere("exchanging");
  Note(b);
  std::map<std::string, Node> first = TakeTree(a);
  PutTree(a, TakeTree(b));
  PutTree(b, std::move(first));
  return absl::OkStatus();
}

absl::Status MemoryFileSystem::RemoveTree(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  Note(path);
  TakeTree(path);
  return absl::OkStatus();
}

std::string MemoryFileSystem::Contents(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  return *nodes_.at(path);
}

void MemoryFileSystem::SetContents(const std::string& path, const std::string& bytes) {
  absl::MutexLock lock(&mutex_);
  nodes_[path] = std::make_shared<std::string>(bytes);
}

void MemoryFileSystem::set_capacity_bytes(int64_t capacity_bytes) {
  absl::MutexLock lock(&mutex_);
  capacity_bytes_ = capacity_bytes;
}

}  // namespace headwater::testing
