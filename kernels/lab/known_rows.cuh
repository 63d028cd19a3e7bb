// The divergence's row pass with log-sum-exps that are known before (log_sums.cuh): a variant of kernels/cuda/divergence_rows.cu,
// of which this has what phase 0 leaves. 0 < beta < 1, bf16, products that are logits, temperatures 1. sm_90a only.
//
// Order     Out of shared memory into registers, phase 1 (terms), the exchange, phase 2 (M). Nothing is done under the exchange;
// the
//           copies of the next row and a half are.
// Sums      Nobody has a thread's sums of q and p, so they are added up in phase 1: where p is q 2^d, and, where q may vanish and p
//           not, by themselves.
// Top       The column with q > 1/2 is looked for in the warps that share a tile with more than half of q, if there is one.

#ifndef HEADWATER_KERNELS_LAB_KNOWN_ROWS_CUH_
#define HEADWATER_KERNELS_LAB_KNOWN_ROWS_CUH_

#include <cmath>

#include "kernels/cuda/device/cluster_row.cuh"
#include "kernels/cuda/device/divergence_terms.cuh"
#include "kernels/cuda/divergence_params.h"
#include "log_sums.cuh"

namespace headwater::lab {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace known_rows {

using cuda::divergence_row::KernelParams;
using cuda::divergence_row::RowOffsets;
using cuda::sm90::Exp2;

// In log2: where q vanishes below this ratio, p does not count.
constexpr float kSafeRatio = 64.0f;

// As divergence_row::Terms, in its units; far_p and far_q are of distant columns.
struct Terms {
  float loss = 0.0f, teacher = 0.0f, mean = 0.0f, distant = 0.0f;
  float near_q = 0.0f, far_p = 0.0f, far_q = 0.0f;
};

__device__ __forceinline__ float Difference(const KernelParams& params, float offset, float student, float teacher) {
  return fmaf(fmaf(-params.ratio, student, teacher), params.log2_scales[1], offset);
}

// A student's logit becomes q, the teacher's L.
__device__ __forceinline__ void Near(const KernelParams& params, float log_q, float d, float& student, float& teacher,
                                     Terms& terms) {
  using cuda::divergence_row::Polynomial;
  const float q = Exp2(log_q);
  const float slope = fmaf(d, Polynomial(params.slope, d), -params.log_rest);
  terms.loss = fmaf(q * (d * d), Polynomial(params.excess, d), terms.loss);
  terms.near_q += q;
  terms.mean = fmaf(q, slope, terms.mean);
  student = q;
  teacher = slope;
}

// Of kCount columns: log2(p / q), and those p that cannot be had from q.
template <int kCount>
__device__ __forceinline__ void LogRatios(const KernelParams& params, const RowOffsets& offsets, const float* student,
                                          const float* teacher, float* log_ratios, Terms& terms) {
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    log_ratios[i] = Difference(params, offsets.ratio, student[i], teacher[i]);
    largest = fmaxf(largest, log_ratios[i]);
  }
  if (!(largest > kSafeRatio)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!(log_ratios[i] > kSafeRatio)) continue;
    terms.far_p += Exp2(fmaf(teacher[i], params.log2_scales[1], offsets.teacher + (params.log_beta + params.log_unit)));
    log_ratios[i] = -cuda::divergence_row::kLargestRatio;
  }
}

__device__ __forceinline__ void Far(float log_q, float log_ratio, float& student, float& teacher, Terms& terms) {
  constexpr auto kLog2E = static_cast<float>(cuda::divergence_row::kLog2E);
  const float q = Exp2(log_q), ratio = Exp2(log_ratio), p = q * ratio;
  float slope;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(slope) : "f"(ratio + 1.0f));
  if (ratio < cuda::divergence_row::kSmallRatio) slope = ratio * fmaf(ratio, -0.5f * kLog2E, kLog2E);
  terms.far_q += q;
  terms.far_p += p;
  terms.teacher = fmaf(p, log_ratio - slope, terms.teacher);
  terms.distant = fmaf(q, slope, terms.distant);
  student = q;
  teacher = slope;
}

