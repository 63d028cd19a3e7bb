// 016: both gradients of cross entropy from a list of the dithered gradient's entries (gradient_lists.cuh), without E.
// Checks against fp64 on the CPU: small lists whole, full size on sampled rows and columns; the bits of two runs from pools in
// different orders are compared. Times after a product of the logits, as in a micro-batch, so that caches and clock are its own.
// Run: 016_gradient_lists [check | time]
//
// Gate (issue 33, 4 b): 100 entries a row at N4096 H4096 V128256 into both gradients within 2.5 ms, the order by column included.
// Predicted for an H100 (2.9 TB/s from memory as copies have it, 5.5 from L2), 410 thousand entries in 60 thousand columns:
//   sorting          capacity 2^20: six passes over 8 bytes an entry, launches more than bytes     0.10 ms
//   plan             binary searches                                                               0.01
//   grad_hidden      3.4 GB from L2 in slices 0.61, of which 0.5 GB from memory once               0.65
//     all of the width at a time: 60 % of 3.4 GB from memory                                       0.9
//   grad_weight      3.4 GB from L2, 1 GB read and 1 GB written beside them                        1.0
//     four micro-batches' at once, a micro-batch                                                   0.75
//   together                                                                                       1.8, gate held

#include <cstring>
#include <random>
#include <unordered_set>

#include "blas.cuh"
#include "e_form_rest.cuh"
#include "frequent_columns.cuh"

namespace {

using headwater::lab::BlasProduct;
using headwater::lab::Check;
using headwater::lab::Chunk;
using headwater::lab::DeviceArray;
using headwater::lab::kChunk;
using headwater::lab::kNoEntry;
using headwater::lab::ListView;
using headwater::lab::PlanCounts;
using headwater::lab::PlanView;
using headwater::lab::SplitColumn;
using headwater::lab::Update;

struct Entry {
  int32_t column;
  float value;
};

// Entries of every row, its target's among them. Lengths are log-normal, the 99th percentile five times the mean; columns by Zipf's
// law, frequent ones at low numbers as tokenizers have them, give or take a factor of e.
std::vector<std::vector<Entry>> MakeRows(int64_t rows, int64_t vocab, double mean, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> cumulative(static_cast<size_t>(vocab)), places(static_cast<size_t>(vocab));
  std::vector<int32_t> column_of(static_cast<size_t>(vocab));
  double total = 0;
  for (int64_t rank = 0; rank < vocab; ++rank) {
    cumulative[rank] = total += 1.0 / static_cast<double>(rank + 1);
    places[rank] = std::log(static_cast<double>(rank + 1)) + normal(random);
    column_of[rank] = static_cast<int32_t>(rank);
  }
  std::sort(column_of.begin(), column_of.end(), [&](int32_t a, int32_t b) { return places[a] < places[b]; });
  const auto draw = [&] {
    const auto found = std::upper_bound(cumulative.begin(), cumulative.end(), uniform(random) * total);
    return column_of[std::min<int64_t>(found - cumulative.begin(), vocab - 1)];
  };
  constexpr double kSigma = 0.85;
  std::vector<std::vector<Entry>> result(static_cast<size_t>(rows));
  for (auto& row : result) {
    const double length = mean * std::exp(kSigma * normal(random) - kSigma * kSigma / 2);
    const auto entries = static_cast<size_t>(std::clamp(length, 1.0, static_cast<double>(vocab) / 4));
    const float q = std::ldexp(1.0f, -4 - static_cast<int>(random() % 7));
    std::unordered_set<int32_t> taken = {draw()};
    row.push_back({*taken.begin(), -static_cast<float>(1 + 20 * uniform(random))});
    while (row.size() < entries + 1) {
      const int32_t column = draw();
      if (!taken.insert(column).second) continue;
      const double value = uniform(random) < 0.85 ? 1.0 : 1 + 15 * uniform(random);
      row.push_back({column, q * __bfloat162float(__float2bfloat16(static_cast<float>(value)))});
    }
  }
  return result;
}

// What grad_weight holds at `index` before: in (-1, 1), the same on host and device.
__host__ __device__ float BeforeAt(int64_t index) {
  const uint64_t state = (static_cast<uint64_t>(index) + 1) * 0x9E3779B97F4A7C15ull;
  return (static_cast<float>(state >> 48) - 32767.5f) / 32768.0f;
}

__global__ void FillFloatKernel(float* out, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = BeforeAt(i);
  }
}

