// Inputs that are messages: binary, or in text form behind a first byte '#'. And their structure-aware mutation, through
// reflection: a field at a random place gets a value that a check may have forgotten, is removed, made, copied or moved.
// (libprotobuf-mutator does more of the kind, and no distribution that the project builds on packages it.)
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_MESSAGES_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_MESSAGES_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/support/target.h"

namespace headwater::fuzz {

// False if the bytes are no such message.
bool ReadMessageInput(InputReader input, google::protobuf::Message* message);
// In text form if `text`. The number of bytes; `otherwise` if there is no room for them.
size_t WriteMessageInput(const google::protobuf::Message& message, bool text, uint8_t* out, size_t max_size, size_t otherwise);

class MessageMutator {
 public:
  // `words`: values that strings and bytes are given now and then.
  MessageMutator(uint32_t seed, std::vector<std::string> words) : state_(seed), words_(std::move(words)) {}

  // One to four changes, each somewhere in `message` or in what it holds.
  void Mutate(google::protobuf::Message* message);

  // A number in [0, bound), bound > 0.
  template <typename Number>
  Number Below(Number bound) {
    return static_cast<Number>(Random() % static_cast<uint64_t>(bound));
  }

 private:
  // SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): there is a mutator for each input,
  // and to seed a std::mt19937 takes longer than all that is asked of it.
  uint64_t Random() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t mixed = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
  }
  void MutateOnce(google::protobuf::Message* message);
  void MutateField(google::protobuf::Message* message, const google::protobuf::FieldDescriptor* field);
  void MutateRepeated(google::protobuf::Message* message, const google::protobuf::FieldDescriptor* field);
  // Sets the field, or its element `index` if that is not negative, to a mutation of what it was.
  void MutateValue(google::protobuf::Message* message, const google::protobuf::FieldDescriptor* field, int index);
  void AddElement(google::protobuf::Message* message, const google::protobuf::FieldDescriptor* field);

  int64_t Integer(int64_t old);
  double Real(double old);
  std::string Bytes(std::string old, bool text);

  uint64_t state_;
  const std::vector<std::string> words_;
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_MESSAGES_H_
