// What a client of a sequence of calls (fuzz.proto) knows: what its "*" stand for, and what the server has acknowledged.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_CLIENT_STATE_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_CLIENT_STATE_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "headwater/v1/session_service.pb.h"
#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {

inline constexpr char kUnknown[] = "*";

// Finite numbers of any of the types, of at most 32 KiB; as INT32 small ones, so that they can be targets or indices.
inline std::string Pattern(int64_t bytes, v1::DataType type) {
  std::string data(static_cast<size_t>(std::clamp<int64_t>(bytes, 0, 32 << 10)), '\0');
  for (size_t i = 0; i < data.size(); ++i) {
    if (type == v1::DATA_TYPE_INT32) {
      data[i] = static_cast<char>(i % 4 == 0 ? i / 4 % 4 : 0);
    } else {
      data[i] = static_cast<char>(i % 2 == 1 ? 0x3c + (i / 2 % 3) : i % 7 * 8);  // the high bytes of numbers around 0.01 to 1.5
    }
  }
  return data;
}

// The bytes of elements, 0 if a mutation made the sizes negative or too large.
inline int64_t ByteSize(v1::DataType type, const std::vector<int64_t>& sizes) {
  int64_t bytes = type == v1::DATA_TYPE_BFLOAT16 || type == v1::DATA_TYPE_FLOAT16 ? 2 : 4;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return 0;
  }
  return bytes;
}

// Thread-safe.
class KnownState {
 public:
  // `new_token` sends a descriptor and answers its token.
  explicit KnownState(std::function<std::string()> new_token) : new_token_(std::move(new_token)) {
    static std::atomic<uint64_t> next{0};
    const uint64_t number = next++;
    transfer_prefix_.assign(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  // Takes the head, session or region from an answer.
  void Learn(const google::protobuf::Message& answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* head = dynamic_cast<const v1::Head*>(&answer);
    if (const auto* const created = dynamic_cast<const v1::CreateHeadResponse*>(&answer)) head = &created->head();
    if (const auto* const uploaded = dynamic_cast<const v1::UploadWeightsResponse*>(&answer)) head = &uploaded->head();
    if (head != nullptr && !head->name().empty()) epochs_[head->name()] = head->epoch();
    if (const auto* const opened = dynamic_cast<const v1::OpenSessionResponse*>(&answer)) sessions_.push_back(opened->session_id());
    if (const auto* const registered = dynamic_cast<const v1::RegisterSharedMemoryResponse*>(&answer)) {
      region_ = registered->region_id();
    }
  }
  // Every head that was answered, and every session.
  std::vector<std::string> heads() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [name, epoch] : epochs_) names.push_back(name);
    return names;
  }
  std::vector<std::string> sessions() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return sessions_;
  }

  // Puts what is known in the place of every "*" in the message and in what it holds.
  void FillIn(google::protobuf::Message* message) const {
    using google::protobuf::FieldDescriptor;
    if (auto* const tensor = dynamic_cast<v1::Tensor*>(message)) {
      if (tensor->data() != kUnknown) return;
      const int64_t bytes = ByteSize(tensor->data_type(), {tensor->shape().begin(), tensor->shape().end()});
      return tensor->set_data(Pattern(bytes, tensor->data_type()));
    }
    const google::protobuf::Reflection* const reflection = message->GetReflection();
    std::vector<const FieldDescriptor*> fields;
    reflection->ListFields(*message, &fields);
    std::string head;
    // Names first: epochs are those of the head beside them.
    for (const FieldDescriptor* field : fields) {
      if (field->cpp_type() != FieldDescriptor::CPPTYPE_STRING || field->is_repeated()) continue;
      if (field->name() != "name" && field->name() != "head") continue;
      head = reflection->GetString(*message, field);
      if (head.size() == 1) head.insert(0, "tenants/default/heads/");
      reflection->SetString(message, field, head);
    }
    for (const FieldDescriptor* field : fields) {
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        for (int i = 0; field->is_repeated() && i < reflection->FieldSize(*message, field); ++i) {
          FillIn(reflection->MutableRepeatedMessage(message, field, i));
        }
        if (!field->is_repeated()) FillIn(reflection->MutableMessage(message, field));
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING && !field->is_repeated()) {
        reflection->SetString(message, field, Filled(field->name(), reflection->GetString(*message, field), head));
      }
    }
  }

 private:
  // A field's value; `head` is the one beside it.
  std::string Filled(const std::string& field, const std::string& value, const std::string& head) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool unknown = value == kUnknown;
    if (unknown && (field == "epoch" || field == "head_epoch")) {
      const auto found = epochs_.find(head);
      return found == epochs_.end() ? std::string(16, 'e') : found->second;
    }
    if (unknown && field == "region_id") return region_;
    if (unknown && field == "descriptor_token") return new_token_();
    if (field == "session_id" && value.size() == 1) {
      const size_t index = static_cast<size_t>(static_cast<unsigned char>(value[0])) - '0';
      return index < sessions_.size() ? sessions_[index] : std::string(32, 's');
    }
    return field == "transfer_id" && value.size() == 1 ? transfer_prefix_ + std::string(8, value[0]) : value;
  }

  const std::function<std::string()> new_token_;
  std::string transfer_prefix_;  // another one for each sequence: the server remembers ids for a while
  mutable std::mutex mutex_;
  std::map<std::string, std::string> epochs_;  // by head
  std::vector<std::string> sessions_;
  std::string region_;
};