// Depends on every bit and its place, not on the order of the additions.
__global__ void BitsKernel(const uint32_t* words, int64_t count, unsigned long long* sum) {
  unsigned long long mine = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    mine += (words[i] + 1ull) * (2ull * static_cast<unsigned long long>(i) + 1) * 0x9E3779B97F4A7C15ull;
  }
  atomicAdd(sum, mine);
}

unsigned long long BitsOf(const void* data, size_t bytes) {
  DeviceArray<unsigned long long> sum(1);
  sum.Zero();
  BitsKernel<<<1056, 256>>>(static_cast<const uint32_t*>(data), static_cast<int64_t>(bytes / 4), sum.get());
  LAB_CUDA(cudaGetLastError());
  return sum.ToHost()[0];
}

// W and grad_weight, which lists of several sizes share.
struct Head {
  Head(int64_t vocab_size, int64_t hidden_size)
      : vocab(vocab_size), width(hidden_size), weight(vocab * width), grad_weight(vocab * width) {
    headwater::lab::FillNormal(weight, 1, 0.02f);
  }
  void Reset() {
    FillFloatKernel<<<1056, 256>>>(grad_weight.get(), grad_weight.count());
    LAB_CUDA(cudaGetLastError());
  }
  std::vector<float> WeightRow(int64_t column) const {
    std::vector<__nv_bfloat16> row(static_cast<size_t>(width));
    LAB_CUDA(cudaMemcpy(row.data(), weight.get() + column * width, row.size() * 2, cudaMemcpyDeviceToHost));
    return {row.begin(), row.end()};
  }
  std::vector<float> GradRow(int64_t column) const {
    std::vector<float> row(static_cast<size_t>(width));
    LAB_CUDA(cudaMemcpy(row.data(), grad_weight.get() + column * width, row.size() * 4, cudaMemcpyDeviceToHost));
    return row;
  }
  int64_t vocab, width;
  DeviceArray<__nv_bfloat16> weight;
  DeviceArray<float> grad_weight;
};

