// 015: the divergence's row pass on a few multiprocessors beside the products of other rows: does that hide it? N8192 Hs2048 Ht4096
// V128256, beta 0.5. First the whole with gradients, each chunk's logits at once or a half's; then the logits alone, slice after
// slice, the pass of one beside the products of the next. What runs beside must give the bits of what runs in turn.
//
// Run: 015_pass_beside_products [check | logits | chain]
//
// Links: kernels/cuda/divergence_rows.cu

#include "blas.cuh"
#include "kernels/cuda/row_passes.h"

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
using headwater::lab::RelativeDifference;
using Bf16 = __nv_bfloat16;

constexpr int64_t kRows = 8192, kChunk = 4096, kHalf = 2048, kVocab = 128256;
constexpr int64_t kStudent = 2048, kTeacher = 4096;
constexpr int kMostSlices = static_cast<int>(kRows / kHalf);

// The multiprocessors that a pass takes; 0: all, in turn with the products.
struct Way {
  int32_t multiprocessors = 0;
  int32_t last_multiprocessors = 0;  // of a pass that has few products beside it
};

// The stream of the passes.
class Beside {
 public:
  Beside() {
    int lowest = 0, highest = 0;
    LAB_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    LAB_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
    for (cudaEvent_t* event : {&ready_, &begun_}) LAB_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    for (int i = 0; i < kMostSlices; ++i) {
      LAB_CUDA(cudaEventCreate(&from_[i]));
      LAB_CUDA(cudaEventCreate(&to_[i]));
    }
  }
  // Enqueues a pass behind what `main` has by now; what `main` is given later runs beside it. That waits for an event right in
  // front of the pass, whose launch is next and of higher priority: so the products take the multiprocessors that the pass leaves.
  template <class Launch>
  void Enqueue(cudaStream_t main, int index, const Launch& launch) {
    LAB_CUDA(cudaEventRecord(ready_, main));
    LAB_CUDA(cudaStreamWaitEvent(stream_, ready_, 0));
    LAB_CUDA(cudaEventRecord(from_[index], stream_));
    LAB_CUDA(cudaEventRecord(begun_, stream_));
    launch(stream_);
    LAB_CUDA(cudaEventRecord(to_[index], stream_));
    LAB_CUDA(cudaStreamWaitEvent(main, begun_, 0));
  }
  // What `main` is given later comes after pass `index`, if there was one.
  void Await(cudaStream_t main, int index) const { LAB_CUDA(cudaStreamWaitEvent(main, to_[index], 0)); }
  // Milliseconds from when the rows were there to when the pass ended. The device is idle.
  float Took(int index) const {
    float ms = 0;
    LAB_CUDA(cudaEventElapsedTime(&ms, from_[index], to_[index]));
    return ms;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t ready_, begun_;
  cudaEvent_t from_[kMostSlices], to_[kMostSlices];
};

// Matrices of one micro-batch. Logits of all rows fit here; M is written over those of the student.
struct Problem {
  DeviceArray<Bf16> student{kRows * kStudent}, teacher{kRows * kTeacher};
  DeviceArray<Bf16> student_weight{kVocab * kStudent}, teacher_weight{kVocab * kTeacher};
  DeviceArray<float> student_logits{kRows * kVocab}, teacher_logits{kRows * kVocab};
  DeviceArray<Bf16> matrix{kRows * kVocab};  // the bare products' M
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
};

// Where a slice's logits lie: both sides' first elements.
struct Slice {
  int64_t first, rows;
  float* student;
  float* teacher;
  Bf16* matrix() const { return reinterpret_cast<Bf16*>(student); }
};

void LaunchPass(const Problem& problem, const Slice& slice, Bf16* matrix, int64_t matrix_stride, cudaStream_t stream,
                int32_t most_multiprocessors) {
  headwater::cuda::LogitsView views[2];
  views[0].products = slice.student;
  views[1].products = slice.teacher;
  for (auto& view : views) view.stride = view.columns = kVocab;
  headwater::cuda::DivergenceTerm term;
  term.common_columns = kVocab;
  headwater::cuda::ChunkRows rows;
  rows.row_count = slice.rows;
  LAB_CUDA(LaunchDivergenceRows(views[0], views[1], rows, term, 1, {matrix, slice.rows, kVocab, matrix_stride, Element::kBFloat16},
                                true, problem.reports.get() + slice.first, problem.row_factor.get() + slice.first,
                                problem.target_factor.get() + slice.first, stream, most_multiprocessors));
}

// The products of so many rows.
class Products {
 public:
  Products(BlasContext& blas, const Problem& p, int64_t rows, bool in_place)
      : problem_(p),
        rows_(rows),
        in_place_(in_place),
        student_(BlasProduct::Logits(blas, rows, kStudent, kVocab, p.student.get(), p.student_weight.get(), p.student_logits.get(),
                                     CUDA_R_32F)),
        teacher_(BlasProduct::Logits(blas, rows, kTeacher, kVocab, p.teacher.get(), p.teacher_weight.get(), p.teacher_logits.get(),
                                     CUDA_R_32F)),
        grad_hidden_(blas, false, false, kStudent, rows, kVocab, kStudent, matrix_stride(), kStudent, CUDA_R_32F, 0.0f,
                     p.student_weight.get(), Matrix(), p.grad_hidden.get()),
        grad_weight_(blas, false, true, kStudent, kVocab, rows, kStudent, matrix_stride(), kStudent, CUDA_R_32F, 1.0f,
                     p.student.get(), Matrix(), p.grad_weight.get()) {}

