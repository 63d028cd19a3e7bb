// Fields of a message by path, through reflection: "header.terms.targets.data". A repeated message on the way means its element 0.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_MESSAGE_PATH_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_MESSAGE_PATH_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace headwater::testing {

// What is done to a field, and the same in words.
struct Edit {
  std::string what;
  std::function<void(google::protobuf::Message* parent, const google::protobuf::FieldDescriptor* field)> apply;
};

Edit Clear();                                   // absent, or empty if repeated
Edit Make();                                    // a message field: present, as it is
Edit Empty();                                   // a message field: present, without fields
Edit Times(int count);                          // a repeated message: its element 0 so many times
Edit Int(int64_t value);                        // any integer, enum or bool field; one more element if repeated
Edit Ints(const std::vector<int64_t>& values);  // all elements of a repeated one
Edit Real(double value);
Edit Text(const std::string& value);                 // string or bytes
Edit Texts(const std::vector<std::string>& values);  // all elements of a repeated one

// Applies `edit` to the field; makes the messages on the way. Throws for a path that is not there.
void Apply(google::protobuf::Message* message, const std::string& path, const Edit& edit);

// Every field path below `descriptor`, messages included, each before what is in it.
std::vector<std::string> FieldPaths(const google::protobuf::Descriptor& descriptor);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_MESSAGE_PATH_H_
