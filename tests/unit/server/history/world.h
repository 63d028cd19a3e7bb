// World: a server's core (registry, heads, sessions, checkpoints) on an engine of whole numbers, files in memory and a clock set by
// hand. Carries events out as the services do, and shows all that can be observed.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_WORLD_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_WORLD_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "events.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head_registry.h"
#include "server/heads/session_registry.h"
#include "tests/unit/server/fake_engine.h"
#include "tests/unit/server/faulty_file_system.h"
#include "tests/unit/server/memory_file_system.h"

namespace headwater::history {

// Bugs of a world, for the test of the test.
struct WorldBugs {
  testing::FakeBug engine = testing::FakeBug::kNone;
  bool keeps_older_checkpoint = false;   // replacing a checkpoint leaves the older one in its place
  bool session_clock_stands = false;     // no lease ever ends
  bool forgets_call_of_session = false;  // a running call does not keep its session's lease
  bool ignores_epochs = false;           // a call counts as one of the life that it finds
  bool never_syncs = false;              // directories are not synced
  bool comes_back_in_silence = false;    // a head that comes back does not say so
};

// The end of the process, thrown through the server's code: what unwinds frees memory and releases locks, and then all but the
// files is thrown away.
struct ProcessEnd {};

// Where the server's code waits for what is around it: the engine, a call's rows, the disk, the client. The process can be made to
// end at any of them. Not thread-safe.
class AwaitPoints {
 public:
  // Ends the process at the `number`-th point from now on; 0: at none.
  void EndAt(int number) {
    end_at_ = number;
    passed_ = 0;
  }
  void Pass() {
    if (++passed_ == end_at_) throw ProcessEnd();
  }
  // Since EndAt().
  int passed() const { return passed_; }

 private:
  int end_at_ = 0;
  int passed_ = 0;
};

class World {
 public:
  World(const std::vector<Payload>& payloads, int shard_count, const WorldBugs& bugs);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Reply Run(const Event& event);
  // The observable state; new epochs get their numbers here.
  View Observe();

 private:
  class Engine;
  struct CallMemory;
  using HeadPointer = std::shared_ptr<heads::Head>;

  void Start();
  void Stop();
  // The engine's call that the event says fails.
  void FailCallOf(const Event& event);
  Reply Dispatch(const Event& event);
  absl::Time Now() const { return absl::UnixEpoch() + absl::Seconds(now_); }

  absl::StatusOr<HeadPointer> Find(const Event& event, int head) const;
  heads::Epoch EpochOf(int number) const;
  int NumberOf(const heads::Epoch& epoch);
  std::optional<heads::SessionId> SessionOf(int number) const;
  // The key of a call's first target.
  heads::StepKey KeyOf(const Target& target) const { return {EpochOf(target), target.step.value_or(0)}; }
  heads::Epoch EpochOf(const Target& target) const;
  absl::Status AwaitStep(const Event& event, const HeadPointer& head, const Target& target) const;
  absl::StatusOr<heads::SessionRegistry::Use> UseSession(int session);
  // Drops what ended sessions left, or remembers to when the call that runs has ended.
  int64_t OnSessionEnd(const heads::SessionId& session);

  Reply Call(const Event& event);
  void DoMeanwhile(const Event& event, const heads::Submission& submission, bool* in_progress);
  // Another call while one is computed, in a thread of its own; returns when it has ended.
  void CallBeside(const Event& event);
  Reply Decide(const Event& event);
  Reply AddGradient(const Event& event, const HeadPointer& head);
  Reply OnHead(const Event& event, const HeadPointer& head);
  Reply Replace(const Event& event, const HeadPointer& head);
  Reply SetTensors(const Event& event, const HeadPointer& head);
  Reply Create(const Event& event);
  Reply Delete(const Event& event);
  Reply ExpireIdle(const Event& event);
  Reply Restart();
  Reply CrashIn(const Event& event);
  // What of the files an event can change: the number of the checkpoint that it saves, or whether a head comes back.
  int64_t StoredBy(const Event& event) const;
  // What a client is told of a head: the number of its epoch, its state, its open step.
  std::vector<double> HeadNumbers(const heads::Head& head);
  // The reply of a call that says them if it went well.
  Reply AndHead(const absl::Status& status, const heads::Head& head);
  void Damage(const Event& event);
  const testing::FakeHead& EngineHeadOf(int head) const;
  static int IndexOf(const heads::HeadName& name);
  static void ObserveStep(View& view, const heads::StepRecord& step);

  const std::vector<Payload>& payloads_;
  const int shard_count_;
  const WorldBugs bugs_;
  double now_ = 0;
  AwaitPoints await_points_;
  testing::MemoryFileSystem disk_;
  testing::FaultyFileSystem files_{disk_};
  std::unique_ptr<checkpoint::CheckpointStore> store_;
  std::unique_ptr<Engine> engine_;
  std::function<void()> during_compute_;  // called once
  std::unique_ptr<heads::HeadRegistry> registry_;
  std::unique_ptr<heads::SessionRegistry> sessions_;
  std::map<int, HeadPointer> deleted_;  // by name: pointers that calls may still hold
  bool computing_ = false;
  std::vector<Reply> beside_;  // replies to calls that were computed beside the one that runs
  std::vector<heads::SessionId> ended_meanwhile_;
  int held_count_ = 0;

  std::vector<heads::Epoch> epochs_;
  std::vector<heads::SessionId> session_ids_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_WORLD_H_