// A list of `rows` rows, from the pool to both gradients.
class Lists {
 public:
  Lists(Head& head, int64_t row_count, double mean)
      : rows_(row_count),
        head_(head),
        entries_(MakeRows(row_count, head.vocab, mean, 5)),
        hidden_(rows_ * head.width),
        grad_hidden_(rows_ * head.width) {
    for (const auto& row : entries_) count_ += static_cast<int64_t>(row.size());
    while ((int64_t{1} << row_bits_) < rows_) ++row_bits_;
    capacity_ = 1024;
    while (capacity_ < count_ * 5 / 4) capacity_ *= 2;
    headwater::lab::FillNormal(hidden_, 2, 1.0f);
    std::mt19937_64 random(9);
    factors_.resize(static_cast<size_t>(rows_));
    for (float& factor : factors_) factor = static_cast<float>(0.5 + static_cast<double>(random() % 1000) / 1000.0);
    factor_ = DeviceArray<float>(factors_);
    const int64_t max_chunks = head.vocab + capacity_ / 32, max_partials = 2 * capacity_ / kChunk;
    pool_keys_ = DeviceArray<uint32_t>(capacity_);
    pool_values_ = DeviceArray<float>(capacity_);
    column_keys_ = DeviceArray<uint32_t>(capacity_);
    column_values_ = DeviceArray<float>(capacity_);
    row_keys_ = DeviceArray<uint32_t>(capacity_);
    row_values_ = DeviceArray<float>(capacity_);
    weights_ = DeviceArray<float>(capacity_);
    row_first_ = DeviceArray<int32_t>(rows_ + 1);
    device_count_ = DeviceArray<uint32_t>(std::vector<uint32_t>{static_cast<uint32_t>(count_)});
    counts_ = DeviceArray<PlanCounts>(1);
    chunks_ = DeviceArray<Chunk>(max_chunks);
    splits_ = DeviceArray<SplitColumn>(max_partials);
    partial_ = DeviceArray<float>(max_partials * head.width);
    FillPool(1);
    size_t bytes = 0, more = 0;
    SortBy(nullptr, &bytes, 0, nullptr);
    SortBy(nullptr, &more, 1, nullptr);
    sort_bytes_ = std::max(bytes, more);
    sort_space_ = DeviceArray<uint8_t>(static_cast<int64_t>(sort_bytes_));
    list_ = ListView{static_cast<int32_t>(rows_),
                     static_cast<int32_t>(head.vocab),
                     static_cast<int32_t>(head.width),
                     row_bits_,
                     static_cast<int32_t>(capacity_),
                     device_count_.get(),
                     factor_.get(),
                     column_keys_.get(),
                     column_values_.get(),
                     row_keys_.get(),
                     row_values_.get()};
    plan_ =
        PlanView{row_first_.get(), weights_.get(), counts_.get(), chunks_.get(), splits_.get(), static_cast<int32_t>(max_chunks)};
  }

  // The pool in another order.
  void FillPool(uint64_t seed) {
    std::vector<std::pair<uint32_t, float>> pool;
    for (int64_t row = 0; row < rows_; ++row) {
      for (const Entry& entry : entries_[row]) {
        pool.emplace_back(static_cast<uint32_t>(entry.column) << row_bits_ | static_cast<uint32_t>(row), entry.value);
      }
    }
    std::mt19937_64 random(seed);
    std::shuffle(pool.begin(), pool.end(), random);
    std::vector<uint32_t> keys(static_cast<size_t>(capacity_), kNoEntry);
    std::vector<float> values(static_cast<size_t>(capacity_), NAN);
    for (size_t i = 0; i < pool.size(); ++i) {
      keys[i] = pool[i].first;
      values[i] = pool[i].second;
    }
    LAB_CUDA(cudaMemcpy(pool_keys_.get(), keys.data(), pool_keys_.bytes(), cudaMemcpyHostToDevice));
    LAB_CUDA(cudaMemcpy(pool_values_.get(), values.data(), pool_values_.bytes(), cudaMemcpyHostToDevice));
  }

  void SortByColumn(cudaStream_t stream) { SortBy(sort_space_.get(), &sort_bytes_, 0, stream); }
  void SortByRow(cudaStream_t stream) { SortBy(sort_space_.get(), &sort_bytes_, 1, stream); }
  void Plan(cudaStream_t stream) {
    LAB_CUDA(cudaMemsetAsync(counts_.get(), 0, sizeof(PlanCounts), stream));
    const int64_t threads = std::max({capacity_, head_.vocab, rows_ + 1});
    headwater::lab::PlanKernel<<<static_cast<int>((threads + 255) / 256), 256, 0, stream>>>(list_, plan_);
    LAB_CUDA(cudaGetLastError());
  }
  // slices_at_once: 0 is all of the width.
  template <int kLanes, int kWarps>
  void GradHidden(cudaStream_t stream, int slices_at_once = 1, const float* dense_sums = nullptr) {
    const auto slices = static_cast<int32_t>(head_.width / (8 * kLanes));
    headwater::lab::GradHiddenKernel<kLanes, kWarps><<<static_cast<int>(rows_) * slices, 32 * kWarps, 0, stream>>>(
        list_, row_first_.get(), head_.weight.get(), grad_hidden_.get(), dense_sums, slices_at_once == 0 ? slices : slices_at_once);
    LAB_CUDA(cudaGetLastError());
  }
  template <int kVectors, Update kUpdate, int kBlocks>
  void GradWeight(cudaStream_t stream) {
    headwater::lab::GradWeightKernel<kVectors, kUpdate, kBlocks>
        <<<132 * kBlocks, 128, 0, stream>>>(list_, plan_, hidden_.get(), head_.grad_weight.get(), partial_.get());
    LAB_CUDA(cudaGetLastError());
  }
  void GradWeightSplit(cudaStream_t stream) {
    headwater::lab::GradWeightSplitKernel<<<132 * 8, 128, 0, stream>>>(list_, plan_, partial_.get(), head_.grad_weight.get());
    LAB_CUDA(cudaGetLastError());
  }
  void All(cudaStream_t stream) {
    SortByColumn(stream);
    SortByRow(stream);
    Plan(stream);
    GradHidden<32, 4>(stream);
    GradWeight<1, Update::kReduce, 8>(stream);
    GradWeightSplit(stream);
  }

