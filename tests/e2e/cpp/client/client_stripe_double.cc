#include "tests/e2e/cpp/client/client_stripe_double.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace headwater::e2e {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kGradChunkBytes = 256 << 10;
constexpr seconds kPatience{60};

bool HasHeader(const v1::ComputeLossRequest& request) { return request.has_header(); }
bool HasHeader(const v1::TransferRowsRequest& request) { return request.has_header(); }

v1::RowChunk* ChunkOf(v1::ComputeLossResponse& response) { return response.mutable_chunk(); }
v1::RowChunk* ChunkOf(v1::TransferRowsResponse& response) { return response.mutable_chunk(); }

grpc::Status StripeLost() { return ErrorWithReason(grpc::StatusCode::ABORTED, "STRIPE_LOST"); }

}  // namespace

struct StripeDouble::Transfer {
  v1::MicroBatchHeader header;
  bool has_header = false;
  std::string rows;  // hidden, [row_count, hidden_size] float32
  std::vector<bool> taken;
  int64_t missing = 0;
  std::set<int> streams;         // that have come
  std::vector<int64_t> rows_of;  // by stream
  std::set<std::string> peers;
  int ended = 0;  // streams that have sent all their gradients
  bool broken = false;

  int stream_count() const { return std::max(1, header.stripe_count()); }
};

StripeDouble::StripeDouble(ScriptedServer& server, int64_t max_stripes) {
  server.WithState([max_stripes](ScriptedServer::State& state) { state.max_stripes = max_stripes; });
  server.compute_loss = [this](grpc::ServerContext* context, ScriptedServer::LossStream* stream) {
    CountServed(1);
    const grpc::Status status = Primary(context, stream);
    CountServed(-1);
    return status;
  };
  server.transfer_rows = [this](grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
    CountServed(1);
    const grpc::Status status = Stripe(context, stream);
    CountServed(-1);
    return status;
  };
}

void StripeDouble::CountServed(int change) {
  std::lock_guard<std::mutex> lock(mutex_);
  served_ += change;
  changed_.notify_all();
}

void StripeDouble::AwaitQuiet(std::unique_lock<std::mutex>& lock) {
  if (!changed_.wait_for(lock, kPatience, [&] { return served_ == 0; })) complaints_.push_back("streams did not end");
}

void StripeDouble::SetAt(At at) {
  std::unique_lock<std::mutex> lock(mutex_);
  AwaitQuiet(lock);
  at_ = std::move(at);
}

void StripeDouble::SetPlan(Plan plan) {
  std::unique_lock<std::mutex> lock(mutex_);
  AwaitQuiet(lock);
  plan_ = std::move(plan);
}

grpc::Status StripeDouble::Stall(grpc::ServerContext* context) {
  while (!context->IsCancelled()) std::this_thread::sleep_for(milliseconds(2));
  return grpc::Status::CANCELLED;
}

void StripeDouble::Complain(const std::string& complaint) {
  std::lock_guard<std::mutex> lock(mutex_);
  complaints_.push_back(complaint);
}

std::shared_ptr<StripeDouble::Transfer> StripeDouble::TransferOf(const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Transfer>& transfer = transfers_[id];
  if (transfer == nullptr) transfer = std::make_shared<Transfer>();
  return transfer;
}

