// Micro-batches whose rows are named, chunked, or both, by the plain stubs: what the client core does with a Placement.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_PLACED_CALL_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_PLACED_CALL_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "client/core/link/error.h"
#include "client/core/rows/memory/memory_paths.h"
#include "headwater/client/error.h"
#include "headwater/v1/loss_service.grpc.pb.h"
#include "tests/e2e/cpp/support/loss_header.h"

namespace headwater::e2e {

inline client::internal::Deadline SoonEnough() { return std::chrono::system_clock::now() + std::chrono::seconds(30); }

// What a call brought.
struct PlacedReply {
  absl::Status status;
  v1::MicroBatchSummary summary;
  std::string grad_hidden;  // of chunks
};

inline void SetPlacement(const client::internal::Placement& placement, v1::MicroBatchHeader* header) {
  header->set_session_id(placement.session_id());
  *header->mutable_hidden_rows() = placement.reads()[0].shared;
  if (placement.write().has_value()) *header->mutable_grad_hidden_rows() = placement.write()->shared;
}

// Sends the header, and `hidden` as chunks if it is not empty, and reads to the end.
inline PlacedReply Call(v1::LossService::Stub& stub, const v1::MicroBatchHeader& header, const std::string& hidden = "") {
  grpc::ClientContext context;
  context.set_deadline(SoonEnough());
  const auto stream = stub.ComputeLoss(&context);
  v1::ComputeLossRequest request;
  *request.mutable_header() = header;
  bool open = stream->Write(request);
  constexpr size_t kChunkRows = 100;
  const size_t row_bytes = hidden.size() / static_cast<size_t>(header.row_count());
  for (size_t start = 0; open && start < hidden.size(); start += kChunkRows * row_bytes) {
    const std::string data = hidden.substr(start, kChunkRows * row_bytes);
    v1::RowChunk* const chunk = request.mutable_chunk();
    chunk->set_role(v1::CHUNK_ROLE_HIDDEN);
    chunk->set_row_start(static_cast<int64_t>(start / row_bytes));
    chunk->set_row_count(static_cast<int64_t>(data.size() / row_bytes));
    chunk->set_data(data);
    open = stream->Write(request);
  }
  stream->WritesDone();
  PlacedReply reply;
  v1::ComputeLossResponse response;
  while (stream->Read(&response)) {
    if (response.has_summary()) {
      reply.summary = response.summary();
    } else {
      const size_t start = static_cast<size_t>(response.chunk().row_start()) *
                           (response.chunk().data().size() / static_cast<size_t>(response.chunk().row_count()));
      reply.grad_hidden.resize(std::max(reply.grad_hidden.size(), start + response.chunk().data().size()));
      std::memcpy(reply.grad_hidden.data() + start, response.chunk().data().data(), response.chunk().data().size());
    }
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) reply.status = client::internal::FromGrpcStatus(status, "the server");
  return reply;
}

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_PLACED_CALL_H_
