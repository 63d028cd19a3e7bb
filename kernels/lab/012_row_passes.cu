// 012: the cross entropy's row passes of the product (kernels/cuda/rows/row_statistics.cu, row_gradient.cu) with every option, on
// fp32 products, against fp64 on the CPU; then the time of either pass alone against the device's copy of as many bytes.
//
// Run: 012_row_passes [check|time]
//
// Links: kernels/cuda/rows/row_distribution.cu kernels/cuda/rows/row_statistics.cu kernels/cuda/rows/finish_rows.cu
// kernels/cuda/rows/row_gradient.cu

#include <cuda_fp16.h>

#include <cstring>

#include "bench.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace {

using headwater::RowStats;
using headwater::cuda::BytesOf;
using headwater::cuda::ChunkRows;
using headwater::cuda::CrossEntropyOptions;
using headwater::cuda::Element;
using headwater::cuda::FinishOptions;
using headwater::cuda::LogitsView;
using headwater::cuda::RoundUp;
using headwater::cuda::RowCoefficients;
using headwater::cuda::RowReport;
using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::NormalAt;

enum class Rows {
  kFlat,
  kWide,       // standard deviation 30
  kConfident,  // every other row's target at 25
  kRising,     // the maximum grows along the row
  kMasked,     // a third of the columns has a bias of -infinity and a class weight of 0, the first vectors among them
};
const char* const kNames[] = {"flat", "std 30", "confident", "rising", "masked"};

struct Case {
  Rows kind = Rows::kFlat;
  int64_t rows = 37;
  int64_t vocab = 1000;
  int64_t split = 0;                 // columns of a first shard; 0: one shard
  Element bias = Element::kFloat64;  // kFloat64: none
  double scale = 1, cap = 0;
  double smoothing = 0, z_loss = 0;
  bool class_weights = false, weighted = false;
  Element matrix = Element::kBFloat16;
};

Case Everything(int64_t vocab, int64_t rows) {
  Case c;
  c.vocab = vocab;
  c.rows = rows;
  c.bias = Element::kBFloat16;
  c.cap = 30;
  c.smoothing = 0.1;
  c.z_loss = 1e-3;
  c.class_weights = c.weighted = true;
  return c;
}

std::string NameOf(const Case& c) {
  std::string name = std::string(kNames[static_cast<int>(c.kind)]) + " N" + std::to_string(c.rows) + " V" + std::to_string(c.vocab);
  if (c.split > 0) name += " split " + std::to_string(c.split);
  if (c.bias != Element::kFloat64) name += " bias";
  if (c.scale != 1) name += " scale";
  if (c.cap != 0) name += " cap " + std::to_string(static_cast<int>(c.cap));
  if (c.smoothing != 0) name += " smoothing";
  if (c.class_weights) name += " weights";
  if (c.weighted) name += " entropy";
  if (c.matrix == Element::kFloat16) name += " fp16";
  return name;
}

__global__ void FillProductsKernel(float* out, int64_t rows, int64_t columns, int64_t stride, int64_t start, int64_t vocab,
                                   Rows kind, const int32_t* targets, float unit) {
  for (int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; index < rows * columns;
       index += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = index / columns, column = start + index % columns;
    float z = NormalAt(31, static_cast<uint64_t>(row * 1000003 + column));
    if (kind == Rows::kWide) z *= 30.0f;
    if (kind == Rows::kConfident && row % 2 == 0 && column == targets[row]) z = 25.0f;
    if (kind == Rows::kRising) z += 60.0f * static_cast<float>(column) / static_cast<float>(vocab);
    out[row * stride + index % columns] = z * unit;
  }
}