grpc::Status StripeDouble::Ask(Transfer& transfer, const Moment& moment) {
  grpc::Status status = at_ ? at_(moment) : grpc::Status::OK;
  if (status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  transfer.broken = true;
  changed_.notify_all();
  return status;
}

grpc::Status StripeDouble::Primary(grpc::ServerContext* context, ScriptedServer::LossStream* stream) {
  v1::ComputeLossRequest request;
  if (!stream->Read(&request) || !request.has_header()) {
    Complain("no header comes first");
    return grpc::Status::OK;
  }
  const v1::MicroBatchHeader& header = request.header();
  if (header.stripe_count() == 1 || header.stripe_count() < 0) Complain("stripe_count of one stream");
  if ((header.stripe_count() > 1) != (header.transfer_id().size() == 16)) {
    Complain(absl::StrCat("transfer_id of ", header.transfer_id().size(), " bytes for ", header.stripe_count(), " streams"));
  }
  const std::shared_ptr<Transfer> transfer =
      header.transfer_id().empty() ? std::make_shared<Transfer>() : TransferOf(header.transfer_id());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (transfer->has_header) complaints_.push_back("a transfer_id was used twice");
    transfer->header = header;
    transfer->rows.resize(static_cast<size_t>(header.row_count() * header.hidden_size() * 4));
    transfer->taken.resize(static_cast<size_t>(header.row_count()));
    transfer->missing = header.row_count();
    transfer->rows_of.resize(static_cast<size_t>(transfer->stream_count()));
    transfer->has_header = true;
    last_ = transfer;
    ++attempts_;
    changed_.notify_all();
  }
  grpc::Status status = Serve<v1::ComputeLossRequest, v1::ComputeLossResponse>(transfer, 0, context, stream);
  if (!status.ok()) return status;
  v1::ComputeLossResponse response;
  for (int i = 0; i < header.terms_size(); ++i) response.mutable_summary()->add_terms();
  response.mutable_summary()->set_state(v1::CONTRIBUTION_STATE_COMMITTED);
  response.mutable_summary()->set_transport("grpc");
  stream->Write(response);
  return grpc::Status::OK;
}

grpc::Status StripeDouble::Stripe(grpc::ServerContext* context, ScriptedServer::TransferStream* stream) {
  v1::TransferRowsRequest request;
  if (!stream->Read(&request)) return grpc::Status::OK;  // cancelled before anything came
  if (!request.has_header() || request.header().transfer_id().size() != 16) {
    Complain("no header comes first on a stripe");
    return grpc::Status::OK;
  }
  const int index = request.header().stripe_index();
  const std::shared_ptr<Transfer> transfer = TransferOf(request.header().transfer_id());
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [&] { return transfer->has_header || context->IsCancelled(); }) ||
        !transfer->has_header) {
      return ErrorWithReason(grpc::StatusCode::NOT_FOUND, "TRANSFER_NOT_FOUND");
    }
    if (index < 1 || index >= transfer->stream_count()) complaints_.push_back(absl::StrCat("stripe_index ", index));
  }
  return Serve<v1::TransferRowsRequest, v1::TransferRowsResponse>(transfer, index, context, stream);
}

template <typename Request>
void StripeDouble::TakeChunk(Transfer& transfer, int stream, const Request& message) {
  const v1::RowChunk& chunk = message.chunk();
  std::lock_guard<std::mutex> lock(mutex_);
  if (chunk.role() != v1::CHUNK_ROLE_HIDDEN || chunk.term_index() != 0) {
    complaints_.push_back(absl::StrCat("a chunk of role ", static_cast<int>(chunk.role()), ", term ", chunk.term_index()));
    return;
  }
  const int64_t row_bytes = transfer.header.hidden_size() * 4;
  if (chunk.row_count() < 1 || chunk.row_start() < 0 || chunk.row_start() + chunk.row_count() > transfer.header.row_count() ||
      static_cast<int64_t>(chunk.data().size()) != chunk.row_count() * row_bytes) {
    complaints_.push_back(
        absl::StrCat("rows [", chunk.row_start(), ", +", chunk.row_count(), ") in ", chunk.data().size(), " bytes"));
    return;
  }
  for (int64_t row = chunk.row_start(); row < chunk.row_start() + chunk.row_count(); ++row) {
    if (transfer.taken[static_cast<size_t>(row)]) complaints_.push_back(absl::StrCat("row ", row, " came twice"));
    transfer.taken[static_cast<size_t>(row)] = true;
  }
  transfer.missing -= chunk.row_count();
  transfer.rows_of[static_cast<size_t>(stream)] += chunk.row_count();
  std::memcpy(transfer.rows.data() + chunk.row_start() * row_bytes, chunk.data().data(), chunk.data().size());
  changed_.notify_all();
}

