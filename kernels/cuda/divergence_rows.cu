// The divergence's row pass on Hopper: each product through memory once, losses and M from it.
//
// P teacher, Q student, over the common columns, in units of log2: d = log2 p - log2 q, L = log2(m / q), m = beta p + (1 - beta) q.
//
//   0 < beta < 1  loss = ln2 sum (beta p (d - L) - (1 - beta) q L), each column's share >= 0;  M = q (mean L - L), mean = sum q L
//   beta = 1      loss = ln2 sum (-q d + (p - q) / ln2), likewise;                             M = q (mean d - d)
//   beta = 0      loss = ln2 sum (p d + (q - p) / ln2), likewise;                              M = q - p
//
// row_factor has what is left: loss_scale, token weight, logit_scale, soft_weight, 1 - beta, 1 / temperature and ln2.
//
// Phases. 0: exponential sums of the next row, from shared memory, against an offset guessed from 16 of its columns. 1: the row's
// terms, which stay in registers: 32 columns of both sides a thread. 2: M. The order is 1 of row n, 0 of row n + 1, 2 of row n:
// each row's two exchanges over the cluster go on under other work. A row's first half goes into registers with phase 2 of the row
// before it, the second with its own phase 1, and each slot is filled again as soon as it is read: the first early, because its
// copy is needed soonest, and the second without a time of its own, under the exponentials.
//
// Factor. M has all of row_factor but its power of two, so that a row's share of grad_weight is rounded once; or, in a row of which
// one column has most, so much that its largest entries are nearly exact (device/exact_entries.cuh).
//
// In place, or apart. M of row n may be written over the student's products of row n when the second exchange has come; it comes
// after every CTA has summed its slice of row n, so all of the row was in shared memory before.
//
// Digits. Columns that all have |d| < 1/2 (a nearly distilled student) take polynomials of d, where every term is of second order
// by itself; logits are subtracted from each other before the log-sum-exps are. A column with q > 1/2 gets what the others leave:
// there is at most one, and only in a thread whose exponentials are more than half of the row's. All sums that its entry needs
// leave it out, so a confident student keeps its digits. L is kept relative to its least value log2(1 - beta), which cancels in M:
// where the teacher has nothing it is then exactly 0, and a student that disagrees keeps its digits too.
//
// Not finite. The exponentials' sums come out as NaN, and so do the row's loss and M. No loop's length depends on values.
//
// Traffic. 10 bytes a column: N4096 V128256 is 5.25 GB; a copy of as many bytes takes 1.23 ms on an H200, this pass 1.41, and 1.90
// at the clock that is left beside products.
//
// Work. 5 exponentials and logarithms a column (16 a clock) with 0 < beta < 1, not near: 2 in phase 0 and 3 in phase 1, since p is
// q 2^d, and where q vanishes only the sum of p is missing, which phase 0 has. That is half of the clocks; of the rest most are the
// exchanges' chains of shuffles, and 15 clusters of 8 leave 12 of 132 multiprocessors idle. There is no register to spare: one that
// is spilled into the loop is read back from beyond the small L1 that is left, which costs 4% of the pass; so what is cheap to make
// again is made again (cluster_row::Lane(), the sources of copies), and sums of parameters are parameters. kernels/lab/README.md,
// 009, has what was tried.
#include <atomic>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/cluster_row.cuh"
#include "kernels/cuda/device/divergence_terms.cuh"
#include "kernels/cuda/divergence_params.h"
#include "kernels/cuda/row_passes.h"