  void PrintShape() const {
    const PlanCounts counts = counts_.ToHost()[0];
    size_t longest = 0;
    for (const auto& row : entries_) longest = std::max(longest, row.size());
    std::printf(
        "\n# N%lld H%lld V%lld: %lld entries (%.1f a row, longest %zu), capacity %lld; chunks %u + %u light; %u columns split "
        "into %u\n",
        static_cast<long long>(rows_), static_cast<long long>(head_.width), static_cast<long long>(head_.vocab),
        static_cast<long long>(count_), static_cast<double>(count_) / static_cast<double>(rows_), longest,
        static_cast<long long>(capacity_), counts.heavy, counts.light, counts.split, counts.partials);
  }
  // Relative errors of grad_hidden over every row_step-th row and of what was added to grad_weight over sampled columns.
  void CheckValues(const std::string& name, int64_t row_step, int64_t column_step, double weight_bound = 2e-6) {
    const std::vector<__nv_bfloat16> grad_hidden = grad_hidden_.ToHost(), hidden = hidden_.ToHost();
    const int64_t width = head_.width;
    double worst_row = 0, worst_column = 0;
    std::vector<double> sums(static_cast<size_t>(width));
    for (int64_t row = 0; row < rows_; row += row_step) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (const Entry& entry : entries_[row]) {
        const std::vector<float> weight = head_.WeightRow(entry.column);
        for (int64_t i = 0; i < width; ++i) sums[i] += static_cast<double>(entry.value) * static_cast<double>(weight[i]);
      }
      for (double& sum : sums) sum *= static_cast<double>(factors_[row]);
      const auto from = grad_hidden.begin() + row * width;
      Raise(headwater::lab::RelativeDifference(std::vector<__nv_bfloat16>(from, from + width), sums), &worst_row);
    }
    Check(name + "grad_hidden, worst row", worst_row, 2.2e-3);
    std::vector<std::vector<std::pair<int64_t, double>>> columns(static_cast<size_t>(head_.vocab));
    for (int64_t row = 0; row < rows_; ++row) {
      for (const Entry& entry : entries_[row]) {
        columns[entry.column].emplace_back(row, static_cast<double>(entry.value) * static_cast<double>(factors_[row]));
      }
    }
    std::vector<int64_t> order(columns.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return columns[a].size() > columns[b].size(); });
    // From the most frequent column to those without entries.
    size_t touched = 0;
    for (const auto& column : columns) touched += column.empty() ? 0 : 1;
    for (size_t place = 0; place < order.size(); place += place < 8 ? 1 : static_cast<size_t>(column_step)) {
      const int64_t column = order[place];
      const std::vector<float> got = head_.GradRow(column);
      double difference = 0, norm = 0;
      for (int64_t i = 0; i < width; ++i) {
        const auto before = static_cast<double>(BeforeAt(column * width + i));
        double sum = 0, size = 0;
        for (const auto& [row, value] : columns[column]) {
          const double term = value * static_cast<double>(__bfloat162float(hidden[row * width + i]));
          sum += term;
          size += term * term;
        }
        const double error = static_cast<double>(got[i]) - before - sum;
        difference += error * error;
        norm += size + before * before;
      }
      Raise(std::sqrt(difference / norm), &worst_column);
    }
    std::printf("%zu columns touched, the most frequent by %zu rows\n", touched, columns[order[0]].size());
    Check(name + "grad_weight, worst column", worst_column, weight_bound);
  }
  std::pair<unsigned long long, unsigned long long> Bits() const {
    return {BitsOf(grad_hidden_.get(), grad_hidden_.bytes()), BitsOf(head_.grad_weight.get(), head_.grad_weight.bytes())};
  }
  void PoisonResult() { grad_hidden_.Poison(); }
  double gathered_bytes() const { return static_cast<double>(count_) * static_cast<double>(head_.width) * 2; }

 private:
  friend class FrequentColumns;
  static void Raise(double value, double* worst) {
    if (!(value <= *worst)) *worst = value;
  }
  // 0: the pool by whole keys. 1: those by row.
  void SortBy(void* space, size_t* bytes, int which, cudaStream_t stream) {
    int key_bits = row_bits_;
    while ((int64_t{1} << (key_bits - row_bits_)) < head_.vocab + 1) ++key_bits;  // kNoEntry comes last
    if (which == 0) {
      LAB_CUDA(cub::DeviceRadixSort::SortPairs(space, *bytes, pool_keys_.get(), column_keys_.get(), pool_values_.get(),
                                               column_values_.get(), static_cast<int>(capacity_), 0, key_bits, stream));
    } else {
      LAB_CUDA(cub::DeviceRadixSort::SortPairs(space, *bytes, column_keys_.get(), row_keys_.get(), column_values_.get(),
                                               row_values_.get(), static_cast<int>(capacity_), 0, row_bits_, stream));
    }
  }

  int64_t rows_, count_ = 0, capacity_ = 0;
  int32_t row_bits_ = 0;
  Head& head_;
  std::vector<std::vector<Entry>> entries_;
  std::vector<float> factors_;
  DeviceArray<__nv_bfloat16> hidden_, grad_hidden_;
  DeviceArray<float> factor_, pool_values_, column_values_, row_values_, weights_, partial_;
  DeviceArray<uint32_t> pool_keys_, column_keys_, row_keys_, device_count_;
  DeviceArray<int32_t> row_first_;
  DeviceArray<PlanCounts> counts_;
  DeviceArray<Chunk> chunks_;
  DeviceArray<SplitColumn> splits_;
  DeviceArray<uint8_t> sort_space_;
  size_t sort_bytes_ = 0;
  ListView list_{};
  PlanView plan_{};
};

