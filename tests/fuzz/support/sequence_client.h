// Makes the calls of a headwater.fuzz.Sequence to a server, and holds every answer against what a client may expect.
#ifndef HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_
#define HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/fuzz/fuzz.pb.h"
#include "tests/fuzz/support/acknowledged.h"
#include "tests/fuzz/support/known_state.h"
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
  void RunSession(const Call& call);
  void RunUpload(const Upload& upload);
  void RunAddGradient(const AddGradient& add);
  void RunCompute(const Compute& compute);
  void RunStripe(const Stripe& stripe, const v1::MicroBatchHeader& header);
  void RunTeacher(const Teacher& teacher);
  void RunRaw(const Raw& raw);
  // What a raw call has made is to be cleaned up, too.
  void Learn(const std::string& method, const grpc::ByteBuffer& answer);

  // A unary call: fills the request in, makes it, and calls `then` with it and the answer if that is OK.
  template <typename Stub, typename Request, typename Response>
  void Unary(const char* name, Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
             Request request, const std::function<void(const Request&, const Response&)>& then = {});
  // What a failed call may say.
  void Answered(const char* name, const grpc::Status& status, End end = END_HALF_CLOSE);

  testing::WireServer& server_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::function<void(const std::string&, const std::string&)> answered_;
  KnownState known_;
  Acknowledged acknowledged_;
  std::vector<std::thread> background_;
};

}  // namespace headwater::fuzz

#endif  // HEADWATER_TESTS_FUZZ_SUPPORT_SEQUENCE_CLIENT_H_
