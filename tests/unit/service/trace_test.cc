// Traces of calls: the metadata, the file's contents, and how many files there may be. The log's level from a file.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observability/call_trace.h"
#include "server/observability/logging.h"
#include "server/observability/metrics.h"
#include "server/observability/monotonic_clock.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/unit/expect_status.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::observability {
namespace {

namespace fs = std::filesystem;
using e2e::Await;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr char kTrace[] = "0af7651916cd43dd8448eb211c80319c";
constexpr char kParent[] = "b7ad6b7169203331";

class Folder : public headwater::testing::TemporaryDirectory {
 public:
  std::string path(const std::string& name = "") const { return TemporaryDirectory::path() + "/" + name; }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(path())) found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }
};

// At once: a reader never sees half of it.
void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path + ".tmp") << text;
  fs::rename(path + ".tmp", path);
}

std::shared_ptr<CallTrace> MakeTrace(const std::string& span_id = NewSpanId()) {
  return std::make_shared<CallTrace>(TraceContext{kTrace, kParent, true}, span_id, "request-7", "ComputeLoss");
}

TEST(Traceparent, IsReadAsTheStandardSays) {
  const std::string good = absl::StrCat("00-", kTrace, "-", kParent, "-01");
  const auto parsed = ParseTraceparent(good);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->trace_id, kTrace);
  EXPECT_EQ(parsed->parent_id, kParent);
  EXPECT_TRUE(parsed->sampled);
  const auto with_flags = [&](const char* flags) { return ParseTraceparent(good.substr(0, 53) + flags); };
  EXPECT_FALSE(with_flags("00")->sampled);
  EXPECT_FALSE(with_flags("fe")->sampled);
  EXPECT_TRUE(with_flags("ff")->sampled);
  // A version of the future may say more.
  EXPECT_TRUE(ParseTraceparent("cc" + good.substr(2) + "-what-comes").has_value());
  EXPECT_TRUE(ParseTraceparent("cc" + good.substr(2)).has_value());

  std::string upper = good;
  upper[5] = 'F';
  for (const std::string& bad :
       {std::string(), good.substr(1), good.substr(0, 54), good + "-", good + "0", "ff" + good.substr(2), upper,
        "0g" + good.substr(2), "cc" + good.substr(2) + "x", std::string(55, '-'), std::string(55, '0'),
        absl::StrCat("00-", std::string(32, '0'), "-", kParent, "-01"),
        absl::StrCat("00-", kTrace, "-", std::string(16, '0'), "-01"), absl::StrCat("00-", kTrace, "_", kParent, "-01"),
        absl::StrCat("00-", kTrace, "-", kParent, "-0\n")}) {
    EXPECT_FALSE(ParseTraceparent(bad).has_value()) << bad;
  }
  EXPECT_NE(NewSpanId(), NewSpanId());
  EXPECT_THAT(NewSpanId(), SizeIs(16));
}