// In units of ln2.
__device__ __forceinline__ float Loss(const KernelParams& params, const Terms& terms, bool distant) {
  if (!distant) return terms.loss * params.inverse_rest_unit;
  const float shares = fmaf(params.log_beta, terms.far_p, params.log_rest * terms.far_q);
  return fmaf(terms.loss, params.inverse_rest_unit, (terms.teacher - terms.distant - shares) * params.inverse_unit);
}

}  // namespace known_rows
#endif

static __global__ void __launch_bounds__(cuda::cluster_row::kMaxThreads, 1)
    KnownRowsKernel(const __grid_constant__ cuda::divergence_row::KernelParams params, const RowLogSums* log_sums) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace cuda::cluster_row;
  using cuda::divergence_row::FactorParts;
  using cuda::divergence_row::kAbsent;
  using cuda::divergence_row::kNearLimit;
  using known_rows::RowOffsets;
  using known_rows::Terms;
  namespace ptx = cuda::sm90;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t shared = ptx::SharedAddress(raw_shared);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int32_t lane = thread % 32;
  const auto warps = static_cast<int32_t>(blockDim.x) / 32;
  const uint32_t barriers = shared + warps * (kSlots * kSlotBytes);
  const Ring ring{shared + warp * (kSlots * kSlotBytes), barriers + warp * (8 * kSlots)};
  Channel<2> sums{barriers + warps * (8 * kSlots), 0};

  const int32_t cluster = params.cluster;
  const auto cta_rank = static_cast<int32_t>(ptx::ClusterCtaRank());
  const int32_t row_step = static_cast<int32_t>(gridDim.x) / cluster;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) / cluster;
  const int32_t begin = min((cta_rank * warps + warp) * params.warp_columns, params.columns);
  const int32_t length = min(params.warp_columns, params.columns - begin);
  const int32_t copied_length = (length + 3) / 4 * 4;
  const int32_t parts = (params.warp_columns + kSlotColumns - 1) / kSlotColumns;
  if (lane == 0) ring.Init();
  if (thread == 0) sums.Init();
  if (lane == 0) ptx::FenceBarrierInit();
  ptx::ClusterSync();

  RingFiller filler{
      {params.inputs[0] + first_row * params.strides[0] + begin, params.inputs[1] + first_row * params.strides[1] + begin},
      {row_step * params.strides[0] - parts * kSlotColumns, row_step * params.strides[1] - parts * kSlotColumns},
      (params.row_count - first_row + row_step - 1) / row_step,
      parts};
  for (int i = 0; i < kSlots; ++i) filler.LoadNext(ring, copied_length, lane);
  uint32_t slot = 0, phase = 0;
  float student[kVectors][4], teacher[kVectors][4];
  const auto load_log_sums = [&](int32_t row) {
    return row < params.row_count ? __ldg(reinterpret_cast<const float4*>(log_sums) + row) : float4{};
  };
  float4 known = load_log_sums(first_row);

  const auto for_each = [&](const auto& function) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      if (vector / kSlotVectors >= parts) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) function(student[vector][i], teacher[vector][i], 4 * vector + i);
    }
  };

  for (int32_t row = first_row; row < params.row_count; row += row_step) {
    // Out of the slots, which are filled again.
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= parts) continue;
      ptx::BarrierWait(ring.Full(slot), phase);
      const uint32_t address = ring.Slot(slot) + 16 * lane;
      slot = Ring::Next(slot);
      if (slot == 0) phase ^= 1;
      const bool is_last = length - part * kSlotColumns < kSlotColumns;
