// 005: the R form's row pass (row_pass.cuh), cross entropy and JSD, against the device's copy of as many bytes. Checked against
// fp64 on the CPU over several logit scales, a nearly distilled student included. Run: 005_row_pass

#include "bench.cuh"
#include "row_pass.cuh"

namespace {

using headwater::lab::BenchOptions;
using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::NormalAt;
using headwater::lab::RelativeDifference;
using headwater::sm90::CrossEntropyRow;
using headwater::sm90::JsdRow;

template <class Policy, int kCluster>
void Enqueue(const typename Policy::Params& params, int64_t rows, int64_t vocab, cudaStream_t stream) {
  const auto kernel = headwater::sm90::RowPassKernel<Policy, kCluster>;
  static int clusters = 0;
  if (clusters == 0) {
    LAB_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  headwater::sm90::kRowSharedBytes<Policy::kInputs>));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kCluster);
    config.blockDim = dim3(headwater::sm90::kRowThreads);
    config.dynamicSmemBytes = headwater::sm90::kRowSharedBytes<Policy::kInputs>;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    LAB_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    std::printf("clusters of %d resident: %d\n", kCluster, clusters);
  }
  const int grid = static_cast<int>(std::min<int64_t>(clusters, rows)) * kCluster;
  kernel<<<grid, headwater::sm90::kRowThreads, headwater::sm90::kRowSharedBytes<Policy::kInputs>, stream>>>(
      params, static_cast<int32_t>(rows), static_cast<int32_t>(vocab));
  LAB_CUDA(cudaGetLastError());
}

std::vector<float> Logits(int64_t count, uint64_t seed, float scale) {
  std::vector<float> logits(static_cast<size_t>(count));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = scale * NormalAt(seed, i);
  return logits;
}

std::vector<double> LogSumExps(const std::vector<float>& logits, int64_t rows, int64_t vocab) {
  std::vector<double> lse;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0.0;
    for (int64_t j = 0; j < vocab; ++j) sum += std::exp(static_cast<double>(logits[i * vocab + j]));
    lse.push_back(std::log(sum));
  }
  return lse;
}

void CheckCrossEntropy(int64_t rows, int64_t vocab, float scale, float target_boost) {
  std::vector<float> logits = Logits(rows * vocab, 5, scale), grad_loss;
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < rows; ++i) {
    targets.push_back(static_cast<int32_t>(i == 0 ? vocab - 1 : i * 7919 % vocab));
    grad_loss.push_back(0.3f + 0.1f * static_cast<float>(i % 7));
    logits[i * vocab + targets.back()] += target_boost;
  }
  std::vector<double> grad(logits.size()), losses;
  for (int64_t i = 0; i < rows; ++i) {
    const double target = static_cast<double>(logits[i * vocab + targets[i]]);
    double rest = 0.0;
    for (int64_t j = 0; j < vocab; ++j)
      rest += j == targets[i] ? 0.0 : std::exp(static_cast<double>(logits[i * vocab + j]) - target);
    losses.push_back(std::log1p(rest));
    for (int64_t j = 0; j < vocab; ++j) {
      const double p = j == targets[i] ? -rest : std::exp(static_cast<double>(logits[i * vocab + j]) - target);
      grad[i * vocab + j] = static_cast<double>(grad_loss[i]) * p / (1.0 + rest);
    }
  }
  const DeviceArray<float> device_logits(logits), device_grad_loss(grad_loss), token_loss(rows), lse(rows);
  const DeviceArray<int32_t> device_targets(targets);
  const DeviceArray<__nv_bfloat16> device_grad(rows * vocab);
  Enqueue<CrossEntropyRow, 4>({{device_logits.get()},
                               device_grad.get(),
                               device_targets.get(),
                               device_grad_loss.get(),
                               token_loss.get(),
                               lse.get(),
                               static_cast<int32_t>(vocab)},
                              rows, vocab, nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::string name = "cross entropy N" + std::to_string(rows) + " V" + std::to_string(vocab) + " std " +
                           std::to_string(static_cast<int>(scale)) + (target_boost > 0.0f ? " confident: " : ": ");
  Check(name + "losses", RelativeDifference(token_loss.ToHost(), losses), 3e-6);
  Check(name + "gradient", RelativeDifference(device_grad.ToHost(), grad), 1.9e-3);
}