namespace headwater::cuda {
namespace {

using cluster_row::kInputs;
using cluster_row::kVectors;
using divergence_row::Form;
using divergence_row::FormOf;
using divergence_row::IsTransformed;
using divergence_row::KernelParams;
using divergence_row::kLn2;
using divergence_row::MakeKernelParams;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using cluster_row::Channel;
using cluster_row::HalfWarpMerge;
using cluster_row::kInputBytes;
using cluster_row::kParts;
using cluster_row::kSlotBytes;
using cluster_row::kSlotColumns;
using cluster_row::kSlots;
using cluster_row::kSlotVectors;
using cluster_row::kVectorBytes;
using cluster_row::kVectorColumns;
using cluster_row::Largest;
using cluster_row::LoadVector;
using cluster_row::Maximum;
using cluster_row::MergeTogether;
using cluster_row::Ring;
using cluster_row::StoreVector;
using cluster_row::Sum;
using cluster_row::WarpMerge;
using divergence_row::FactorParts;
using divergence_row::FitHalf;
using divergence_row::kAbsent;
using divergence_row::kNearLimit;
using divergence_row::LogitOf;
using divergence_row::MakeExact;
using divergence_row::MakeLogits;
using divergence_row::Pack;
using divergence_row::PowerOfTwo;
using divergence_row::RowOffsets;
using divergence_row::RowTerms;
using divergence_row::SplitFactor;
using divergence_row::Terms;
using divergence_row::Top;
using sm90::Exp2;

// Vectors of a warp that are looked at for nearness in vain before it looks no more.
constexpr int kNearTries = 2;

// Without a branch, so that the stores of several vectors are in one block of instructions.
__device__ __forceinline__ void StorePairIf(bool wanted, uint64_t address, uint32_t low, uint32_t high) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %3, 0;\n"
      "@wanted st.global.v2.b32 [%0], {%1, %2};\n"
      "}\n" ::"l"(address),
      "r"(low), "r"(high), "r"(static_cast<int32_t>(wanted))
      : "memory");
}

// log2 of a positive number, NaN of what is not finite: of the exponent and, with 2^-22 of error, of a rest within [0.7, 1.42).
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