#pragma unroll
      for (int i = 0; i < kSlotVectors; ++i) {
        float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
        const int vector = part * kSlotVectors + i;
        if (is_last) {
          const int32_t local = vector * kVectorColumns + 4 * lane;
          cuda::divergence_row::MakeLogits<false>(params.sides[0], begin + local, length - local, params.no_column[0], s);
          cuda::divergence_row::MakeLogits<false>(params.sides[1], begin + local, length - local, params.no_column[1], t);
        }
        student[vector][0] = s.x, student[vector][1] = s.y, student[vector][2] = s.z, student[vector][3] = s.w;
        teacher[vector][0] = t.x, teacher[vector][1] = t.y, teacher[vector][2] = t.z, teacher[vector][3] = t.w;
      }
      __syncwarp();
      filler.LoadNext(ring, copied_length, lane);
    }

    // Phase 1.
    const float token_weight = params.token_weights == nullptr ? 1.0f : __ldg(params.token_weights + row);
    const RowOffsets offsets{-known.x + (params.log_rest + params.log_unit), -known.y, known.z,
                             known.z + (params.log_beta - params.log_rest)};
    const int32_t top_column = __float_as_int(known.w);
    Terms terms;
    float loss = 0.0f, top_slope = 0.0f;
    int32_t top_index = -1;
    if (top_column >= 0 && begin < top_column + kTileColumns && top_column < begin + length) {
      float s_top = params.no_column[0], t_top = params.no_column[1], largest = -INFINITY;
      int32_t index_top = -1;
      for_each([&](float s, float t, int index) {
        const float log_q = fmaf(s, params.log2_scales[0], offsets.student);
        if (!(log_q > largest)) return;
        largest = log_q;
        index_top = index;
        s_top = s;
        t_top = t;
      });
      if (largest > params.log_rest + params.log_unit - 1.0f) {
        top_index = index_top;
        const float d = known_rows::Difference(params, offsets.difference, s_top, t_top);
        const bool near = fabsf(d) < kNearLimit;
        Terms apart;
        if (near) {
          known_rows::Near(params, largest, d, s_top, t_top, apart);
        } else {
          float log_ratio;
          known_rows::LogRatios<1>(params, offsets, &s_top, &t_top, &log_ratio, apart);
          known_rows::Far(largest, log_ratio, s_top, t_top, apart);
        }
        top_slope = t_top;
        loss = known_rows::Loss(params, apart, !near);
        for_each([&](float& s, float& t, int index) {
          if (index != top_index) return;
          s = params.no_column[0];
          t = params.no_column[1];
        });
      }
    }
    int32_t tries = 0;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      if (vector / kSlotVectors >= parts) continue;
      float log_q[4], d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) log_q[i] = fmaf(student[vector][i], params.log2_scales[0], offsets.student);
      bool near = false;
      if (tries < 2) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          d[i] = known_rows::Difference(params, offsets.difference, student[vector][i], teacher[vector][i]);
          if (log_q[i] < kAbsent) d[i] = 0.0f;
          largest = fmaxf(largest, fabsf(d[i]));
        }
        near = __all_sync(0xffffffffu, largest < kNearLimit);
        tries += near ? 0 : 1;
      }
      if (near) {
#pragma unroll
        for (int i = 0; i < 4; ++i) known_rows::Near(params, log_q[i], d[i], student[vector][i], teacher[vector][i], terms);
      } else {
        float log_ratios[4];
        known_rows::LogRatios<4>(params, offsets, student[vector], teacher[vector], log_ratios, terms);
#pragma unroll
        for (int i = 0; i < 4; ++i) known_rows::Far(log_q[i], log_ratios[i], student[vector][i], teacher[vector][i], terms);
      }
    }
    float2 partial[2];
    partial[0] =
        make_float2(loss + known_rows::Loss(params, terms, tries != 0), (terms.mean + terms.distant) * params.inverse_rest_unit);
    partial[1] = make_float2((terms.near_q + terms.far_q) * params.inverse_rest_unit, top_slope);
    sums.Send<Sum, Sum>(partial, 3, cluster, cta_rank);
    known = load_log_sums(row + row_step);
    sums.Receive<Sum, Sum>(partial, cluster);

    // What the row's sums give, as the product has it.
    const float q_rest = partial[1].x;
    const bool row_has_top = q_rest < 0.75f;
    const float top_entry = (1.0f - q_rest) * fmaf(-partial[1].y, q_rest, partial[0].y);
    float mean = row_has_top ? fmaf(partial[1].y, 1.0f - q_rest, partial[0].y) : partial[0].y / q_rest;
    if (!(fabsf(partial[0].x) < INFINITY)) mean = NAN;
    const double weight = static_cast<double>(token_weight);
    FactorParts factor = cuda::divergence_row::SplitFactor(params.matrix_factor * weight);
    const bool has_gradient = factor.rest != 0.0f;
    float row_power = cuda::divergence_row::PowerOfTwo(factor.exponent);
    const float row_loss = partial[0].x;
    if (row_has_top) {
      float2 largest[2] = {};
      for_each([&](float s, float t, int) { largest[0].x = fmaxf(largest[0].x, fabsf(s * (mean - t))); });
      sums.Send<Largest, Largest>(largest, 3, cluster, cta_rank);
      sums.Receive<Largest, Largest>(largest, cluster);
      const float size = fabsf(factor.rest);
      row_power *= cuda::divergence_row::MakeExact<false>(fabsf(top_entry) * params.top_unit * size, largest[0].x * size, factor);
    }
    if (cta_rank == 0 && thread == 0) {
      cuda::RowReport report;
      report.soft = cuda::divergence_row::kLn2 * static_cast<double>(row_loss);
      report.gradient_bound = fabs(params.gradient_scale * weight) * params.soft_weight;
      params.reports[row] = report;
      params.row_factor[row] = has_gradient ? row_power : 0.0f;
      params.target_factor[row] = 0.0f;
    }

    // Phase 2.
    if (top_index >= 0) {
      for_each([&](float& s, float& t, int index) {
        if (index != top_index) return;
        s = top_entry * params.top_unit;
        t = mean - 1.0f;
      });
    }
    if (!has_gradient) {
      mean = 0.0f;
      for_each([](float& s, float& t, int) { s = t = 0.0f; });
    }
    uint16_t* const out = params.matrix + row * params.matrix_stride;
    const int32_t room = length - 4 * lane;
    const uint64_t own_out = reinterpret_cast<uint64_t>(out + begin + 4 * lane);
    const float mean_factor = mean * factor.rest;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      if (room <= vector * kVectorColumns) continue;
      float entries[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) entries[i] = student[vector][i] * fmaf(-teacher[vector][i], factor.rest, mean_factor);
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(own_out + 2 * kVectorColumns * vector),
                   "r"(ptx::PackBf16(entries[0], entries[1])), "r"(ptx::PackBf16(entries[2], entries[3]))
                   : "memory");
    }
  }
  ptx::ClusterSync();  // no CTA leaves while another may still store into it
