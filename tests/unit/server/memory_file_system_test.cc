// The file system of tests answers as the operating system's does: both go through the same operations.
#include "memory_file_system.h"

#include <gtest/gtest.h>

#include "temporary_directory.h"
#include "tests/unit/server/heads/head_test_util.h"

namespace headwater::testing {
namespace {

using checkpoint::FileSystem;
using checkpoint::ReadableFile;
using checkpoint::WritableFile;

enum class Kind { kMemory, kPosix };

class FileSystemTest : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam() == Kind::kMemory) {
      root_ = "/root";
      ASSERT_OK(files().CreateDirectory(root_));
    } else {
      root_ = directory_.path();
    }
  }
  FileSystem& files() { return GetParam() == Kind::kMemory ? static_cast<FileSystem&>(memory_) : checkpoint::PosixFileSystem(); }
  std::string At(const std::string& path) const { return root_ + "/" + path; }
  void Write(const std::string& path, const std::string& bytes) {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<WritableFile> file, files().CreateFile(At(path)));
    const int64_t half = static_cast<int64_t>(bytes.size() / 2);
    EXPECT_OK(file->Append(bytes.data(), half));
    EXPECT_OK(file->Append(bytes.data() + half, static_cast<int64_t>(bytes.size()) - half));
    EXPECT_OK(file->SyncAndClose());
  }
  std::string Read(const std::string& path) {
    const absl::StatusOr<std::unique_ptr<ReadableFile>> file = files().OpenFile(At(path));
    if (!file.ok()) return std::string(file.status().message());
    std::string bytes(static_cast<size_t>((*file)->size()), '\0');
    EXPECT_OK((*file)->ReadAt(0, (*file)->size(), bytes.data()));
    return bytes;
  }

  TemporaryDirectory directory_;
  MemoryFileSystem memory_;
  std::string root_;
};

TEST_P(FileSystemTest, FilesAreWrittenOnceAndReadInParts) {
  Write("a", "hello");
  EXPECT_EQ(Read("a"), "hello");
  EXPECT_TRUE(absl::IsAlreadyExists(files().CreateFile(At("a")).status()));
  EXPECT_TRUE(absl::IsNotFound(files().CreateFile(At("no/a")).status()));
  EXPECT_TRUE(absl::IsNotFound(files().OpenFile(At("b")).status()));
  const std::unique_ptr<ReadableFile> file = *files().OpenFile(At("a"));
  char bytes[3] = {};
  EXPECT_OK(file->ReadAt(2, 2, bytes));
  EXPECT_STREQ(bytes, "ll");
  EXPECT_OK(file->ReadAt(5, 0, bytes));
  EXPECT_REASON(file->ReadAt(4, 2, bytes), kFileCorrupt);
  EXPECT_OK(files().RemoveTree(At("a")));
  EXPECT_OK(file->ReadAt(0, 2, bytes));  // what is open stays
  EXPECT_STREQ(bytes, "he");
}

TEST_P(FileSystemTest, DirectoriesHoldNames) {
  EXPECT_OK(files().CreateDirectory(At("d")));
  EXPECT_TRUE(absl::IsAlreadyExists(files().CreateDirectory(At("d"))));
  EXPECT_TRUE(absl::IsNotFound(files().CreateDirectory(At("no/d"))));
  EXPECT_OK(files().CreateDirectory(At("d/e")));
  Write("d/.x", "1");
  Write("d/e/y", "2");
  Write("d-1", "3");  // sorts before "d/", belongs to its parent
  EXPECT_EQ(*files().ListDirectory(At("d")), (std::vector<std::string>{".x", "e"}));
  EXPECT_EQ(*files().ListDirectory(root_), (std::vector<std::string>{"d", "d-1"}));
  EXPECT_TRUE(absl::IsNotFound(files().ListDirectory(At("no")).status()));
  EXPECT_TRUE(absl::IsNotFound(files().ListDirectory(At("d-1")).status()));
  EXPECT_TRUE(files().IsDirectory(At("d/e")));
  EXPECT_FALSE(files().IsDirectory(At("d/.x")));
  EXPECT_FALSE(files().IsDirectory(At("no")));
  EXPECT_REASON(files().OpenFile(At("d")), kFileCorrupt);
  EXPECT_OK(files().SyncDirectory(At("d")));
  EXPECT_TRUE(absl::IsNotFound(files().SyncDirectory(At("no"))));
  EXPECT_OK(files().RemoveTree(At("d")));
  EXPECT_OK(files().RemoveTree(At("d")));
  EXPECT_EQ(*files().ListDirectory(root_), std::vector<std::string>{"d-1"});
}

TEST_P(FileSystemTest, TreesAreRenamedAndExchanged) {
  for (const char* name : {"a", "b"}) {
    EXPECT_OK(files().CreateDirectory(At(name)));
    Write(std::string(name) + "/f", name);
  }
  EXPECT_TRUE(absl::IsAlreadyExists(files().Rename(At("a"), At("b"))));
  EXPECT_TRUE(absl::IsNotFound(files().Rename(At("no"), At("c"))));
  EXPECT_OK(files().Rename(At("a"), At("c")));
  EXPECT_EQ(Read("c/f"), "a");
  EXPECT_FALSE(files().IsDirectory(At("a")));
  EXPECT_TRUE(absl::IsNotFound(files().Exchange(At("a"), At("b"))));
  EXPECT_OK(files().Exchange(At("c"), At("b")));
  EXPECT_EQ(Read("c/f"), "b");
  EXPECT_EQ(Read("b/f"), "a");
}

INSTANTIATE_TEST_SUITE_P(Kinds, FileSystemTest, ::testing::Values(Kind::kMemory, Kind::kPosix),
                         [](const auto& param_info) { return param_info.param == Kind::kMemory ? "Memory" : "Posix"; });

TEST(MemoryFileSystemTest, WithThePowerGoesWhatWasNotSynced) {
  MemoryFileSystem files;
  for (const char* directory : {"/a", "/b"}) EXPECT_OK(files.CreateDirectory(directory));
  files.WatchSyncs(true);
  const auto write = [&files](const char* path, bool sync) {
    const std::unique_ptr<WritableFile> file = *files.CreateFile(path);
    EXPECT_OK(file->Append("1234", 4));
    if (sync) EXPECT_OK(file->SyncAndClose());
  };
  write("/a/synced", true);
  EXPECT_OK(files.SyncDirectory("/a"));
  write("/a/torn", false);
  EXPECT_OK(files.SyncDirectory("/a"));
  write("/b/entry", true);
  EXPECT_OK(files.Rename("/a/synced", "/b/moved"));
  // One of two changes stays, and of the torn file two bytes.
  files.LosePower(130);
  EXPECT_EQ(files.Contents("/a/synced"), "1234");
  EXPECT_EQ(files.Contents("/a/torn"), "12");
  EXPECT_EQ(files.Contents("/b/entry"), "1234");
  EXPECT_FALSE(files.OpenFile("/b/moved").ok());
  // The watch is over.
  EXPECT_OK(files.Rename("/a/synced", "/b/moved"));
  files.LosePower(0);
  EXPECT_EQ(files.Contents("/b/moved"), "1234");
}

}  // namespace
}  // namespace headwater::testing
