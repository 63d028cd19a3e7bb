// Whole sequences of calls, plausible and not, to a server in this process over a Unix socket, on the CPU engine with tiny shapes
// and tiny limits. Input: a headwater.fuzz.Sequence. Nothing may crash or hang; what was acknowledged must be in its step; a
// refusal tells its reason and nothing about the server; and when the heads are gone so is everything that was reserved.
#include <sanitizer/lsan_interface.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/observability/logging.h"
#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/check.h"
#include "tests/fuzz/support/json_file.h"
#include "tests/fuzz/support/messages.h"
#include "tests/fuzz/support/sequence_client.h"
#include "tests/fuzz/support/target.h"
#include "tests/unit/server/temporary_directory.h"

namespace headwater::fuzz {

// What libFuzzer counts as coverage here: each call with each of its answers, and after each answer of the call before. The server
// is not instrumented, so that it is the one that the other tests have built. Only libFuzzer reads them.
constexpr size_t kCounters = 1 << 15;
__attribute__((used, section("__libfuzzer_extra_counters"))) uint8_t counters[kCounters];

// LeakSanitizer finds a living thread's stack by the number that the system gave the thread. It takes the first thread of this
// process that ever had the number, even one that has ended (so in LLVM 14 and in GCC 12). Numbers repeat after 32768 threads of
// the machine by default (/proc/sys/kernel/pid_max). From then on, what only such a thread's stack refers to is reported as leaked.
std::atomic<bool> thread_numbers_repeat{false};

}  // namespace headwater::fuzz

// Absent without LeakSanitizer, which asks the other one before it looks.
extern "C" int __lsan_do_recoverable_leak_check() __attribute__((weak));
extern "C" int __lsan_is_turned_off() { return headwater::fuzz::thread_numbers_repeat ? 1 : 0; }

namespace headwater::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxCalls = 40;  // that mutations make
// How many sequences share a look for leaks, which stops the whole process.
constexpr int kLeakCheckInterval = 500;
// Which make some 300 threads.
constexpr int kThreadNumberInterval = 100;

// Learns the number of a thread that it makes. When numbers repeat, says so once and turns LeakSanitizer off, at the process' end,
// too. To be called often enough to see that numbers have restarted.
void NoteThreadNumber() {
  static const pid_t first = getpid();  // no thread of the process had a lower one before numbers restarted
  static pid_t last = first;
  static bool restarted = false;
  if (thread_numbers_repeat) return;
  pid_t number = 0;
  std::thread([&number] { number = static_cast<pid_t>(syscall(SYS_gettid)); }).join();
  restarted = restarted || number < last;
  last = number;
  if (!restarted || number < first) return;
  thread_numbers_repeat = true;
  std::fprintf(stderr, "leaks are not looked for any more: the numbers of this process' threads have come round\n");
}

void CheckLeaks() {
  if (&__lsan_do_recoverable_leak_check != nullptr) FUZZ_CHECK(__lsan_do_recoverable_leak_check() == 0);
}

testing::ServerSetup Setup(const std::string& directory) {
  testing::ServerSetup setup;
  setup.engine.shard_count = 2;
  setup.engine.memory_budget_bytes = 64 << 20;
  service::ServerOptions& options = setup.options;
  options.checkpoint_directory = directory + "/checkpoints";
  options.load_root = directory + "/models";
  options.descriptor_socket = directory + "/descriptors";
  options.stream_idle_timeout = absl::Milliseconds(500);
  service::Limits& limits = options.limits;
  limits.max_message_bytes = 128 << 10;
  limits.max_chunk_bytes = 4096;
  limits.max_micro_batch_rows = 64;
  limits.max_micro_batch_bytes = 16 << 10;
  limits.max_vocab_size = 64;
  limits.max_hidden_size = 16;
  limits.max_heads = 3;
  limits.max_heads_per_tenant = 2;
  limits.max_step_micro_batches = 6;
  limits.max_staging_slots = 2;
  limits.max_queue_depth = 4;
  limits.max_in_flight_bytes = 32 << 10;
  limits.max_upload_bytes = 16 << 10;
  limits.max_sessions = 4;
  limits.max_session_lease = absl::Seconds(2);  // also of those that a raw call has opened, whose ids nobody knows
  limits.max_held_bytes = 1024;
  limits.max_waiting_calls = 3;
  limits.max_step_wait = absl::Milliseconds(10);
  limits.max_terms = 3;
  limits.max_stripes = 3;
  limits.max_stripe_wait = absl::Milliseconds(20);
  limits.max_session_regions = 2;
  limits.max_region_bytes = 8192;
  limits.max_join_bytes = 4096;
  limits.max_join_wait = absl::Milliseconds(20);
  return setup;
}

void WriteModel(const std::string& directory) {
  fs::create_directories(directory + "/models");
  std::ofstream(directory + "/models/m.safetensors", std::ios::binary)
      << SafetensorsFile(R"({"weight": {"dtype": "F32", "shape": [13, 5], "data_offsets": [0, 260]}})", '\x3c');
}

