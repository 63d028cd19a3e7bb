// Trainer: a simulated client that takes its part in a job, call after call, by the real client's rules.
//
// It knows what the server has answered, and nothing else. It says what it would call next; the network tells it what became of
// that.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_TRAINER_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_TRAINER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client_rules.h"
#include "events.h"
#include "job.h"

namespace headwater::history {

class Trainer {
 public:
  Trainer(int rank, Job& job, uint64_t seed);

  // The next attempt; nothing while one is under way, or while it waits for the others.
  std::optional<Event> Next();
  // The attempt under way has failed: with a reason of the server, or because the connection broke (empty). "DEADLINE" when the
  // call itself has come to its end.
  void Failed(const std::string& reason);
  // `life`: which of the server's processes answered.
  void Succeeded(const Reply& reply, int life);
  bool is_calling() const { return attempt_.has_value(); }
  // It is started again, and remembers nothing but what the job knows.
  void Die();

  // What was wrong with an answer; empty if nothing was.
  std::string TakeProblem() { return std::exchange(problem_, ""); }

 private:
  enum class State { kNew, kStaged, kDone };
  struct MicroBatch {
    State state = State::kNew;
    int64_t attempt = 0;  // of its next call, or that it is staged with
  };

  int Pick(int count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  std::optional<Event> Choose();
  std::optional<Event> ChooseFind() const;
  std::optional<Event> ChooseExtra();
  Event ChooseRepair() const;
  std::optional<Event> ChooseClose();
  Event OnHead(Op op) const { return TrainerEvent(op, job_.head()); }
  Event WithEpoch(Event event) const;
  Event OnStep(Op op) const { return WithEpoch(TrainerEvent(op, job_.head(), step_)); }
  Event Delete() const;
  static bool NeedsSession(const Event& event);
  static bool IsSafe(const Event& event);
  void StartRound();
  void Finish(const Event& call, const Reply& reply, int life);
  void GiveUp(const Event& call, const std::string& reason);
  void Found(const std::vector<double>& head, int life);
  MicroBatch& Current(const Event& call) { return micro_batches_[call.micro_batch]; }

  const int rank_;
  Job& job_;
  std::mt19937_64 random_;
  int64_t round_ = -1;
  int64_t step_ = -1;
  int epoch_ = kNoEpoch;  // unknown, or lost
  // What the head was found to be: its state, '-' if there is none, 'F' if somebody else has taken it.
  char found_ = ' ';
  int session_ = kNoSession;
  bool sealed_ = false;
  bool wants_save_ = false;
  std::map<int64_t, MicroBatch> micro_batches_;
  std::unique_ptr<ClientLog> log_;
  std::deque<Event> replays_;  // that are left of the recovery

  // The call under way, and its attempt.
  std::optional<Event> call_;
  std::optional<Event> attempt_;
  std::optional<RetryState> retries_;
  int attempt_count_ = 0;
  int session_losses_ = 0;
  bool is_replay_ = false;
  std::string problem_;
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_TRAINER_H_
