// The divergence's row pass on Hopper: each product through memory once, losses and M from it.
//
// P is the teacher, Q the student, over the common columns. In units of log2, d = log2 p - log2 q, L = log2(m / q), m = beta p +
// (1 - beta) q.
//
//   0 < beta < 1  loss = ln2 sum (beta p (d - L) - (1 - beta) q L), each column's share >= 0;  M = q (mean L - L), mean = sum q L
//   beta = 1      loss = ln2 sum (-q d + (p - q) / ln2), likewise;                             M = q (mean d - d)
//   beta = 0      loss = ln2 sum (p d + (q - p) / ln2), likewise;                              M = q - p
//
// The other factors are in row_factor: loss_scale, token weight, logit_scale, soft_weight, 1 - beta, 1 / temperature and ln2.
//
// Phases. 0: a row's exponential sums, from shared memory, against offsets guessed from 16 of its columns. 1: the row's terms,
// which stay in registers: 32 columns of both sides a thread. 2: the gradient's matrix. The order is 1 of row n, the rest of 0 of
// n + 1, the first part of 0 of n + 2, 2 of n. Each row's two exchanges over the cluster run under other work. A row's first half
// goes into registers with phase 2 of the row before it, the second with its own phase 1. Each slot is filled again when it has
// been read. The service warps do the work that a row needs once (device/divergence_service.cuh).
//
// Factor. M has all of row_factor except its power of two, so that a row's share of grad_weight is rounded once. In a row of which
// one column has most, M has so much that its largest entries are nearly exact (device/exact_entries.cuh).
//
// In place, or apart. M of row n may be written over the student's products of row n when the second exchange has come. That comes
// after every CTA has summed its slice of row n, so all of the row was in shared memory before.
//
// Digits. Columns that all have |d| < 1 (a student near its teacher) take polynomials of d, where every term is of second order by
// itself. Logits are subtracted from each other before the log-sum-exps are. A warp whose first vector has a quarter of its lanes
// near takes each column's share of the loss apart. A column with q > 1/2 gets the remainder of the others. There is at most one,
// and only in a thread whose exponentials are more than half of the row's. All sums that its entry needs leave it out, so a
// confident student keeps its digits. L is kept relative to its least value log2(1 - beta), which cancels in the matrix. Where the
// teacher has nothing it is then exactly 0, and a student that disagrees keeps its digits too.
//
// Not finite. The exponentials' sums come out as NaN, and so do the row's loss and M. No loop's length depends on values.
//
// Traffic. 10 bytes a column: N4096 V128256 is 5.25 GB. A copy of as many bytes takes 1.24 ms on an H200, whatever its clock. This
// pass takes 1.34, and 1.59 at the clock that is left beside products. On an H100 it is 1.74 and 1.84.
//
// Work. 5 exponentials and logarithms a column (16 a clock) with 0 < beta < 1, not near: 2 in phase 0 and 3 in phase 1. Since p is
// q 2^d, only the sum of p is missing where q vanishes, and phase 0 has that. That is 3/5 of the clocks; 15 clusters of 8 leave 12
// of 132 multiprocessors idle. 20 warps get 96 each of the 65536 registers; the compute warps take 16 more from the service warps.
// There is none to spare: one that is spilled into the loop is read back from beyond the small L1 that is left. The trials are in
// kernels/lab/README.md, 009.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/cluster_row.cuh"
#include "kernels/cuda/device/divergence_service.cuh"
#include "kernels/cuda/device/divergence_terms.cuh"
#include "kernels/cuda/rows/divergence_params.h"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda {
namespace {

using cluster_row::kVectors;
using divergence_row::Form;
using divergence_row::FormOf;
using divergence_row::IsTransformed;
using divergence_row::KernelParams;
using divergence_row::kLn2;
using divergence_row::kSharedBytes;
using divergence_row::MakeKernelParams;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using cluster_row::kInputBytes;
using cluster_row::kParts;
using cluster_row::kSlotColumns;
using cluster_row::kSlotVectors;
using cluster_row::kVectorBytes;
using cluster_row::kVectorColumns;
using cluster_row::kWarpBytes;
using cluster_row::LoadVector;
using cluster_row::Maximum;
using cluster_row::Ring;
using cluster_row::StoreVector;
using divergence_row::kNearLimit;
using divergence_row::MakeLogits;
using divergence_row::Pack;
using divergence_row::Place;
using divergence_row::RowOffsets;
using divergence_row::RowTerms;
using divergence_row::Terms;
using divergence_row::Top;
using sm90::Exp2;

// The number of a row's vectors whose exponentials are added up while the row before waits for its log-sum-exps.
constexpr int kEarlyVectors = 2;

// A thread's, of the 96 that each has at first.
constexpr int kComputeRegisters = 112, kServiceRegisters = 32;

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

// A compute warp's part of all rows.
template <Form kForm, bool kTransformed, bool kHalf>
__device__ __forceinline__ void ComputeRows(const KernelParams& params, const Place& place, int32_t warp) {
  using Math = RowTerms<kForm, kTransformed, kHalf>;
  // Through a shuffle, so that the compiler keeps it instead of asking for it again where the latency shows.
  const uint32_t thread = __shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32);
  const auto lane = static_cast<int32_t>(thread % 32);
  const Ring& ring = place.ring;
  const int32_t parts = place.parts, row_step = place.row_step;
  // This warp's columns of the slice's first part.
  const int32_t begin = place.begin + warp * kSlotColumns, length = place.length - warp * kSlotColumns;
  const auto part_length = [&](int part) { return length - part * place.part_columns; };
  const auto slot_address = [&](uint32_t slot) { return ring.Slot(slot) + warp * kWarpBytes + 16 * lane; };
  uint32_t slot = 0, phase = 0;  // of the rows that go into registers next
  uint32_t logs_parity = 0, rows_parity = 0;
  float student[kVectors][4], teacher[kVectors][4];