  // Each product on the values that it will have. Leaves M of these rows where the gradients read it.
  void Search(Bench& bench) {
    const std::string rows = ", " + std::to_string(rows_) + " rows";
    student_.Search(bench, "student's logits" + rows, 0.2);
    teacher_.Search(bench, "teacher's logits" + rows, 0.2);
    const Slice slice = {0, rows_, problem_.student_logits.get(), problem_.teacher_logits.get()};
    LaunchPass(problem_, slice, in_place_ ? slice.matrix() : problem_.matrix.get(), matrix_stride(), bench.stream(), 0);
    grad_hidden_.Search(bench, "grad_hidden" + rows, 0.2);
    grad_weight_.Search(bench, "grad_weight" + rows, 0.2);
  }
  void StudentLogits(cudaStream_t stream, const Slice& slice) const {
    student_.Enqueue(stream, problem_.student_weight.get(), problem_.student.get() + slice.first * kStudent, slice.student);
  }
  void TeacherLogits(cudaStream_t stream, const Slice& slice) const {
    teacher_.Enqueue(stream, problem_.teacher_weight.get(), problem_.teacher.get() + slice.first * kTeacher, slice.teacher);
  }
  void GradHidden(cudaStream_t stream, const Slice& slice) const {
    grad_hidden_.Enqueue(stream, problem_.student_weight.get(), slice.matrix(),
                         problem_.grad_hidden.get() + slice.first * kStudent);
  }
  void GradWeight(cudaStream_t stream, const Slice& slice) const {
    grad_weight_.Enqueue(stream, problem_.student.get() + slice.first * kStudent, slice.matrix(), problem_.grad_weight.get());
  }
  // All four, of rows [0, rows), gradients from the compact M.
  void EnqueueBare(cudaStream_t stream) const {
    EnqueueBareLogits(stream);
    grad_hidden_.Enqueue(stream);
    grad_weight_.Enqueue(stream);
  }
  void EnqueueBareLogits(cudaStream_t stream) const {
    student_.Enqueue(stream);
    teacher_.Enqueue(stream);
  }
  double logits_flops() const { return student_.flops() + teacher_.flops(); }
  double flops() const { return logits_flops() + grad_hidden_.flops() + grad_weight_.flops(); }

 private:
  int64_t matrix_stride() const { return in_place_ ? 2 * kVocab : kVocab; }
  const Bf16* Matrix() const {
    return in_place_ ? reinterpret_cast<const Bf16*>(problem_.student_logits.get()) : problem_.matrix.get();
  }

  const Problem& problem_;
  int64_t rows_;
  bool in_place_;
  BlasProduct student_, teacher_, grad_hidden_, grad_weight_;
};

class Experiment {
 public:
  void Run(const std::string& what) {
    all_.Search(bench_);
    chunk_.Search(bench_);
    half_.Search(bench_);
    CheckAll();
    if (what == "check") return;
    if (what != "logits") TimeChains();
    if (what != "chain") TimeLogits();
  }

 private:
  using Enqueue = void (Experiment::*)(cudaStream_t, const Way&);
  struct Chain {
    const char* name;
    Enqueue enqueue;
    std::vector<Way> ways;
  };

  Slice SliceAt(int64_t first, int64_t rows) const {
    return {first, rows, problem_.student_logits.get() + first * kVocab, problem_.teacher_logits.get() + first * kVocab};
  }
  // Of a slice in place; `index` names it for Await().
  void Pass(cudaStream_t main, const Way& way, int index, const Slice& slice, bool last = false) {
    const int32_t most = last ? way.last_multiprocessors : way.multiprocessors;
    const auto launch = [&](cudaStream_t stream) { LaunchPass(problem_, slice, slice.matrix(), 2 * kVocab, stream, most); };
    if (most == 0) {
      launch(main);
    } else {
      beside_.Enqueue(main, index, launch);
    }
  }
  void Await(cudaStream_t main, const Way& way, int index) const {
    if (way.multiprocessors != 0) beside_.Await(main, index);
  }

