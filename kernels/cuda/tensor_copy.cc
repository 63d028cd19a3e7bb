#include "kernels/cuda/tensor_copy.h"

#include <algorithm>
#include <cstring>

#include "headwater/kernels/error.h"
#include "kernels/cuda/computation/deferred_grad_weight.h"
#include "kernels/cuda/rows/conversions.h"
#include "kernels/cuda/rows/parameters.h"

namespace headwater::cuda {
namespace {

// Elements of a block: enough to keep the bus busy.
constexpr int64_t kMaxBlockElements = int64_t{1} << 20;
constexpr int64_t kLargestElement = 4;
// A block's elements with the padding between them, at worst one element a row: 7 of padding behind each.
constexpr int64_t kLargestSpread = 8;

// Stored elements from `first` to the last of `count`, padding between them included.
int64_t SpanOf(const TensorPlace& place, int64_t first, int64_t count) {
  return place.OffsetOf(first + count - 1) - place.OffsetOf(first) + 1;
}

}  // namespace

TensorCopy::TensorCopy(EngineCore& core) : core_(core), stream_(core.stream()), scratch_(core.workspace().As<char>()) {}

TensorCopy::~TensorCopy() {
  for (const cudaEvent_t event : free_) {
    if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  }
}

absl::Status TensorCopy::Open() {
  if (block_elements_ > 0) return absl::OkStatus();
  HEADWATER_RETURN_IF_ERROR(core_.CheckWorkspace());
  for (cudaEvent_t& event : free_) {
    HEADWATER_RETURN_IF_ERROR(Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
  }
  // Rows that wait for their product keep their share at the end of the workspace. The rest is never too small for a block: every
  // head's plan has kPanelBytes at least.
  const int64_t workspace_bytes = core_.workspace().bytes();
  const int64_t scratch_bytes = workspace_bytes - DeferredGradWeight::ShareOf(workspace_bytes);
  block_elements_ = std::min({kMaxBlockElements, core_.bounce().bytes() / (kBuffers * kLargestElement),
                              scratch_bytes / (kLargestElement * kLargestSpread)});
  return absl::OkStatus();
}

absl::Status TensorCopy::Await(int buffer) {
  bool& in_use = in_use_[static_cast<size_t>(buffer)];
  if (!in_use) return absl::OkStatus();
  in_use = false;
  return Check(cudaEventSynchronize(free_[static_cast<size_t>(buffer)]));
}

absl::Status TensorCopy::Release(int buffer) {
  in_use_[static_cast<size_t>(buffer)] = true;
  return Check(cudaEventRecord(free_[static_cast<size_t>(buffer)], stream_));
}

absl::Status TensorCopy::SendBlocks(const void* in, int64_t element_bytes, int64_t count,
                                    absl::FunctionRef<absl::Status(int64_t, int64_t, const void*)> enqueue) {
  HEADWATER_RETURN_IF_ERROR(Open());
  int buffer = 0;
  for (int64_t start = 0; start < count; start += block_elements_) {
    const int64_t block = std::min(block_elements_, count - start);
    char* host = core_.bounce().As<char>() + buffer * block_elements_ * kLargestElement;
    HEADWATER_RETURN_IF_ERROR(Await(buffer));
    std::memcpy(host, static_cast<const char*>(in) + start * element_bytes, static_cast<size_t>(block * element_bytes));
    HEADWATER_RETURN_IF_ERROR(enqueue(start, block, host));
    HEADWATER_RETURN_IF_ERROR(Release(buffer));
    buffer = (buffer + 1) % kBuffers;
  }
  return core_.Synchronize("copying a tensor");
}

absl::Status TensorCopy::CopyElements(const TensorPlace& place, char* data, int64_t origin, int64_t first, int64_t count,
                                      char* host, cudaMemcpyKind kind) {
  const int64_t bytes = BytesOf(place.element);
  // `rows` stretches of `width` elements from the block's element `done` on.
  const auto copy = [&](int64_t done, int64_t width, int64_t rows) {
    char* device = data + (place.OffsetOf(first + done) - origin) * bytes;
    char* buffer = host + done * bytes;
    const bool up = kind == cudaMemcpyHostToDevice;
    if (rows == 1) {
      return Check(cudaMemcpyAsync(up ? device : buffer, up ? buffer : device, static_cast<size_t>(width * bytes), kind, stream_));
    }
    const size_t device_pitch = static_cast<size_t>(place.stride * bytes);
    const size_t host_pitch = static_cast<size_t>(width * bytes);
    return Check(cudaMemcpy2DAsync(up ? device : buffer, up ? device_pitch : host_pitch, up ? buffer : device,
                                   up ? host_pitch : device_pitch, host_pitch, static_cast<size_t>(rows), kind, stream_));
  };
  if (place.columns == place.stride) return copy(0, count, 1);
  // The rest of a row, whole rows, the beginning of one.
  int64_t done = 0;
  if (first % place.columns != 0) {
    const int64_t width = std::min(count, place.columns - first % place.columns);
    HEADWATER_RETURN_IF_ERROR(copy(0, width, 1));
    done = width;
  }
  const int64_t rows = (count - done) / place.columns;
  if (rows > 0) {
    HEADWATER_RETURN_IF_ERROR(copy(done, place.columns, rows));
    done += rows * place.columns;
  }
  return done < count ? copy(done, count - done, 1) : absl::OkStatus();
}

absl::Status TensorCopy::UploadToScratch(const TensorPlace& place, Element element, int64_t first, int64_t count,
                                         const void* host) {
  TensorPlace shape = place;
  shape.element = element;
  const int64_t span = SpanOf(place, first, count);
  if (span > count)
    HEADWATER_RETURN_IF_ERROR(Check(cudaMemsetAsync(scratch_, 0, static_cast<size_t>(span * BytesOf(element)), stream_)));
  // Only read, since it is copied to the device.
  char* buffer = const_cast<char*>(static_cast<const char*>(host));
  return CopyElements(shape, scratch_, place.OffsetOf(first), first, count, buffer, cudaMemcpyHostToDevice);
}

absl::Status TensorCopy::Read(const TensorPlace& from, int64_t first, int64_t count, Element out_element, void* out) {
  HEADWATER_RETURN_IF_ERROR(Open());
  const int64_t bytes = BytesOf(out_element);
  const auto host_of = [&](int buffer) { return core_.bounce().As<char>() + buffer * block_elements_ * kLargestElement; };
  // A block is copied to the caller when the next one is on its way.
  int64_t previous_start = 0;
  int64_t previous_count = 0;
  int buffer = 0;
  const auto take_previous = [&] {
    const int previous = (buffer + kBuffers - 1) % kBuffers;
    HEADWATER_RETURN_IF_ERROR(Await(previous));
    std::memcpy(static_cast<char*>(out) + previous_start * bytes, host_of(previous), static_cast<size_t>(previous_count * bytes));
    return absl::OkStatus();
  };
  for (int64_t start = 0; start < count; start += block_elements_) {
    const int64_t block = std::min(block_elements_, count - start);
    const int64_t begin = first + start;
    TensorPlace source = from;
    int64_t origin = 0;
    if (from.element != out_element) {
      source.data = scratch_;
      source.element = out_element;
      origin = from.OffsetOf(begin);
      HEADWATER_RETURN_IF_ERROR(
          Check(LaunchConvert(from.At(begin), from.element, SpanOf(from, begin, block), scratch_, out_element, stream_)));
    }
    HEADWATER_RETURN_IF_ERROR(CopyElements(source, source.data, origin, begin, block, host_of(buffer), cudaMemcpyDeviceToHost));
    HEADWATER_RETURN_IF_ERROR(Release(buffer));
    if (previous_count > 0) HEADWATER_RETURN_IF_ERROR(take_previous());
    previous_start = start;
    previous_count = block;
    buffer = (buffer + 1) % kBuffers;
  }
  return previous_count > 0 ? take_previous() : absl::OkStatus();
}

absl::Status TensorCopy::Write(const void* in, Element in_element, const TensorPlace& to, int64_t first, int64_t count,
                               const TensorPlace* follower) {
  return SendBlocks(in, BytesOf(in_element), count, [&](int64_t start, int64_t block, const void* host) {
    const int64_t begin = first + start;
    const int64_t span = SpanOf(to, begin, block);
    if (in_element == to.element) {
      char* buffer = const_cast<char*>(static_cast<const char*>(host));
      HEADWATER_RETURN_IF_ERROR(CopyElements(to, to.data, 0, begin, block, buffer, cudaMemcpyHostToDevice));
    } else {
      HEADWATER_RETURN_IF_ERROR(UploadToScratch(to, in_element, begin, block, host));
      HEADWATER_RETURN_IF_ERROR(Check(LaunchConvert(scratch_, in_element, span, to.At(begin), to.element, stream_)));
    }
    if (follower == nullptr) return absl::OkStatus();
    return Check(LaunchConvert(to.At(begin), to.element, span, follower->At(begin), follower->element, stream_));
  });
}

absl::Status TensorCopy::AddProduct(const float* in, float factor, const TensorPlace& to, int64_t first, int64_t count) {
  return SendBlocks(in, BytesOf(Element::kFloat32), count, [&](int64_t start, int64_t block, const void* host) {
    const int64_t begin = first + start;
    HEADWATER_RETURN_IF_ERROR(UploadToScratch(to, Element::kFloat32, begin, block, host));
    return Check(LaunchAddProduct(reinterpret_cast<const float*>(scratch_), SpanOf(to, begin, block), factor,
                                  reinterpret_cast<float*>(to.At(begin)), stream_));
  });
}

}  // namespace headwater::cuda
