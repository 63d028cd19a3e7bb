// What a client of a sequence of calls (fuzz.proto) knows: what its "*" stand for, and what the server has acknowledged.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_CLIENT_STATE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_CLIENT_STATE_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::fuzz {

// Thread-safe.
class KnownState {
 public:
  // `new_token` sends a descriptor and answers its token.
  explicit KnownState(std::function<std::string()> new_token);

  void AddHead(const v1::Head& head);
  void AddSession(const std::string& id);
  void AddRegion(const std::string& id);
  // Every head that was answered, and every session.
  std::vector<std::string> heads() const;
  std::vector<std::string> sessions() const;

  // Puts what is known in the place of every "*" in the message and in what it holds.
  void FillIn(google::protobuf::Message* message) const;
  // The bytes of a chunk of rows, and of a part of a tensor, that are "*".
  static void FillIn(v1::RowChunk* chunk, const v1::MicroBatchHeader& header);
  static void FillIn(v1::RowChunk* chunk, v1::DataType data_type, int64_t hidden_size);
  static void FillIn(v1::ByteChunk* chunk, int64_t total_bytes);

 private:
  std::string Epoch(const std::string& head) const;

  const std::function<std::string()> new_token_;
  const std::string transfer_prefix_;  // another one for each sequence: the server remembers ids for a while
  mutable std::mutex mutex_;
  std::map<std::string, std::string> epochs_;  // by head
  std::vector<std::string> sessions_;
  std::string region_;
};

// A record of acknowledged micro-batches, against the sums that the server reports of a step. Thread-safe. Requests are those that
// were sent, with everything filled in.
class Acknowledged {
 public:
  // Contributions of a step of a head in one of its lives.
  struct Contributions {
    std::map<int64_t, std::optional<int64_t>> committed;  // their valid tokens, if they are known
  };

  // Before a call that may add something.
  void Try(const v1::MicroBatchHeader& header);
  void Try(const v1::AddGradientHeader& header);
  // After one that was answered with OK.
  void Computed(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary);
  void Committed(const v1::CommitMicroBatchRequest& request);
  void Added(const v1::AddGradientHeader& header);

  // What was committed when a call that asks for it began.
  Contributions Before(const v1::HeadStep& step) const;
  // Finds an answer that lacks something of it, or has what nobody sent.
  void CheckTotals(const v1::HeadStep& step, const Contributions& before, const v1::StepTotals& totals) const;
  void CheckStep(const v1::HeadStep& head, const v1::Step& step, const Contributions& before) const;

 private:
  using Key = std::tuple<std::string, std::string, int64_t>;  // head, epoch, step
  static Key KeyOf(const v1::HeadStep& step) { return {step.head(), step.head_epoch(), step.step()}; }

  mutable std::mutex mutex_;
  std::map<Key, Contributions> steps_;
  std::map<std::string, std::set<int64_t>> tried_;  // ids, by head, whatever the epoch and step
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_CLIENT_STATE_H_