// The student's logits are the teacher's plus noise, or their own if noise is 0.
void CheckJsd(int64_t rows, int64_t vocab, float scale, float noise, float beta) {
  const std::vector<float> teacher = Logits(rows * vocab, 6, scale);
  std::vector<float> student = Logits(rows * vocab, 7, noise > 0.0f ? noise : scale), grad_loss;
  if (noise > 0.0f) {
    for (size_t i = 0; i < student.size(); ++i) student[i] += teacher[i];
  }
  const std::vector<double> lse_p = LogSumExps(teacher, rows, vocab), lse_q = LogSumExps(student, rows, vocab);
  std::vector<double> grad(student.size()), losses;
  const double b = static_cast<double>(beta);
  for (int64_t i = 0; i < rows; ++i) {
    grad_loss.push_back(0.3f + 0.1f * static_cast<float>(i % 7));
    double kl_p = 0.0, kl_q = 0.0;
    std::vector<double> ratio(static_cast<size_t>(vocab)), q(static_cast<size_t>(vocab));
    for (int64_t j = 0; j < vocab; ++j) {
      const double log_p = static_cast<double>(teacher[i * vocab + j]) - lse_p[i],
                   log_q = static_cast<double>(student[i * vocab + j]) - lse_q[i];
      const double larger = std::max(log_p, log_q);
      const double log_m = larger + std::log(b * std::exp(log_p - larger) + (1.0 - b) * std::exp(log_q - larger));
      q[j] = std::exp(log_q);
      ratio[j] = log_q - log_m;
      kl_p += std::exp(log_p) * (log_p - log_m);
      kl_q += q[j] * ratio[j];
    }
    losses.push_back(b * kl_p + (1.0 - b) * kl_q);
    for (int64_t j = 0; j < vocab; ++j)
      grad[i * vocab + j] = static_cast<double>(grad_loss[i]) * (1.0 - b) * q[j] * (ratio[j] - kl_q);
  }
  const DeviceArray<float> device_student(student), device_teacher(teacher), device_grad_loss(grad_loss), token_loss(rows);
  const DeviceArray<float> device_lse_q(std::vector<float>(lse_q.begin(), lse_q.end())),
      device_lse_p(std::vector<float>(lse_p.begin(), lse_p.end()));
  const DeviceArray<__nv_bfloat16> device_grad(rows * vocab);
  Enqueue<JsdRow, 8>({{device_student.get(), device_teacher.get()},
                      device_grad.get(),
                      device_lse_q.get(),
                      device_lse_p.get(),
                      device_grad_loss.get(),
                      token_loss.get(),
                      beta},
                     rows, vocab, nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  char name[96];
  std::snprintf(name, sizeof(name), "JSD N%d V%d std %.1f noise %.2f beta %.1f: ", static_cast<int>(rows), static_cast<int>(vocab),
                static_cast<double>(scale), static_cast<double>(noise), b);
  Check(name + std::string("losses"), RelativeDifference(token_loss.ToHost(), losses), noise > 0.0f ? 1e-4 : 1e-5);
  Check(name + std::string("gradient"), RelativeDifference(device_grad.ToHost(), grad), scale > 5.0f ? 5e-3 : 2.2e-3);
}

__global__ void FillFloatKernel(float* out, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = scale * NormalAt(seed, static_cast<uint64_t>(i));
  }
}

}  // namespace

int main() {
  headwater::lab::PrintDevice("005_row_pass");
  CheckCrossEntropy(67, 2008, 1.0f, 0.0f);
  CheckCrossEntropy(130, 33000, 30.0f, 0.0f);
  CheckCrossEntropy(130, 33000, 1.0f, 20.0f);
  for (const float beta : {0.1f, 0.5f, 0.9f}) {
    CheckJsd(33, 2008, 1.0f, 0.0f, beta);
    CheckJsd(40, 33000, 10.0f, 0.0f, beta);
    CheckJsd(40, 33000, 3.0f, 0.03f, beta);
  }
  headwater::lab::Bench bench;
  const int64_t rows = 4096, vocab = 128256;
  DeviceArray<float> student(rows * vocab), teacher(rows * vocab), grad_loss(rows), token_loss(rows), lse(rows), lse_q(rows),
      lse_p(rows);
  DeviceArray<__nv_bfloat16> grad(rows * vocab);
  DeviceArray<int32_t> targets(rows);
  FillFloatKernel<<<1056, 256>>>(student.get(), student.count(), 11, 1.0f);
  FillFloatKernel<<<1056, 256>>>(teacher.get(), teacher.count(), 12, 1.0f);
  FillFloatKernel<<<16, 256>>>(grad_loss.get(), rows, 13, 1.0f);
  headwater::lab::FillTargets(targets, vocab, 14);
  const CrossEntropyRow::Params ce{
      {student.get()}, grad.get(), targets.get(), grad_loss.get(), token_loss.get(), lse.get(), static_cast<int32_t>(vocab)};
  const CrossEntropyRow::Params ce_teacher{
      {teacher.get()}, grad.get(), targets.get(), grad_loss.get(), token_loss.get(), lse_p.get(), static_cast<int32_t>(vocab)};
  const CrossEntropyRow::Params ce_student{
      {student.get()}, grad.get(), targets.get(), grad_loss.get(), token_loss.get(), lse_q.get(), static_cast<int32_t>(vocab)};
  Enqueue<CrossEntropyRow, 4>(ce_teacher, rows, vocab, nullptr);
  Enqueue<CrossEntropyRow, 4>(ce_student, rows, vocab, nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const JsdRow::Params jsd{
      {student.get(), teacher.get()}, grad.get(), lse_q.get(), lse_p.get(), grad_loss.get(), token_loss.get(), 0.5f};
  const double elements = static_cast<double>(rows) * static_cast<double>(vocab);
  // The copy moves what cross entropy must: 3 bytes an element in, 3 out.
  const auto copy = [&](cudaStream_t stream) {
    LAB_CUDA(cudaMemcpyAsync(grad.get(), teacher.get(), grad.bytes(), cudaMemcpyDeviceToDevice, stream));
    LAB_CUDA(cudaMemcpyAsync(grad.get(), teacher.get(), grad.bytes() / 2, cudaMemcpyDeviceToDevice, stream));
  };
  bench.Run(
      "row pass, N4096 V128256",
      {{"copy of as many bytes as cross entropy", copy, 0.0, 6.0 * elements},
       {"cross entropy, cluster of 4", [&](cudaStream_t stream) { Enqueue<CrossEntropyRow, 4>(ce, rows, vocab, stream); }, 0.0,
        6.0 * elements},
       {"cross entropy, cluster of 8", [&](cudaStream_t stream) { Enqueue<CrossEntropyRow, 8>(ce, rows, vocab, stream); }, 0.0,
        6.0 * elements},
       {"JSD, cluster of 8", [&](cudaStream_t stream) { Enqueue<JsdRow, 8>(jsd, rows, vocab, stream); }, 0.0, 10.0 * elements}},
      BenchOptions{1.0, 0.7, 2, true});
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
