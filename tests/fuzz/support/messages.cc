#include "tests/fuzz/support/messages.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>

#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

namespace headwater::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr size_t kMaxBytes = 4096;
constexpr int kMaxElements = 64;

struct Place {
  Message* message;
  const FieldDescriptor* field;
};

// Every field of the message and of those that it holds.
void CollectPlaces(Message* message, int depth, std::vector<Place>* places) {
  const Reflection* const reflection = message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message->GetDescriptor()->field(i);
    places->push_back({message, field});
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE || depth == 0) continue;
    if (field->is_repeated()) {
      for (int j = 0; j < reflection->FieldSize(*message, field); ++j) {
        CollectPlaces(reflection->MutableRepeatedMessage(message, field, j), depth - 1, places);
      }
    } else if (reflection->HasField(*message, field)) {
      CollectPlaces(reflection->MutableMessage(message, field), depth - 1, places);
    }
  }
}

}  // namespace

bool ReadMessageInput(InputReader input, Message* message) {
  // Errors of a mutated text are not logged.
  static const bool silent_parser = google::protobuf::SetLogHandler(nullptr) == nullptr;
  static_cast<void>(silent_parser);
  const std::string bytes = input.Rest();
  message->Clear();
  return bytes[0] == '#' ? google::protobuf::TextFormat::ParseFromString(bytes.substr(1), message)
                         : message->ParseFromString(bytes);
}

size_t WriteMessageInput(const Message& message, bool text, uint8_t* out, size_t max_size, size_t otherwise) {
  std::string bytes;
  if (text) {
    google::protobuf::TextFormat::PrintToString(message, &bytes);
    bytes = '#' + bytes;
  } else {
    bytes = message.SerializeAsString();
  }
  if (bytes.size() > max_size) return otherwise;
  std::memcpy(out, bytes.data(), bytes.size());
  return bytes.size();
}

void MessageMutator::Mutate(Message* message) {
  for (int changes = 1 + Below(4); changes > 0; --changes) MutateOnce(message);
}

void MessageMutator::MutateOnce(Message* message) {
  std::vector<Place> places;
  CollectPlaces(message, /*depth=*/8, &places);
  if (places.empty()) return;
  const Place& place = places[Below(places.size())];
  if (place.field->is_repeated()) {
    MutateRepeated(place.message, place.field);
  } else {
    MutateField(place.message, place.field);
  }
}

void MessageMutator::MutateField(Message* message, const FieldDescriptor* field) {
  const Reflection* const reflection = message->GetReflection();
  const bool present = !field->has_presence() || reflection->HasField(*message, field);
  // A member of a oneof replaces the one that is there, which mostly makes another input of it: seldom.
  if (field->containing_oneof() != nullptr && !present && Below(8) != 0) return;
  if (Below(present ? 8 : 64) == 0) return reflection->ClearField(message, field);
  if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) return MutateValue(message, field, -1);
  Message* const inner = reflection->MutableMessage(message, field);
  if (present) MutateOnce(inner);
}

void MessageMutator::MutateRepeated(Message* message, const FieldDescriptor* field) {
  const Reflection* const reflection = message->GetReflection();
  const int size = reflection->FieldSize(*message, field);
  if (size == 0) return AddElement(message, field);
  const int index = Below(size);
  switch (Below(6)) {
    case 0:
      return reflection->RemoveLast(message, field);
    case 1:
      return reflection->SwapElements(message, field, index, Below(size));
    case 2: {  // without one of them
      for (int i = index; i + 1 < size; ++i) reflection->SwapElements(message, field, i, i + 1);
      return reflection->RemoveLast(message, field);
    }
    case 3:
      return AddElement(message, field);
    default:
      break;
  }
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    MutateOnce(reflection->MutableRepeatedMessage(message, field, index));
  } else {
    MutateValue(message, field, index);
  }
}

void MessageMutator::AddElement(Message* message, const FieldDescriptor* field) {
  const Reflection* const reflection = message->GetReflection();
  const int size = reflection->FieldSize(*message, field);
  if (size >= kMaxElements) return;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      Message* const added = reflection->AddMessage(message, field);
      if (size > 0) {
        const int from = Below(size);
        added->CopyFrom(reflection->GetRepeatedMessage(*message, field, from));
        // Somewhere, not always at the end.
        reflection->SwapElements(message, field, size, Below(size + 1));
      }
      return;
    }
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection->AddInt32(message, field, static_cast<int32_t>(Integer(0)));
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection->AddInt64(message, field, Integer(0));
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection->AddEnumValue(message, field, Below(8));
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection->AddString(message, field, Bytes("", field->type() == FieldDescriptor::TYPE_STRING));
    default:
      return;
  }
}

