// What a client of a sequence of calls (fuzz.proto) has been told, and what its "*" stand for.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_KNOWN_STATE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_KNOWN_STATE_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
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

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_KNOWN_STATE_H_
