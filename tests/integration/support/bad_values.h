// The table of bad_input_test.cc: bad values for every field of every request.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_BAD_VALUES_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_BAD_VALUES_H_

#include <string>
#include <utility>
#include <vector>

#include "tests/integration/support/message_path.h"

namespace headwater::testing {

inline constexpr char kHeadName[] = "tenants/default/heads/student";     // trainable, fp32 [13, 5], with bias, AdamW
inline constexpr char kTeacherName[] = "tenants/default/heads/teacher";  // frozen, fp32 [13, 4]

// For BadValue::field: the path itself, with [0] behind repeated messages.
inline constexpr char kThePath[] = "<path>";

// What is done to a request before a row's own edit: paths and edits.
using Prepare = std::vector<std::pair<std::string, Edit>>;
inline Prepare Set(const std::string& path, const Edit& edit) { return {{path, edit}}; }
inline Prepare Join(Prepare first, const Prepare& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// A field of a request with a value that must be refused. The RPC's valid request is changed by `prepare`, which must leave it
// valid or at least not worse in an earlier place, and then by `edit` at `path`.
struct BadValue {
  std::string rpc;
  std::string path;
  std::string value;  // in words, for failures
  Edit edit;
  std::string reason;
  std::string field = kThePath;  // metadata `field`; empty: the reason names none
  Prepare prepare = {};
};

// A field, or with ".*" at its end everything below one, that no value of can make a request bad; and why.
struct HarmlessField {
  std::string rpc;
  std::string path;
  std::string why;
};

// Rows that several tables have.
// A session's id.
void AddSessionRows(const std::string& rpc, const std::string& path, bool required, bool looks_up, std::vector<BadValue>* rows);
// Finite, but not as float32: what factors of losses and gradients must not be.
inline const std::vector<double> kBeyondFloat32 = {4e38, -4e38};
// NaN, the infinities, and `bad`.
void AddNumberRows(const std::string& rpc, const std::string& path, const std::vector<double>& bad, const Prepare& prepare,
                   std::vector<BadValue>* rows);
// A HeadStep at `path`; `looks_up`: the head is looked up, and the epoch compared; `step`: it works on a step.
void AddHeadStepRows(const std::string& rpc, const std::string& path, bool looks_up, bool step, std::vector<BadValue>* rows);

std::vector<BadValue> LossServiceBadValues();
std::vector<BadValue> HeadServiceBadValues();
std::vector<BadValue> SessionServiceBadValues();
std::vector<HarmlessField> HarmlessFields();

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_BAD_VALUES_H_
