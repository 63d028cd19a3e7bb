// Statistics of rows of fp32 products for entropy, log_sum_sq_probs and mean_logits (PieceStats::rest and its kin).
//
// Mapping   as row_statistics.cu: one block a row, or four rows beside which a bias or class weights are read. Of four
//           rows a thread has its fp64 sums in shared memory.
// Traffic   every product is read once, nothing of that size is written.
// Numerics  A thread keeps its largest logit out of the sums, and adds the one that it displaces: sums that are small against the
//           row's 1 keep their digits. They are relative to a power of two near that maximum: fp32 over 16 elements, fp64 across
//           those, threads and warps, in a fixed order. An exponential is one multiply-add and one approximation, and off by 2^-24
//           of its exponent, so that what is far below the maximum counts little. NaN is looked for where the sum of four logits
//           has it.
#include "kernels/cuda/device/row_block.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {
namespace {

using row_block::BlockMax;
using row_block::BlockSum;
using row_block::kVector;
using row_block::LoadSide;
using row_block::LoadVector;
using row_block::MakeRowView;
using row_block::MakeSideArray;
using row_block::RowView;
using row_block::SideArray;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kStep = kThreads * kVector<float>;
constexpr int32_t kNoColumn = INT32_MAX;
// The value for columns that do not count, and for lower logits. It is finite, so that nothing computed from it is NaN, and e^ of
// it is 0.
constexpr float kNothing = -2e38f;
// Sums move to another base only where a logit exceeds it by more, so that they rarely do.
constexpr float kBaseSlack = 4.0f;
// Logit units per base-2 exponent. It is the inverse of log2 e as rounded to float: only differences within a thread are off by
// that, and not those between threads.
constexpr double kPerExponent = 1 / static_cast<double>(row_math::kLog2E);

// Sums over a thread's logits of a row, of which the largest is left out but in `total` and `linear`.
struct Sums {
  double rest;      // sum of e^z
  double weighted;  // sum of that times its exponent
  double squares;   // sum of e^{2 z}; 0 if it is not asked for
  double total;     // sum of z
  double linear;    // sum of class_weight z
};

// A thread's part of a row: sums over all but its largest logit, except `total` and `linear`.
struct Distribution {
  float top = kNothing;
  float offset = 0;        // sums are relative to 2^offset, exponents are of 2
  float limit = kNothing;  // a higher logit is the next base
  int32_t best = -1;       // the first vector that has `top`
  // Sums over the vectors since Flush().
  float step_rest = 0, step_weighted = 0, step_squares = 0, step_total = 0, step_linear = 0;
  Sums* sums;

  __device__ __forceinline__ void Flush() {
    sums->rest += static_cast<double>(step_rest);
    sums->weighted += static_cast<double>(step_weighted);
    sums->squares += static_cast<double>(step_squares);
    sums->total += static_cast<double>(step_total);
    sums->linear += static_cast<double>(step_linear);
    step_rest = step_weighted = step_squares = step_total = step_linear = 0;
  }

  // Relative to 2^to, `to` in the place of `offset`.
  __device__ __forceinline__ void MoveTo(double to) {
    // Without a best, nothing but NaN has been added.
    if (best < 0) return;
    const double shift = static_cast<double>(offset) - to;
    const double factor = exp(kPerExponent * shift);
    sums->weighted = factor == 0 ? 0.0 : factor * (sums->weighted + shift * sums->rest);
    sums->rest *= factor;
    sums->squares *= factor * factor;
  }
};

struct DistributionParams {
  RowView<float> view;
  const int32_t* targets;   // or null
  SideArray class_weights;  // of this shard's columns; data null: all 1
  int64_t row_count;
  RowStats* out;
};

// The rare cases of a row's logits `z` of columns [j, j + 4): columns that do not count, and a higher base.
__device__ __forceinline__ void SeeToRare(float (&z)[4], bool has_weights, const float (&weights)[4], int32_t j, int32_t columns,
                                          int32_t target, float* total, float* linear, Distribution* stats) {
  bool counts[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) counts[i] = j + i < columns && j + i != target;
  *total = ((counts[0] ? z[0] : 0.0f) + (counts[1] ? z[1] : 0.0f)) + ((counts[2] ? z[2] : 0.0f) + (counts[3] ? z[3] : 0.0f));
  *linear = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A weight of 0 wins over a logit that is not finite.
    if (has_weights && counts[i] && weights[i] != 0.0f) *linear = fmaf(weights[i], z[i], *linear);
    if (counts[i] && isnan(z[i])) stats->step_rest = z[i];  // and stays
    if (!counts[i] || !(z[i] > kNothing)) z[i] = kNothing;
  }
  const float others = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
  if (others > stats->limit) {
    const float offset = __fmul_rn(others, row_math::kLog2E);
    stats->Flush();
    stats->MoveTo(static_cast<double>(offset));
    stats->offset = offset;
    stats->limit = others + kBaseSlack;
  }
}