template <Form kForm, bool kTransformed, bool kHalf>
__global__ void __launch_bounds__(cluster_row::kMaxThreads, 1) DivergenceRowsKernel(const __grid_constant__ KernelParams params) {
  using Math = RowTerms<kForm, kTransformed, kHalf>;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t shared = sm90::SharedAddress(raw_shared);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int32_t lane = thread % 32;
  const auto warps = static_cast<int32_t>(blockDim.x) / 32;
  const uint32_t barriers = shared + warps * (kSlots * kSlotBytes);
  const Ring ring{shared + warp * (kSlots * kSlotBytes), barriers + warp * (8 * kSlots)};
  const uint32_t channels = barriers + warps * (8 * kSlots);
  Channel<2> exponentials{channels, 0};
  Channel<4> sums{channels + Channel<2>::kBytes, 0};
  Channel<2> extremes{channels + Channel<2>::kBytes + Channel<4>::kBytes, 0};  // fp16's

  const int32_t cluster = params.cluster;
  const auto cta_rank = static_cast<int32_t>(sm90::ClusterCtaRank());
  const int32_t row_step = static_cast<int32_t>(gridDim.x) / cluster;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) / cluster;
  // The warp's slice, in parts of a slot's size: as many in all warps, some of them empty.
  const int32_t slice = cta_rank * warps + warp, slices = cluster * warps;
  const int32_t begin = min(slice * params.warp_columns, params.columns);
  const int32_t length = min(params.warp_columns, params.columns - begin);
  const int32_t parts = (params.warp_columns + kSlotColumns - 1) / kSlotColumns;

  if (lane == 0) {
    ring.Init();
    sm90::FenceBarrierInit();
  }
  exponentials.Init();
  sums.Init();
  extremes.Init();
  if (thread == 0) sm90::FenceBarrierInit();
  sm90::ClusterSync();

  {
    const int32_t copied = max((length + 3) / 4 * 4, 0);
    const cluster_row::SliceSource source{{params.inputs[0] + begin, params.inputs[1] + begin},
                                          {params.strides[0], params.strides[1]},
                                          params.row_count,
                                          row_step,
                                          {min(copied, kSlotColumns), max(copied - kSlotColumns, 0)},
                                          parts};
#pragma unroll
    for (int i = 0; i < kSlots; ++i) source.Load(ring, i, first_row, i);
    uint32_t slot = 0, phase = 0;  // of what goes into registers next
    float student[kVectors][4], teacher[kVectors][4];

    // One column for each lane, from its student's and then its teacher's first 16.
    const auto load_sample = [&](int32_t row) {
      if (row >= params.row_count) return 0.0f;
      const uint32_t of_lane = cluster_row::Lane();
      const float* const input = of_lane < 16 ? params.inputs[0] : params.inputs[1];
      const auto stride = static_cast<uint32_t>(of_lane < 16 ? params.strides[0] : params.strides[1]);
      return input[static_cast<uint64_t>(stride) * static_cast<uint32_t>(row) +
                   min(of_lane % 16, static_cast<uint32_t>(params.columns - 1))];
    };

    // Phase 0: this thread's share of the exponential sums of the row in the slots from `slot` on.
    const auto sum_exponentials = [&](const float2& offsets, float2& own) {
      own = make_float2(0.0f, 0.0f);
      const float a = params.log2_scales[0], b = params.log2_scales[1];
      uint32_t read_slot = slot, read_phase = phase;
#pragma unroll
      for (int32_t part = 0; part < kParts; ++part) {
        if (part >= parts) continue;
        sm90::BarrierWait(ring.Full(read_slot), read_phase);
        const uint32_t address = ring.Slot(read_slot) + 16 * lane;
        read_slot = Ring::Next(read_slot);
        if (read_slot == 0) read_phase ^= 1;
        // A slice's last part is filled up, so that nobody has to look at columns' numbers again.
        if (kTransformed || length - part * kSlotColumns < kSlotColumns) {
          for (int i = 0; i < kSlotVectors; ++i) {
            const int32_t local = part * kSlotColumns + i * kVectorColumns + 4 * lane;
            float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
            MakeLogits<kTransformed>(params.sides[0], begin + local, length - local, params.no_column[0], s);
            MakeLogits<kTransformed>(params.sides[1], begin + local, length - local, params.no_column[1], t);
            StoreVector(address + i * kVectorBytes, s);
            StoreVector(address + i * kVectorBytes + kInputBytes, t);
          }
          sm90::FenceProxyAsync();  // what is stored must not overtake the copy into this slot that comes later
        }
        constexpr int kAhead = 2;
        float4 s[kSlotVectors], t[kSlotVectors];
        const auto load = [&](int i) {
          s[i] = LoadVector(address + i * kVectorBytes);
          t[i] = LoadVector(address + i * kVectorBytes + kInputBytes);
        };
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
        for (int i = 0; i < kSlotVectors; ++i) {
          if (i + kAhead < kSlotVectors) load(i + kAhead);
          own.x += (Exp2(fmaf(s[i].x, a, -offsets.x)) + Exp2(fmaf(s[i].y, a, -offsets.x))) +
                   (Exp2(fmaf(s[i].z, a, -offsets.x)) + Exp2(fmaf(s[i].w, a, -offsets.x)));
          own.y += (Exp2(fmaf(t[i].x, b, -offsets.y)) + Exp2(fmaf(t[i].y, b, -offsets.y))) +
                   (Exp2(fmaf(t[i].z, b, -offsets.y)) + Exp2(fmaf(t[i].w, b, -offsets.y)));
        }
      }
    };

    // A slot into registers.
    const auto load_part = [&](int part, uint32_t address) {
#pragma unroll
      for (int i = 0; i < kSlotVectors; ++i) {
        const float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
        const int vector = part * kSlotVectors + i;
        student[vector][0] = s.x, student[vector][1] = s.y, student[vector][2] = s.z, student[vector][3] = s.w;
        teacher[vector][0] = t.x, teacher[vector][1] = t.y, teacher[vector][2] = t.z, teacher[vector][3] = t.w;
      }
    };
    // The slot that has been read is filled again.
    const auto refill = [&](int32_t row, int part) {
      __syncwarp();
      source.Load(ring, slot, row, part + kSlots);
      slot = Ring::Next(slot);
      if (slot == 0) phase ^= 1;
    };

    // Over the row's columns that this thread has in registers.
    const auto for_each = [&](const auto& function) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (vector / kSlotVectors >= parts) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) function(student[vector][i], teacher[vector][i], 4 * vector + i);
      }
    };

    // Over the row's logits before phase 1: the first part's are in registers, the others still in their slot. `function` may
    // change them.
    const auto for_each_logit = [&](const auto& function) {
#pragma unroll
      for (int vector = 0; vector < kSlotVectors; ++vector) {
#pragma unroll
        for (int i = 0; i < 4; ++i) function(student[vector][i], teacher[vector][i], 4 * vector + i);
      }
      if (parts == 1) return;
      const uint32_t address = ring.Slot(slot) + 16 * lane;
      for (int i = 0; i < kSlotVectors; ++i) {
        float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
        const int index = 4 * (kSlotVectors + i);
        function(s.x, t.x, index);
        function(s.y, t.y, index + 1);
        function(s.z, t.z, index + 2);
        function(s.w, t.w, index + 3);
        StoreVector(address + i * kVectorBytes, s);
        StoreVector(address + i * kVectorBytes + kInputBytes, t);
      }
      sm90::FenceProxyAsync();  // as in phase 0
    };

    float sample = load_sample(first_row);
    float2 offsets = make_float2(0.0f, 0.0f), own = make_float2(0.0f, 0.0f);  // of the row in registers
    float total[2] = {};
    // Phases 1 and 2 are of `row`; there is none at first.
    for (int32_t row = first_row - row_step;; row += row_step) {
      const int32_t next = row + row_step;
      const bool more = next < params.row_count;
      Top top;
      WarpMerge<Sum, 4> own_sums{};
      WarpMerge<Largest, 2> own_extremes{};
      if (row >= 0) {
        // A sample far below the row's largest logit, or a row that is not finite. Every thread of the cluster sees the same sums.
        if (!(total[0] > 1e-20f && total[0] < 1e36f && total[1] > 1e-20f && total[1] < 1e36f)) {
          float largest[2] = {Maximum::kNothing, Maximum::kNothing};
          for_each_logit([&](float s, float t, int) {
            largest[0] = fmaxf(largest[0], s * params.log2_scales[0]);
            largest[1] = fmaxf(largest[1], t * params.log2_scales[1]);
          });
          exponentials.Exchange<Maximum>(largest, cluster, slices, slice);
          offsets = make_float2(ceilf(largest[0]), ceilf(largest[1]));
          own = make_float2(0.0f, 0.0f);
          for_each_logit([&](float s, float t, int) {
            own.x += Exp2(fmaf(s, params.log2_scales[0], -offsets.x));
            own.y += Exp2(fmaf(t, params.log2_scales[1], -offsets.y));
          });
          total[0] = own.x;
          total[1] = own.y;
          exponentials.Exchange<Sum>(total, cluster, slices, slice);
          if (!(total[0] > 0.0f)) total[0] = NAN;
          if (!(total[1] > 0.0f)) total[1] = NAN;
        }
        const float student_log = Log2OfSum(total[0]), teacher_log = Log2OfSum(total[1]);
        const float student_offset = -(offsets.x + student_log);
        const float teacher_offset = -(offsets.y + teacher_log);
        const float difference = (offsets.x - offsets.y) + (student_log - teacher_log);
        const RowOffsets row_offsets{student_offset + params.log_rest_unit, teacher_offset, difference,
                                     difference + params.log_beta_rest};

        // Phase 1.
        Terms terms;
        float loss = 0.0f;
        // With the log-sum-exp's rounding, as the columns' q have it: means over q are divided by the sum of just these q.
        float q_rest = own.x * Exp2(student_offset + offsets.x), p_rest = own.y * Exp2(teacher_offset + offsets.y);
        if (q_rest > 0.5f) {
          // The column that has more than half of q can be here. It is taken out of what follows: its share of the loss goes its
          // own way, near or far, and what it leaves of q is added up without it.
          float s_top = params.no_column[0], t_top = params.no_column[1], largest = -INFINITY;
          int32_t index_top = -1;
          for_each_logit([&](float s, float t, int index) {
            const float log_q = fmaf(s, params.log2_scales[0], row_offsets.student);
            if (!(log_q > largest)) return;
            largest = log_q;
            index_top = index;
            s_top = s;
            t_top = t;
          });
          if (largest > params.log_rest_unit - 1.0f) {
            top.index = index_top;
            if constexpr (kTransformed) top.derivative = Math::Derivative(params, s_top);
            const float d = Math::Difference(params, row_offsets.difference, s_top, t_top);
            const float p_top = Exp2(fmaf(t_top, params.log2_scales[1], teacher_offset));
            Terms apart;
            if (fabsf(d) < kNearLimit) {
              Math::Near(params, largest, d, s_top, t_top, apart);
            } else {
              Math::Far(params, row_offsets, largest, s_top, t_top, apart);
            }
            top.slope = t_top;
            loss = Math::Loss(params, apart, !(fabsf(d) < kNearLimit), Exp2(largest) / params.top_unit, p_top);
            q_rest = p_rest = 0.0f;
            for_each_logit([&](float& s, float& t, int index) {
              if (index == top.index) {
                s = params.no_column[0];
                t = params.no_column[1];
              }
              q_rest += Exp2(fmaf(s, params.log2_scales[0], student_offset));
              p_rest += Exp2(fmaf(t, params.log2_scales[1], teacher_offset));
            });
          }
        }
        int32_t tries = 0;  // vectors that were not near: a warp that has seen some does not look any more
        const auto far = [&](int vector) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float log_q = fmaf(student[vector][i], params.log2_scales[0], row_offsets.student);
            Math::Far(params, row_offsets, log_q, student[vector][i], teacher[vector][i], terms);
          }
        };
        const auto near_or_far = [&](int vector) {
          if (tries < kNearTries) {
            float log_q[4], d[4], largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              log_q[i] = fmaf(student[vector][i], params.log2_scales[0], row_offsets.student);
              d[i] = Math::Difference(params, row_offsets.difference, student[vector][i], teacher[vector][i]);
              if (log_q[i] < kAbsent) d[i] = 0.0f;
              largest = fmaxf(largest, fabsf(d[i]));
            }
            if (__all_sync(0xffffffffu, largest < kNearLimit)) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                Math::Near(params, log_q[i], d[i], student[vector][i], teacher[vector][i], terms);
              }
              return;
            }
            ++tries;
          }
          far(vector);
        };
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part >= parts) continue;
          int first = part * kSlotVectors;
          if (part != 0) {
            load_part(part, ring.Slot(slot) + 16 * lane);
            refill(row, part);
          }
          if (part == 0) {
            near_or_far(0);
            near_or_far(1);
            first = 2;
          }
          if (tries == kNearTries) {
#pragma unroll
            for (int vector = 0; vector < kSlotVectors; ++vector) {
              if (part * kSlotVectors + vector >= first) far(part * kSlotVectors + vector);
            }
          } else {
#pragma unroll
            for (int vector = 0; vector < kSlotVectors; ++vector) {
              if (part * kSlotVectors + vector >= first) near_or_far(part * kSlotVectors + vector);
            }
          }
        }
        own_sums.values[0] = loss + Math::Loss(params, terms, tries != 0, q_rest, p_rest);
        own_sums.values[1] = (terms.mean + terms.distant) * params.inverse_rest_unit;
        own_sums.values[2] = q_rest;
        own_sums.values[3] = kForm == Form::kForward ? 0.0f : top.slope;
        if constexpr (kHalf) {  // in M's units
          own_extremes.values[0] = terms.largest;
          own_extremes.values[1] = terms.q_largest;
        }
      }
      // log2 of what the next row's exponential sums are relative to. Whole numbers, so that they cancel exactly; above the sampled
      // columns, so that a largest logit 2^80 above them still fits.
      if constexpr (kTransformed) sample = LogitOf(params.sides[lane / 16], sample, min(lane % 16, params.columns - 1));
      HalfWarpMerge<Maximum> sampled{sample * (cluster_row::Lane() < 16 ? params.log2_scales[0] : params.log2_scales[1])};
      if constexpr (kHalf) {
        MergeTogether(own_sums, own_extremes, sampled);
        extremes.Post(own_extremes, cluster, slices, slice);
      } else {
        MergeTogether(own_sums, sampled);
      }
      sums.Post(own_sums, cluster, slices, slice);
      const float above = ceilf(sampled.value) + 40.0f;
      offsets = make_float2(__shfl_sync(0xffffffffu, above, 0), __shfl_sync(0xffffffffu, above, 16));
      sample = load_sample(next + row_step);
      const float token_weight = row < 0 ? 0.0f : params.token_weights == nullptr ? 1.0f : __ldg(params.token_weights + row);
      if (more) {
        sum_exponentials(offsets, own);
        WarpMerge<Sum, 2> own_exponentials{{own.x, own.y}};
        MergeTogether(own_exponentials);
        exponentials.Post(own_exponentials, cluster, slices, slice);
      }
      sums.Wait();
      sums.Load(own_sums, slices);
      float row_sums[4], row_extremes[2];
      if constexpr (kHalf) {
        extremes.Wait();
        extremes.Load(own_extremes, slices);
        MergeTogether(own_sums, own_extremes);
        extremes.Collect(own_extremes, row_extremes);
      } else {
        MergeTogether(own_sums);
      }
      sums.Collect(own_sums, row_sums);
      const float loss = row_sums[0];
      float mean = row_sums[1];
      const float q_rest = row_sums[2], slope_top = row_sums[3];
      const bool row_has_top = row >= 0 && q_rest < 0.75f;  // 1, if no column was left out, else below 1/2
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
      if (row_has_top && params.want_gradient != 0) {
        // The most probable column's entry weighs as much as all others together; often one of them has most of that.
        float largest[4] = {};
        for_each(
            [&](float s, float t, int) { largest[0] = fmaxf(largest[0], fabsf(kForm == Form::kForward ? s : s * (mean - t))); });
        sums.Exchange<Largest>(largest, cluster, slices, slice);
        const float size = fabsf(factor.rest);
        row_power *= MakeExact<kHalf>(fabsf(top_entry) * params.top_unit * size, largest[0] * size, factor);
      }
      if (top.index >= 0) {
        for_each([&](float& s, float& t, int index) {
          if (index != top.index) return;
          s = top_entry * params.top_unit * top.derivative;
          t = mean - 1.0f;
        });
      }
      if (!has_gradient) {
        // M is 0, whatever the row holds.
        mean = 0.0f;
        for_each([](float& s, float& t, int) { s = t = 0.0f; });
      }

      // Phase 2, and the row that phase 0 has read out of its slots, which are filled again.
      const bool writes = row >= 0 && params.want_gradient != 0;
      uint16_t* const out = params.matrix + max(row, 0) * params.matrix_stride;
      const uint64_t own_out = reinterpret_cast<uint64_t>(out + begin + 4 * lane);
      const int32_t room = writes ? length - 4 * lane : 0;
      const float mean_factor = mean * factor.rest;
      const auto write_part = [&](int part) {
        uint32_t packed[kSlotVectors][2];
#pragma unroll
        for (int i = 0; i < kSlotVectors; ++i) {
          float entries[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float t = teacher[part * kSlotVectors + i][j];
            entries[j] =
                student[part * kSlotVectors + i][j] * (kForm == Form::kForward ? factor.rest : fmaf(-t, factor.rest, mean_factor));
          }
          packed[i][0] = Pack<kHalf>(entries[0], entries[1]);
          packed[i][1] = Pack<kHalf>(entries[2], entries[3]);
        }
#pragma unroll
        for (int i = 0; i < kSlotVectors; ++i) {
          const int vector = part * kSlotVectors + i;
          StorePairIf(room > vector * kVectorColumns, own_out + 2 * kVectorColumns * vector, packed[i][0], packed[i][1]);
        }
      };
      write_part(0);
      if (more) {
        load_part(0, ring.Slot(slot) + 16 * lane);
        refill(next, 0);
      }
      if (parts > 1) write_part(1);
      if (more) {
        exponentials.Wait();
        WarpMerge<Sum, 2> row_exponentials;
        exponentials.Load(row_exponentials, slices);
        MergeTogether(row_exponentials);
        exponentials.Collect(row_exponentials, total);
      }
      if (writes) {
        // The last four may have gone past the last column, where a row that is not finite has left NaN: the same thread's zeros.
        if (params.columns % 4 != 0 && length > 0 && begin + length == params.columns &&
            static_cast<int32_t>(cluster_row::Lane()) == length / 4 % 32) {
          for (int32_t column = params.columns; column % 4 != 0; ++column) out[column] = 0;
        }
#pragma unroll 1
        for (int32_t column = (params.columns + 3) / 4 * 4 + cta_rank * static_cast<int32_t>(blockDim.x) + thread;
             column < params.zero_columns; column += cluster * static_cast<int32_t>(blockDim.x)) {
          out[column] = 0;
        }
      }
      if (row >= 0 && cta_rank == 0 && thread == 0) {
        RowReport report;
        report.soft = kLn2 * static_cast<double>(loss);
        report.gradient_bound = fabs(params.gradient_scale * static_cast<double>(token_weight)) * params.soft_weight;
        params.reports[row] = report;
        if (params.want_gradient != 0) {
          params.row_factor[row] = has_gradient ? row_power : 0.0f;
          params.target_factor[row] = 0.0f;
        }
      }
      if (!more) break;
    }
  }
  sm90::ClusterSync();  // no CTA leaves while another may still store into it
}
#else
// Other architectures: DivergenceRowsFit() says no.
template <Form kForm, bool kTransformed, bool kHalf>
__global__ void DivergenceRowsKernel(const __grid_constant__ KernelParams) {}
#endif