#endif
}

// As cuda::LaunchDivergenceRows() with gradient; columns a multiple of 4, both strides `columns`.
inline void EnqueueKnownRows(const float* student, const float* teacher, int64_t rows, int64_t columns, double beta,
                             const RowLogSums* log_sums, __nv_bfloat16* matrix, cuda::RowReport* reports, float* row_factor,
                             float* target_factor, cudaStream_t stream) {
  const cuda::cluster_row::Layout layout = cuda::cluster_row::LayoutFor(columns);
  cuda::LogitsView views[2];
  views[0].products = student;
  views[1].products = teacher;
  for (cuda::LogitsView& view : views) view.stride = view.columns = columns;
  cuda::DivergenceTerm term;
  term.beta = beta;
  term.common_columns = columns;
  cuda::divergence_row::KernelParams params = cuda::divergence_row::MakeKernelParams(views[0], views[1], term, 1);
  params.matrix = reinterpret_cast<uint16_t*>(matrix);
  params.matrix_stride = columns;
  params.reports = reports;
  params.row_factor = row_factor;
  params.target_factor = target_factor;
  params.row_count = static_cast<int32_t>(rows);
  params.columns = static_cast<int32_t>(columns);
  params.warp_columns = layout.warp_columns;
  params.cluster = layout.cluster;
  params.want_gradient = 1;

  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  config.blockDim = dim3(static_cast<unsigned>(32 * layout.warps));
  config.dynamicSmemBytes = static_cast<size_t>(layout.warps * cuda::cluster_row::kRingBytes + cuda::cluster_row::kChannelBytes<2>);
  config.stream = stream;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(layout.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  config.gridDim = dim3(static_cast<unsigned>(layout.cluster));
  int resident = 0;
  LAB_CUDA(cudaFuncSetAttribute(KnownRowsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(config.dynamicSmemBytes)));
  LAB_CUDA(cudaOccupancyMaxActiveClusters(&resident, KnownRowsKernel, &config));
  config.gridDim = dim3(static_cast<unsigned>(layout.cluster * std::min<int64_t>(resident, rows)));
  LAB_CUDA(cudaLaunchKernelEx(&config, KnownRowsKernel, params, log_sums));
}

}  // namespace headwater::lab

#endif  // HEADWATER_KERNELS_LAB_KNOWN_ROWS_CUH_
