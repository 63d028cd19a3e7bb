// Makes the calls of a headwater.fuzz.Sequence to a server, and holds every answer against what a client may expect.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/client_state.h"
#include "tests/integration/support/wire_server.h"

namespace headwater::fuzz {

// One sequence's client.
class SequenceClient {
 public:
  // `answered` is told each call's name and what it was answered with: OK, a reason, or gRPC's code. From any thread.
  SequenceClient(testing::WireServer& server, const std::shared_ptr<grpc::Channel>& channel, const std::string& descriptor_socket,
                 std::function<void(const std::string& call, const std::string& answer)> answered);
  ~SequenceClient();

  // Returns when all calls have ended.
  void Run(const Sequence& sequence);
  // Deletes the heads that were made, and ends the sessions.
  void CleanUp();

 private:
  void RunCall(const Call& call);
  // A call of one request, the message that the call holds.
  void RunRequest(const Call& call);
  void RunUpload(const Upload& upload);
  void RunAddGradient(const AddGradient& add);
  void RunCompute(const Compute& compute);
  void RunStripe(const Stripe& stripe, const v1::MicroBatchHeader& micro_batch);
  void RunTeacher(const Teacher& teacher);
  void RunRaw(const Raw& raw);
  // Heads, sessions and regions that were answered.
  void Learn(const google::protobuf::Message& answer);

  // Writes the messages, ends as `end` says, and reads what comes.
  grpc::Status Exchange(const google::protobuf::MethodDescriptor& method, const std::vector<std::string>& messages, End end,
                        const std::function<void(const std::string&)>& on_answer);
  template <typename Request, typename Response>
  grpc::Status Stream(const char* name, const std::vector<std::string>& messages, End end,
                      const std::function<void(const Response&)>& on_answer = {});
  // What a failed call may say.
  void Answered(absl::string_view name, const grpc::Status& status, End end = END_HALF_CLOSE);

  testing::WireServer& server_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::function<void(const std::string&, const std::string&)> answered_;
  KnownState known_;
  Acknowledged acknowledged_;
  std::vector<std::thread> background_;
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_