  // Slot number `ahead` after `slot`, when it is full.
  const auto wait_slot = [&](int32_t ahead) {
    uint32_t of_slot = slot + static_cast<uint32_t>(ahead), of_phase = phase;
    if (of_slot >= cluster_row::kSlots) {
      of_slot -= cluster_row::kSlots;
      of_phase ^= 1;
    }
    sm90::BarrierWait(ring.Full(of_slot), of_phase);
    return slot_address(of_slot);
  };
  // A slice's last part is filled up, so that later code need not look at columns' numbers again.
  const auto fill_up = [&](int part, uint32_t address) {
    if (!kTransformed && __builtin_expect(part_length(part) >= kSlotColumns, 1)) return;
    const int32_t first = part * place.part_columns + 4 * static_cast<int32_t>(cluster_row::Lane());
    for (int i = 0; i < kSlotVectors; ++i) {
      const int32_t local = first + i * kVectorColumns;
      float4 s = LoadVector(address + i * kVectorBytes), t = LoadVector(address + i * kVectorBytes + kInputBytes);
      MakeLogits<kTransformed>(params.sides[0], begin + local, length - local, params.no_column[0], s);
      MakeLogits<kTransformed>(params.sides[1], begin + local, length - local, params.no_column[1], t);
      StoreVector(address + i * kVectorBytes, s);
      StoreVector(address + i * kVectorBytes + kInputBytes, t);
    }
    sm90::FenceProxyAsync();  // stored data must not be overtaken by the copy into this slot that comes later
  };
  // Phase 0: this thread's exponentials of so many vectors.
  const auto add_exponentials = [&](auto count, uint32_t address, float offset_a, float offset_b, float(&own)[2]) {
    constexpr int kCount = decltype(count)::value;
    const float a = params.log2_scales[0], b = params.log2_scales[1];
    constexpr int kAhead = 2;
    static_assert(kAhead <= kCount);
    float4 s[kCount], t[kCount];
    const auto load = [&](int i) {
      s[i] = LoadVector(address + i * kVectorBytes);
      t[i] = LoadVector(address + i * kVectorBytes + kInputBytes);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i + kAhead < kCount) load(i + kAhead);
      own[0] += (Exp2(fmaf(s[i].x, a, -offset_a)) + Exp2(fmaf(s[i].y, a, -offset_a))) +
                (Exp2(fmaf(s[i].z, a, -offset_a)) + Exp2(fmaf(s[i].w, a, -offset_a)));
      own[1] += (Exp2(fmaf(t[i].x, b, -offset_b)) + Exp2(fmaf(t[i].y, b, -offset_b))) +
                (Exp2(fmaf(t[i].z, b, -offset_b)) + Exp2(fmaf(t[i].w, b, -offset_b)));
    }
  };
  // The first kEarlyVectors of the row that begins in slot number `ahead`; then the others of the row that begins in `slot`.
  const auto begin_exponentials = [&](int32_t ahead, float offset_a, float offset_b) {
    float own[2] = {};
    const uint32_t address = wait_slot(ahead);
    fill_up(0, address);
    add_exponentials(std::integral_constant<int, kEarlyVectors>(), address, offset_a, offset_b, own);
    cluster_row::StorePair(place.early + 8 * thread, own[0], own[1]);
  };
  const auto finish_exponentials = [&](float offset_a, float offset_b) {
    float own[2];
    cluster_row::LoadPair(place.early + 8 * thread, own[0], own[1]);
    add_exponentials(std::integral_constant<int, kSlotVectors - kEarlyVectors>(), slot_address(slot) + kEarlyVectors * kVectorBytes,
                     offset_a, offset_b, own);
    if (parts > 1) {
      const uint32_t address = wait_slot(1);
      fill_up(1, address);
      add_exponentials(std::integral_constant<int, kSlotVectors>(), address, offset_a, offset_b, own);
    }
    place.exponentials.Give(thread, own);
  };

  // A lane's share of 128 columns into registers.
  const auto load_vector = [&](int vector, uint32_t address) {
    const float4 s = LoadVector(address), t = LoadVector(address + kInputBytes);
    student[vector][0] = s.x, student[vector][1] = s.y, student[vector][2] = s.z, student[vector][3] = s.w;
    teacher[vector][0] = t.x, teacher[vector][1] = t.y, teacher[vector][2] = t.z, teacher[vector][3] = t.w;
  };
  // The slot has been read.
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) sm90::BarrierArrive(ring.Empty(slot));
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
    const uint32_t address = slot_address(slot);
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

  place.logs.Wait(logs_parity);
  float4 factors = place.logs.Second();
  begin_exponentials(0, factors.z, factors.w);
  // Phases 1 and 2 are of `row`; there is none at first.
  for (int32_t row = place.first_row - row_step;; row += row_step) {
    const bool more = row + row_step < params.row_count;
    Top top;
    if (row >= 0) {
      place.logs.Wait(logs_parity);
      factors = place.logs.Second();
      float own[2];  // of phase 0
      if (__builtin_expect(factors.x < 0.0f, 0)) {
        float largest[2] = {Maximum::kNothing, Maximum::kNothing};
        for_each_logit([&](float s, float t, int) {
          largest[0] = fmaxf(largest[0], s * params.log2_scales[0]);
          largest[1] = fmaxf(largest[1], t * params.log2_scales[1]);
        });
        place.exponentials.Give(thread, largest);
        place.logs.Wait(logs_parity);
        const float4 offsets = place.logs.Second();
        own[0] = own[1] = 0.0f;
        for_each_logit([&](float s, float t, int) {
          own[0] += Exp2(fmaf(s, params.log2_scales[0], -offsets.z));
          own[1] += Exp2(fmaf(t, params.log2_scales[1], -offsets.w));
        });
        place.exponentials.Give(thread, own);
        place.logs.Wait(logs_parity);
        factors = place.logs.Second();
      }
      const float4 logs = place.logs.First();
      const RowOffsets row_offsets{logs.x, logs.y, logs.z, logs.w};
      cluster_row::LoadPair(place.exponentials.Given(thread), own[0], own[1]);

      // Phase 1.
      Terms terms;
      float loss = 0.0f;
      // With the log-sum-exp's rounding, as the columns' q have it: means over q are divided by the sum of just these q.
      float q_rest = own[0] * factors.x, p_rest = own[1] * factors.y;
      if (__builtin_expect(q_rest > 0.5f, 0)) {
        // The column that has more than half of q can be here. It is taken out of the following sums. Its share of the loss is
        // taken apart, near or far, and the rest of q is added up without it.
        float s_top = params.no_column[0], t_top = params.no_column[1], largest = -INFINITY;
        int32_t index_top = -1;
        for_each_logit([&](float s, float t, int index) {
          const float log_q = Math::LogQ(params, row_offsets, s);
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
          Terms apart;
          if (fabsf(d) < kNearLimit) {
            Math::Near(params, row_offsets, s_top, t_top, apart);
          } else {
            Math::Mixed(params, row_offsets, s_top, t_top, apart);
          }
          top.slope = t_top;
          loss = Math::Loss(params, apart, false, 0.0f, 0.0f);
          q_rest = p_rest = 0.0f;
          for_each_logit([&](float& s, float& t, int index) {
            if (index == top.index) {
              s = params.no_column[0];
              t = params.no_column[1];
            }
            q_rest += Exp2(fmaf(s, params.log2_scales[0], row_offsets.student - params.log_rest_unit));
            p_rest += Exp2(Math::LogP(params, row_offsets, t));
          });
        }
      }
      // Until the sums are there, since registers are short in the following code.
      const uint32_t stored = place.sums.Given(thread);
      StoreVector(stored, make_float4(loss, q_rest, p_rest, top.slope));
      bool is_far = false;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part >= parts) continue;
        const int first = part * kSlotVectors;
        if (part != 0) {
          const uint32_t address = slot_address(slot);
#pragma unroll
          for (int i = 0; i < kSlotVectors; ++i) load_vector(first + i, address + i * kVectorBytes);
          release();
        }
        const auto near_lanes = [&](int vector) { return Math::NearLanes(params, row_offsets, student[vector], teacher[vector]); };
        const auto for_part = [&](const auto& function) {
#pragma unroll
          for (int vector = first; vector < first + kSlotVectors; ++vector) {
#pragma unroll
            for (int i = 0; i < 4; ++i) function(student[vector][i], teacher[vector][i]);
          }
        };
        // Each of the three ways is straight code.
        uint32_t near = is_far ? 0 : near_lanes(first);
        if (part == 0) is_far = __popc(near) < divergence_row::kMixedLanes;
        if (is_far) {
          for_part([&](float& s, float& t) { Math::Far(params, row_offsets, s, t, terms); });
        } else {
#pragma unroll
          for (int vector = first + 1; vector < first + kSlotVectors; ++vector) near &= near_lanes(vector);
          if (near == ~0u) {
            for_part([&](float& s, float& t) { Math::Near(params, row_offsets, s, t, terms); });
          } else {
            for_part([&](float& s, float& t) { Math::Mixed(params, row_offsets, s, t, terms); });
          }
        }
      }
      const float4 before = LoadVector(stored);
      const float own_sums[4] = {before.x + Math::Loss(params, terms, is_far, before.y, before.z),
                                 terms.mean * params.inverse_rest_unit, before.y, kForm == Form::kForward ? 0.0f : before.w};
      place.sums.Give(thread, own_sums);
      if constexpr (kHalf) {  // in M's units
        const float own_extremes[2] = {terms.largest, terms.q_largest};
        place.extremes.Give(thread, own_extremes);
      }
    }
    if (more) {
      const float4 after_next = place.logs.Third();
      finish_exponentials(factors.z, factors.w);
      // The next row's log-sum-exps come while this is under way, and phase 2.
      if (row + 2 * row_step < params.row_count) begin_exponentials(parts, after_next.x, after_next.y);
    }
    float factor = 0.0f, mean = 0.0f;
    if (row >= 0) {
      place.rows.Wait(rows_parity);
      float4 message = place.rows.First();
      mean = message.y;
      if (__builtin_expect(message.w != 0.0f, 0)) {
        // The most probable column's entry weighs as much as all others together; often one of them has most of that.
        float largest[4] = {};
        for_each(
            [&](float s, float t, int) { largest[0] = fmaxf(largest[0], fabsf(kForm == Form::kForward ? s : s * (mean - t))); });
        place.sums.Give(thread, largest);
        place.rows.Wait(rows_parity);
        message = place.rows.First();
      }
      factor = message.x;
      if (__builtin_expect(top.index >= 0, 0)) {
        for_each([&](float& s, float& t, int index) {
          if (index != top.index) return;
          s = message.z * params.top_unit * top.derivative;
          t = mean - 1.0f;
        });
      }
      if (__builtin_expect(factor == 0.0f, 0)) {
        // M is 0, whatever the row holds.
        mean = 0.0f;
        for_each([](float& s, float& t, int) { s = t = 0.0f; });
      }
    }

    // Phase 2, and the row that phase 0 has read out of its slots, which are filled again.
    const bool writes = row >= 0 && params.want_gradient != 0;
    uint16_t* const out = params.matrix + max(row, 0) * params.matrix_stride;
    const float mean_factor = mean * factor;
    const auto write_vector = [&](int vector) {
      float entries[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float t = teacher[vector][j];
        entries[j] = student[vector][j] * (kForm == Form::kForward ? factor : fmaf(-t, factor, mean_factor));
      }
      const int part = vector / kSlotVectors, i = vector % kSlotVectors;
      const auto own_out = reinterpret_cast<uint64_t>(out + begin + part * place.part_columns + 4 * lane);
      const int32_t room = writes ? part_length(part) - 4 * lane : 0;
      StorePairIf(room > i * kVectorColumns, own_out + 2 * kVectorColumns * i, Pack<kHalf>(entries[0], entries[1]),
                  Pack<kHalf>(entries[2], entries[3]));
    };
    const uint32_t address = slot_address(slot);
