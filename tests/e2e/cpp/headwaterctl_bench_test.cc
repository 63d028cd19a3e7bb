// `headwaterctl bench` as its user sees it: figures, files, what it leaves behind.
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "headwater/client/client.h"
#include "tests/e2e/cpp/support/await.h"
#include "tests/e2e/cpp/support/headwaterctl_fixture.h"
#include "tests/e2e/cpp/support/server_process.h"
#include "tests/e2e/cpp/support/test_tensors.h"

namespace headwater::e2e {
namespace {

using nlohmann::json;

// A small head, and all sweeps.
const Arguments kSmall = {"--vocab_size=64", "--hidden_size=16",  "--rows=32",
                          "--sizes=8,32",    "--concurrency=1,3", "--duration=20ms"};

class Bench : public testing::Test {
 protected:
  // `words` come behind the command and its address.
  Arguments Command(const Arguments& words) const { return Joined({HEADWATERCTL, "bench", server_.target()}, words); }
  ProgramResult Run(const Arguments& words) const { return RunProgram(Command(Joined(words, kSmall))); }
  size_t HeadCount() const { return Value(server_.Connect().ListHeads()).size(); }

  ServerProcess server_;
};

// The cells of a CSV file, by title.
std::vector<std::map<std::string, std::string>> ReadCsv(const std::string& text) {
  std::vector<std::map<std::string, std::string>> rows;
  std::vector<std::string> titles;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> cells = absl::StrSplit(line, ',');
    if (titles.empty()) {
      titles = cells;
      continue;
    }
    EXPECT_EQ(cells.size(), titles.size()) << line;
    std::map<std::string, std::string>& row = rows.emplace_back();
    for (size_t i = 0; i < cells.size() && i < titles.size(); ++i) row[titles[i]] = cells[i];
  }
  return rows;
}

TEST_F(Bench, MeasuresThePathsAndLeavesNothingBehind) {
  TemporaryDirectory directory;
  const std::string csv = directory.path() + "/bench.csv";
  const ProgramResult result = Run({"--transports=grpc,cuda_ipc", "--csv=" + csv});
  Expect(result, 0, &ProgramResult::out,
         {"engine cpu", "head [64, 16] float32", "One micro-batch of 32 rows at a time", "OVER ENGINE", "IN FLIGHT",
          "cuda_ipc  not measured: "});
  EXPECT_EQ(HeadCount(), 0u);

  const std::vector<std::map<std::string, std::string>> rows = ReadCsv(ReadFile(csv));
  // One row for the path, two of concurrency, two of sizes.
  ASSERT_EQ(rows.size(), 5u) << ReadFile(csv);
  std::multiset<std::string> kinds;
  for (const std::map<std::string, std::string>& row : rows) {
    kinds.insert(absl::StrCat(row.at("sweep"), " ", row.at("in_flight"), " ", row.at("rows")));
    EXPECT_EQ(row.at("transport"), "grpc");
    EXPECT_EQ(row.at("vocab_size"), "64");
    EXPECT_GE(std::stoi(row.at("micro_batches")), 3);
    EXPECT_GT(std::stod(row.at("engine_ms")), 0);
    EXPECT_GE(std::stod(row.at("p90_ms")), std::stod(row.at("median_ms")));
    EXPECT_GT(std::stod(row.at("median_ms")), std::stod(row.at("engine_ms")) / 2);
    // Rows a second are those of one micro-batch in the time from one result to the next.
    EXPECT_NEAR(std::stod(row.at("rows_per_second")), 1000 * std::stod(row.at("rows")) / std::stod(row.at("period_ms")),
                0.001 * std::stod(row.at("rows_per_second")));
  }
  EXPECT_EQ(kinds, (std::multiset<std::string>{"transport 1 32", "concurrency 1 32", "concurrency 3 32", "size 1 8", "size 1 32"}));
}

TEST_F(Bench, JsonHasTheSameFigures) {
  const json document = ExpectJson(Run({"--transports=grpc", "--json"}), R"({"vocab_size": 64, "not_measured": []})"_json);
  EXPECT_EQ(document["measurements"].size(), 5u);
  EXPECT_EQ(document["server"], server_.target());
}

TEST_F(Bench, APathThatCannotBeTakenAloneIsAFailureThatSaysWhy) {
  Expect(Run({"--transports=cuda_ipc"}), 1, &ProgramResult::err, {"no path could be measured: cuda_ipc: "});
  EXPECT_EQ(HeadCount(), 0u);
}

TEST_F(Bench, AHeadThatDoesNotFitIsMadeSmaller) {
  ServerProcess small({"--memory_budget_bytes=67108864"});
  const json document =
      ExpectJson(RunProgram({HEADWATERCTL, "bench", small.target(), "--vocab_size=1048576", "--hidden_size=16", "--rows=8",
                             "--sizes=8", "--concurrency=2", "--duration=10ms", "--transports=grpc", "--json"}));
  EXPECT_LT(document["vocab_size"], 1048576);
  EXPECT_GE(document["vocab_size"], 1024);
}

TEST_F(Bench, ThePlotNeedsMatplotlibAndSaysSoFirst) {
  TemporaryDirectory directory;
  const std::string png = directory.path() + "/bench.png";
  const Arguments nowhere = Joined({"/usr/bin/env", "PATH=" + directory.path()}, Command({"--png=" + png}));
  Expect(RunProgram(nowhere), 1, &ProgramResult::err,
         {"--png needs a python3 with matplotlib, and there is no python3 on the PATH", "--csv needs neither"});

  // A Python without the library.
  WriteFile(directory.path() + "/python3", "#!/bin/sh\nexit 1\n");
  ASSERT_EQ(RunProgram({"/bin/chmod", "755", directory.path() + "/python3"}).exit_code, 0);
  const ProgramResult bare = RunProgram(nowhere);
  Expect(bare, 1, &ProgramResult::err, {"--png needs matplotlib, which the python3 on the PATH does not have"});
  EXPECT_FALSE(absl::StrContains(bare.err, "making a head")) << bare.err;

  const std::string path = "PATH=/usr/bin:/bin";
  if (RunProgram({"/usr/bin/env", path, "python3", "-c", "import matplotlib"}).exit_code != 0) {
    GTEST_SKIP() << "the system's python3 has no matplotlib: no plot is drawn";
  }
  const Arguments with = Joined(Command({"--transports=grpc", "--png=" + png}), kSmall);
  const ProgramResult drawn = RunProgram(Joined({"/usr/bin/env", path}, with));
  EXPECT_EQ(drawn.exit_code, 0) << drawn.err;
  EXPECT_EQ(ReadFile(png).substr(0, 4), "\x89PNG");
}

TEST_F(Bench, AnInterruptedOneDeletesItsHead) {
  TemporaryDirectory directory;
  const std::string err = directory.path() + "/err";
  ChildProcess bench(Command({"--vocab_size=64", "--hidden_size=16", "--rows=8", "--transports=grpc", "--duration=30s"}),
                     directory.path() + "/out", err);
  ASSERT_TRUE(Await([&] { return HeadCount() == 1; }));
  bench.Signal(SIGINT);
  EXPECT_EQ(bench.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(ReadFile(err), "interrupted")) << ReadFile(err);
  EXPECT_EQ(HeadCount(), 0u);
}

TEST_F(Bench, AFileThatCannotBeWrittenIsToldBeforeAnythingIsMeasured) {
  TemporaryDirectory directory;
  const std::string kept = directory.path() + "/kept.csv";
  WriteFile(kept, "figures");
  for (const std::string& path : {directory.path() + "/no/such/folder/bench.csv", directory.path()}) {
    const ProgramResult result = Run({"--csv=" + path});
    Expect(result, 2, &ProgramResult::err, {"--csv: expected a file that can be written, got " + path});
    EXPECT_FALSE(absl::StrContains(result.err, "making a head")) << result.err;
  }
  // The one that is there is not touched for an error that comes later.
  EXPECT_EQ(Run({"--csv=" + kept, "--transports=cuda_ipc"}).exit_code, 1);
  EXPECT_EQ(ReadFile(kept), "figures");
}

TEST_F(Bench, WrongCommandLinesEndWithTwo) {
  for (const Arguments& words : std::vector<Arguments>{{"--transports=pigeon"},
                                                       {"--transports="},
                                                       {"--concurrency=0"},
                                                       {"--concurrency=1000"},
                                                       {"--sizes=many"},
                                                       {"--rows=-1"},
                                                       {"--duration=1h"},
                                                       {"--trainable"},
                                                       {"elsewhere"}}) {
    SCOPED_TRACE(words[0]);
    Expect(RunProgram(Command(words)), 2, &ProgramResult::err, {"hint: "});
  }
  EXPECT_EQ(HeadCount(), 0u);
}

}  // namespace
}  // namespace headwater::e2e