// The same with a product for the frequent columns.
class FrequentColumns {
 public:
  FrequentColumns(headwater::lab::BlasContext& blas, Lists& lists, int64_t slots, int32_t threshold)
      : lists_(lists),
        blocks_(static_cast<int>((lists.head_.vocab + 255) / 256)),
        frequent_(lists.head_.vocab),
        block_counts_(blocks_),
        slot_of_(lists.head_.vocab),
        column_of_(slots),
        matrix_(lists.rows_ * slots),
        weight_(slots * lists.head_.width),
        scaled_(lists.rows_ * lists.head_.width),
        hidden_sums_(lists.rows_ * lists.head_.width),
        weight_sums_(slots * lists.head_.width),
        hidden_product_(BlasProduct::GradHidden(blas, lists.rows_, lists.head_.width, slots, matrix_.get(), weight_.get(),
                                                hidden_sums_.get(), CUDA_R_32F)),
        weight_product_(BlasProduct::GradWeight(blas, lists.rows_, lists.head_.width, slots, matrix_.get(), scaled_.get(),
                                                weight_sums_.get(), 0.0f)),
        view_{static_cast<int32_t>(slots),
              threshold,
              frequent_.get(),
              block_counts_.get(),
              slot_of_.get(),
              column_of_.get(),
              matrix_.get(),
              weight_.get()} {
    hidden_product_.TakeFirst();
    weight_product_.TakeFirst();
  }
  // Between the two sorts.
  void Prepare(cudaStream_t stream) {
    LAB_CUDA(cudaMemsetAsync(column_of_.get(), 0xff, column_of_.bytes(), stream));
    LAB_CUDA(cudaMemsetAsync(matrix_.get(), 0, matrix_.bytes(), stream));
    headwater::lab::CountFrequentKernel<<<blocks_, 256, 0, stream>>>(lists_.list_, view_);
    headwater::lab::AssignSlotsKernel<<<blocks_, 256, 0, stream>>>(lists_.list_, view_);
    headwater::lab::SpreadKernel<<<static_cast<int>((lists_.capacity_ + 255) / 256), 256, 0, stream>>>(lists_.list_, view_,
                                                                                                       lists_.column_values_.get());
    headwater::lab::GatherWeightKernel<<<view_.slots, 256, 0, stream>>>(view_, lists_.head_.weight.get(), lists_.list_.width);
    LAB_CUDA(cudaGetLastError());
  }
  void GradHidden(cudaStream_t stream) {
    hidden_product_.Enqueue(stream);
    lists_.GradHidden<32, 4>(stream, 1, hidden_sums_.get());
  }
  void GradWeight(cudaStream_t stream) {
    const int64_t vectors = lists_.rows_ * lists_.head_.width / 8;
    headwater::sm90::ScaleRowsKernel<<<static_cast<int>((vectors + 255) / 256), 256, 0, stream>>>(
        lists_.hidden_.get(), lists_.factor_.get(), vectors, lists_.list_.width / 8, scaled_.get());
    weight_product_.Enqueue(stream);
    lists_.GradWeight<1, Update::kReduce, 8>(stream);
    lists_.GradWeightSplit(stream);
    headwater::lab::AddFrequentKernel<<<view_.slots, 256, 0, stream>>>(view_, weight_sums_.get(), lists_.list_.width,
                                                                       lists_.head_.grad_weight.get());
    LAB_CUDA(cudaGetLastError());
  }
  void All(cudaStream_t stream) {
    lists_.SortByColumn(stream);
    Prepare(stream);
    lists_.SortByRow(stream);
    lists_.Plan(stream);
    GradHidden(stream);
    GradWeight(stream);
  }
  void PrintShape() const {
    int64_t used = 0, zeros = 0;
    for (const int32_t column : column_of_.ToHost()) used += column >= 0 ? 1 : 0;
    const std::vector<float> values = lists_.column_values_.ToHost();
    for (int64_t i = 0; i < lists_.count_; ++i) zeros += values[i] == 0.0f ? 1 : 0;
    std::printf("%lld of %d slots used by columns of more than %d entries, which have %lld entries, %.2f of all\n",
                static_cast<long long>(used), view_.slots, view_.threshold, static_cast<long long>(zeros),
                static_cast<double>(zeros) / static_cast<double>(lists_.count_));
  }

