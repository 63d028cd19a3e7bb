#include "tests/fuzz/support/client_state.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "tests/fuzz/support/check.h"

namespace headwater::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr char kUnknown[] = "*";
constexpr int64_t kMaxFilledBytes = 32 << 10;

// Finite numbers of any of the types; as INT32 small ones, so that they can be targets or indices.
std::string Pattern(int64_t bytes, v1::DataType type) {
  std::string data(static_cast<size_t>(std::clamp<int64_t>(bytes, 0, kMaxFilledBytes)), '\0');
  for (size_t i = 0; i < data.size(); ++i) {
    if (type == v1::DATA_TYPE_INT32) {
      data[i] = static_cast<char>(i % 4 == 0 ? i / 4 % 4 : 0);
    } else {
      data[i] = static_cast<char>(i % 2 == 1 ? 0x3c + (i / 2 % 3) : i % 7 * 8);  // the high bytes of numbers around 0.01 to 1.5
    }
  }
  return data;
}

int64_t ElementSize(v1::DataType type) { return type == v1::DATA_TYPE_BFLOAT16 || type == v1::DATA_TYPE_FLOAT16 ? 2 : 4; }

// Saturates: fields are whatever a mutation made of them.
int64_t Product(int64_t a, int64_t b) {
  int64_t product = 0;
  return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product) ? 0 : product;
}

void FillTensor(v1::Tensor* tensor) {
  if (tensor->data() != kUnknown) return;
  int64_t bytes = ElementSize(tensor->data_type());
  for (const int64_t size : tensor->shape()) bytes = Product(bytes, size);
  tensor->set_data(Pattern(bytes, tensor->data_type()));
}

std::string NextTransferPrefix() {
  static std::atomic<uint64_t> next{0};
  const uint64_t number = next++;
  return std::string(reinterpret_cast<const char*>(&number), sizeof(number));
}

std::string FullHeadName(const std::string& name) { return name.size() == 1 ? "tenants/default/heads/" + name : name; }

// Valid tokens of each head, over its terms.
std::map<std::string, int64_t> TokensByHead(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary) {
  std::map<std::string, int64_t> tokens;
  for (int i = 0; i < header.terms_size() && i < summary.terms_size(); ++i) {
    tokens[header.terms(i).head().head()] += summary.terms(i).sums().valid_token_count();
  }
  return tokens;
}

}  // namespace

KnownState::KnownState(std::function<std::string()> new_token)
    : new_token_(std::move(new_token)), transfer_prefix_(NextTransferPrefix()) {}

void KnownState::AddHead(const v1::Head& head) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!head.name().empty()) epochs_[head.name()] = head.epoch();
}

void KnownState::AddSession(const std::string& id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sessions_.push_back(id);
}

void KnownState::AddRegion(const std::string& id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  region_ = id;
}

std::vector<std::string> KnownState::heads() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, epoch] : epochs_) names.push_back(name);
  return names;
}

std::vector<std::string> KnownState::sessions() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sessions_;
}

std::string KnownState::Epoch(const std::string& head) const {
  const auto found = epochs_.find(head);
  return found == epochs_.end() ? std::string(16, 'e') : found->second;
}

void KnownState::FillIn(Message* message) const {
  if (auto* const tensor = dynamic_cast<v1::Tensor*>(message); tensor != nullptr) return FillTensor(tensor);
  const Reflection* const reflection = message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(*message, &fields);
  std::string head;
  // Names first: epochs are those of the head beside them.
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_STRING || field->is_repeated()) continue;
    if (field->name() != "name" && field->name() != "head") continue;
    head = FullHeadName(reflection->GetString(*message, field));
    reflection->SetString(message, field, head);
  }
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      for (int i = 0; field->is_repeated() && i < reflection->FieldSize(*message, field); ++i) {
        FillIn(reflection->MutableRepeatedMessage(message, field, i));
      }
      if (!field->is_repeated()) FillIn(reflection->MutableMessage(message, field));
      continue;
    }
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_STRING || field->is_repeated()) continue;
    const std::string value = reflection->GetString(*message, field);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (value == kUnknown && (field->name() == "epoch" || field->name() == "head_epoch")) {
      reflection->SetString(message, field, Epoch(head));
    } else if (value == kUnknown && field->name() == "region_id") {
      reflection->SetString(message, field, region_);
    } else if (value == kUnknown && field->name() == "descriptor_token") {
      reflection->SetString(message, field, new_token_());
    } else if (field->name() == "session_id" && value.size() == 1) {
      const size_t index = static_cast<size_t>(static_cast<unsigned char>(value[0])) - '0';
      reflection->SetString(message, field, index < sessions_.size() ? sessions_[index] : std::string(32, 's'));
    } else if (field->name() == "transfer_id" && value.size() == 1) {
      reflection->SetString(message, field, transfer_prefix_ + std::string(8, value[0]));
    }
  }
}