std::vector<StripeDouble::GradRun> StripeDouble::PlanOf(const Transfer& transfer) const {
  const int streams = transfer.stream_count();
  const int64_t row_count = transfer.header.row_count();
  if (plan_) return plan_(streams, row_count);
  std::vector<GradRun> runs;
  const int64_t rows = std::max<int64_t>(1, kGradChunkBytes / (transfer.header.hidden_size() * 4));
  for (int64_t start = 0; start < row_count; start += rows) {
    runs.push_back({static_cast<int>(runs.size()) % streams, start, std::min(rows, row_count - start)});
  }
  return runs;
}

template <typename Request, typename Response, typename Stream>
grpc::Status StripeDouble::Serve(const std::shared_ptr<Transfer>& transfer, int stream, grpc::ServerContext* context, Stream* rpc) {
  Moment moment{stream, Phase::kHeader, transfer->header.attempt(), 0, context};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!transfer->streams.insert(stream).second) complaints_.push_back(absl::StrCat("stream ", stream, " came twice"));
    transfer->peers.insert(context->peer());
  }
  if (grpc::Status status = Ask(*transfer, moment); !status.ok()) return status;
  Request request;
  moment.phase = Phase::kChunk;
  while (rpc->Read(&request)) {
    if (HasHeader(request) || !request.has_chunk()) Complain("a message that is no chunk");
    TakeChunk(*transfer, stream, request);
    if (grpc::Status status = Ask(*transfer, moment); !status.ok()) return status;
    ++moment.chunk;
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (transfer->missing > 0 && !transfer->broken && !context->IsCancelled()) {
      changed_.wait_for(lock, milliseconds(2));
      if (std::chrono::steady_clock::now() > deadline) {
        complaints_.push_back(absl::StrCat(transfer->missing, " rows never came"));
        transfer->broken = true;
      }
    }
    if (transfer->missing > 0) {
      transfer->broken = true;
      return StripeLost();
    }
  }
  moment.phase = Phase::kAllRows;
  moment.chunk = 0;
  if (grpc::Status status = Ask(*transfer, moment); !status.ok()) return status;
  if (transfer->header.return_grad_hidden()) {
    moment.phase = Phase::kGradChunk;
    const int64_t row_bytes = transfer->header.hidden_size() * 4;
    for (const GradRun& run : PlanOf(*transfer)) {
      if (run.stream != stream) continue;
      Response response;
      v1::RowChunk* chunk = ChunkOf(response);
      chunk->set_role(v1::CHUNK_ROLE_GRAD_HIDDEN);
      chunk->set_row_start(run.row_start);
      chunk->set_row_count(run.row_count);
      const int64_t from = std::min(run.row_start, transfer->header.row_count());
      const int64_t to = std::min(run.row_start + run.row_count, transfer->header.row_count());
      std::string data(static_cast<size_t>(run.row_count * row_bytes), '\0');
      std::memcpy(data.data(), transfer->rows.data() + from * row_bytes, static_cast<size_t>((to - from) * row_bytes));
      for (size_t i = 3; i < data.size(); i += 4) data[i] = static_cast<char>(data[i] ^ 0x80);
      chunk->set_data(std::move(data));
      if (!rpc->Write(response)) break;
      if (grpc::Status status = Ask(*transfer, moment); !status.ok()) return status;
      ++moment.chunk;
    }
  }
  moment.phase = Phase::kEnd;
  moment.chunk = 0;
  if (grpc::Status status = Ask(*transfer, moment); !status.ok()) return status;
  std::unique_lock<std::mutex> lock(mutex_);
  ++transfer->ended;
  changed_.notify_all();
  // The summary comes after the last chunk of any stream, and the streams end with it.
  while (transfer->ended < transfer->stream_count() && !transfer->broken && !context->IsCancelled()) {
    changed_.wait_for(lock, milliseconds(2));
  }
  return transfer->broken ? StripeLost() : grpc::Status::OK;
}

std::vector<std::string> StripeDouble::complaints() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return complaints_;
}

StripeDouble::Attempt StripeDouble::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (last_ == nullptr) return {};
  return {static_cast<int>(last_->streams.size()), last_->rows_of, last_->peers, last_->header};
}

int StripeDouble::attempts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return attempts_;
}

}  // namespace headwater::e2e