// Adds the logits `z` of columns [j, j + 4). The rare cases are in one branch of all rows.
template <bool kWantSquares, int kRows>
__device__ __forceinline__ void AddVectors(float (&z)[kRows][4], bool has_weights, const float (&weights)[4], int32_t j,
                                           int32_t columns, const int32_t (&target)[kRows], Distribution (&stats)[kRows]) {
  float total[kRows], linear[kRows];
  bool rare = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    total[r] = (z[r][0] + z[r][1]) + (z[r][2] + z[r][3]);
    linear[r] = 0;
    if (has_weights) {
#pragma unroll
      for (int i = 0; i < 4; ++i) linear[r] = fmaf(weights[i], z[r][i], linear[r]);
    }
    const float largest = fmaxf(fmaxf(z[r][0], z[r][1]), fmaxf(z[r][2], z[r][3]));
    rare |=
        row_block::HasExceptions(j, columns, target[r]) | (largest > stats[r].limit) | !(fabsf(total[r] + linear[r]) < INFINITY);
  }
  if (rare) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) SeeToRare(z[r], has_weights, weights, j, columns, target[r], &total[r], &linear[r], &stats[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Distribution& of_row = stats[r];
    const float high[2] = {fmaxf(z[r][0], z[r][1]), fmaxf(z[r][2], z[r][3])};
    const float vector_top = fmaxf(high[0], high[1]);
    // All values except the largest, and the smaller one of that and the row's former largest.
    const float values[4] = {fminf(z[r][0], z[r][1]), fminf(z[r][2], z[r][3]), fminf(high[0], high[1]),
                             fminf(of_row.top, vector_top)};
    if (vector_top > of_row.top) {
      of_row.top = vector_top;
      of_row.best = j;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Equal logits have the same exponent.
      const float exponent = fmaxf(row_math::ExponentOver(values[i], of_row.offset), -1e30f);
      const float e = row_math::Exp2Approx(exponent);
      of_row.step_rest += e;
      of_row.step_weighted = fmaf(e, exponent, of_row.step_weighted);
      if constexpr (kWantSquares) of_row.step_squares = fmaf(e, e, of_row.step_squares);
    }
    of_row.step_total += total[r];
    of_row.step_linear += linear[r];
  }
}

