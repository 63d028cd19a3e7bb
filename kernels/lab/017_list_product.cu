// 017: product 1 whose epilogue dithers and appends to a pool instead of writing E (list_product.cuh), against the E form's.
// Checks entry by entry against fp64 exponentials with the same draws. Run: 017_list_product [check]
//
// The dense form with a hash an element in straight code, in the product's epilogue, takes about 1.5 times the clocks of the E
// form's. Predicted, N4096 H4096 V128256, flat rows of 100 to 200 entries: 25 instructions an element more, 8000 issue slots of a
// tile's 112000 clocks, in the pauses of the other warpgroup's products; 1.05 GB less to write. In time 0.98 to 1.03 of the E
// form's; straight code of 80 KB 3 % slower than the loop. With a draw a group of 16 columns: 1000 issue slots more, 0.97 to 1.00.

#include "list_product.cuh"
#include "problem.cuh"

namespace {

using headwater::lab::Check;
using headwater::lab::DeviceArray;
using headwater::lab::Problem;
using headwater::sm90::Dithering;
using headwater::sm90::Draw;
using headwater::sm90::DrawKey;
using headwater::sm90::Major;
using headwater::sm90::Tile256;
using headwater::sm90::Tile320;

template <Dithering kDithering, class Config>
using ListProduct = headwater::sm90::Product<Major::kK, Major::kK, headwater::sm90::ListProductEpilogue<kDithering>, Config>;

// The pool, and what the epilogue needs of the rows: units a power of two at or below `resolution` times the row's sum.
struct Pool {
  Pool(const Problem& problem, const std::vector<double>& sums, double resolution, int64_t capacity_in)
      : capacity(capacity_in), pool_keys(capacity), pool_values(capacity), count(1) {
    while ((int64_t{1} << row_bits) < problem.rows) ++row_bits;
    for (int64_t i = 0; i < problem.rows; ++i) {
      units.push_back(static_cast<float>(std::exp2(std::floor(std::log2(resolution * sums[i])))));
      keys.push_back({static_cast<uint32_t>(i) * 0x85EBCA6Bu + 1, static_cast<uint32_t>(i) * 0xC2B2AE35u + 7});
    }
    device_units = DeviceArray<float>(units);
    device_keys = DeviceArray<DrawKey>(keys);
    Clear(nullptr);
  }
  void Clear(cudaStream_t stream) const {
    LAB_CUDA(cudaMemsetAsync(count.get(), 0, count.bytes(), stream));
    LAB_CUDA(cudaMemsetAsync(pool_keys.get(), 0xff, pool_keys.bytes(), stream));
  }
  template <Dithering kDithering, class Config>
  ListProduct<kDithering, Config> Make(const Problem& problem) const {
    return ListProduct<kDithering, Config>(
        problem.hidden.get(), problem.weight.get(), problem.exponentials.get(), problem.rows, problem.vocab, problem.width,
        {problem.offset.get(), problem.targets.get(), device_units.get(), device_keys.get(), problem.partial_sum.get(),
         pool_keys.get(), pool_values.get(), count.get(), static_cast<uint32_t>(capacity), row_bits, 1.0f},
        {8});
  }
  // By key.
  std::vector<std::pair<uint32_t, float>> Entries() const {
    const uint32_t entries = std::min<uint32_t>(count.ToHost()[0], static_cast<uint32_t>(capacity));
    const std::vector<uint32_t> host_keys = pool_keys.ToHost();
    const std::vector<float> host_values = pool_values.ToHost();
    std::vector<std::pair<uint32_t, float>> result;
    for (uint32_t i = 0; i < entries; ++i) result.emplace_back(host_keys[i], host_values[i]);
    std::sort(result.begin(), result.end());
    return result;
  }
  int64_t capacity;
  int32_t row_bits = 0;
  std::vector<float> units;
  std::vector<DrawKey> keys;
  DeviceArray<uint32_t> pool_keys;
  DeviceArray<float> pool_values;
  DeviceArray<uint32_t> count;
  DeviceArray<float> device_units;
  DeviceArray<DrawKey> device_keys;
};

std::vector<double> Sums(const Problem& problem, int tile_columns) {
  const std::vector<float> partial = problem.partial_sum.ToHost();
  std::vector<double> sums(static_cast<size_t>(problem.rows), 0.0);
  for (int64_t tile = 0; tile < (problem.vocab + tile_columns - 1) / tile_columns; ++tile) {
    for (int64_t i = 0; i < problem.rows; ++i) sums[i] += static_cast<double>(partial[tile * problem.rows + i]);
  }
  return sums;
}

template <Dithering kDithering, class Config>
void CheckSmall(const Problem& problem, const headwater::lab::Reference& reference, double resolution, const std::string& name) {
  Pool pool(problem, reference.sum, resolution, problem.rows * problem.vocab);
  const auto product = pool.Make<kDithering, Config>(problem);
  product.Enqueue(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  const std::vector<double> sums = Sums(problem, Config::kTileN);
  double worst_sum = 0;
  for (int64_t i = 0; i < problem.rows; ++i) {
    const double error = std::abs(sums[i] / reference.sum[i] - 1.0);
    if (!(error <= worst_sum)) worst_sum = error;
  }
  Check(name + "S, worst row", worst_sum, 2e-5);
  // What each element's entry is in units, and whether it is too near to a threshold for fp32 to be held to it.
  std::vector<double> expected(static_cast<size_t>(problem.rows * problem.vocab), 0.0);
  std::vector<bool> undecided(expected.size(), false);
  const auto ratio_at = [&](int64_t i, int64_t j) {
    return reference.exponentials[i * problem.vocab + j] / static_cast<double>(pool.units[i]);
  };
  if (kDithering == Dithering::kSystematic) {
    for (int64_t i = 0; i < problem.rows; ++i) {
      for (int64_t first = 0; first < problem.vocab; first += 64) {
        for (int64_t group = 0; group < 4; ++group) {
          double sum = std::ldexp(static_cast<double>(Draw(pool.keys[i], static_cast<uint32_t>(first / 16 + group)) >> 8), -24);
          bool near = false;
          for (int64_t k = 0; k < 16; ++k) {
            const int64_t j = first + k / 2 * 8 + 2 * group + k % 2;
            if (j >= problem.vocab) break;
            const double ratio = ratio_at(i, j);
            near = near || std::abs(ratio - 1) < 1e-4;
            if (ratio >= 1) {
              expected[i * problem.vocab + j] = ratio;
            } else {
              sum += ratio;
              near = near || std::abs(sum - 1) < 1e-4;
              expected[i * problem.vocab + j] = sum >= 1 ? 1 : 0;
              if (sum >= 1) sum -= 1;
            }
            undecided[i * problem.vocab + j] = near;
          }
        }
      }
    }
  } else {
    for (int64_t i = 0; i < problem.rows; ++i) {
      for (int64_t j = 0; j < problem.vocab; ++j) {
        const double ratio = ratio_at(i, j);
        const double draw = std::ldexp(static_cast<double>(Draw(pool.keys[i], static_cast<uint32_t>(j))), -32);
        undecided[i * problem.vocab + j] = std::abs(draw / ratio - 1) < 1e-4 || std::abs(ratio - 1) < 1e-4;
        expected[i * problem.vocab + j] = ratio >= 1 ? ratio : draw < ratio ? 1 : 0;
      }
    }
  }
  const auto entries = pool.Entries();
  size_t next = 0;
  double wrong = 0, close = 0;
  for (int64_t j = 0; j < problem.vocab; ++j) {
    for (int64_t i = 0; i < problem.rows; ++i) {
      const double value = expected[i * problem.vocab + j];
      const bool there = next < entries.size() && entries[next].first == static_cast<uint32_t>(j << pool.row_bits | i);
      const double got = there ? static_cast<double>(entries[next].second) / static_cast<double>(pool.units[i]) : 0;
      if (undecided[i * problem.vocab + j]) {
        ++close;
      } else if (!(std::abs(got - value) <= (value > 1 ? 4e-3 * value : 0))) {
        ++wrong;
      }
      if (there) ++next;
    }
  }
  std::printf("%s%zu entries of %lld, %.0f undecided\n", name.c_str(), entries.size(),
              static_cast<long long>(problem.rows * problem.vocab), close);
  Check(name + "wrong entries", wrong, 0);
  Check(name + "entries of no element", static_cast<double>(entries.size() - next), 0);
  Check(name + "undecided", close, 5e-3 * static_cast<double>(problem.rows * problem.vocab));
}

void CheckAll() {
  Problem problem(200, 136, 1096, 1.0f);
  problem.EnqueueTargetLogits(nullptr);
  const headwater::lab::Reference reference(problem, false, 1.0, 0.0);
  // A few entries of a row, about half of them, and nearly all: more than a warp's staging memory holds.
  for (const double resolution : {1.0 / 64, 1.0 / 1024, 1.0 / 16384}) {
    const std::string name = "resolution 1/" + std::to_string(static_cast<int>(1 / resolution)) + " ";
    CheckSmall<Dithering::kStraight, Tile256>(problem, reference, resolution, name + "256 straight: ");
    CheckSmall<Dithering::kStraight, Tile320>(problem, reference, resolution, name + "320 straight: ");
    CheckSmall<Dithering::kRolled, Tile320>(problem, reference, resolution, name + "320 loop: ");
    CheckSmall<Dithering::kSystematic, Tile256>(problem, reference, resolution, name + "256 groups: ");
    CheckSmall<Dithering::kSystematic, Tile320>(problem, reference, resolution, name + "320 groups: ");
  }
}

void TimeAll() {
  headwater::lab::Bench bench;
  Problem problem(4096, 4096, 128256, 1.0f);
  problem.EnqueueTargetLogits(bench.stream());
  const auto dense = problem.MakeEProduct<Tile320>({8});
  dense.Enqueue(bench.stream());
  LAB_CUDA(cudaStreamSynchronize(bench.stream()));
  const Pool pool(problem, Sums(problem, Tile320::kTileN), 1.0 / 100, int64_t{1} << 20);
  const auto none = pool.Make<Dithering::kNone, Tile320>(problem);
  const auto straight = pool.Make<Dithering::kStraight, Tile320>(problem);
  const auto rolled = pool.Make<Dithering::kRolled, Tile320>(problem);
  const auto systematic = pool.Make<Dithering::kSystematic, Tile320>(problem);
  const auto systematic_256 = pool.Make<Dithering::kSystematic, Tile256>(problem);
  const auto entries_of = [&](const auto& product) {
    pool.Clear(bench.stream());
    product.Enqueue(bench.stream());
    LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    return pool.Entries();
  };
  const auto first = entries_of(straight), second = entries_of(rolled), third = entries_of(rolled);
  std::printf("%.1f entries a row\n", static_cast<double>(first.size()) / 4096);
  Check("full size: straight, loop and again have the same entries", (first != second) + (second != third), 0);
  const auto fourth = entries_of(systematic), fifth = entries_of(systematic_256);
  std::printf("%.1f entries a row by groups\n", static_cast<double>(fourth.size()) / 4096);
  Check("full size: groups in either tile have the same entries", fourth != fifth, 0);
  const auto candidate = [&](const char* name, const auto& product) {
    return headwater::lab::Candidate{name,
                                     [&](cudaStream_t stream) {
                                       pool.Clear(stream);
                                       product.Enqueue(stream);
                                     },
                                     product.flops(), 0.0};
  };
  bench.Run("product 1, N4096 H4096 V128256",
            {dense.AsCandidate("E, 128 x 320"), candidate("sums alone", none), candidate("pool, straight code", straight),
             candidate("pool, loop", rolled), candidate("pool, groups", systematic),
             candidate("pool, groups, 128 x 256", systematic_256)},
            headwater::lab::BenchOptions{2.0, 0.7, 3, false});
}

}  // namespace

int main(int argc, char** argv) {
  headwater::lab::PrintDevice("017_list_product");
  CheckAll();
  if (argc < 2 || std::string(argv[1]) != "check") TimeAll();
  return headwater::lab::AnyCheckFailed() ? 1 : 0;
}
