// Generator: chooses the events of a history, from a seed and from what the model says the clients can know.
//
// Clients mostly do what makes sense: the open step, the epoch they were told, the sessions that they opened. Now and then each
// thing is wrong in every way that can be thought of, and calls arrive late, twice or out of order.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_GENERATOR_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_GENERATOR_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "events.h"
#include "tests/unit/server/history/model/model.h"

namespace headwater::history {

class Generator : public Source {
 public:
  Generator(uint64_t seed, const Model& model) : random_(seed), model_(model) {}

  Event Next() override;
  std::string Answered(const Event&, const Reply&) override { return ""; }
  // Names of all kinds of events, for checking that all of them occur.
  static std::vector<std::string> KindNames();

 private:
  friend struct KindTable;

  int Pick(int count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  bool OneIn(int count) { return Pick(count) == 0; }
  template <typename T>
  const T& PickFrom(const std::vector<T>& values) {
    return values[static_cast<size_t>(Pick(static_cast<int>(values.size())))];
  }

  // ---- what there is; false or -1 if there is nothing
  int PickHead(bool (*wanted)(const ModelHead& head));
  int PickTrainable();  // ready
  const ModelHead& At(int head) const { return model_.heads().at(head); }
  Target TargetOf(int head) const;
  int PickSession();
  bool PickContribution(Event& event, bool (*wanted)(const ModelContribution& contribution) = nullptr);
  bool PickRecord(Event& event, char state);
  bool PickCheckpoint(Event& event, bool newest);
  int PickStaleEpoch(int head);
  // An id without record in any of the heads, or else any; and an attempt that is not refused.
  void PickId(Event& event);
  heads::ExpectedMicroBatches CommittedIds(int head, bool count);

  // ---- events of a sort
  bool Call(Event& event);
  bool CallOn(Event& event, const std::vector<int>& heads);
  bool OnStep(Event& event, Op op);
  bool OnHead(Event& event, Op op, bool (*wanted)(const ModelHead& head) = nullptr);
  bool Seal(Event& event);
  bool Apply(Event& event);
  bool Replace(Event& event);
  bool AddGradient(Event& event);
  // The process ends in the event, at one of its first `points` await points.
  bool Crash(Event& event, int points) {
    event.crash_at = 1 + Pick(points);
    if (OneIn(2)) event.power_loss = random_();
    return true;
  }
  // What has to be done before anything else makes sense.
  bool Prepare(Event& event);
  Event Choose();

  std::mt19937_64 random_;
  const Model& model_;
  std::vector<Event> delayed_;
  std::vector<Event> announced_;
  std::vector<Event> sent_;  // the last few calls
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_GENERATOR_H_