double MatrixValue(uint16_t bits, Element element) {
  if (element == Element::kFloat16) {
    __half_raw raw;
    raw.x = bits;
    return static_cast<double>(__half2float(__half(raw)));
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0.0f;
  std::memcpy(&value, &wide, sizeof(value));
  return static_cast<double>(value);
}

// `value` as `element` has it, and its bytes.
double Rounded(double value, Element element, uint8_t* bytes) {
  const float single = static_cast<float>(value);
  if (element == Element::kFloat32) {
    std::memcpy(bytes, &single, 4);
    return static_cast<double>(single);
  }
  if (element == Element::kFloat16) {
    const __half half = __float2half(single);
    std::memcpy(bytes, &half, 2);
    return static_cast<double>(__half2float(half));
  }
  const __nv_bfloat16 half = __float2bfloat16(single);
  std::memcpy(bytes, &half, 2);
  return static_cast<double>(__bfloat162float(half));
}

// A chunk on the device, in shards.
class Chunk {
 public:
  explicit Chunk(const Case& c) : c_(c) {
    const size_t bytes_of_bias = c.bias == Element::kFloat64 ? 0 : static_cast<size_t>(BytesOf(c.bias));
    std::vector<uint8_t> bias_bytes(static_cast<size_t>(c.vocab) * bytes_of_bias + 1);
    for (int64_t j = 0; j < c.vocab; ++j) {
      const bool masked = c.kind == Rows::kMasked && (j < 5 || j % 3 == 1);
      const double wanted = masked ? -INFINITY : 0.5 * static_cast<double>(NormalAt(32, static_cast<uint64_t>(j)));
      bias.push_back(bytes_of_bias == 0 ? 0.0 : Rounded(wanted, c.bias, &bias_bytes[static_cast<size_t>(j) * bytes_of_bias]));
      weights.push_back(!c.class_weights ? 1.0f : masked ? 0.0f : 0.25f * static_cast<float>(j % 7));
    }
    for (int64_t i = 0; i < c.rows; ++i) {
      int64_t target = (i * 7919 + 2 * (c.vocab - 1)) % c.vocab;
      while (c.kind == Rows::kMasked && bias[static_cast<size_t>(target)] == -INFINITY) target = (target + 1) % c.vocab;
      targets.push_back(i % 9 == 8 ? -1 : static_cast<int32_t>(target));
      token_weights.push_back(i % 11 == 5 ? 0.0f : 0.3f + 0.1f * static_cast<float>(i % 7));
    }
    device_bias_ = DeviceArray<uint8_t>(bias_bytes);
    device_weights_ = DeviceArray<float>(weights);
    device_targets_ = DeviceArray<int32_t>(targets);
    device_token_weights_ = DeviceArray<float>(token_weights);
    const int64_t starts[] = {0, c.split > 0 ? c.split : c.vocab, c.vocab};
    for (int shard = 0; shard < (c.split > 0 ? 2 : 1); ++shard) {
      LogitsView view;
      view.columns = starts[shard + 1] - starts[shard];
      view.stride = RoundUp(view.columns, 8) + 8 * shard;
      view.vocab_start = starts[shard];
      products_[shard] = DeviceArray<float>(c.rows * view.stride);
      view.products = products_[shard].get();
      if (bytes_of_bias > 0) view.bias = device_bias_.get() + static_cast<size_t>(starts[shard]) * bytes_of_bias;
      view.bias_element = c.bias;
      view.transform = {c.scale, c.cap};
      views.push_back(view);
      FillProductsKernel<<<1056, 256>>>(products_[shard].get(), c.rows, view.columns, view.stride, view.vocab_start, c.vocab,
                                        c.kind, device_targets_.get(), static_cast<float>(1 / c.scale));
      LAB_CUDA(cudaGetLastError());
    }
    rows.row_count = c.rows;
    rows.targets = device_targets_.get();
    rows.token_weights = device_token_weights_.get();
    finish.cross_entropy.term.label_smoothing = c.smoothing;
    finish.cross_entropy.term.z_loss = c.z_loss;
    finish.cross_entropy.term.class_weights = c.class_weights ? device_weights_.get() : nullptr;
    for (const float weight : weights) finish.cross_entropy.term.class_weight_sum += static_cast<double>(weight);
    finish.cross_entropy.term.class_weight_bound = finish.cross_entropy.term.class_weight_sum;  // none is negative
    finish.cross_entropy.term.valid_vocab_size = c.vocab;
    finish.cross_entropy.want_rest = c.weighted;
    finish.cross_entropy.want_argmax = true;
    finish.loss_scale = 8;
    finish.transform = {c.scale, c.cap};
    finish.matrix_element = c.matrix;
    stats_ = DeviceArray<RowStats>(c.rows * static_cast<int64_t>(views.size()));
    coefficients_ = DeviceArray<RowCoefficients>(c.rows);
    reports = DeviceArray<RowReport>(c.rows);
    row_factor = DeviceArray<float>(c.rows);
    target_factor = DeviceArray<float>(c.rows);
  }

  float* products(int shard) { return products_[shard].get(); }
  std::vector<float> Products(int shard) const { return products_[shard].ToHost(); }

  void Stats() {
    for (size_t shard = 0; shard < views.size(); ++shard) {
      LAB_CUDA(
          LaunchRowStats(views[shard], rows, finish.cross_entropy, stats_.get() + static_cast<int64_t>(shard) * c_.rows, nullptr));
    }
  }
  void Finish(const std::vector<double>& target_arguments) {
    const DeviceArray<double> arguments(target_arguments);
    LAB_CUDA(LaunchFinishRows(stats_.get(), static_cast<int32_t>(views.size()), arguments.get(), rows, finish, reports.get(),
                              coefficients_.get(), row_factor.get(), target_factor.get(), /*dither=*/nullptr, nullptr));
    LAB_CUDA(cudaDeviceSynchronize());
  }
  void Gradient() {
    for (const LogitsView& view : views) {
      LAB_CUDA(LaunchCrossEntropyGradient(view, rows, finish.cross_entropy, coefficients_.get(),
                                          headwater::cuda::InPlaceMatrix(view, c_.rows, c_.matrix), nullptr));
    }
  }

  std::vector<double> bias;
  std::vector<float> weights, token_weights;
  std::vector<int32_t> targets;
  std::vector<LogitsView> views;
  ChunkRows rows;
  FinishOptions finish;
  DeviceArray<RowReport> reports;
  DeviceArray<float> row_factor, target_factor;

 private:
  const Case c_;
  DeviceArray<uint8_t> device_bias_;
  DeviceArray<float> device_weights_, device_token_weights_;
  DeviceArray<int32_t> device_targets_;
  DeviceArray<float> products_[2];
  DeviceArray<RowStats> stats_;
  DeviceArray<RowCoefficients> coefficients_;
};

// NaN wins.
void Raise(double value, double* worst) {
  if (!(value <= *worst)) *worst = value;
}

void CheckCase(const Case& c) {
  Chunk chunk(c);
  std::vector<std::vector<float>> products;
  for (size_t shard = 0; shard < chunk.views.size(); ++shard) products.push_back(chunk.Products(static_cast<int>(shard)));
  const auto argument = [&](int64_t row, int64_t column) {
    const size_t shard = c.split > 0 && column >= c.split ? 1 : 0;
    const LogitsView& view = chunk.views[shard];
    const float product = products[shard][static_cast<size_t>(row * view.stride + column - view.vocab_start)];
    return c.scale * (static_cast<double>(product) + chunk.bias[static_cast<size_t>(column)]);
  };
  std::vector<double> target_arguments;
  for (int64_t i = 0; i < c.rows; ++i) target_arguments.push_back(chunk.targets[i] < 0 ? NAN : argument(i, chunk.targets[i]));
  chunk.Stats();
  chunk.Finish(target_arguments);
  chunk.Gradient();
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<RowReport> reports = chunk.reports.ToHost();
  const std::vector<float> row_factor = chunk.row_factor.ToHost();
  std::vector<std::vector<float>> matrices;
  for (size_t shard = 0; shard < chunk.views.size(); ++shard) matrices.push_back(chunk.Products(static_cast<int>(shard)));

  const double v = static_cast<double>(c.vocab), mass = c.smoothing / v,
               weight_sum = chunk.finish.cross_entropy.term.class_weight_sum;
  const double rounding = c.matrix == Element::kFloat16 ? 1.0 / 2048 : 1.0 / 256;
  double loss = 0, lse = 0, entropy = 0, log_probability = 0, argmax = 0, element = 0, zeros = 0, difference = 0, norm = 0;
  std::vector<double> z(static_cast<size_t>(c.vocab));
  const int64_t step = std::max<int64_t>(1, c.rows / 24);
  for (int64_t i = c.rows - 1; i >= 0; i -= step) {
    const int32_t y = chunk.targets[i];
    size_t best = 0;
    double largest = 1;
    for (size_t j = 0; j < z.size(); ++j) {
      const double a = argument(i, static_cast<int64_t>(j));
      z[j] = c.cap == 0 ? a : c.cap * std::tanh(a / c.cap);
      if (z[j] > z[best]) best = j;
      if (z[j] > -INFINITY) largest = std::max(largest, std::fabs(z[j]));
    }
    double sum = 0, weighted = 0, linear = 0;
    for (size_t j = 0; j < z.size(); ++j) {
      const double e = std::exp(z[j] - z[best]);
      sum += e;
      if (e > 0) weighted += e * (z[j] - z[best]);
      if (chunk.weights[j] != 0.0f) linear += static_cast<double>(chunk.weights[j]) * z[j];
    }
    const double row_lse = z[best] + std::log(sum), unit = 1e-6 * largest;
    Raise(std::fabs(reports[i].lse - row_lse) / unit, &lse);
    if (c.weighted) Raise(std::fabs(reports[i].entropy - (std::log(sum) - weighted / sum)) / unit, &entropy);
    // fp32 may make two logits one.
    const int32_t got_best = reports[i].argmax;
    Raise(got_best < 0 ? INFINITY : (z[best] - z[static_cast<size_t>(got_best)]) / (0.5 * unit), &argmax);
    const double token_weight = static_cast<double>(chunk.token_weights[i]);
    double probability_factor = 0, class_factor = 0;
    if (y >= 0) {
      const double hard_mass = (1 - c.smoothing) * static_cast<double>(chunk.weights[y]);
      double others = 0;  // without the target: the missing probability has digits of its own
      for (size_t j = 0; j < z.size(); ++j) others += static_cast<int32_t>(j) == y ? 0.0 : std::exp(z[j] - z[y]);
      const double missing = others < 1e300 ? std::log1p(others) : row_lse - z[y];
      double expected = hard_mass == 0 ? 0 : hard_mass * missing;
      if (c.smoothing > 0) expected += mass * (weight_sum * row_lse - linear);
      Raise(std::fabs(reports[i].hard - expected) / unit, &loss);
      Raise(std::fabs(reports[i].z_loss - c.z_loss * row_lse * row_lse) / (unit * std::max(1.0, std::fabs(row_lse))), &loss);
      Raise(std::fabs(reports[i].target_log_probability + missing) / unit, &log_probability);
      probability_factor = hard_mass + mass * weight_sum + 2 * c.z_loss * row_lse;
      class_factor = mass;
    }
    const double factor = 8 * token_weight * c.scale;
    for (size_t shard = 0; shard < chunk.views.size(); ++shard) {
      const LogitsView& view = chunk.views[shard];
      const auto* matrix = reinterpret_cast<const uint16_t*>(matrices[shard].data() + i * view.stride);
      for (int64_t column = 0; column < RoundUp(view.columns, 8); ++column) {
        const double value = MatrixValue(matrix[column], c.matrix);
        const int64_t j = view.vocab_start + column;
        if (column >= view.columns || j == y || y < 0 || token_weight == 0) {
          if (!(value == 0)) ++zeros;
          continue;
        }
        const double u = c.cap == 0 ? 0 : argument(i, j) / c.cap, cosine = std::cosh(u);
        const double derivative = factor / (cosine * cosine);
        const double probability_part = derivative * probability_factor * std::exp(z[j] - row_lse);
        const double class_part = derivative * class_factor * static_cast<double>(chunk.weights[j]);
        const double expected = probability_part - class_part, got = static_cast<double>(row_factor[i]) * value;
        const double error = std::fabs(got - expected);
        const double smallest =
            c.matrix == Element::kFloat16 ? std::ldexp(std::fabs(static_cast<double>(row_factor[i])), -25) : 1e-36;
        Raise(error /
                  (rounding * std::fabs(expected) +
                   2e-6 * (1 + std::fabs(u)) * largest * (std::fabs(probability_part) + std::fabs(class_part)) + 1.001 * smallest),
              &element);
        difference += error * error;
        norm += expected * expected;
      }
    }
  }
  const std::string name = NameOf(c);
  std::printf("%-62s lse %.2f loss %.2f log p %.2f entropy %.2f argmax %.2f M %.2e element %.3f\n", name.c_str(), lse, loss,
              log_probability, entropy, argmax, std::sqrt(difference / norm), element);
  const auto require = [&](const char* what, double error, double bound) {
    if (!(error <= bound)) Check(name + ": " + what, error, bound);
  };
  // In units of 1e-6 of the largest logit, 1 at least; a class weight is up to 1.5.
  require("log-sum-exp", lse, 1);
  require("loss", loss, 1.5);
  require("target's log-probability", log_probability, 1);
  require("entropy", entropy, 2);
  require("argmax", argmax, 1);
  require("M", std::sqrt(difference / norm), c.matrix == Element::kFloat16 ? 4e-4 : 2.2e-3);
  require("worst element of M", element, 1);
  require("zeros of M", zeros, 0);
}

// A product that is not finite makes its row's loss NaN or infinite, and nobody else's; a block's other rows too.
void CheckNotFinite(float value, bool at_target, int64_t rows, double cap) {
  Case c = Everything(4104, rows);
  c.cap = cap;
  Chunk chunk(c);
  const int64_t row = rows - 3;
  const int64_t column = at_target ? chunk.targets[row] : (chunk.targets[row] + 7) % c.vocab;
  LAB_CUDA(cudaMemcpy(chunk.products(0) + row * chunk.views[0].stride + column, &value, sizeof(value), cudaMemcpyHostToDevice));
  const std::vector<float> products = chunk.Products(0);
  std::vector<double> arguments;
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t y = chunk.targets[i];
    arguments.push_back(y < 0 ? NAN
                              : static_cast<double>(products[static_cast<size_t>(i * chunk.views[0].stride + y)]) +
                                    chunk.bias[static_cast<size_t>(y)]);
  }
  chunk.Stats();
  chunk.Finish(arguments);
  chunk.Gradient();
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<RowReport> reports = chunk.reports.ToHost();
  double wrong = 0;
  const bool spoils = std::isnan(value) || cap == 0;
  for (int64_t i = 0; i < rows; ++i) {
    const bool finite = std::fabs(reports[i].hard) < INFINITY && std::fabs(reports[i].lse) < INFINITY;
    wrong += finite == !(spoils && i == row) ? 0 : 1;
  }
  Check("a product " + std::to_string(value) + (at_target ? " at the target" : "") + ", N" + std::to_string(rows) +
            (cap != 0 ? ", capped" : ""),
        wrong, 0);
}

