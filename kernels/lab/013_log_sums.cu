// 013: the divergence's log-sum-exps from the products' epilogues: logits and sums against fp64; the row pass with known sums
// against the product's, which takes them itself; then the logits' product against cuBLASLt's, the row pass alone, and 4096 rows of
// a divergence with a student of 2048 and a teacher of 4096 against their bare products.
//
// Run: 013_log_sums [check | product | chain]
//
// Links: kernels/cuda/divergence_rows.cu kernels/cuda/divergence_params.cu

#include "blas.cuh"
#include "known_rows.cuh"
#include "log_sums.cuh"
#include "logits_epilogue.cuh"

namespace {

using headwater::cuda::Element;
using headwater::cuda::RowReport;
using headwater::lab::Bench;
using headwater::lab::BenchOptions;
using headwater::lab::BlasContext;
using headwater::lab::BlasProduct;
using headwater::lab::Candidate;
using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::FillNormal;
using headwater::lab::LogitsProduct;
using headwater::lab::LogitsStore;
using headwater::lab::LogSum;
using headwater::lab::LogSumSide;
using headwater::lab::NormalAt;
using headwater::lab::RowLogSums;
using headwater::lab::TileSum;

constexpr float kLog2E = 1.4426950408889634f;

struct Variant {
  const char* name;
  void (LogitsProduct::*enqueue)(cudaStream_t) const;
  bool sums;
};
constexpr Variant kVariants[] = {
    {"own, by copy engine", &LogitsProduct::Enqueue<LogitsStore::kBoxes, false>, false},
    {"own, from registers", &LogitsProduct::Enqueue<LogitsStore::kSectors, false>, false},
    {"own, whole lines", &LogitsProduct::Enqueue<LogitsStore::kLines, false>, false},
    {"own, by copy engine, sums", &LogitsProduct::Enqueue<LogitsStore::kBoxes, true>, true},
    {"own, from registers, sums", &LogitsProduct::Enqueue<LogitsStore::kSectors, true>, true},
    {"own, whole lines, sums", &LogitsProduct::Enqueue<LogitsStore::kLines, true>, true},
};

__global__ void ReferenceProductKernel(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t rows, int64_t columns, int64_t width,
                                       double* out) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (index >= rows * columns) return;
  double sum = 0;
  for (int64_t k = 0; k < width; ++k) {
    sum += static_cast<double>(__bfloat162float(a[index / columns * width + k])) *
           static_cast<double>(__bfloat162float(b[index % columns * width + k]));
  }
  out[index] = sum;
}

