// A client that sends the header and one of three rows of a micro-batch, and then waits to be killed.
// Usage: stalling_client ADDRESS HEAD FILE_WITH_EPOCH
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>

#include "headwater/v1/loss_service.grpc.pb.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  namespace v1 = headwater::v1;
  std::ifstream epoch_file(argv[3], std::ios::binary);
  const std::string epoch(std::istreambuf_iterator<char>(epoch_file), {});
  const auto stub = v1::LossService::NewStub(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->ComputeLoss(&context);
  v1::ComputeLossRequest request;
  v1::MicroBatchHeader* const header = request.mutable_header();
  header->set_micro_batch(0);
  header->set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header->set_row_count(3);
  header->set_hidden_size(5);
  header->set_data_type(v1::DATA_TYPE_FLOAT32);
  v1::LossTerm* const term = header->add_terms();
  term->mutable_head()->set_head(argv[2]);
  term->mutable_head()->set_head_epoch(epoch);
  term->mutable_head()->set_step(0);
  term->mutable_cross_entropy();
  term->mutable_targets()->set_data_type(v1::DATA_TYPE_INT32);
  term->mutable_targets()->add_shape(3);
  term->mutable_targets()->set_data(std::string(12, '\0'));
  if (!stream->Write(request)) return 1;
  request.mutable_chunk()->set_role(v1::CHUNK_ROLE_HIDDEN);
  request.mutable_chunk()->set_row_count(1);
  request.mutable_chunk()->set_data(std::string(20, '\0'));
  if (!stream->Write(request)) return 1;
  for (int second = 0; second < 60; ++second) sleep(1);  // bounded, should nobody kill it
  return 1;
}
