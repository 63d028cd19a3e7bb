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
// terms, in registers: 32 columns of both sides a thread; their slots are filled again as soon as they are read. 2: M. The order is
// 1 of row n, 0 of row n + 1, 2 of row n, row n + 1 into registers: sums travel over the cluster under other work.
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
// Traffic. 10 bytes a column: N4096 V128256 is 5.25 GB; a copy of as many bytes takes 1.23 ms on an H200, this pass 1.55 to 1.6.
//
// Work. 5 exponentials and logarithms a column (16 a clock) with 0 < beta < 1, not near: 2 in phase 0, of which the multiply-add
// units take a quarter (2% of the pass; half is slower, and so is any of phase 1's), 3 in phase 1, since p is q 2^d, and where q
// vanishes only the sum of p is missing, which phase 0 has. Both phases run at that rate, 2.6 us of a row of 16384 columns a
// multiprocessor; the rest is what a row waits for its cluster, and 15 clusters of 8, which leave 12 of 132 multiprocessors
// idle. Log-sum-exps from own products' epilogues make this pass 1.40 ms and both products 0.64 ms slower
// (kernels/lab/013_log_sums.cu). Without effect or slower: two CTAs of 8 warps a multiprocessor in clusters of 16 (14 of them
// fit: 1.62 ms); summing the exponentials on the way into registers, with the cluster's waits exposed (1.86 ms); one decision for
// near or not a slice instead of one a vector (1.71 ms, though 7% faster in clusters of 2); a warp apart for the copies, which
// leaves 96 registers a thread and spills as much again as it reads (2.36 ms); exponentials and differences left in shared memory
// by phase 0, which saves phase 1 an exponential of three (2.05 ms); branches by vector instead of by slot, for slices that are not
// whole (1.64 ms).
#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

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
using cluster_row::Ring;
using cluster_row::StoreVector;
using cluster_row::Sum;
using divergence_row::Exp2ByPolynomial;
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