 private:
  Lists& lists_;
  const int blocks_;
  DeviceArray<uint32_t> frequent_;
  DeviceArray<int32_t> block_counts_, slot_of_, column_of_;
  DeviceArray<__nv_bfloat16> matrix_, weight_, scaled_;
  DeviceArray<float> hidden_sums_, weight_sums_;
  BlasProduct hidden_product_, weight_product_;
  headwater::lab::FrequentView view_;
};

// All units' results, and that neither the pool's order nor the variant of a kernel that splits no sum changes a bit of them.
void CheckLists(const std::string& name, Head& head, Lists& lists, int64_t row_step, int64_t column_step) {
  const auto run = [&] {
    head.Reset();
    lists.PoisonResult();
    lists.All(nullptr);
    LAB_CUDA(cudaDeviceSynchronize());
    return lists.Bits();
  };
  const auto first = run();
  lists.PrintShape();
  lists.CheckValues(name, row_step, column_step);
  lists.FillPool(2);
  const auto second = run();
  Check(name + "another order of the pool, words of bits that differ",
        (first.first != second.first) + (first.second != second.second), 0);
  head.Reset();
  lists.GradWeight<2, Update::kReadWrite, 4>(nullptr);
  lists.GradWeightSplit(nullptr);
  Check(name + "grad_weight in wider slices, read and written", lists.Bits().second != first.second, 0);
}