void CheckAll() {
  for (const int64_t rows : {37, 1025}) {
    for (const int64_t vocab : {1000, 4104, 32000}) {
      for (const Rows kind : {Rows::kFlat, Rows::kWide, Rows::kConfident, Rows::kRising}) {
        Case c;
        c.rows = rows;
        c.vocab = vocab;
        c.kind = kind;
        CheckCase(c);
        c = Everything(vocab, rows);
        c.kind = kind;
        CheckCase(c);
      }
    }
    for (const Element bias : {Element::kFloat64, Element::kFloat32, Element::kBFloat16, Element::kFloat16}) {
      for (const double cap : {0.0, 5.0}) {
        for (const double smoothing : {0.0, 0.2}) {
          Case c;
          c.rows = rows;
          c.vocab = 5003;
          c.bias = bias;
          c.cap = cap;
          c.smoothing = smoothing;
          c.scale = cap == 0 ? -0.5 : 3;
          c.weighted = bias == Element::kFloat32;
          CheckCase(c);
          c.class_weights = true;
          c.split = 2002;
          c.matrix = Element::kFloat16;
          CheckCase(c);
          c.split = 2001;
          c.kind = Rows::kWide;
          CheckCase(c);
          c.kind = Rows::kMasked;
          c.weighted = true;
          if (bias != Element::kFloat64 && cap == 0) {
            c.scale = 1;
            CheckCase(c);
          }
        }
      }
    }
    for (const double cap : {0.0, 30.0}) {
      CheckNotFinite(NAN, false, rows, cap);
      CheckNotFinite(INFINITY, false, rows, cap);
      CheckNotFinite(NAN, true, rows, cap);
      CheckNotFinite(INFINITY, true, rows, cap);
    }
  }
}