void MessageMutator::MutateValue(Message* message, const FieldDescriptor* field, int index) {
  const Reflection* const reflection = message->GetReflection();
  const bool element = index >= 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const int64_t old = element ? reflection->GetRepeatedInt32(*message, field, index) : reflection->GetInt32(*message, field);
      const auto value = static_cast<int32_t>(Integer(old));
      return element ? reflection->SetRepeatedInt32(message, field, index, value) : reflection->SetInt32(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const int64_t old = element ? reflection->GetRepeatedInt64(*message, field, index) : reflection->GetInt64(*message, field);
      const int64_t value = Integer(old);
      return element ? reflection->SetRepeatedInt64(message, field, index, value) : reflection->SetInt64(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection->SetUInt32(message, field, static_cast<uint32_t>(Integer(reflection->GetUInt32(*message, field))));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection->SetDouble(message, field, Real(reflection->GetDouble(*message, field)));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->SetBool(message, field, !reflection->GetBool(*message, field));
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int value = Below(16) == 0 ? static_cast<int>(Integer(0)) : Below(5);
      return element ? reflection->SetRepeatedEnumValue(message, field, index, value)
                     : reflection->SetEnumValue(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_STRING: {
      const bool text = field->type() == FieldDescriptor::TYPE_STRING;
      std::string old = element ? reflection->GetRepeatedString(*message, field, index) : reflection->GetString(*message, field);
      std::string value = Bytes(std::move(old), text);
      return element ? reflection->SetRepeatedString(message, field, index, std::move(value))
                     : reflection->SetString(message, field, std::move(value));
    }
    default:
      return;
  }
}

int64_t MessageMutator::Integer(int64_t old) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kSmall[] = {0, 1, 2, 3, 4, 5, 8, 13, 16, 64, 65, -1, -2};
  constexpr int64_t kLarge[] = {INT32_MAX, INT32_MAX + 1ll, INT32_MIN,     kMost,    kMost - 1,
                                kLeast,    kMost / 4,       kMost / 8 + 1, 1ll << 61};
  const size_t place = Below(std::size(kSmall) + std::size(kLarge));
  switch (Below(4)) {
    case 0:
      return place < std::size(kSmall) ? kSmall[place] : kLarge[place - std::size(kSmall)];
    case 1:
      return Below(8);
    case 2:
      return static_cast<int64_t>(static_cast<uint64_t>(old) + Below(uint64_t{5}) - 2);
    default:
      return static_cast<int64_t>(static_cast<uint64_t>(old) ^ (uint64_t{1} << Below(64)));
  }
}

double MessageMutator::Real(double old) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kValues[] = {
      0,      1,         -1,         0.5,  2,         1e-3,      1e300, -1e300,
      1e-310, kInfinity, -kInfinity, -0.0, 1 - 1e-16, 1 + 1e-15, 1e39,  std::numeric_limits<double>::quiet_NaN()};
  if (Below(2) == 0) return kValues[Below(std::size(kValues))];
  return old * (0.25 * Below(9)) + 0.125 * Below(3);
}

std::string MessageMutator::Bytes(std::string old, bool text) {
  const auto byte = [&] { return static_cast<char>(text ? 0x20 + Below(0x5f) : Below(256)); };
  switch (Below(7)) {
    case 0:
    case 1:
      return words_.empty() ? old : words_[Below(words_.size())];
    case 2:
      old.resize(old.empty() ? 0 : Below(old.size() + 1));
      return old;
    case 3:
      return old.size() * 2 <= kMaxBytes ? old + old : old;
    case 4:
      for (int count = 1 + Below(4); count > 0; --count) old.push_back(byte());
      return old;
    case 5: {
      constexpr size_t kSizes[] = {1, 4, 15, 16, 17, 31, 32, 33, 64, 65, 255, 256, 257};
      old.resize(kSizes[Below(std::size(kSizes))], 'a');
      return old;
    }
    default:
      if (!old.empty()) old[Below(old.size())] = byte();
      return old;
  }
}

}  // namespace headwater::fuzz
