#include "kernels/cuda/computation/row_digester.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/rows/row_digest.h"

namespace headwater::cuda {
namespace {

constexpr int64_t kSumBytes = 2 * sizeof(uint64_t);
constexpr int64_t kOtherRowsBytes = int64_t{1} << 20;

}  // namespace

RowDigester::~RowDigester() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

absl::Status RowDigester::Open() {
  // Its few blocks go first wherever the products leave room, or they would wait for a whole product.
  int lowest = 0;
  int highest = 0;
  HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities"));
  HEADWATER_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "making a stream"));
  absl::StatusOr<DeviceMemory> sum = DeviceMemory::Allocate(kSumBytes);
  if (!sum.ok()) return sum.status();
  sum_ = *std::move(sum);
  absl::StatusOr<PinnedMemory> host_sum = PinnedMemory::Allocate(kSumBytes);
  if (!host_sum.ok()) return host_sum.status();
  host_sum_ = *std::move(host_sum);
  return absl::OkStatus();
}

absl::Status RowDigester::Add(const RowsView& rows, Place place, int64_t first, int64_t count, int32_t stream_index,
                              DigestBuilder* digest) {
  if (count == 0) return absl::OkStatus();
  const int64_t row_bytes = rows.column_count * ElementBytes(rows.data_type);
  const char* data = static_cast<const char*>(rows.data) + first * row_bytes;
  if (place == Place::kOwnDevice || place == Place::kForeignDevice)
    return AddFromDevice(data, row_bytes, first, count, stream_index, digest);
  if (place == Place::kOtherDevice) return AddFromOtherDevice(data, row_bytes, first, count, stream_index, digest);
  digest->AddRows(stream_index, first, count, row_bytes, data);
  return absl::OkStatus();
}

absl::Status RowDigester::AddFromDevice(const char* rows, int64_t row_bytes, int64_t first, int64_t count, int32_t stream_index,
                                        DigestBuilder* digest) {
  constexpr const char* kWhat = "summing rows up";
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t* sum = sum_.As<uint64_t>();
  HEADWATER_RETURN_IF_ERROR(core_.Check(cudaMemsetAsync(sum, 0, kSumBytes, stream_), kWhat));
  HEADWATER_RETURN_IF_ERROR(
      core_.Check(LaunchDigestRows(rows, count, row_bytes, stream_index, nullptr, first, sum, stream_), kWhat));
  const uint64_t* host_sum = host_sum_.As<uint64_t>();
  HEADWATER_RETURN_IF_ERROR(
      core_.Check(cudaMemcpyAsync(host_sum_.As<void>(), sum, kSumBytes, cudaMemcpyDeviceToHost, stream_), kWhat));
  HEADWATER_RETURN_IF_ERROR(core_.Check(cudaStreamSynchronize(stream_), kWhat));
  digest->AddSum(host_sum[0], host_sum[1]);
  return absl::OkStatus();
}

absl::Status RowDigester::AddFromOtherDevice(const char* rows, int64_t row_bytes, int64_t first, int64_t count,
                                             int32_t stream_index, DigestBuilder* digest) {
  constexpr const char* kWhat = "fetching another device's rows";
  std::lock_guard<std::mutex> lock(mutex_);
  if (other_rows_.bytes() < std::max(row_bytes, kOtherRowsBytes)) {
    absl::StatusOr<PinnedMemory> memory = PinnedMemory::Allocate(std::max(row_bytes, kOtherRowsBytes));
    if (!memory.ok()) return memory.status();
    other_rows_ = *std::move(memory);
  }
  const int64_t most = other_rows_.bytes() / std::max<int64_t>(row_bytes, 1);
  for (int64_t start = 0; start < count; start += most) {
    const int64_t piece = std::min(most, count - start);
    HEADWATER_RETURN_IF_ERROR(core_.Check(cudaMemcpyAsync(other_rows_.As<void>(), rows + start * row_bytes,
                                                          static_cast<size_t>(piece * row_bytes), cudaMemcpyDefault, stream_),
                                          kWhat));
    HEADWATER_RETURN_IF_ERROR(core_.Check(cudaStreamSynchronize(stream_), kWhat));
    digest->AddRows(stream_index, first + start, piece, row_bytes, other_rows_.As<void>());
  }
  return absl::OkStatus();
}

}  // namespace headwater::cuda