constexpr int SharedBytes(int warps) {
  return warps * cluster_row::kRingBytes + 2 * cluster_row::Channel<2>::kBytes + cluster_row::Channel<4>::kBytes;
}
static_assert(SharedBytes(cluster_row::kMaxWarps) <= 232448, "a CTA of sm_90 has 227 KiB");

using Kernel = void (*)(KernelParams);

template <Form kForm>
Kernel KernelOfForm(bool transformed, bool half) {
  if (transformed) return half ? DivergenceRowsKernel<kForm, true, true> : DivergenceRowsKernel<kForm, true, false>;
  return half ? DivergenceRowsKernel<kForm, false, true> : DivergenceRowsKernel<kForm, false, false>;
}

Kernel KernelOf(Form form, bool transformed, bool half) {
  switch (form) {
    case Form::kForward:
      return KernelOfForm<Form::kForward>(transformed, half);
    case Form::kMixture:
      return KernelOfForm<Form::kMixture>(transformed, half);
    case Form::kReverse:
      break;
  }
  return KernelOfForm<Form::kReverse>(transformed, half);
}

using cluster_row::Layout;

struct LaunchShape {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  LaunchShape(const Layout& layout, int64_t clusters, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(layout.cluster * clusters));
    config.blockDim = dim3(static_cast<unsigned>(32 * layout.warps));
    config.dynamicSmemBytes = static_cast<size_t>(SharedBytes(layout.warps));
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(layout.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  LaunchShape(const LaunchShape&) = delete;
  LaunchShape& operator=(const LaunchShape&) = delete;
};

// Clusters of this layout that the current device holds at once; 0 if none, or if it is not sm_90. Asked once for each kernel,
// layout and device; any thread.
int ResidentClusters(Form form, bool transformed, bool half, const Layout& layout) {
  constexpr int kDevices = 16, kSizes = 5;
  if (layout.cluster == 0) return 0;
  static std::atomic<int> known[kDevices][3][2][2][kSizes];  // one more than the number
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int size = 0;
  while ((1 << size) < layout.cluster) ++size;
  std::atomic<int>& entry = known[device][static_cast<int>(form)][transformed ? 1 : 0][half ? 1 : 0][size];
  if (const int value = entry.load(); value != 0) return value - 1;
  int major = 0, minor = 0, clusters = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return 0;
  }
  if (major == 9 && minor == 0) {
    const Kernel kernel = KernelOf(form, transformed, half);
    const LaunchShape shape(layout, 1, nullptr);
    const bool asked = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            SharedBytes(cluster_row::kMaxWarps)) == cudaSuccess &&
                       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&clusters, kernel, &shape.config) == cudaSuccess;
    if (!asked) {
      cudaGetLastError();  // such a size is refused, which is an answer
      clusters = 0;
    }
  }
  entry.store(clusters + 1);
  return clusters;
}