// Flat rows but for row 3 (one column so far above the others that no sample shows it), 5 (confident) and 7 (a NaN).
void CheckProduct(const Variant& variant, int64_t rows, int64_t columns, int64_t width) {
  const DeviceArray<__nv_bfloat16> hidden(rows * width), weight(columns * width);
  FillNormal(weight, 2, 1.0f);
  FillNormal(hidden, 1, 1.0f / std::sqrt(static_cast<float>(width)));
  std::vector<__nv_bfloat16> x = hidden.ToHost();
  const std::vector<__nv_bfloat16> w = weight.ToHost();
  const auto turn_to = [&](int64_t row, int64_t column, float size) {
    if (row >= rows) return;
    for (int64_t k = 0; k < width; ++k) {
      x[row * width + k] = __float2bfloat16(size / static_cast<float>(width) * __bfloat162float(w[column * width + k]));
    }
  };
  turn_to(3, columns - 1, 200.0f);
  turn_to(5, columns / 2, 20.0f);
  if (rows > 7) x[7 * width + 1] = __float2bfloat16(NAN);
  LAB_CUDA(cudaMemcpy(hidden.get(), x.data(), hidden.bytes(), cudaMemcpyHostToDevice));
  const int64_t stride = (columns + 7) / 8 * 8 + 8;
  const DeviceArray<float> logits(rows * stride);
  const LogitsProduct product{hidden.get(), weight.get(),         rows, columns, width, logits.get(), stride,
                              kLog2E,       /*tile_sums=*/nullptr};
  const DeviceArray<TileSum> tile_sums(product.tiles() * rows);
  const DeviceArray<double> products(rows * columns);
  LogitsProduct with_sums = product;
  with_sums.tile_sums = tile_sums.get();
  (with_sums.*variant.enqueue)(nullptr);
  ReferenceProductKernel<<<static_cast<int>((rows * columns + 255) / 256), 256>>>(hidden.get(), weight.get(), rows, columns, width,
                                                                                  products.get());
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<float> got = logits.ToHost();
  const std::vector<double> expected = products.ToHost();
  const std::string name = std::string(variant.name) + " " + std::to_string(rows) + " x " + std::to_string(columns) + " x " +
                           std::to_string(width) + ": ";
  double worst = 0, outside = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < stride; ++j) {
      const float value = got[i * stride + j];
      if (j >= columns || i == 7) {
        outside += std::isnan(value) ? 0 : 1;  // the array's poison, or the row's
        continue;
      }
      const double exact = expected[i * columns + j];
      const double error = std::fabs(static_cast<double>(value) - exact) / (1 + std::fabs(exact));
      if (!(error <= worst)) worst = error;
    }
  }
  Check(name + "logits", worst, 3e-5);
  Check(name + "outside", outside, 0);
  if (!variant.sums) return;
  const DeviceArray<LogSum> merged(rows);
  const DeviceArray<RowLogSums> joined(rows), reference(rows);
  headwater::lab::EnqueueMergeStudent(tile_sums.get(), rows, product.tiles(), merged.get(), nullptr);
  headwater::lab::EnqueueMergeTeacher(tile_sums.get(), rows, product.tiles(), merged.get(), joined.get(), nullptr);
  const LogSumSide side{logits.get(), stride, kLog2E};
  headwater::lab::ComputeLogSums(side, side, rows, columns, reference.get());
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<LogSum> sums = merged.ToHost();
  const std::vector<RowLogSums> both = joined.ToHost(), slow = reference.ToHost();
  double worst_sum = 0, wrong = 0;
  for (int64_t i = 0; i < rows; ++i) {
    if (i == 7) {
      wrong += std::isnan(sums[i].log2_sum) && std::isnan(both[i].student) && std::isnan(both[i].difference) ? 0 : 1;
      continue;
    }
    const double exact = static_cast<double>(slow[i].student);
    const double error = std::fabs(sums[i].log2_sum - exact) - 6e-8 * std::fabs(exact);
    if (!(error <= worst_sum)) worst_sum = error;
    wrong += both[i].teacher == both[i].student && both[i].difference == 0 && both[i].top_column == sums[i].top_column ? 0 : 1;
    // A tile may be named where no column has half.
    wrong += slow[i].top_column >= 0 && slow[i].top_column != both[i].top_column ? 1 : 0;
    wrong += (i == 3 || i == 5) && slow[i].top_column < 0 ? 1 : 0;
  }
  Check(name + "log2 of sums", worst_sum, 5e-6);
  Check(name + "not finite, tops", wrong, 0);
}

struct Problem {
  static constexpr int64_t kRows = 4096, kVocab = 128256;
  static constexpr int64_t kStudent = 2048, kTeacher = 4096;
  DeviceArray<__nv_bfloat16> student{kRows * kStudent}, teacher{kRows * kTeacher};
  DeviceArray<__nv_bfloat16> student_weight{kVocab * kStudent}, teacher_weight{kVocab * kTeacher};
  DeviceArray<float> student_logits{kRows * kVocab}, teacher_logits{kRows * kVocab};
  DeviceArray<TileSum> tile_sums{(kVocab + headwater::lab::kTileColumns - 1) / headwater::lab::kTileColumns * kRows};
  DeviceArray<LogSum> log_sums{kRows};
  DeviceArray<RowLogSums> joined{kRows};
  DeviceArray<__nv_bfloat16> matrix{kRows * kVocab};
  DeviceArray<float> grad_hidden{kRows * kStudent}, grad_weight{kVocab * kStudent};
  DeviceArray<RowReport> reports{kRows};
  DeviceArray<float> row_factor{kRows}, target_factor{kRows};

  Problem() {
    FillNormal(student, 1, 1.0f);
    FillNormal(teacher, 2, 1.0f);
    FillNormal(student_weight, 3, 1.0f / std::sqrt(static_cast<float>(kStudent)));
    FillNormal(teacher_weight, 4, 1.0f / std::sqrt(static_cast<float>(kTeacher)));
    grad_weight.Zero();
    LAB_CUDA(cudaDeviceSynchronize());
  }
  LogitsProduct Product(bool of_teacher) const {
    return {of_teacher ? teacher.get() : student.get(),
            of_teacher ? teacher_weight.get() : student_weight.get(),
            kRows,
            kVocab,
            of_teacher ? kTeacher : kStudent,
            of_teacher ? teacher_logits.get() : student_logits.get(),
            kVocab,
            kLog2E,
            tile_sums.get()};
  }
  void Merge(bool of_teacher, cudaStream_t stream) const {
    const int64_t tiles = Product(of_teacher).tiles();
    if (of_teacher) {
      headwater::lab::EnqueueMergeTeacher(tile_sums.get(), kRows, tiles, log_sums.get(), joined.get(), stream);
    } else {
      headwater::lab::EnqueueMergeStudent(tile_sums.get(), kRows, tiles, log_sums.get(), stream);
    }
  }
  void Pass(bool known, cudaStream_t stream, int64_t rows = kRows, int64_t vocab = kVocab) const {
    if (known) {
      headwater::lab::EnqueueKnownRows(student_logits.get(), teacher_logits.get(), rows, vocab, 0.5, joined.get(), matrix.get(),
                                       reports.get(), row_factor.get(), target_factor.get(), stream);
      return;
    }
    headwater::cuda::LogitsView views[2];
    for (int side = 0; side < 2; ++side) {
      views[side].products = side == 0 ? student_logits.get() : teacher_logits.get();
      views[side].stride = views[side].columns = vocab;
    }
    headwater::cuda::DivergenceTerm term;
    term.common_columns = vocab;
    headwater::cuda::ChunkRows chunk;
    chunk.row_count = rows;
    LAB_CUDA(LaunchDivergenceRows(views[0], views[1], chunk, term, 1, {matrix.get(), rows, vocab, vocab, Element::kBFloat16}, true,
                                  reports.get(), row_factor.get(), target_factor.get(), stream));
  }
};