void KnownState::FillIn(v1::RowChunk* chunk, v1::DataType data_type, int64_t hidden_size) {
  if (chunk->data() != kUnknown) return;
  chunk->set_data(Pattern(Product(Product(chunk->row_count(), hidden_size), ElementSize(data_type)), data_type));
}

void KnownState::FillIn(v1::RowChunk* chunk, const v1::MicroBatchHeader& header) {
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

void KnownState::FillIn(v1::ByteChunk* chunk, int64_t total_bytes) {
  if (chunk->data() != kUnknown) return;
  int64_t left = 0;
  if (__builtin_sub_overflow(total_bytes, chunk->offset_bytes(), &left)) left = 0;
  chunk->set_data(Pattern(left, v1::DATA_TYPE_FLOAT32));
}

void Acknowledged::Try(const v1::MicroBatchHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::LossTerm& term : header.terms()) tried_[term.head().head()].insert(header.micro_batch());
}

void Acknowledged::Try(const v1::AddGradientHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tried_[header.head().head()].insert(header.micro_batch());
}

void Acknowledged::Computed(const v1::MicroBatchHeader& header, const v1::MicroBatchSummary& summary) {
  FUZZ_CHECK(summary.terms_size() == header.terms_size());
  if (!header.has_micro_batch()) return;
  const std::map<std::string, int64_t> tokens = TokensByHead(header, summary);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::LossTerm& term : header.terms()) {
    if (summary.state() != v1::CONTRIBUTION_STATE_COMMITTED) continue;
    // A repeat adds nothing, even with other rows: what counted before counts.
    const std::optional<int64_t> count =
        summary.replayed() || summary.payload_differs() ? std::nullopt : std::optional(tokens.at(term.head().head()));
    steps_[KeyOf(term.head())].committed.try_emplace(header.micro_batch(), count);
  }
}

void Acknowledged::Committed(const v1::CommitMicroBatchRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const v1::HeadStep& head : request.heads()) {
    // Several attempts may have been staged by now, whose tokens may differ: which it was is not known here.
    steps_[KeyOf(head)].committed.try_emplace(request.micro_batch(), std::nullopt);
  }
}

void Acknowledged::Added(const v1::AddGradientHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  steps_[KeyOf(header.head())].committed.try_emplace(header.micro_batch(), 0);
}

Acknowledged::Contributions Acknowledged::Before(const v1::HeadStep& step) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = steps_.find(KeyOf(step));
  return found == steps_.end() ? Contributions() : found->second;
}

void Acknowledged::CheckTotals(const v1::HeadStep& step, const Contributions& before, const v1::StepTotals& totals) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto tried = tried_.find(step.head());
  const size_t most = tried == tried_.end() ? 0 : tried->second.size();
  int64_t tokens = 0;
  bool all_known = before.committed.size() == most;
  for (const auto& [id, count] : before.committed) {
    tokens += count.value_or(0);
    all_known = all_known && count.has_value();
  }
  const auto committed = static_cast<size_t>(totals.micro_batch_count());
  FUZZ_CHECK(totals.micro_batch_count() >= 0 && committed >= before.committed.size() && committed <= most, totals.DebugString());
  FUZZ_CHECK(totals.valid_token_count() >= tokens, totals.DebugString());
  if (all_known) FUZZ_CHECK(totals.valid_token_count() == tokens, totals.DebugString());
}

void Acknowledged::CheckStep(const v1::HeadStep& head, const v1::Step& step, const Contributions& before) const {
  if (step.step() != head.step()) return;
  std::set<int64_t> committed;
  for (const v1::MicroBatchState& state : step.micro_batches()) {
    if (state.state() == v1::CONTRIBUTION_STATE_COMMITTED) FUZZ_CHECK(committed.insert(state.micro_batch()).second);
  }
  for (const auto& [id, tokens] : before.committed) FUZZ_CHECK(committed.count(id) == 1, step.DebugString());
}

}  // namespace headwater::fuzz