  // Logits and M only. A pass is awaited where its memory is needed again, in the next call: nothing is at an end here.
  void Logits(cudaStream_t main, const Way& way, const Products& products, int64_t slice_rows) {
    for (int i = 0; i < kRows / slice_rows; ++i) {
      const Slice slice = SliceAt(i * slice_rows, slice_rows);
      Await(main, way, i);
      products.StudentLogits(main, slice);
      products.TeacherLogits(main, slice);
      Pass(main, way, i, slice);
    }
  }
  void LogitsOfChunks(cudaStream_t main, const Way& way) { Logits(main, way, chunk_, kChunk); }
  void LogitsOfHalves(cudaStream_t main, const Way& way) { Logits(main, way, half_, kHalf); }

  // Two chunks, each with memory of its own: 8.4 GB.
  void TwoChunks(cudaStream_t main, const Way& way) {
    const Slice slices[] = {SliceAt(0, kChunk), SliceAt(kChunk, kChunk)};
    for (int i = 0; i < 2; ++i) {
      chunk_.StudentLogits(main, slices[i]);
      chunk_.TeacherLogits(main, slices[i]);
      Pass(main, way, i, slices[i], i == 1);
    }
    for (int i = 0; i < 2; ++i) {
      Await(main, way, i);
      chunk_.GradHidden(main, slices[i]);
      chunk_.GradWeight(main, slices[i]);
    }
  }
  // A chunk's halves: the first one's pass beside the second one's teacher, the second one's beside the first one's grad_hidden.
  void Halves(cudaStream_t main, const Way& way) {
    for (int64_t first = 0; first < kRows; first += kChunk) {
      const Slice chunk = SliceAt(first, kChunk), halves[] = {SliceAt(first, kHalf), SliceAt(first + kHalf, kHalf)};
      chunk_.StudentLogits(main, chunk);
      for (int i = 0; i < 2; ++i) {
        half_.TeacherLogits(main, halves[i]);
        Pass(main, way, i, halves[i], i == 1);
      }
      for (int i = 0; i < 2; ++i) {
        Await(main, way, i);
        half_.GradHidden(main, halves[i]);
      }
      chunk_.GradWeight(main, chunk);
    }
  }

  // What a chain leaves, as it lies.
  struct Result {
    DeviceArray<float> student_logits{kRows * kVocab}, teacher_logits{kRows * kVocab};
    DeviceArray<float> grad_hidden{kRows * kStudent}, grad_weight{kVocab * kStudent};
    DeviceArray<RowReport> reports{kRows};
    DeviceArray<float> row_factor{kRows};
  };
  void TakeResult(const std::function<void(cudaStream_t)>& enqueue, Result* result);
  void CheckAll();
  void TimeLogits();
  void TimeChains();
  void Time(const std::string& title, const Candidate& floor, const std::vector<Chain>& chains, double flops);
  std::vector<Chain> Chains() const;

  Bench bench_;
  BlasContext blas_;
  Problem problem_;
  Beside beside_;
  Products all_{blas_, problem_, kRows, false};
  Products chunk_{blas_, problem_, kChunk, true};
  Products half_{blas_, problem_, kHalf, true};
};

__global__ void CountDifferentKernel(const uint32_t* a, const uint32_t* b, int64_t count, unsigned long long* different) {
  unsigned long long own = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    own += a[i] != b[i] ? 1 : 0;
  }
  if (own != 0) atomicAdd(different, own);
}

template <class T>
double Different(const DeviceArray<T>& a, const DeviceArray<T>& b) {
  DeviceArray<unsigned long long> count(1);
  count.Zero();
  CountDifferentKernel<<<1056, 256>>>(reinterpret_cast<const uint32_t*>(a.get()), reinterpret_cast<const uint32_t*>(b.get()),
                                      static_cast<int64_t>(a.bytes() / 4), count.get());
  LAB_CUDA(cudaGetLastError());
  return static_cast<double>(count.ToHost()[0]);
}

template <class T>
void CopyTo(const DeviceArray<T>& from, const DeviceArray<T>& to) {
  LAB_CUDA(cudaMemcpy(to.get(), from.get(), from.bytes(), cudaMemcpyDeviceToDevice));
}