// Frequent columns by a product: its scaled hidden states are rounded.
void CheckFrequent(headwater::lab::BlasContext& blas, const std::string& name, Head& head, Lists& lists, int64_t slots,
                   int64_t row_step, int64_t column_step) {
  FrequentColumns frequent(blas, lists, slots, 32);
  const auto run = [&] {
    head.Reset();
    lists.PoisonResult();
    frequent.All(nullptr);
    LAB_CUDA(cudaDeviceSynchronize());
    return lists.Bits();
  };
  const auto first = run();
  frequent.PrintShape();
  lists.CheckValues(name, row_step, column_step, 2.2e-3);
  lists.FillPool(3);
  Check(name + "another order of the pool", run() != first, 0);
}

// Median milliseconds of `pass` after `before`, which is not counted.
template <class Before, class Pass>
double MedianOf(const Before& before, const Pass& pass) {
  cudaEvent_t start, stop;
  LAB_CUDA(cudaEventCreate(&start));
  LAB_CUDA(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int i = 0; i < 13; ++i) {
    before();
    LAB_CUDA(cudaEventRecord(start, nullptr));
    pass();
    LAB_CUDA(cudaEventRecord(stop, nullptr));
    LAB_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    LAB_CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) times.push_back(static_cast<double>(ms));
  }
  LAB_CUDA(cudaEventDestroy(start));
  LAB_CUDA(cudaEventDestroy(stop));
  return headwater::lab::Median(times);
}