// --- Times -----------------------------------------------------------------------------------------------------------------------

// Median milliseconds of `pass`; `before` is not counted.
template <class Before, class Pass>
double MedianOf(const Before& before, const Pass& pass) {
  cudaEvent_t start, stop;
  LAB_CUDA(cudaEventCreate(&start));
  LAB_CUDA(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int i = 0; i < 30; ++i) {
    before();
    LAB_CUDA(cudaEventRecord(start, nullptr));
    pass();
    LAB_CUDA(cudaEventRecord(stop, nullptr));
    LAB_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    LAB_CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 3) times.push_back(static_cast<double>(ms));
  }
  LAB_CUDA(cudaEventDestroy(start));
  LAB_CUDA(cudaEventDestroy(stop));
  return headwater::lab::Median(times);
}

void Time(const char* name, Case c, int64_t rows = 4096) {
  c.rows = rows;
  c.vocab = 128256;
  Chunk chunk(c);
  const size_t bytes = static_cast<size_t>(c.rows * c.vocab) * sizeof(float);
  const DeviceArray<float> products(c.rows * c.vocab);
  // Between the passes runs what leaves the card as warm as a product does, and the caches as cold.
  const auto restore = [&] {
    LAB_CUDA(cudaMemcpyAsync(chunk.products(0), products.get(), bytes, cudaMemcpyDeviceToDevice, nullptr));
  };
  LAB_CUDA(cudaMemcpy(products.get(), chunk.products(0), bytes, cudaMemcpyDeviceToDevice));
  const double stats = MedianOf(restore, [&] { chunk.Stats(); });
  chunk.Finish(std::vector<double>(static_cast<size_t>(c.rows), 1.0));
  const double gradient = MedianOf(restore, [&] { chunk.Gradient(); });
  const double elements = static_cast<double>(c.rows) * static_cast<double>(c.vocab);
  std::printf("%-36s statistics %7.3f ms %5.2f TB/s   gradient %7.3f ms %5.2f TB/s   together %7.3f ms\n", name, stats,
              4e-9 * elements / stats, gradient, 6e-9 * elements / gradient, stats + gradient);
  std::fflush(stdout);
}