void Experiment::TakeResult(const std::function<void(cudaStream_t)>& enqueue, Result* result) {
  LAB_CUDA(cudaDeviceSynchronize());
  problem_.student_logits.Poison();
  problem_.teacher_logits.Poison();
  problem_.grad_hidden.Poison();
  problem_.reports.Poison();
  problem_.row_factor.Poison();
  problem_.grad_weight.Zero();
  LAB_CUDA(cudaDeviceSynchronize());
  enqueue(bench_.stream());
  LAB_CUDA(cudaDeviceSynchronize());
  CopyTo(problem_.student_logits, result->student_logits);
  CopyTo(problem_.teacher_logits, result->teacher_logits);
  CopyTo(problem_.grad_hidden, result->grad_hidden);
  CopyTo(problem_.grad_weight, result->grad_weight);
  CopyTo(problem_.reports, result->reports);
  CopyTo(problem_.row_factor, result->row_factor);
  LAB_CUDA(cudaDeviceSynchronize());
}

void Experiment::CheckAll() {
  Result bare, in_turn, beside;
  TakeResult([&](cudaStream_t stream) { all_.EnqueueBare(stream); }, &bare);
  for (const Chain& chain : Chains()) {
    const std::string name = std::string(chain.name) + ": ";
    TakeResult([&](cudaStream_t stream) { (this->*chain.enqueue)(stream, Way{}); }, &in_turn);
    Check(name + "grad_hidden", RelativeDifference(in_turn.grad_hidden.get(), bare.grad_hidden.get(), kRows * kStudent), 1e-3);
    Check(name + "grad_weight", RelativeDifference(in_turn.grad_weight.get(), bare.grad_weight.get(), kVocab * kStudent), 1e-3);
    for (const Way& way : chain.ways) {
      TakeResult([&](cudaStream_t stream) { (this->*chain.enqueue)(stream, way); }, &beside);
      const double different =
          Different(in_turn.student_logits, beside.student_logits) + Different(in_turn.teacher_logits, beside.teacher_logits) +
          Different(in_turn.grad_hidden, beside.grad_hidden) + Different(in_turn.grad_weight, beside.grad_weight) +
          Different(in_turn.reports, beside.reports) + Different(in_turn.row_factor, beside.row_factor);
      Check(name + "words that differ with " + std::to_string(way.multiprocessors) + " beside", different, 0);
    }
  }
}

void Experiment::Time(const std::string& title, const Candidate& floor, const std::vector<Chain>& chains, double flops) {
  std::vector<Candidate> candidates = {floor};
  for (const Chain& chain : chains) {
    for (const Way& way : chain.ways) {
      const std::string share = way.multiprocessors == 0
                                    ? ", in turn"
                                    : ", " + std::to_string(way.multiprocessors) + "/" + std::to_string(way.last_multiprocessors);
      candidates.push_back({chain.name + share, [this, chain, way](cudaStream_t s) { (this->*chain.enqueue)(s, way); }, flops, 0});
    }
  }
  bench_.Run(title, candidates, {1.0, 0.4, 2, false});
  // How long the passes of one more call took, warm.
  size_t next = 1;
  for (const Chain& chain : chains) {
    for (const Way& way : chain.ways) {
      const Candidate& candidate = candidates[next++];
      if (way.multiprocessors == 0) continue;
      bench_.TimeCalls(candidate, 3);
      LAB_CUDA(cudaDeviceSynchronize());
      std::printf("passes took %-44s", candidate.name.c_str());
      const int passes = chain.enqueue == &Experiment::LogitsOfHalves ? 4 : 2;
      for (int i = 0; i < passes; ++i) std::printf(" %6.2f", beside_.Took(i));
      std::printf(" ms\n");
    }
  }
  std::fflush(stdout);
}

void Experiment::TimeLogits() {
  const Candidate floor = {"bare products, 8192 rows", [&](cudaStream_t s) { all_.EnqueueBareLogits(s); }, all_.logits_flops(), 0};
  const auto ways = [](std::vector<int32_t> shares) {
    std::vector<Way> ways = {Way{}};
    for (const int32_t share : shares) ways.push_back({share, share});
    return ways;
  };
  std::vector<Chain> chains;
  chains.push_back({"4096 rows", &Experiment::LogitsOfChunks, ways({16, 24, 32, 40, 48, 64})});
  chains.push_back({"2048 rows", &Experiment::LogitsOfHalves, ways({24, 32, 40, 48})});
  Time("logits and M of 8192 rows", floor, chains, all_.logits_flops());
}

std::vector<Experiment::Chain> Experiment::Chains() const {
  return {{"two chunks apart", &Experiment::TwoChunks, {{0, 0}, {24, 40}, {32, 48}, {40, 64}}},
          {"halves", &Experiment::Halves, {{0, 0}, {40, 64}, {56, 88}}}};
}

void Experiment::TimeChains() {
  const Candidate floor = {"bare products, 8192 rows", [&](cudaStream_t s) { all_.EnqueueBare(s); }, all_.flops(), 0};
  Time("divergence of 8192 rows with gradients", floor, Chains(), all_.flops());
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("015_pass_beside_products");
  Experiment().Run(argc < 2 ? "" : argv[1]);
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
