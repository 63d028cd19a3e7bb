// 007: which order of tiles, and how tight a pace, costs the least energy: sustained time of the three products over raster groups
// and paces. Run: 007_raster           times every variant at N4096 H4096 V128256
//      007_raster once      each variant a single time, for a profiler: bytes from L2 and DRAM

#include <cstring>
#include <deque>

#include "problem.cuh"

namespace {

using headwater::lab::BenchOptions;
using headwater::lab::DeviceArray;
using headwater::lab::Problem;
using headwater::sm90::ProductTuning;

// Group, slack, k-blocks a step.
const std::vector<ProductTuning> kVariants = {{8, 0, 8},  {8, 1, 1},  {8, 1, 4},  {8, 2, 8},  {8, 2, 16},  {8, 4, 8},
                                              {1, 2, 16}, {2, 2, 16}, {4, 2, 16}, {6, 2, 16}, {11, 2, 16}, {16, 2, 16}};

std::string Name(const ProductTuning& tuning) {
  const std::string group = "group " + std::to_string(tuning.group);
  if (tuning.pace_slack == 0) return group + ", not paced";
  return group + ", slack " + std::to_string(tuning.pace_slack) + " x " + std::to_string(tuning.pace_blocks);
}

template <class Product, class Make>
void RunProduct(headwater::lab::Bench& bench, const std::string& title, bool once, const Make& make) {
  std::deque<Product> products;
  std::vector<headwater::lab::Candidate> candidates;
  for (const ProductTuning& tuning : kVariants) {
    make(products, tuning);
    candidates.push_back(products.back().AsCandidate(Name(tuning)));
  }
  if (once) {
    for (const auto& candidate : candidates) {
      candidate.enqueue(bench.stream());
      LAB_CUDA(cudaStreamSynchronize(bench.stream()));
    }
    return;
  }
  bench.Run(title, candidates, BenchOptions{1.0, 0.3, 2, false});
}

}  // namespace

int main(int argc, char** argv) {
  const bool once = argc > 1 && std::strcmp(argv[1], "once") == 0;
  headwater::lab::PrintDevice("007_raster");
  headwater::lab::Bench bench;
  const int64_t rows = 4096, width = 4096, vocab = 128256;
  Problem problem(rows, width, vocab, 1.0f);
  DeviceArray<float> grad_weight(vocab * width);
  grad_weight.Zero();
  problem.EnqueueTargetLogits(nullptr);
  if (!once) {
    const auto e_product = problem.MakeEProduct({});
    e_product.Enqueue(nullptr);
  } else {
    problem.exponentials.Zero();  // a profiler counts bytes: their values do not matter
    problem.partial_sum.Zero();
  }
  problem.EnqueueFinishRows(nullptr);
  LAB_CUDA(cudaDeviceSynchronize());
  using EProduct = headwater::lab::PlainEProduct<>;
  using GradHidden = headwater::lab::GradHiddenProduct<>;
  using GradWeight = headwater::lab::GradWeightProduct<>;
  RunProduct<EProduct>(bench, "product 1", once, [&](std::deque<EProduct>& products, const ProductTuning& tuning) {
    products.emplace_back(problem.hidden.get(), problem.weight.get(), problem.exponentials.get(), rows, vocab, width,
                          problem.EParams<false, false, false>(), tuning);
  });
  RunProduct<GradHidden>(bench, "grad_hidden", once, [&](std::deque<GradHidden>& products, const ProductTuning& tuning) {
    products.emplace_back(problem.exponentials.get(), problem.weight.get(), problem.grad_hidden.get(), rows, width, vocab,
                          headwater::sm90::GradHiddenEpilogue::Params{problem.row_factor.get(), problem.target_factor.get(),
                                                                      problem.targets.get(), problem.weight.get()},
                          tuning);
  });
  RunProduct<GradWeight>(bench, "grad_weight", once, [&](std::deque<GradWeight>& products, const ProductTuning& tuning) {
    products.emplace_back(problem.exponentials.get(), problem.scaled_hidden.get(), grad_weight.get(), vocab, width, rows,
                          headwater::sm90::GradWeightEpilogue::Params{1.0f}, tuning);
  });
  return 0;
}