void TimeAll() {
  {
    const int64_t bytes = int64_t{4096} * 128256 * 4;
    const DeviceArray<uint8_t> from(bytes), to(bytes);
    const double copy = MedianOf(
        [] {},
        [&] { LAB_CUDA(cudaMemcpyAsync(to.get(), from.get(), static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, nullptr)); });
    std::printf("copy of the products %.3f ms, %.2f TB/s\n", copy, 2e-9 * static_cast<double>(bytes) / copy);
  }
  const Case plain;
  Time("plain", plain);
  Case c = plain;
  c.cap = 30;
  Time("softcap", c);
  c.kind = Rows::kWide;
  Time("softcap, std 30", c);
  c = plain;
  c.bias = Element::kBFloat16;
  Time("bias", c);
  c.cap = 30;
  Time("bias, softcap", c);
  c = plain;
  c.smoothing = 0.1;
  Time("smoothing", c);
  c.class_weights = true;
  Time("smoothing, class weights", c);
  c = plain;
  c.weighted = true;
  Time("entropy", c);
  c = Everything(0, 0);
  Time("everything, N1024", c, 1024);
  Time("everything, N512", c, 512);
  Time("everything", c);
  c.kind = Rows::kWide;
  Time("everything, std 30", c);
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("012_row_passes");
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode != "time") CheckAll();
  if (mode != "check") TimeAll();
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