enum class Rows { kFlat, kWide, kDistilled, kConfident };

__global__ void FillLogitsKernel(float* out, int64_t rows, int64_t columns, Rows kind, bool teacher) {
  for (int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; index < rows * columns;
       index += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const auto at = static_cast<uint64_t>(index);
    const float own = NormalAt(teacher ? 21 : 22, at), shared = NormalAt(23, at);
    float z = own;
    if (kind == Rows::kWide) z = 30.0f * own;
    if (kind == Rows::kDistilled) z = 3.0f * shared + (teacher ? 0.0f : 0.03f * own);
    if (kind == Rows::kConfident && index % columns == index / columns * 7919 % columns) z += 18.0f;
    out[index] = z;
  }
}

// The pass with known sums against the product's, with sums from fp64 and, at full size, from the epilogues.
void CheckPass(const Problem& problem, int64_t rows, int64_t vocab, const std::string& what) {
  problem.Pass(false, nullptr, rows, vocab);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<RowReport> today = problem.reports.ToHost();
  const std::vector<__nv_bfloat16> matrix = problem.matrix.ToHost();
  const std::vector<float> factors = problem.row_factor.ToHost();
  problem.Pass(true, nullptr, rows, vocab);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<RowReport> known = problem.reports.ToHost();
  const std::vector<__nv_bfloat16> known_matrix = problem.matrix.ToHost();
  const std::vector<float> known_factors = problem.row_factor.ToHost();
  double worst = 0, difference = 0, norm = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const double error = std::fabs(today[i].soft - known[i].soft) / (today[i].soft + 1e-5);
    if (!(error <= worst)) worst = error;
    for (int64_t j = i % 17; j<vocab; j += rows> 100 ? 17 : 1) {
      const double a = static_cast<double>(factors[i]) * static_cast<double>(__bfloat162float(matrix[i * vocab + j]));
      const double b = static_cast<double>(known_factors[i]) * static_cast<double>(__bfloat162float(known_matrix[i * vocab + j]));
      difference += (a - b) * (a - b);
      norm += a * a;
    }
  }
  Check("pass with known sums, " + what + ": losses", worst, 1e-4);
  // Either rounds M to bf16.
  Check("pass with known sums, " + what + ": M", std::sqrt(difference / norm), 2.4e-3);
}

void CheckPasses(const Problem& problem) {
  const std::pair<Rows, const char*> kinds[] = {
      {Rows::kFlat, "flat"}, {Rows::kWide, "std 30"}, {Rows::kDistilled, "distilled"}, {Rows::kConfident, "confident"}};
  for (const int64_t vocab : {4104, 128256}) {
    for (const auto& [kind, name] : kinds) {
      const int64_t rows = 33;
      FillLogitsKernel<<<1056, 256>>>(problem.student_logits.get(), rows, vocab, kind, false);
      FillLogitsKernel<<<1056, 256>>>(problem.teacher_logits.get(), rows, vocab, kind, true);
      headwater::lab::ComputeLogSums({problem.student_logits.get(), vocab, kLog2E}, {problem.teacher_logits.get(), vocab, kLog2E},
                                     rows, vocab, problem.joined.get());
      CheckPass(problem, rows, vocab, std::string(name) + " V" + std::to_string(vocab));
    }
  }
  for (const bool of_teacher : {false, true}) {
    problem.Product(of_teacher).Enqueue<LogitsStore::kSectors, true>(nullptr);
    problem.Merge(of_teacher, nullptr);
  }
  CheckPass(problem, Problem::kRows, Problem::kVocab, "sums from epilogues");
}

