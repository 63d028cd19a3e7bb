// 014: grad_weight of a rank's columns beside the sum of grad_hidden over ranks, which takes a few multiprocessors for most of a
// millisecond: does the product lose what those would have done, or wait for them? Run: 014_beside_sums [columns]...

#include "blas.cuh"

namespace {

using headwater::lab::BlasProduct;
using headwater::lab::DeviceArray;

constexpr int64_t kRows = 8192, kWidth = 4096;
constexpr int kBlocks = 8;  // NCCL's, of kSumBlocks (kernels/cuda/device_group.cc)
constexpr int kThreads = 640;

// Takes kBlocks multiprocessors for so many nanoseconds, and copies meanwhile.
__global__ void __launch_bounds__(kThreads, 1) OccupyKernel(const float4* from, float4* to, int64_t count, uint64_t nanoseconds) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  do {
    to[i] = from[i];
    i = (i + static_cast<int64_t>(kBlocks) * kThreads) % count;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

void RunShape(headwater::lab::Bench& bench, headwater::lab::BlasContext& blas, int64_t columns) {
  const DeviceArray<__nv_bfloat16> matrix(kRows * columns), hidden(kRows * kWidth);
  DeviceArray<float> grad_weight(columns * kWidth);
  headwater::lab::FillNormal(matrix, 1, 1.0f);
  headwater::lab::FillNormal(hidden, 2, 1.0f);
  grad_weight.Zero();
  const DeviceArray<float4> from(kRows * kWidth / 4), to(kRows * kWidth / 4);
  cudaStream_t side;
  int lowest = 0, highest = 0;
  LAB_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  LAB_CUDA(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, highest));
  cudaEvent_t begun, ended;
  LAB_CUDA(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
  LAB_CUDA(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming));
  BlasProduct whole = BlasProduct::GradWeight(blas, kRows, kWidth, columns, matrix.get(), hidden.get(), grad_weight.get(), 1.0f);
  BlasProduct limited = BlasProduct::GradWeight(blas, kRows, kWidth, columns, matrix.get(), hidden.get(), grad_weight.get(), 1.0f);
  limited.LimitTo(132 - kBlocks);
  whole.Search(bench, "grad_weight");
  limited.Search(bench, "grad_weight, 124 multiprocessors");
  const auto beside = [&](const BlasProduct& product, uint64_t nanoseconds) {
    return [&, nanoseconds](cudaStream_t stream) {
      LAB_CUDA(cudaEventRecord(begun, stream));
      LAB_CUDA(cudaStreamWaitEvent(side, begun, 0));
      OccupyKernel<<<kBlocks, kThreads, 0, side>>>(from.get(), to.get(), from.count(), nanoseconds);
      LAB_CUDA(cudaGetLastError());
      LAB_CUDA(cudaEventRecord(ended, side));
      // The side's blocks have their places when the product comes: passes over rows stand in between in the engine.
      LAB_CUDA(cudaMemsetAsync(to.get(), 0, to.bytes() / 4, stream));
      product.Enqueue(stream);
      LAB_CUDA(cudaStreamWaitEvent(stream, ended, 0));
    };
  };
  headwater::lab::BenchOptions options;
  options.warmup_seconds = 1;
  options.block_seconds = 0.4;
  options.burst = false;
  const double flops = whole.flops();
  bench.Run("N8192 H4096, " + std::to_string(columns) + " columns",
            {{"alone", beside(whole, 0), flops},
             {"124 multiprocessors, alone", beside(limited, 0), flops},
             {"beside 0.4 ms", beside(whole, 400000), flops},
             {"124 multiprocessors, beside 0.4 ms", beside(limited, 400000), flops},
             {"beside 0.8 ms", beside(whole, 800000), flops},
             {"124 multiprocessors, beside 0.8 ms", beside(limited, 800000), flops}},
            options);
  LAB_CUDA(cudaStreamDestroy(side));
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("014_beside_sums");
  headwater::lab::Bench bench;
  headwater::lab::BlasContext blas;
  std::vector<int64_t> shapes;
  for (int i = 1; i < argc; ++i) shapes.push_back(std::atoll(argv[i]));
  if (shapes.empty()) shapes = {32064, 16032};
  for (const int64_t columns : shapes) RunShape(bench, blas, columns);
  return 0;
}