// Bytes for a chunk of rows, or for a part of a tensor, that has "*".
inline void FillIn(v1::RowChunk* chunk, v1::DataType data_type, int64_t hidden_size) {
  if (chunk->data() != kUnknown) return;
  chunk->set_data(Pattern(ByteSize(data_type, {chunk->row_count(), hidden_size}), data_type));
}
inline void FillIn(v1::RowChunk* chunk, const v1::MicroBatchHeader& header) {
  v1::DataType type = header.data_type();
  int64_t columns = header.hidden_size();
  if (chunk->role() == v1::CHUNK_ROLE_TEACHER_HIDDEN) {
    columns = 4;  // of the teacher in every corpus
    if (chunk->term_index() >= 0 && chunk->term_index() < header.terms_size()) {
      type = header.terms(chunk->term_index()).teacher_hidden().data_type();
    }
  }
  FillIn(chunk, type, columns);
}
inline void FillIn(v1::ByteChunk* chunk, int64_t total_bytes) {
  if (chunk->data() != kUnknown) return;
  int64_t left = 0;
  if (__builtin_sub_overflow(total_bytes, chunk->offset_bytes(), &left)) left = 0;
  chunk->set_data(Pattern(left, v1::DATA_TYPE_FLOAT32));
}

// A record of acknowledged micro-batches, against the sums that the server reports of a step. Thread-safe. Requests are those that
// were sent, with everything filled in.
class Acknowledged {
 public:
  // What was committed to a step of a head in one of its lives: the ids, with their valid tokens if they are known.
  using Committed = std::map<int64_t, std::optional<int64_t>>;

  // Before a call that may add something.
  void Try(const std::string& head, int64_t micro_batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tried_[head].insert(micro_batch);
  }
  // After one that was answered with OK.
  void Add(const v1::HeadStep& step, int64_t micro_batch, std::optional<int64_t> tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    steps_[KeyOf(step)].try_emplace(micro_batch, tokens);
  }
  // The same for all heads of a micro-batch.
  void Add(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary) {
    FUZZ_CHECK(summary.terms_size() == header.terms_size());
    if (!header.has_micro_batch() || summary.state() != v1::CONTRIBUTION_STATE_COMMITTED) return;
    std::map<std::string, int64_t> tokens;  // by head, over its terms
    for (int i = 0; i < header.terms_size(); ++i) {
      tokens[header.terms(i).head().head()] += summary.terms(i).sums().valid_token_count();
    }
    for (const v1::LossTerm& term : header.terms()) {
      // A repeat adds nothing, even with other rows: what counted before counts.
      const bool repeat = summary.replayed() || summary.payload_differs();
      Add(term.head(), header.micro_batch(), repeat ? std::nullopt : std::optional(tokens.at(term.head().head())));
    }
  }

  // What was committed when a call that asks for it began.
  Committed Before(const v1::HeadStep& step) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = steps_.find(KeyOf(step));
    return found == steps_.end() ? Committed() : found->second;
  }
  // Finds an answer that lacks something of it, or has what nobody sent.
  void CheckTotals(const v1::HeadStep& step, const Committed& before, const v1::StepTotals& totals) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto tried = tried_.find(step.head());
    const size_t most = tried == tried_.end() ? 0 : tried->second.size();
    int64_t tokens = 0;
    bool all_known = before.size() == most;
    for (const auto& [id, count] : before) {
      tokens += count.value_or(0);
      all_known = all_known && count.has_value();
    }
    const auto committed = static_cast<size_t>(totals.micro_batch_count());
    FUZZ_CHECK(totals.micro_batch_count() >= 0 && committed >= before.size() && committed <= most, totals.DebugString());
    FUZZ_CHECK(totals.valid_token_count() >= tokens, totals.DebugString());
    if (all_known) FUZZ_CHECK(totals.valid_token_count() == tokens, totals.DebugString());
  }

 private:
  using Key = std::tuple<std::string, std::string, int64_t>;  // head, epoch, step
  static Key KeyOf(const v1::HeadStep& step) { return {step.head(), step.head_epoch(), step.step()}; }

  mutable std::mutex mutex_;
  std::map<Key, Committed> steps_;
  std::map<std::string, std::set<int64_t>> tried_;  // ids, by head, whatever the epoch and step
};

// Finds a step that lacks something of what was committed before, or has it twice.
inline void CheckStep(const v1::HeadStep& head, const v1::Step& step, const Acknowledged::Committed& before) {
  if (step.step() != head.step()) return;
  std::set<int64_t> committed;
  for (const v1::MicroBatchState& state : step.micro_batches()) {
    if (state.state() == v1::CONTRIBUTION_STATE_COMMITTED) FUZZ_CHECK(committed.insert(state.micro_batch()).second);
  }
  for (const auto& [id, tokens] : before) FUZZ_CHECK(committed.count(id) == 1, step.DebugString());
}

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_CLIENT_STATE_H_