template <Form kForm, bool kTransformed, bool kHalf>
__global__ void __launch_bounds__(cluster_row::kMaxThreads, 1) DivergenceRowsKernel(const __grid_constant__ KernelParams params) {
  using Math = RowTerms<kForm, kTransformed, kHalf>;
  constexpr int kUnits = kHalf ? 3 : 2;
  using LastOperation = std::conditional_t<kHalf, Largest, Sum>;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t shared = sm90::SharedAddress(raw_shared);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int32_t lane = thread % 32;
  const auto warps = static_cast<int32_t>(blockDim.x) / 32;
  const uint32_t barriers = shared + warps * (kSlots * kSlotBytes);
  const Ring ring{shared + warp * (kSlots * kSlotBytes), barriers + warp * (8 * kSlots)};
  const uint32_t channels = barriers + warps * (8 * kSlots);
  Channel<1> exponentials{channels, 0};
  Channel<kUnits> sums{channels + cluster_row::kChannelBytes<1>, 0};

  const int32_t cluster = params.cluster;
  const auto cta_rank = static_cast<int32_t>(sm90::ClusterCtaRank());
  const int32_t row_step = static_cast<int32_t>(gridDim.x) / cluster;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) / cluster;
  // The warp's slice, in parts of a slot's size: as many in all warps, some of them empty.
  const int32_t begin = min((cta_rank * warps + warp) * params.warp_columns, params.columns);
  const int32_t length = min(params.warp_columns, params.columns - begin);
  const int32_t copied_length = (length + 3) / 4 * 4;
  const int32_t parts = (params.warp_columns + kSlotColumns - 1) / kSlotColumns;

  if (lane == 0) {
    ring.Init();
    sm90::FenceBarrierInit();
  }
  if (thread == 0) {
    exponentials.Init();
    sums.Init();
    sm90::FenceBarrierInit();
  }
  sm90::ClusterSync();

  {
    cluster_row::RingFiller filler{
        {params.inputs[0] + first_row * params.strides[0] + begin, params.inputs[1] + first_row * params.strides[1] + begin},
        {row_step * params.strides[0] - parts * kSlotColumns, row_step * params.strides[1] - parts * kSlotColumns},
        (params.row_count - first_row + row_step - 1) / row_step,
        parts};
    for (int i = 0; i < kSlots; ++i) filler.LoadNext(ring, copied_length, lane);
    uint32_t slot = 0;                       // of the row that goes into registers next
    uint32_t read_slot = 0, read_phase = 0;  // of the row that phase 0 reads next
    float student[kVectors][4], teacher[kVectors][4];

    // One column for each lane, from its student's and then its teacher's first 16.
    const int32_t sample_side = lane / 16;
    const int32_t sample_column = min(lane % 16, params.columns - 1);
    const auto load_sample = [&](int32_t row) {
      return row < params.row_count ? params.inputs[sample_side][row * params.strides[sample_side] + sample_column] : 0.0f;
    };
    float sample = load_sample(first_row);

    // Phase 0: exponential sums of a row, in shared memory. `offsets`: log2 of what they are relative to. Whole numbers, so that
    // they cancel exactly; above the sampled columns, so that a largest logit 2^80 above them still fits.
    const auto sum_exponentials = [&](int32_t row, float2& offsets, float2& own) {
      if constexpr (kTransformed) sample = LogitOf(params.sides[sample_side], sample, sample_column);
      float largest = sample * params.log2_scales[sample_side];
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      largest = ceilf(largest) + 40.0f;
      offsets = make_float2(__shfl_sync(0xffffffffu, largest, 0), __shfl_sync(0xffffffffu, largest, 16));
      sample = load_sample(row + row_step);
      own = make_float2(0.0f, 0.0f);
      const float a = params.log2_scales[0], b = params.log2_scales[1];
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
#pragma unroll
        for (int i = 0; i < kSlotVectors; ++i) {
          const float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
          own.x += (Exp2(fmaf(s.x, a, -offsets.x)) + Exp2(fmaf(s.y, a, -offsets.x))) +
                   (Exp2(fmaf(s.z, a, -offsets.x)) + Exp2ByPolynomial(fmaf(s.w, a, -offsets.x)));
          own.y += (Exp2(fmaf(t.x, b, -offsets.y)) + Exp2(fmaf(t.y, b, -offsets.y))) +
                   (Exp2(fmaf(t.z, b, -offsets.y)) + Exp2ByPolynomial(fmaf(t.w, b, -offsets.y)));
        }
      }
      float2 partial[1] = {own};
      exponentials.Send<Sum, Sum>(partial, 1, cluster, cta_rank);
    };

    // The row that phase 0 has read, out of its slots, which are filled again.
    const auto load_row = [&] {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part >= parts) continue;
        const uint32_t address = ring.Slot(slot) + 16 * lane;
        slot = Ring::Next(slot);
