// Simulation: trainers, the network between them and the server, the clock, and what befalls the process and its disk, as actors
// of which a seed lets one act at a time. The server is the other side of Source: what is delivered to it is an event.
//
// Trainers check what they are told: the answer to a micro-batch never changes, whoever asks, in whatever life of the server; a
// step's gradient and the weights after it are those of the job's script, with each micro-batch that counts in it once; and no call
// succeeds that names an epoch of an earlier life.
#ifndef HEADWATER_TESTS_UNIT_SERVER_HISTORY_SIMULATION_H_
#define HEADWATER_TESTS_UNIT_SERVER_HISTORY_SIMULATION_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "events.h"
#include "faults.h"
#include "job.h"
#include "trainer.h"

namespace headwater::history {

class Simulation : public Source {
 public:
  // `faults` gets what befalls the messages; what befalls the server is in the events.
  Simulation(uint64_t seed, FaultTable& faults);

  Event Next() override;
  std::string Answered(const Event& event, const Reply& reply) override;

 private:
  struct Message {
    Trainer* trainer = nullptr;
    int64_t call = 0;  // the attempt that it belongs to
    int64_t sent = 0;
    bool is_copy = false;
    bool is_answer = false;
    Event request = {};
    Reply answer = {};
  };

  int Pick(int count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  bool OneIn(int count) { return Pick(count) == 0; }
  // The trainer still waits for this attempt.
  bool IsAwaited(const Message& message) const {
    return message.trainer->is_calling() && attempts_.at(message.trainer) == message.call;
  }
  bool OvertakesAnother(const Message& message) const;
  void Count(const Message& message, Fault fault) { faults_.CountIfPossible(message.request, fault); }
  // A trainer sends, an answer arrives, or something befalls a message. True if a request came to the server: it is `current_`.
  bool Act();
  bool ActOn(size_t index);
  void DeliverAnswer(const Message& message);
  void BreakConnections();
  // What befalls the server while the request is carried out.
  void Befall(Event& event);
  Event Operate();
  std::string Check(const Event& event, const Reply& reply);

  std::mt19937_64 random_;
  FaultTable& faults_;
  const std::vector<Payload> payloads_;
  std::deque<Job> jobs_;
  std::deque<Trainer> trainers_;
  std::map<const Trainer*, int64_t> attempts_;
  std::vector<Message> wire_;
  int64_t sent_ = 0;
  std::unique_ptr<Message> current_;
  int life_ = 0;
  std::map<int, int> life_of_;   // epochs
  std::map<int, int64_t> open_;  // steps of heads whose weights must be those of the script
};

}  // namespace headwater::history

#endif  // HEADWATER_TESTS_UNIT_SERVER_HISTORY_SIMULATION_H_
