// The service warps' part of the kernel in divergence_rows.cu, which has the formulas and the phases. It is the work that a row of
// the divergence's pass on Hopper needs once, and not once a column. It also has the shared memory through which compute warps give
// and get that work's data.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_DIVERGENCE_SERVICE_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_DIVERGENCE_SERVICE_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/cluster_row.cuh"
#include "kernels/cuda/device/divergence_terms.cuh"

namespace headwater::cuda::divergence_row {

constexpr int kSharedBytes = cluster_row::Ring::kBytes + 2 * cluster_row::Message::kBytes + 2 * cluster_row::Exchange<2>::kBytes +
                             cluster_row::Exchange<4>::kBytes + 8 * 32 * cluster_row::kMaxWarps;
static_assert(kSharedBytes <= 232448, "a CTA of sm_90 has 227 KiB");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using cluster_row::Exchange;
using cluster_row::Message;
using cluster_row::Ring;

// log2 of a positive number, NaN of one that is not finite. It is that of the exponent and, with 2^-22 of error, of a rest within
// [0.7, 1.42).
__device__ __forceinline__ float Log2OfSum(float value) {
  const uint32_t bits = __float_as_uint(value);
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  float log;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(__uint_as_float(bits - (static_cast<uint32_t>(exponent) << 23))));
  return fmaf(value, 0.0f, log + static_cast<float>(exponent));
}

// a / b for a b about 1.
__device__ __forceinline__ float Quotient(float a, float b) {
  const float reciprocal = sm90::ReciprocalApprox(b), quotient = a * reciprocal;
  return fmaf(fmaf(-b, quotient, a), reciprocal, quotient);
}

// A CTA's shared memory, and its part of its cluster's rows.
//
// `logs` says, when a row's exponential sums are known:
//   what is added to log2 of an exponential to get log2 q and log2 p, and to a difference of logits to get d and log2(p / q), as
//   RowOffsets has them;
//   what turns a thread's exponential sums into its q and p, and the offsets of the next row's exponentials (log2), student's and
//   teacher's;
//   the offsets of the row after that, twice.
// The first message comes before any row and has offsets only. A factor below 0 says that the sums are useless. Every thread then
// gives its largest logits, and later its exponentials' sums again with the offsets that come in the second line in between.
//
// `rows` says, when its sums over phase 1 are known: M's factor, mean, the entry of the column with q > 1/2. It also says whether
// threads give their largest entries. In that case it comes again with the factor that follows from those entries.
struct Place {
  Ring ring;
  Message logs, rows;
  Exchange<2> exponentials;
  Exchange<4> sums;
  Exchange<2> extremes;  // fp16's
  uint32_t early;        // where a pair of each thread's lies, between two phases 0
  int32_t warps;         // that compute
  int32_t first_service;
  int32_t cta;       // in the cluster
  int32_t row_step;  // clusters
  int32_t first_row;
  int32_t begin;  // of the slice
  int32_t length;
  int32_t part_columns;
  int32_t parts;

  __device__ __forceinline__ Place(const KernelParams& params, uint32_t shared) {
    ring.base = shared;
    logs.base = ring.base + Ring::kBytes;
    rows.base = logs.base + Message::kBytes;
    exponentials = {rows.base + Message::kBytes, 0};
    sums = {exponentials.base + Exchange<2>::kBytes, 0};
    extremes = {sums.base + Exchange<4>::kBytes, 0};
    early = extremes.base + Exchange<2>::kBytes;
    warps = params.warps;
    first_service = static_cast<int32_t>(blockDim.x) / 32 - cluster_row::kServiceWarps;
    cta = static_cast<int32_t>(sm90::ClusterCtaRank());
    row_step = static_cast<int32_t>(gridDim.x) / params.cluster;
    first_row = static_cast<int32_t>(blockIdx.x) / params.cluster;
    begin = min(cta * params.cta_columns, params.columns);
    length = min(params.cta_columns, params.columns - begin);
    part_columns = warps * cluster_row::kSlotColumns;
    parts = params.cta_columns > part_columns ? 2 : 1;
  }
  // By one thread.
  __device__ __forceinline__ void Init() const {
    ring.Init(warps);
    logs.Init();
    rows.Init();
    exponentials.Init(warps);
    sums.Init(warps);
    extremes.Init(warps);
    sm90::FenceBarrierInit();
  }
};

