#include "tests/fuzz/support/known_state.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <atomic>
#include <utility>

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

}  // namespace headwater::fuzz