#pragma unroll
        for (int i = 0; i < kSlotVectors; ++i) {
          const float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
          const int vector = part * kSlotVectors + i;
          student[vector][0] = s.x, student[vector][1] = s.y, student[vector][2] = s.z, student[vector][3] = s.w;
          teacher[vector][0] = t.x, teacher[vector][1] = t.y, teacher[vector][2] = t.z, teacher[vector][3] = t.w;
        }
        __syncwarp();
        filler.LoadNext(ring, copied_length, lane);
      }
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

    float2 offsets = make_float2(0.0f, 0.0f), own = make_float2(0.0f, 0.0f);
    // Phases 1 and 2 are of `row`; there is none at first.
    for (int32_t row = -1, next = first_row;; row = next, next += row_step) {
      const bool more = next < params.row_count;
      float token_weight = 0.0f;
      Top top;
      if (row >= 0) {
        token_weight = params.token_weights == nullptr ? 1.0f : __ldg(params.token_weights + row);
        float2 total[1];
        exponentials.Receive<Sum, Sum>(total, cluster);
        // A sample far below the row's largest logit, or a row that is not finite. Every thread of the cluster sees the same sums.
        if (!(total[0].x > 1e-20f && total[0].x < 1e36f && total[0].y > 1e-20f && total[0].y < 1e36f)) {
          float2 largest[1] = {make_float2(Maximum::kNothing, Maximum::kNothing)};
          for_each([&](float s, float t, int) {
            largest[0].x = fmaxf(largest[0].x, s * params.log2_scales[0]);
            largest[0].y = fmaxf(largest[0].y, t * params.log2_scales[1]);
          });
          exponentials.Send<Maximum, Maximum>(largest, 1, cluster, cta_rank);
          exponentials.Receive<Maximum, Maximum>(largest, cluster);
          offsets = make_float2(ceilf(largest[0].x), ceilf(largest[0].y));
          own = make_float2(0.0f, 0.0f);
          for_each([&](float s, float t, int) {
            own.x += Exp2(fmaf(s, params.log2_scales[0], -offsets.x));
            own.y += Exp2(fmaf(t, params.log2_scales[1], -offsets.y));
          });
          total[0] = own;
          exponentials.Send<Sum, Sum>(total, 1, cluster, cta_rank);
          exponentials.Receive<Sum, Sum>(total, cluster);
        }
        const float student_log = log2f(total[0].x), teacher_log = log2f(total[0].y);
        const float student_offset = -(offsets.x + student_log);
        const float teacher_offset = -(offsets.y + teacher_log);
        const float difference = (offsets.x - offsets.y) + (student_log - teacher_log);
        const RowOffsets row_offsets{student_offset + (params.log_rest + params.log_unit), teacher_offset, difference,
                                     difference + (params.log_beta - params.log_rest)};

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
          for_each([&](float s, float t, int index) {
            const float log_q = fmaf(s, params.log2_scales[0], row_offsets.student);
            if (!(log_q > largest)) return;
            largest = log_q;
            index_top = index;
            s_top = s;
            t_top = t;
          });
          if (largest > params.log_rest + params.log_unit - 1.0f) {
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
            for_each([&](float& s, float& t, int index) {
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
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          if (vector / kSlotVectors >= parts) continue;
          float log_q[4], d[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) log_q[i] = fmaf(student[vector][i], params.log2_scales[0], row_offsets.student);
          bool near = false;
          if (tries < 2) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              d[i] = Math::Difference(params, row_offsets.difference, student[vector][i], teacher[vector][i]);
              if (log_q[i] < kAbsent) d[i] = 0.0f;
              largest = fmaxf(largest, fabsf(d[i]));
            }
            near = __all_sync(0xffffffffu, largest < kNearLimit);
            tries += near ? 0 : 1;
          }
          if (near) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              Math::Near(params, log_q[i], d[i], student[vector][i], teacher[vector][i], terms);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) Math::Far(params, row_offsets, log_q[i], student[vector][i], teacher[vector][i], terms);
          }
        }
        float2 partial[kUnits];
        partial[0] = make_float2(loss + Math::Loss(params, terms, tries != 0, q_rest, p_rest),
                                 (terms.mean + terms.distant) * params.inverse_rest_unit);
        partial[1] = make_float2(q_rest, kForm == Form::kForward ? 0.0f : top.slope);
        if constexpr (kHalf) partial[2] = make_float2(terms.largest, terms.q_largest);  // in M's units
        sums.template Send<Sum, LastOperation>(partial, 3, cluster, cta_rank);
      }
      if (more) sum_exponentials(next, offsets, own);
      if (row >= 0) {
        float2 partial[kUnits];
        sums.template Receive<Sum, LastOperation>(partial, cluster);
        const float loss = partial[0].x;
        float mean = partial[0].y;
        const float q_rest = partial[1].x;
        const bool row_has_top = q_rest < 0.75f;  // 1, if no column was left out, else below 1/2
        float top_entry;
        if constexpr (kForm == Form::kForward) {
          top_entry = -mean;
        } else {
          top_entry = (1.0f - q_rest) * fmaf(-partial[1].y, q_rest, mean);
          mean = row_has_top ? fmaf(partial[1].y, 1.0f - q_rest, mean) : mean / q_rest;
          if (!(fabsf(loss) < INFINITY)) mean = NAN;  // nothing finite comes out of a row that is not
        }
        const double weight = static_cast<double>(token_weight);
        FactorParts factor = SplitFactor(params.matrix_factor * weight);
        const bool has_gradient = factor.rest != 0.0f;
        if constexpr (kHalf) {
          const float bound = fmaxf(kForm == Form::kForward ? partial[2].x : fmaf(partial[2].y, fabsf(mean), partial[2].x),
                                    row_has_top ? fabsf(top_entry) * params.top_unit : 0.0f) *
                              fabsf(factor.rest);
          FitHalf(bound, factor);
        }
        float row_power = PowerOfTwo(factor.exponent);
        if (row_has_top && params.want_gradient != 0) {
          // The most probable column's entry weighs as much as all others together; often one of them has most of that.
          float2 largest[kUnits] = {};
          for_each([&](float s, float t, int) {
            largest[0].x = fmaxf(largest[0].x, fabsf(kForm == Form::kForward ? s : s * (mean - t)));
          });
          sums.template Send<Largest, Largest>(largest, 3, cluster, cta_rank);
          sums.template Receive<Largest, Largest>(largest, cluster);
          const float size = fabsf(factor.rest);
          row_power *= MakeExact<kHalf>(fabsf(top_entry) * params.top_unit * size, largest[0].x * size, factor);
        }
        if (cta_rank == 0 && thread == 0) {
          RowReport report;
          report.soft = kLn2 * static_cast<double>(loss);
          report.gradient_bound = fabs(params.gradient_scale * weight) * params.soft_weight;
          params.reports[row] = report;
          if (params.want_gradient != 0) {
            params.row_factor[row] = has_gradient ? row_power : 0.0f;
            params.target_factor[row] = 0.0f;
          }
        }

        // Phase 2.
        if (params.want_gradient != 0) {
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
          uint16_t* const out = params.matrix + row * params.matrix_stride;
          const int32_t room = length - 4 * lane;
          const uint64_t own_out = reinterpret_cast<uint64_t>(out + begin + 4 * lane);
          const float mean_factor = mean * factor.rest;
#pragma unroll
          for (int vector = 0; vector < kVectors; ++vector) {
            if (room <= vector * kVectorColumns) continue;
            float entries[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              entries[i] = student[vector][i] *
                           (kForm == Form::kForward ? factor.rest : fmaf(-teacher[vector][i], factor.rest, mean_factor));
            }
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(own_out + 2 * kVectorColumns * vector),
                         "r"(Pack<kHalf>(entries[0], entries[1])), "r"(Pack<kHalf>(entries[2], entries[3]))
                         : "memory");
          }
          // The last four may have gone past the last column, where a row that is not finite has left NaN: the same thread's zeros.
          if (length > 0 && begin + length == params.columns && length % 4 != 0 && lane == length / 4 % 32) {
            for (int32_t column = params.columns; column % 4 != 0; ++column) out[column] = 0;
          }
          for (int32_t column = (params.columns + 3) / 4 * 4 + cta_rank * static_cast<int32_t>(blockDim.x) + thread;
               column < params.zero_columns; column += cluster * static_cast<int32_t>(blockDim.x)) {
            out[column] = 0;
          }
        }
      }
      if (!more) break;
      load_row();
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
  return warps * cluster_row::kRingBytes + cluster_row::kChannelBytes<1> + cluster_row::kChannelBytes<3>;
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
