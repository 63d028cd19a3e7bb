// A file system that fails at a chosen point, and records what it is asked.
#ifndef HEADWATER_TESTS_UNIT_SERVER_FAULTY_FILE_SYSTEM_H_
#define HEADWATER_TESTS_UNIT_SERVER_FAULTY_FILE_SYSTEM_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "headwater/kernels/error.h"
#include "server/checkpoint/file_system.h"

namespace headwater::testing {

class FaultyFileSystem : public checkpoint::FileSystem {
 public:
  // `files` does what does not fail, and must outlive this.
  explicit FaultyFileSystem(checkpoint::FileSystem& files = checkpoint::PosixFileSystem()) : files_(files) {}

  // Every change from number `first` on (0: the first one) fails, as if the process had ended there.
  void CrashAt(int first) { crash_at_ = first; }
  // Change number `which` alone fails, with `status`.
  void FailAt(int which, const absl::Status& status) {
    fail_at_ = which;
    failure_ = status;
  }
  // Called once, before the next change.
  void OnNextChange(std::function<void()> hook) { hook_ = std::move(hook); }
  // Called before and after each change.
  void OnEachChange(std::function<void()> hook) { each_hook_ = std::move(hook); }
  // Changes whose names begin with this are not made, and look as if they were.
  void LeaveOut(const std::string& what) { left_out_ = what; }
  void DisableExchange() { can_exchange_ = false; }
  void Reset() {
    crash_at_ = fail_at_ = -1;
    changes_.clear();
  }
  // Changes so far: "append shard-...", "sync file", "rename A B", with the last component of each path.
  const std::vector<std::string>& changes() const { return changes_; }

  absl::Status CreateDirectory(const std::string& path) override {
    return Change("mkdir " + Last(path), [&] { return files_.CreateDirectory(path); });
  }
  absl::Status SyncDirectory(const std::string& path) override {
    return Change("syncdir " + Last(path), [&] { return files_.SyncDirectory(path); });
  }
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) const override {
    return files_.ListDirectory(path);
  }
  bool IsDirectory(const std::string& path) const override { return files_.IsDirectory(path); }
  absl::StatusOr<std::unique_ptr<checkpoint::WritableFile>> CreateFile(const std::string& path) override {
    absl::StatusOr<std::unique_ptr<checkpoint::WritableFile>> file;
    absl::Status status = Change("create " + Last(path), [&] {
      file = files_.CreateFile(path);
      return file.status();
    });
    if (!status.ok()) return status;
    return std::make_unique<File>(*this, Last(path), *std::move(file));
  }
  absl::StatusOr<std::unique_ptr<checkpoint::ReadableFile>> OpenFile(const std::string& path) const override {
    return files_.OpenFile(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Change("rename " + Last(from) + " " + Last(to), [&] { return files_.Rename(from, to); });
  }
  absl::Status Exchange(const std::string& a, const std::string& b) override {
    if (!can_exchange_) return absl::UnimplementedError("no exchange");
    return Change("exchange " + Last(a) + " " + Last(b), [&] { return files_.Exchange(a, b); });
  }
  absl::Status RemoveTree(const std::string& path) override {
    return Change("remove " + Last(path), [&] { return files_.RemoveTree(path); });
  }

 private:
  class File : public checkpoint::WritableFile {
   public:
    File(FaultyFileSystem& files, std::string name, std::unique_ptr<checkpoint::WritableFile> file)
        : files_(files), name_(std::move(name)), file_(std::move(file)) {}
    absl::Status Append(const void* data, int64_t byte_count) override {
      return files_.Change("append " + name_, [&] { return file_->Append(data, byte_count); });
    }
    absl::Status SyncAndClose() override {
      return files_.Change("sync " + name_, [&] { return file_->SyncAndClose(); });
    }

   private:
    FaultyFileSystem& files_;
    const std::string name_;
    std::unique_ptr<checkpoint::WritableFile> file_;
  };

  static std::string Last(const std::string& path) { return path.substr(path.rfind('/') + 1); }

  template <typename Work>
  absl::Status Change(const std::string& what, const Work& work) {
    if (hook_ != nullptr) std::exchange(hook_, nullptr)();
    const int number = static_cast<int>(changes_.size());
    changes_.push_back(what);
    if (crash_at_ >= 0 && number >= crash_at_) return MakeError(ErrorReason::kInternal, "the process has ended");
    if (number == fail_at_) return failure_;
    if (each_hook_ != nullptr) each_hook_();
    const absl::Status status = !left_out_.empty() && what.starts_with(left_out_) ? absl::OkStatus() : work();
    if (each_hook_ != nullptr) each_hook_();
    return status;
  }

  checkpoint::FileSystem& files_;
  int crash_at_ = -1;
  int fail_at_ = -1;
  absl::Status failure_;
  std::function<void()> hook_, each_hook_;
  std::string left_out_;
  bool can_exchange_ = true;
  std::vector<std::string> changes_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_UNIT_SERVER_FAULTY_FILE_SYSTEM_H_