void TimeLists(headwater::lab::BlasContext& blas, Lists& lists, const BlasProduct& logits, bool variants) {
  lists.All(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  lists.PrintShape();
  const auto time = [&](const char* name, double bytes, const auto& pass) {
    const double ms = MedianOf([&] { logits.Enqueue(nullptr); }, pass);
    std::printf("%-58s %8.3f ms", name, ms);
    if (bytes > 0) std::printf("  %6.2f TB/s gathered", bytes / ms * 1e-9);
    std::printf("\n");
    std::fflush(stdout);
  };
  const double bytes = lists.gathered_bytes();
  time("sorts", 0, [&] {
    lists.SortByColumn(nullptr);
    lists.SortByRow(nullptr);
  });
  time("plan", 0, [&] { lists.Plan(nullptr); });
  time("grad_hidden, slices of 256", bytes, [&] { lists.GradHidden<32, 4>(nullptr); });
  if (variants) {
    time("grad_hidden, slices of 64", bytes, [&] { lists.GradHidden<8, 4>(nullptr); });
    time("grad_hidden, slices of 128", bytes, [&] { lists.GradHidden<16, 4>(nullptr); });
    time("grad_hidden, slices of 256, all of the width", bytes, [&] { lists.GradHidden<32, 4>(nullptr, 0); });
    time("grad_hidden, slices of 256, 8 warps", bytes, [&] { lists.GradHidden<32, 8>(nullptr); });
  }
  time("grad_weight, slices of 256, added by L2, 8 blocks", bytes, [&] { lists.GradWeight<1, Update::kReduce, 8>(nullptr); });
  time("grad_weight, slices of 512, added by L2, 5 blocks", bytes, [&] { lists.GradWeight<2, Update::kReduce, 5>(nullptr); });
  time("grad_weight, slices of 256, prefetched, 6 blocks", bytes, [&] { lists.GradWeight<1, Update::kPrefetch, 6>(nullptr); });
  if (variants) {
    time("grad_weight, slices of 512, prefetched, 4 blocks", bytes, [&] { lists.GradWeight<2, Update::kPrefetch, 4>(nullptr); });
    time("grad_weight, slices of 256, read and written, 6 blocks", bytes,
         [&] { lists.GradWeight<1, Update::kReadWrite, 6>(nullptr); });
    time("grad_weight, slices of 512, read and written, 4 blocks", bytes,
         [&] { lists.GradWeight<2, Update::kReadWrite, 4>(nullptr); });
  }
  time("grad_weight, split columns", 0, [&] { lists.GradWeightSplit(nullptr); });
  time("all", 2 * bytes, [&] { lists.All(nullptr); });
  for (const int64_t slots : {1024, 2048}) {
    FrequentColumns frequent(blas, lists, slots, 32);
    frequent.All(nullptr);
    LAB_CUDA(cudaDeviceSynchronize());
    frequent.PrintShape();
    time("frequent columns' matrix and rows of W", 0, [&] { frequent.Prepare(nullptr); });
    time("grad_hidden with a product for frequent columns", 0, [&] { frequent.GradHidden(nullptr); });
    time("grad_weight with a product for frequent columns", 0, [&] { frequent.GradWeight(nullptr); });
    time("all with products for frequent columns", 0, [&] { frequent.All(nullptr); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("016_gradient_lists");
  const std::string mode = argc > 1 ? argv[1] : "";
  headwater::lab::BlasContext blas;
  {
    Head head(1000, 512);
    Lists few(head, 37, 30), many(head, 700, 60);
    CheckLists("N37 H512 V1000: ", head, few, 1, 1);
    CheckLists("N700 H512 V1000: ", head, many, 1, 1);
    CheckFrequent(blas, "N700 H512 V1000, 64 slots: ", head, many, 64, 1, 1);
  }
  Head head(128256, 4096);
  if (mode != "time") {
    Lists lists(head, 4096, 100);
    CheckLists("N4096 H4096 V128256: ", head, lists, 256, 997);
    CheckFrequent(blas, "N4096 H4096 V128256, 1024 slots: ", head, lists, 1024, 256, 997);
  }
  if (mode != "check") {
    DeviceArray<__nv_bfloat16> product(int64_t{4096} * 128256), hidden(int64_t{4096} * 4096);
    headwater::lab::FillNormal(hidden, 3, 1.0f);
    BlasProduct logits = BlasProduct::Logits(blas, 4096, 4096, 128256, hidden.get(), head.weight.get(), product.get(), CUDA_R_16BF);
    logits.TakeFirst();
    std::printf("\nlogits' product before each %.3f ms\n", MedianOf([] {}, [&] { logits.Enqueue(nullptr); }));
    {
      const double copied = 2e-9 * static_cast<double>(product.bytes());
      const double ms = MedianOf(
          [] {},
          [&] {
            LAB_CUDA(cudaMemcpyAsync(head.grad_weight.get(), product.get(), product.bytes(), cudaMemcpyDeviceToDevice, nullptr));
          });
      std::printf("copy of %.2f GB %.3f ms, %.2f TB/s\n", copied / 2, ms, copied / ms);
    }
    head.Reset();
    for (const double mean : {100.0, 30.0, 270.0}) {
      Lists lists(head, 4096, mean);
      TimeLists(blas, lists, logits, mean == 100.0);
    }
    std::printf("\n# four micro-batches' at once\n");
    Lists lists(head, 16384, 100);
    TimeLists(blas, lists, logits, false);
  }
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