TEST(CallTrace, IsAFileOfChromesFormat) {
  const absl::Time start = MonotonicNow();
  const absl::Time wall_start = absl::Now();
  const auto trace = MakeTrace("00f067aa0ba902b7");
  trace->AddSpan("upload", "upload", start, start + absl::Microseconds(250));
  trace->AddSpan("commit", "decision", start + absl::Milliseconds(1), start + absl::Milliseconds(1));
  trace->AddSpan("upload", "again", start + absl::Milliseconds(2), start + absl::Milliseconds(1));  // never negative
  trace->AddRows("rows", 10, start);
  trace->AddRows("rows", 10, start);  // nothing new
  trace->AddRows("rows", 25, start);
  trace->SetAttribute("head", "tenants/t/heads/\xff\"h");
  const nlohmann::json document = nlohmann::json::parse(trace->ToJson());
  EXPECT_EQ(document["otherData"]["request_id"], "request-7");
  EXPECT_EQ(document["otherData"]["trace_id"], kTrace);
  EXPECT_EQ(document["otherData"]["parent_span_id"], kParent);
  std::vector<nlohmann::json> spans;
  std::vector<std::string> tracks;
  for (const nlohmann::json& event : document["traceEvents"]) {
    if (event["ph"] != "M") spans.push_back(event);
    if (event["name"] == "thread_name") tracks.push_back(event["args"]["name"]);
  }
  EXPECT_THAT(tracks, ::testing::ElementsAre("upload", "commit", "rows"));
  ASSERT_THAT(spans, SizeIs(5));
  EXPECT_EQ(spans[0]["ph"], "X");
  // The steady clock's times are told as the wall clock would have told them when the trace was begun; tests may be held up.
  EXPECT_NEAR(spans[0]["ts"].get<double>(), absl::ToDoubleMicroseconds(wall_start - absl::UnixEpoch()), 5e6);
  EXPECT_EQ(spans[0]["dur"], 250);
  EXPECT_EQ(spans[0]["args"]["parent_span_id"], "00f067aa0ba902b7");
  EXPECT_EQ(spans[1]["ph"], "i");
  EXPECT_EQ(spans[1]["tid"], 1);
  EXPECT_EQ(spans[2]["tid"], 0);
  EXPECT_EQ(spans[2]["ph"], "i");
  EXPECT_EQ(spans[3]["name"], "rows 0 to 10");
  EXPECT_EQ(spans[4]["name"], "rows 10 to 25");
  // Microseconds since 1970 are doubles of a quarter of one each.
  EXPECT_NEAR(spans[4]["ts"].get<double>(), spans[3]["ts"].get<double>() + spans[3]["dur"].get<double>(), 1);
}

TEST(CallTrace, HasAnEnd) {
  const auto trace = MakeTrace();
  for (size_t i = 0; i < CallTrace::kMostSpans + 3; ++i) trace->AddSpan("x", "x", MonotonicNow(), MonotonicNow());
  const nlohmann::json document = nlohmann::json::parse(trace->ToJson());
  EXPECT_EQ(document["otherData"]["spans_left_out"], "3");
  EXPECT_THAT(document["traceEvents"], SizeIs(CallTrace::kMostSpans + 2));  // the process's name, and the track's
  // Rows leave room for the call's end.
  const auto many_rows = MakeTrace();
  for (size_t i = 1; i <= CallTrace::kMostSpans; ++i) many_rows->AddRows("rows", static_cast<int64_t>(i), MonotonicNow());
  many_rows->AddSpan("call", "the call", MonotonicNow(), MonotonicNow());
  EXPECT_THAT(many_rows->ToJson(), AllOf(HasSubstr("\"name\":\"the call\""), HasSubstr("\"spans_left_out\":\"32\"")));
}

TEST(TraceWriter, KeepsTheNewestFiles) {
  Folder folder;
  WriteFile(folder.path("headwater-20200101T000000.000000Z-a-b.json"), "of an earlier server");
  WriteFile(folder.path("headwater-20200101T000001.000000Z-a-b.json"), "of an earlier server");
  WriteFile(folder.path("somebody-elses.json"), "stays");
  // That server was ended in the middle of one.
  WriteFile(folder.path("headwater-20200101T000002.000000Z-a-b.json.tmp"), "{\"half");
  Metrics metrics("1", "cpu");
  {
    ASSERT_OK_AND_ASSIGN(auto writer, TraceWriter::Open(folder.path(), 3, metrics));
    writer->Write(MakeTrace("1111111111111111"));
    writer->Write(MakeTrace("2222222222222222"));
  }  // what waits is written
  std::vector<std::string> names = folder.names();
  ASSERT_THAT(names, SizeIs(4));
  EXPECT_EQ(names[0], "headwater-20200101T000001.000000Z-a-b.json");
  EXPECT_TRUE(absl::EndsWith(names[1], absl::StrCat("-", kTrace, "-1111111111111111.json"))) << names[1];
  EXPECT_TRUE(absl::EndsWith(names[2], absl::StrCat("-", kTrace, "-2222222222222222.json"))) << names[2];
  EXPECT_EQ(names[3], "somebody-elses.json");
  EXPECT_THAT(metrics.Serialize(), HasSubstr("headwater_traces_total{outcome=\"written\"} 2\n"));
  std::ifstream file(folder.path(names[1]));
  EXPECT_TRUE(nlohmann::json::accept(file));
}

