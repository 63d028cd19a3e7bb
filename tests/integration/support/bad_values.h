// The table of bad_input_test.cc: bad values for every field of every request.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_BAD_VALUES_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_BAD_VALUES_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/support/message_path.h"

namespace headwater::testing {

inline constexpr char kHeadName[] = "tenants/default/heads/student";     // trainable, fp32 [13, 5], with bias, AdamW
inline constexpr char kTeacherName[] = "tenants/default/heads/teacher";  // frozen, fp32 [13, 4]

inline const Edit kFar = Int(std::numeric_limits<int64_t>::max());
inline const Edit kStaleEpoch = Text(std::string(16, 'x'));

// For BadValue::field: the path itself, with [0] behind repeated messages.
inline constexpr char kThePath[] = "<path>";

// What is done to a request before a row's own edit: paths and edits.
using Prepare = std::vector<std::pair<std::string, Edit>>;
inline Prepare Join(Prepare first, const Prepare& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// A field of a request with a value that must be refused. The RPC's valid request is changed by `prepare`, which must leave it
// valid or at least not worse in an earlier place, and then by `edit` at `path`.
struct BadValue {
  std::string rpc;
  std::string path;
  Edit edit;
  std::string reason;
  std::string field = kThePath;  // metadata `field`; empty: the reason names none
  Prepare prepare = {};
};

// Rows of one RPC that are being written.
class BadValues {
 public:
  BadValues(std::vector<BadValue>* rows, std::string rpc) : rows_(rows), rpc_(std::move(rpc)) {}
  // The same RPC below `prefix`, with more done to its request first.
  BadValues At(const std::string& prefix, const Prepare& prepare = {}) const {
    BadValues below = *this;
    below.prefix_ += prefix;
    below.prepare_ = Join(prepare_, prepare);
    return below;
  }
  // With each of these values each of the fields is refused.
  void Add(const std::string& reason, const std::vector<std::string>& names, const std::vector<Edit>& values,
           const std::string& field = kThePath) const {
    for (const std::string& name : names) {
      for (const Edit& value : values) rows_->push_back({rpc_, prefix_ + name, value, reason, field, prepare_});
    }
  }

 private:
  std::vector<BadValue>* const rows_;
  const std::string rpc_;
  std::string prefix_;
  Prepare prepare_;
};

// A field, or with ".*" at its end everything below one, that no value of can make a request bad; and why.
struct HarmlessField {
  std::string rpc;
  std::string path;
  std::string why;
};

std::vector<BadValue> AllBadValues();
std::vector<HarmlessField> HarmlessFields();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_BAD_VALUES_H_
