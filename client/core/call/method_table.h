// The properties of each method that the core calls; attempts, repetitions, epochs, log and recovery follow from this table.
#ifndef HEADWATER_CLIENT_CORE_CALL_METHOD_TABLE_H_
#define HEADWATER_CLIENT_CORE_CALL_METHOD_TABLE_H_

#include <string>

#include "client/core/call/retry.h"
#include "google/protobuf/message.h"

namespace headwater::client::internal {

// How a call is made.
enum class Shape {
  kUnary,
  kLoss,      // ComputeLoss: rows both ways
  kTeacher,   // rows up
  kGradient,  // bytes up
  kUpload,    // bytes up, from where an earlier try was cut
  kDownload,  // bytes down
};

// The replay log's entry for an answered call.
enum class Record {
  kNone,
  kLoss,      // a micro-batch with its rows
  kGradient,  // a gradient of the caller's own, with its rows
  kCommit,    // a decision about a micro-batch that is in the log
  kDiscard,   // takes the micro-batch out of it
  kSeal,      // repeated with `wait`: other trainers repeat their part at the same time
  kApply,     // closes the step; repeated after such a seal if it names the expected micro-batches
  kClose,     // closes the step, with other weights perhaps: an upload is repeated under another id
};

// The meaning of an answer for heads.
enum class HeadNews {
  kNoNews,
  kDescribed,  // the answer is, or has, a head at an epoch that this client may not know
  kReplaced,   // as kDescribed; all other epochs are fenced, and nothing that was done in them is to be repeated
  kDeleted,
};

// Whether the call names the session.
enum class InSession { kNo, kIfOpen, kExplicit, kOwned };

struct Method {
  const char* path;
  Shape shape;
  const google::protobuf::Message* request;  // default instances; of a streaming method the header's and the last answer's
  const google::protobuf::Message* answer;
  Repeat repeat;
  // Works on heads at epochs or steps: it waits for recoveries, and recovers steps that it finds lost.
  bool follows = false;
  Record record = Record::kNone;
  HeadNews news = HeadNews::kNoNews;
  InSession session = InSession::kNo;
  // Waits until earlier abandoned micro-batches of its heads are discarded.
  bool settles = false;
  // An absent server is waited for, if the options say so.
  bool patient = true;
};

// A method of that path; null if there is none.
const Method* FindMethod(const std::string& path);
// The method whose request, or header, the message is.
const Method& MethodOf(const google::protobuf::Message& request);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_METHOD_TABLE_H_