// kHasSides: a bias or class weights. kRows: of a block, not more than there are; the last block takes rows of the block before it
// again, with the same results.
template <bool kHasSides, bool kWantSquares, int kRows>
__global__ void __launch_bounds__(kThreads, kHasSides ? 2 : 3) DistributionKernel(const DistributionParams params) {
  constexpr int kVectors = row_block::kQuickVectors / kRows;  // of a row at a time
  const RowView<float>& view = params.view;
  const int64_t first_row = min(static_cast<int64_t>(blockIdx.x) * kRows, params.row_count - kRows);
  const float* products = view.products + first_row * view.stride;
  const int32_t columns = view.columns;
  const bool has_bias = kHasSides && view.bias.data != nullptr, has_weights = kHasSides && params.class_weights.data != nullptr;
  int32_t target[kRows];  // matches no column if the row has none or it lies elsewhere
  Distribution stats[kRows];
  // The sums of four rows would not fit into registers.
  Sums own_sums[1];
  __shared__ Sums thread_sums[kRows > 1 ? kRows * kThreads : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    stats[r].sums = kRows > 1 ? &thread_sums[r * kThreads + threadIdx.x] : own_sums;
    *stats[r].sums = {};
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) target[r] = params.targets == nullptr ? -1 : params.targets[first_row + r] - view.vocab_start;

  auto first = static_cast<int32_t>(threadIdx.x) * 4;
  float next[kVectors][kRows][4];
  row_block::SideBits next_bias[kVectors] = {}, next_weights[kVectors] = {};
  const auto load = [&](int32_t from) {
    row_block::LoadQuick<kVectors, kRows, kStep>(products, view.stride, kRows, from, columns, next);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = from + v * kStep;
      if (has_bias) next_bias[v] = row_block::LoadSideBits<false>(view.bias, j, columns);
      if (has_weights) next_weights[v] = row_block::LoadSideBits<true>(params.class_weights, j, columns);
    }
  };
  if (columns > 0) load(first);
  for (int32_t count = kVectors; first < columns; first += kStep * kVectors, count += kVectors) {
    float z[kVectors][kRows][4], weights[kVectors][4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float bias[4] = {};
      if (has_bias) row_block::Convert<false>(next_bias[v], view.bias.element, bias);
      if (has_weights) row_block::Convert<true>(next_weights[v], Element::kFloat32, weights[v]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) row_block::ToArguments<kHasSides>(view, bias, next[v][r], z[v][r]);
    }
    load(first + kStep * kVectors);
    if (view.cap != 0.0f) row_block::ToLogitsQuick<true>(view, z);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t j = first + v * kStep;
      if (kVectors == 1 || j < columns) AddVectors<kWantSquares>(z[v], has_weights, weights[v], j, columns, target, stats);
    }
    // The same sums however many rows a block has.
    if (count % row_block::kQuickVectors == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) stats[r].Flush();
    }
  }

  __shared__ float shared_max[kRows][kWarps];
  __shared__ int32_t shared_column[kRows][kWarps];
  __shared__ double shared_sums[kRows][5][kWarps];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Distribution& of_row = stats[r];
    of_row.Flush();
    const float row_max = BlockMax<kThreads>(of_row.top, shared_max[r]);
    int32_t own_column = kNoColumn;
    if (of_row.best >= 0 && of_row.top == row_max) {
      // Its logits once more, to see which it was.
      const int32_t j = of_row.best;
      float vector[4], bias[4] = {}, again[1][1][4];
      LoadVector(products + r * view.stride + j, vector);
      if (has_bias) LoadSide(view.bias, j, columns, bias);
      row_block::ToArguments<kHasSides>(view, bias, vector, again[0][0]);
      if (view.cap != 0.0f) row_block::ToLogitsQuick<true>(view, again);
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if (j + i < columns && j + i != target[r] && again[0][0][i] == row_max) own_column = j + i;
      }
    }
    // Smallest column of those with the maximum: the largest negative.
    const int32_t column = -BlockMax<kThreads>(-own_column, shared_column[r]);
    if (of_row.best >= 0) {
      of_row.MoveTo(static_cast<double>(row_max) / kPerExponent);
      of_row.sums->weighted *= kPerExponent;
      if (own_column != column) {
        // This thread's largest logit is not the row's.
        const double shift = static_cast<double>(of_row.top) - static_cast<double>(row_max);
        const double e = exp(shift);
        of_row.sums->rest += e;
        of_row.sums->weighted += e == 0 ? 0.0 : e * shift;
        if constexpr (kWantSquares) of_row.sums->squares += e * e;
      }
    }
    double sums[5] = {of_row.sums->rest, of_row.sums->weighted, of_row.sums->squares, of_row.sums->total, of_row.sums->linear};
    BlockSum<kThreads>(sums, shared_sums[r]);
    if (threadIdx.x == 0) {
      RowStats result;
      const bool has_top = column != kNoColumn;
      const double rest = row_max == INFINITY ? kRowNan : sums[0];
      if (has_top) {
        result.best = static_cast<double>(row_max);
        result.best_column = static_cast<double>(view.vocab_start + column);
      }
      result.others = {result.best, has_top ? 1 + rest : rest, sums[1], has_weights ? sums[4] : sums[3], rest, sums[2], sums[3]};
      params.out[first_row + r] = result;
    }
  }
}

template <bool kWantSquares>
cudaError_t RunDistribution(const DistributionParams& params, bool has_sides, cudaStream_t stream) {
  constexpr int kRows = row_block::kQuickVectors;
  const auto blocks = static_cast<unsigned>(params.row_count);
  if (!has_sides) {
    DistributionKernel<false, kWantSquares, 1><<<blocks, kThreads, 0, stream>>>(params);
  } else if (params.row_count < row_block::kSharingRows) {
    DistributionKernel<true, kWantSquares, 1><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    DistributionKernel<true, kWantSquares, kRows><<<(blocks + kRows - 1) / kRows, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchRowDistribution(const LogitsView& logits, const ChunkRows& rows, const float* class_weights, bool want_squares,
                                  RowStats* out, cudaStream_t stream) {
  if (logits.element != Element::kFloat32) return cudaErrorInvalidValue;
  if (rows.row_count == 0) return cudaSuccess;
  const DistributionParams params = {MakeRowView<float>(logits), rows.targets,
                                     MakeSideArray<float>(class_weights, Element::kFloat32), rows.row_count, out};
  const bool has_sides = logits.bias != nullptr || class_weights != nullptr;
  return want_squares ? RunDistribution<true>(params, has_sides, stream) : RunDistribution<false>(params, has_sides, stream);
}

}  // namespace headwater::cuda