// The server that all sequences share.
class Fixture {
 public:
  Fixture() {
    // A line for each call would be most of what a campaign does.
    FUZZ_CHECK(observability::ConfigureLogging("off", "text").ok());
    fs::create_directories(directory_.path() + "/checkpoints");
    WriteModel(directory_.path());
    server_ = std::make_unique<testing::WireServer>(Setup(directory_.path()));
    channel_ = server_->NewChannel();
  }

  void Run(const Sequence& sequence) {
    previous_ = 0;
    {
      SequenceClient client(*server_, channel_, directory_.path() + "/descriptors",
                            [this](const std::string& call, const std::string& answer) { Count(call, answer); });
      client.Run(sequence);
      client.CleanUp();
    }
    CheckAtRest();
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_.path() + "/checkpoints")) fs::remove_all(entry);
    ++runs_;
    if (runs_ % kThreadNumberInterval == 0) NoteThreadNumber();
    if (runs_ % kLeakCheckInterval == 0) CheckLeaks();
  }

 private:
  void Count(const std::string& call, const std::string& answer) {
    const size_t hash = std::hash<std::string>()(absl::StrCat(call, " ", answer));
    const size_t previous = previous_.exchange(hash);
    counters[hash % (kCounters / 2)] = 1;
    counters[kCounters / 2 + (hash * 31 + previous) % (kCounters / 2)] = 1;
  }

  // Nothing is reserved, waits or is held for clients that have gone.
  void CheckAtRest() const {
    std::string left;
    const bool rest = testing::Await([&] {
      left.clear();
      const std::string metrics = server_->server().SerializeMetrics();
      for (const absl::string_view line : absl::StrSplit(metrics, '\n')) {
        if (absl::EndsWith(line, " 0")) continue;
        for (const absl::string_view name :
             {"headwater_heads", "headwater_sessions", "headwater_waiting_calls", "headwater_queue_depth",
              "headwater_in_flight_bytes", "headwater_upload_bytes", "headwater_held_bytes", "headwater_join_bytes",
              "headwater_row_memory_bytes{state=\"used\"}", "headwater_regions", "headwater_region_bytes",
              "headwater_memory_planned_bytes"}) {
          if (!absl::StartsWith(line, name)) continue;
          const char next = line[name.size()];
          if (next == ' ' || next == '{') absl::StrAppend(&left, line, "; ");
        }
      }
      return left.empty();
    });
    FUZZ_CHECK(rest, left);
  }

  const testing::TemporaryDirectory directory_;
  std::unique_ptr<testing::WireServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::atomic<size_t> previous_{0};
  int runs_ = 0;
};

}  // namespace

void CheckInput(InputReader input) {
  Sequence sequence;
  if (!ReadMessageInput(input, &sequence)) return;
  static Fixture fixture;
  fixture.Run(sequence);
}

// libFuzzer's mutations: calls are copied, removed, moved, taken from another sequence, and their fields changed. Sequences are
// written as text, so that a finding can be read.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  MessageMutator mutator(seed, {"*", "0", "1", "a", "b", "tenants/default/heads/a", "tenants/t/heads/a", "tenants/t", "c1", "k",
                                "m.safetensors", "..", std::string(16, 'e'), std::string(32, 's'), std::string(20, '\0')});
  Sequence sequence;
  if (!ReadMessageInput({data, size}, &sequence)) sequence.Clear();
  auto* const calls = sequence.mutable_calls();
  const auto any = [&] { return mutator.Below(calls->size()); };
  const int kind = mutator.Below(8);
  if (calls->empty() || kind >= 4) {
    mutator.Mutate(&sequence);
  } else if (kind == 0 && calls->size() < kMaxCalls) {
    // The same again, here or later: a repeat.
    const auto again = calls->Get(any());
    *calls->Add() = again;
    for (int i = calls->size() - 1, to = any(); i > to; --i) calls->SwapElements(i, i - 1);
  } else if (kind == 1) {
    calls->SwapElements(any(), any());
  } else if (kind == 2) {
    auto* const call = calls->Mutable(any());
    call->set_background(!call->background());
  } else {
    mutator.Mutate(calls->Mutable(any()));
  }
  while (calls->size() > kMaxCalls) calls->RemoveLast();
  return WriteMessageInput(sequence, /*text=*/true, data, max_size, size);
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* data1, size_t size1, const uint8_t* data2, size_t size2, uint8_t* out,
                                            size_t max_out_size, unsigned int seed) {
  MessageMutator mutator(seed, {});
  Sequence first;
  Sequence second;
  if (!ReadMessageInput({data1, size1}, &first) || !ReadMessageInput({data2, size2}, &second)) return 0;
  // The beginning of one, and the end of the other.
  const int kept = mutator.Below(first.calls_size() + 1);
  const int from = mutator.Below(second.calls_size() + 1);
  while (first.calls_size() > kept) first.mutable_calls()->RemoveLast();
  for (int i = from; i < second.calls_size() && first.calls_size() < kMaxCalls; ++i) *first.add_calls() = second.calls(i);
  return WriteMessageInput(first, /*text=*/true, out, max_out_size, 0);
}

}  // namespace headwater::fuzz