bool SideFits(const LogitsView& logits, int64_t common_columns) {
  return logits.element == Element::kFloat32 && logits.vocab_start == 0 && logits.columns >= common_columns &&
         logits.stride % 4 == 0 && logits.stride >= logits.columns && reinterpret_cast<uintptr_t>(logits.products) % 16 == 0 &&
         logits.bias_element != Element::kFloat64;
}

}  // namespace

bool DivergenceRowsFit(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term, Element matrix_element) {
  const bool half = matrix_element == Element::kFloat16;
  if (!half && matrix_element != Element::kBFloat16) return false;
  if (term.common_columns < 1 || !SideFits(student, term.common_columns) || !SideFits(teacher, term.common_columns)) return false;
  const Layout layout = cluster_row::LayoutFor(term.common_columns);
  return ResidentClusters(FormOf(term), IsTransformed(student) || IsTransformed(teacher), half, layout) > 0;
}

cudaError_t LaunchDivergenceRows(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                 const DivergenceTerm& term, double loss_scale, const MutableMatrix& matrix, bool want_gradient,
                                 RowReport* reports, float* row_factor, float* target_factor, cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  const Form form = FormOf(term);
  const bool transformed = IsTransformed(student) || IsTransformed(teacher);
  const bool half = matrix.element == Element::kFloat16;
  const Layout layout = cluster_row::LayoutFor(term.common_columns);
  const int resident = ResidentClusters(form, transformed, half, layout);
  if (resident == 0 || rows.row_count > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  if (matrix.stride % 8 != 0 || reinterpret_cast<uintptr_t>(matrix.data) % 16 != 0) return cudaErrorInvalidValue;

  KernelParams params = MakeKernelParams(student, teacher, term, loss_scale);
  params.matrix = static_cast<uint16_t*>(matrix.data);
  params.matrix_stride = matrix.stride;
  params.token_weights = rows.token_weights;
  params.reports = reports;
  params.row_factor = row_factor;
  params.target_factor = target_factor;
  params.row_count = static_cast<int32_t>(rows.row_count);
  params.columns = static_cast<int32_t>(term.common_columns);
  params.zero_columns = static_cast<int32_t>(RoundUp(student.columns, 8));
  params.warp_columns = layout.warp_columns;
  params.cluster = layout.cluster;
  params.want_gradient = want_gradient ? 1 : 0;

  const int64_t clusters = rows.row_count < resident ? rows.row_count : resident;
  const LaunchShape shape(layout, clusters, stream);
  const cudaError_t status = cudaLaunchKernelEx(&shape.config, KernelOf(form, transformed, half), params);
  return status != cudaSuccess ? status : cudaGetLastError();
}

}  // namespace headwater::cuda