#pragma unroll
    for (int vector = 0; vector < kSlotVectors; ++vector) {
      write_vector(vector);
      if (more) load_vector(vector, address + vector * kVectorBytes);
    }
    if (parts > 1) {
#pragma unroll
      for (int vector = kSlotVectors; vector < kVectors; ++vector) write_vector(vector);
    }
    if (more) release();
    if (__builtin_expect(writes && params.columns % 4 != 0, 0)) {
      // The last four may have gone past the last column, where a row that is not finite has left NaN: the same thread's zeros.
      const int32_t last = params.columns - 1 - begin;
      for (int part = 0; part < parts; ++part) {
        const int32_t local = last - part * place.part_columns;
        if (local < 0 || local >= kSlotColumns || local / 4 % 32 != lane || last >= length) continue;
        for (int32_t column = params.columns; column % 4 != 0; ++column) out[column] = 0;
      }
    }
    if (!more) break;
  }
}

template <Form kForm, bool kTransformed, bool kHalf>
__global__ void __launch_bounds__(cluster_row::kMaxThreads, 1) DivergenceRowsKernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const Place place(params, sm90::SharedAddress(raw_shared));
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) place.Init();
  sm90::ClusterSync();
  if (warp >= place.first_service) {
    sm90::RegistersDecrease<kServiceRegisters>();
    divergence_row::ServeRows<kForm, kTransformed, kHalf>(params, place, warp - place.first_service);
  } else {
    sm90::RegistersIncrease<kComputeRegisters>();
    if (warp < place.warps) ComputeRows<kForm, kTransformed, kHalf>(params, place, warp);
  }
  __syncwarp();
  sm90::ClusterSync();  // no CTA leaves while another may still store into it
}
#else
// Other architectures: DivergenceRowsFit() says no.
template <Form kForm, bool kTransformed, bool kHalf>
__global__ void DivergenceRowsKernel(const __grid_constant__ KernelParams) {}
#endif

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
    config.blockDim = dim3(static_cast<unsigned>(32 * ((layout.warps + 3) / 4 * 4 + cluster_row::kServiceWarps)));
    config.dynamicSmemBytes = kSharedBytes;
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
    const bool asked = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) == cudaSuccess &&
                       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&clusters, kernel, &shape.config) == cudaSuccess;
    if (!asked) {
      // A refusal of such a size is an answer; any other error may differ the next time.
      const cudaError_t error = cudaGetLastError();
      if (error != cudaErrorInvalidValue && error != cudaErrorInvalidConfiguration && error != cudaErrorInvalidClusterSize)
        return 0;
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
  if (!HasDigitsInOnePass(term.beta) || !IsOrdinaryScale(student.transform.logit_scale, term.student_temperature) ||
      !IsOrdinaryScale(teacher.transform.logit_scale, term.teacher_temperature)) {
    return false;
  }
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
  params.warps = layout.warps;
  params.cta_columns = layout.warps * layout.warp_columns;
  params.cluster = layout.cluster;
  params.want_gradient = want_gradient ? 1 : 0;

  const int64_t clusters = rows.row_count < resident ? rows.row_count : resident;
  const LaunchShape shape(layout, clusters, stream);
  const cudaError_t status = cudaLaunchKernelEx(&shape.config, KernelOf(form, transformed, half), params);
  return status != cudaSuccess ? status : cudaGetLastError();
}

}  // namespace headwater::cuda