void TimePass(Bench& bench, const Problem& problem) {
  std::printf("\n== row pass alone, N4096 V128256 beta 0.5\n");
  for (const bool known : {false, true, false, true}) {
    const Candidate candidate{"", [&](cudaStream_t s) { problem.Pass(known, s); }, 0, 0};
    bench.TimeCalls(candidate, 5);
    std::printf("%-44s %8.3f ms\n", known ? "known sums" : "own sums", bench.TimeCalls(candidate, 200));
  }
  const Candidate merge{"", [&](cudaStream_t s) { problem.Merge(true, s); }, 0, 0};
  bench.TimeCalls(merge, 5);
  std::printf("%-44s %8.4f ms\n", "merge of one side's tiles", bench.TimeCalls(merge, 50));
  std::fflush(stdout);
}

void Time(const Problem& problem, bool products, bool chain) {
  Bench bench;
  BlasContext blas;
  TimePass(bench, problem);
  BlasProduct student = BlasProduct::Logits(blas, Problem::kRows, Problem::kStudent, Problem::kVocab, problem.student.get(),
                                            problem.student_weight.get(), problem.student_logits.get(), CUDA_R_32F);
  BlasProduct teacher = BlasProduct::Logits(blas, Problem::kRows, Problem::kTeacher, Problem::kVocab, problem.teacher.get(),
                                            problem.teacher_weight.get(), problem.teacher_logits.get(), CUDA_R_32F);
  student.Search(bench, "student's logits");
  teacher.Search(bench, "teacher's logits");
  const BenchOptions options{1.5, 0.5, 2, false};
  if (products) {
    for (const bool of_teacher : {false, true}) {
      const BlasProduct& floor = of_teacher ? teacher : student;
      const LogitsProduct product = problem.Product(of_teacher);
      std::vector<Candidate> candidates = {floor.AsCandidate("cuBLASLt, fp32 out")};
      for (const Variant& variant : kVariants) {
        candidates.push_back({variant.name, [&](cudaStream_t s) { (product.*variant.enqueue)(s); }, floor.flops(), 0});
      }
      bench.Run(of_teacher ? "logits, N4096 V128256 H4096" : "logits, N4096 V128256 H2048", candidates, options);
    }
  }
  if (!chain) return;
  BlasProduct grad_hidden = BlasProduct::GradHidden(blas, Problem::kRows, Problem::kStudent, Problem::kVocab, problem.matrix.get(),
                                                    problem.student_weight.get(), problem.grad_hidden.get(), CUDA_R_32F);
  BlasProduct grad_weight = BlasProduct::GradWeight(blas, Problem::kRows, Problem::kStudent, Problem::kVocab, problem.matrix.get(),
                                                    problem.student.get(), problem.grad_weight.get(), 1.0f);
  grad_hidden.Search(bench, "grad_hidden");
  grad_weight.Search(bench, "grad_weight");
  const double flops = student.flops() + teacher.flops() + grad_hidden.flops() + grad_weight.flops();
  const auto by_library = [&](cudaStream_t s) {
    student.Enqueue(s);
    teacher.Enqueue(s);
  };
  const auto gradients = [&](cudaStream_t s) {
    grad_hidden.Enqueue(s);
    grad_weight.Enqueue(s);
  };
  std::vector<Candidate> candidates;
  candidates.push_back({"bare products",
                        [&](cudaStream_t s) {
                          by_library(s);
                          gradients(s);
                        },
                        flops, 0});
  for (const bool known : {false, true}) {
    candidates.push_back({known ? "cuBLASLt, sums known for nothing" : "cuBLASLt, the pass takes the sums",
                          [&, known](cudaStream_t s) {
                            by_library(s);
                            problem.Pass(known, s);
                            gradients(s);
                          },
                          flops, 0});
  }
  for (const Variant& variant : kVariants) {
    if (!variant.sums) continue;
    candidates.push_back({variant.name,
                          [&](cudaStream_t s) {
                            for (const bool of_teacher : {false, true}) {
                              (problem.Product(of_teacher).*variant.enqueue)(s);
                              problem.Merge(of_teacher, s);
                            }
                            problem.Pass(true, s);
                            gradients(s);
                          },
                          flops, 0});
  }
  bench.Run("divergence, N4096 Hs2048 Ht4096 V128256", candidates, options);
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("013_log_sums");
  const std::string what = argc < 2 ? "" : argv[1];
  for (const Variant& variant : kVariants) {
    CheckProduct(variant, 300, 1000, 200);
    CheckProduct(variant, 9, 333, 64);
    CheckProduct(variant, 130, 5, 72);
    CheckProduct(variant, 257, 4104, 512);
  }
  const Problem problem;
  CheckPasses(problem);
  if (what != "check") Time(problem, what != "chain", what != "product");
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