TEST(TraceWriter, LeavesOutWhatComesTooFast) {
  Folder folder;
  Metrics metrics("1", "cpu");
  constexpr int kCalls = 1000;
  {
    ASSERT_OK_AND_ASSIGN(auto writer, TraceWriter::Open(folder.path("new/folder"), 1000, metrics));
    for (int i = 0; i < kCalls; ++i) writer->Write(MakeTrace());
  }
  const auto count = [&](const char* outcome) {
    const std::string text = metrics.Serialize();
    const std::string name = absl::StrCat("headwater_traces_total{outcome=\"", outcome, "\"} ");
    return std::stoll(text.substr(text.find(name) + name.size()));
  };
  const int64_t files = std::distance(fs::directory_iterator(folder.path("new/folder")), fs::directory_iterator());
  EXPECT_EQ(count("written"), files);
  EXPECT_EQ(count("written") + count("left_out"), kCalls);
  EXPECT_GE(count("written"), 1);
  EXPECT_GE(count("left_out"), 1);
}

TEST(TraceWriter, SaysWhatCannotBeUsedOrWritten) {
  Folder folder;
  Metrics metrics("1", "cpu");
  WriteFile(folder.path("file"), "");
  EXPECT_THAT(std::string(TraceWriter::Open(folder.path("file"), 3, metrics).status().message()),
              HasSubstr("trace_dir: cannot use "));
  EXPECT_THAT(std::string(TraceWriter::Open(folder.path(), 0, metrics).status().message()),
              HasSubstr("max_trace_files: expected >= 1"));
  {
    ASSERT_OK_AND_ASSIGN(auto writer, TraceWriter::Open(folder.path("gone"), 3, metrics));
    fs::remove(folder.path("gone"));
    writer->Write(MakeTrace());
  }
  EXPECT_THAT(metrics.Serialize(), HasSubstr("headwater_traces_total{outcome=\"failed\"} 1\n"));
}

// The log is the process's stderr, which is a file while a test runs.
class LogLevelFileTest : public ::testing::Test {
 protected:
  LogLevelFileTest() {
    const int file = open(log_path_.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    dup2(file, STDERR_FILENO);
    close(file);
  }
  ~LogLevelFileTest() override {
    dup2(stderr_, STDERR_FILENO);
    close(stderr_);
    EXPECT_TRUE(ConfigureLogging("info", "text").ok());
  }
  // Whether the log has `text` behind its first `begin` bytes.
  bool LogHas(const char* text, size_t begin = 0) {
    std::ifstream file(log_path_);
    const std::string log{std::istreambuf_iterator<char>(file), {}};
    return log.find(text, begin) != std::string::npos;
  }
  // Whether debug lines come now.
  bool IsDebug() {
    const size_t begin = fs::file_size(log_path_);
    Log(LogLevel::kDebug, "probe", {});
    return LogHas("event=probe", begin);
  }

  Folder folder_;
  const std::string log_path_ = folder_.path("log");
  const int stderr_ = dup(STDERR_FILENO);
};

TEST_F(LogLevelFileTest, ChangesTheLevelWhileTheProcessRuns) {
  const std::string path = folder_.path("level");
  const LogLevelFile file(path, "info");
  EXPECT_FALSE(IsDebug());
  WriteFile(path, "debug\n");
  EXPECT_TRUE(Await([this] { return IsDebug(); }));
  // Another word is not taken, which the log says; what held holds.
  WriteFile(path, "louder\n");
  EXPECT_TRUE(Await([this] { return LogHas("event=log_level_not_taken"); }));
  EXPECT_TRUE(IsDebug());
  WriteFile(path, " error ");
  EXPECT_TRUE(Await([this] { return !IsDebug(); }));
  WriteFile(path, "debug");
  EXPECT_TRUE(Await([this] { return IsDebug(); }));
  fs::remove(path);
  EXPECT_TRUE(Await([this] { return !IsDebug(); }));
}

TEST_F(LogLevelFileTest, IsReadAtTheStart) {
  WriteFile(folder_.path("level"), "debug");
  const LogLevelFile file(folder_.path("level"), "warning");
  EXPECT_TRUE(IsDebug());
}

}  // namespace
}  // namespace headwater::observability