// All rows' slots, filled as they come free.
__device__ __forceinline__ void FillSlots(const KernelParams& params, const Place& place) {
  cluster_row::SliceSource source{{params.inputs[0] + place.begin, params.inputs[1] + place.begin},
                                  {params.strides[0], params.strides[1]},
                                  params.row_count,
                                  place.row_step,
                                  place.part_columns,
                                  (place.length + 3) / 4 * 4,
                                  place.parts,
                                  place.first_row,
                                  0};
  uint32_t slot = 0, phase = 1;  // of a barrier that is new, the phase before the first one is over
#pragma unroll 1
  while (source.More()) {
    sm90::BarrierWait(place.ring.Empty(slot), phase);
    source.Load(place.ring, slot);
    slot = Ring::Next(slot);
    if (slot == 0) phase ^= 1;
  }
}

__device__ __forceinline__ void Put(const Message& message, const float4& first, const float4& second = {},
                                    const float4& third = {}) {
  if (cluster_row::Lane() == 0) message.Put(first, second, third);
  __syncwarp();
}

// All rows' log-sum-exps.
template <bool kTransformed>
__device__ __forceinline__ void ServeLogs(const KernelParams& params, const Place& place) {
  const auto lane = static_cast<int32_t>(cluster_row::Lane());
  const int32_t cluster = params.cluster, warps = place.warps, cta = place.cta;
  Exchange<2> exponentials = place.exponentials;
  // One column for each lane, from its student's and then its teacher's first 16.
  const auto load_sample = [&](int32_t row) {
    if (row >= params.row_count) return 0.0f;
    const int side = lane / 16;
    return params.inputs[side][params.strides[side] * row + min(lane % 16, params.columns - 1)];
  };
  // log2 of the base of the row's exponential sums. Whole numbers, so that they cancel exactly; above the sampled columns, so that
  // a largest logit 2^80 above them still fits.
  const auto offsets_of = [&](float sample) {
    if constexpr (kTransformed) sample = LogitOf(params.sides[lane / 16], sample, min(lane % 16, params.columns - 1));
    cluster_row::HalfWarpMerge<cluster_row::Maximum> sampled{sample * params.log2_scales[lane / 16]};
    cluster_row::MergeTogether(sampled);
    const float above = ceilf(sampled.value) + 40.0f;
    return make_float2(__shfl_sync(0xffffffffu, above, 0), __shfl_sync(0xffffffffu, above, 16));
  };

  const auto as_vector = [](const float2& pair) { return make_float4(pair.x, pair.y, 0.0f, 0.0f); };
  float2 offsets = offsets_of(load_sample(place.first_row));  // of `row`, and of the row after it
  float2 next = offsets_of(load_sample(place.first_row + place.row_step));
  Put(place.logs, {}, make_float4(0.0f, 0.0f, offsets.x, offsets.y), as_vector(next));
  float sample = load_sample(place.first_row + 2 * place.row_step);
#pragma unroll 1
  for (int32_t row = place.first_row; row < params.row_count; row += place.row_step) {
    const float2 after_next = offsets_of(sample);
    sample = load_sample(row + 3 * place.row_step);
    float total[2];
    exponentials.Run<cluster_row::Sum>(total, warps, cluster, cta);
    if (!(total[0] > 1e-20f && total[0] < 1e36f && total[1] > 1e-20f && total[1] < 1e36f)) {
      // A sample far below the row's largest logit, or a row that is not finite. Every CTA sees the same sums.
      Put(place.logs, {}, make_float4(-1.0f, -1.0f, 0.0f, 0.0f));
      exponentials.Run<cluster_row::Maximum>(total, warps, cluster, cta);
      offsets = make_float2(ceilf(total[0]), ceilf(total[1]));
      Put(place.logs, {}, make_float4(0.0f, 0.0f, offsets.x, offsets.y));
      exponentials.Run<cluster_row::Sum>(total, warps, cluster, cta);
      if (!(total[0] > 0.0f)) total[0] = NAN;
      if (!(total[1] > 0.0f)) total[1] = NAN;
    }
    const float student_log = Log2OfSum(total[0]), teacher_log = Log2OfSum(total[1]);
    const float student_offset = -(offsets.x + student_log), teacher_offset = -(offsets.y + teacher_log);
    const float difference = (offsets.x - offsets.y) + (student_log - teacher_log);
    Put(place.logs,
        make_float4(student_offset + params.log_rest_unit, teacher_offset, difference, difference + params.log_beta_rest),
        make_float4(Exp2(student_offset + offsets.x), Exp2(teacher_offset + offsets.y), next.x, next.y), as_vector(after_next));
    offsets = next;
    next = after_next;
  }
}

// All rows' losses, and M's coefficients from their sums.
template <Form kForm, bool kHalf>
__device__ __forceinline__ void ServeSums(const KernelParams& params, const Place& place) {
  const auto lane = static_cast<int32_t>(cluster_row::Lane());
  const int32_t cluster = params.cluster, warps = place.warps, cta = place.cta;
  Exchange<4> sums = place.sums;
  Exchange<2> extremes = place.extremes;
#pragma unroll 1
  for (int32_t row = place.first_row; row < params.row_count; row += place.row_step) {
    const float token_weight = params.token_weights == nullptr ? 1.0f : __ldg(params.token_weights + row);
    float row_sums[4], row_extremes[2] = {};
    sums.Run<cluster_row::Sum>(row_sums, warps, cluster, cta);
    if constexpr (kHalf) extremes.Run<cluster_row::Largest>(row_extremes, warps, cluster, cta);
    const float loss = row_sums[0];
    float mean = row_sums[1];
    const float q_rest = row_sums[2], slope_top = row_sums[3];
    const bool row_has_top = q_rest < 0.75f;  // 1, if no column was left out, else below 1/2
    float top_entry;
    if constexpr (kForm == Form::kForward) {
      top_entry = -mean;
    } else {
      top_entry = (1.0f - q_rest) * fmaf(-slope_top, q_rest, mean);
      mean = row_has_top ? fmaf(slope_top, 1.0f - q_rest, mean) : Quotient(mean, q_rest);
      if (!(fabsf(loss) < INFINITY)) mean = NAN;  // nothing finite comes out of a row that is not
    }
    FactorParts factor = params.unit_factor;
    if (token_weight != 1.0f) factor = SplitFactor(params.matrix_factor * static_cast<double>(token_weight));
    const bool has_gradient = factor.rest != 0.0f;
    if constexpr (kHalf) {
      const float bound = fmaxf(kForm == Form::kForward ? row_extremes[0] : fmaf(row_extremes[1], fabsf(mean), row_extremes[0]),
                                row_has_top ? fabsf(top_entry) * params.top_unit : 0.0f) *
                          fabsf(factor.rest);
      FitHalf(bound, factor);
    }
    float row_power = PowerOfTwo(factor.exponent);
    const bool fits_top = row_has_top && params.want_gradient != 0;
    Put(place.rows, make_float4(factor.rest, mean, top_entry, fits_top ? 1.0f : 0.0f));
    if (fits_top) {
      float largest[4];
      sums.Run<cluster_row::Largest>(largest, warps, cluster, cta);
      const float size = fabsf(factor.rest);
      row_power *= MakeExact<kHalf>(fabsf(top_entry) * params.top_unit * size, largest[0] * size, factor);
      Put(place.rows, make_float4(factor.rest, mean, top_entry, 0.0f));
    }
    if (params.want_gradient != 0) {
      // Up to zero_columns, a multiple of 8, M has zeros. Every CTA has read its slice.
      uint16_t* const out = params.matrix + row * params.matrix_stride;
#pragma unroll 1
      for (int32_t column = (params.columns + 3) / 4 * 4 + 4 * (cta * 32 + lane); column < params.zero_columns;
           column += 4 * 32 * cluster) {
        *reinterpret_cast<uint2*>(out + column) = make_uint2(0, 0);
      }
    }
    if (cta == 0 && lane == 0) {
      RowReport report;
      report.soft = kLn2 * static_cast<double>(loss);
      report.gradient_bound = fabs(params.gradient_scale * static_cast<double>(token_weight)) * params.soft_weight;
      params.reports[row] = report;
      if (params.want_gradient != 0) {
        params.row_factor[row] = has_gradient ? row_power : 0.0f;
        params.target_factor[row] = 0.0f;
      }
    }
  }
}

// The work of service warp number `service`. One has nothing to do, but registers are given back by four warps together.
template <Form kForm, bool kTransformed, bool kHalf>
__device__ __forceinline__ void ServeRows(const KernelParams& params, const Place& place, int32_t service) {
  if (service == 0) FillSlots(params, place);
  if (service == 1) ServeLogs<kTransformed>(params, place);
  if (service == 2) ServeSums<kForm, kHalf>(params, place);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace headwater::cuda::divergence_row

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_DIVERGENCE_SERVICE_CUH_
