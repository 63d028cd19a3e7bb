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
// terms, in registers: 32 columns of both sides a thread; their slots are free for the next rows. 2: M. The order is 1 of row n, 0
// of row n + 1, 2 of row n, row n + 1 into registers: sums travel over the cluster under other work.
//
// In place. M of row n is written over the student's products of row n when the second exchange has come; it comes after every CTA
// has summed its slice of row n, so all of the row was in shared memory before.
//
// Digits. Columns that all have |d| < 1/2 (a nearly distilled student) take polynomials of d, where every term is of second order
// by itself; logits are subtracted from each other before the log-sum-exps are. A column with q > 1/2 gets what the others leave:
// there is at most one, and only in a thread whose exponentials are more than half of the row's. All sums that its entry needs
// leave it out, so a confident student keeps its digits. L is kept relative to its least value log2(1 - beta), which cancels in M:
// where the teacher has nothing it is then exactly 0, and a student that disagrees keeps its digits too.
//
// Not finite. The exponentials' sums come out as NaN, and so do the row's loss and M. No loop's length depends on values.
//
// Traffic. 10 bytes a column: N4096 V128256 is 5.25 GB, 1.24 ms at 4.25 TB/s.
//
// Work. From the sm_90a code, a column of both sides with 0 < beta < 1, not near: phase 0 has 2 MUFU of 12 instructions, phase 1 4
// of 15, the way into registers 5, phase 2 4: 6 MUFU (16 a clock) of 36 instructions (128 a clock). A slice of 16032 columns takes
// 6000 clocks of MUFU beside 4500 of issue, 3.2 us at 1.9 GHz, and its memory 4.5 us (15 clusters of 8): 1.3 to 1.6 ms are
// predicted.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/cluster_row.cuh"
#include "kernels/cuda/device/row_math.cuh"
#include "kernels/cuda/row_passes.h"

namespace headwater::cuda {
namespace {

using cluster_row::kInputs;
using cluster_row::kVectors;

enum class Form : int32_t { kForward, kMixture, kReverse };

constexpr int kSeries = 6;
constexpr double kLn2 = 0.693147180559945309417;
constexpr double kLog2E = 1.44269504088896340736;
// Stands for columns that are not there; no exponential is left of it, and differences of two of them are finite.
constexpr float kNoColumn = 1e20f;

// How one side's products become logits, where that is more than a factor.
struct SideTransform {
  const void* bias = nullptr;  // [columns], or null
  Element bias_element = Element::kFloat32;
  float logit_scale = 1;
  float cap = 0;
  float inverse_cap = 0;
};

struct KernelParams {
  const float* inputs[kInputs];  // student's, teacher's products
  int64_t strides[kInputs];
  uint16_t* matrix;  // [row_count, 2 * strides[0]], over the student's products
  const float* token_weights;
  RowReport* reports;
  float* row_factor;
  float* target_factor;
  SideTransform sides[kInputs];
  double gradient_scale;  // loss_scale * logit_scale
  double soft_weight;
  double matrix_factor;        // from M to d(divergence)/d(logit), soft_weight included
  float log2_scales[kInputs];  // from a value in shared memory to log2 of its exponential
  float ratio;                 // log2_scales[0] / log2_scales[1]
  float no_column[kInputs];
  float beta, one_minus_beta;
  float log_rest;         // kMixture: log2(1 - beta), else 0
  float slope[kSeries];   // L = d * sum slope_k d^k
  float excess[kSeries];  // loss = q d^2 sum excess_k d^k
  int32_t row_count;
  int32_t columns;       // common ones
  int32_t zero_columns;  // up to here M has zeros
  int32_t slice;
  int32_t cluster;
  int32_t want_gradient;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using cluster_row::Channel;
using cluster_row::kChunk;
using cluster_row::kConsumers;
using cluster_row::kConsumerWarps;
using cluster_row::kSlotBytes;
using cluster_row::kSlots;
using cluster_row::Largest;
using cluster_row::LoadVector;
using cluster_row::Maximum;
using cluster_row::StoreVector;
using cluster_row::Sum;
using sm90::Exp2;

constexpr float kNearLimit = 0.5f;  // of |d|, for the series
constexpr float kLargestDifference = 126.0f;

__device__ __forceinline__ float BiasAt(const SideTransform& side, int32_t column) {
  if (side.bias == nullptr) return 0.0f;
  if (side.bias_element == Element::kFloat32) return __ldg(static_cast<const float*>(side.bias) + column);
  if (side.bias_element == Element::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(side.bias)[column]);
  return __half2float(static_cast<const __half*>(side.bias)[column]);
}

__device__ __forceinline__ float LogitOf(const SideTransform& side, float product, int32_t column) {
  const float argument = side.logit_scale * (product + BiasAt(side, column));
  return side.cap == 0.0f ? argument : row_math::Softcap(argument, side.cap, side.inverse_cap).z;
}

// The first `count` of four products become logits, the rest `no_column`: there the copy engine left whatever lies between rows.
template <bool kTransformed>
__device__ __forceinline__ void MakeLogits(const SideTransform& side, int32_t column, int32_t count, float no_column,
                                           float4& values) {
  const auto make = [&](float& value, int32_t i) {
    if (i >= count) {
      value = no_column;
    } else if constexpr (kTransformed) {
      value = LogitOf(side, value, column + i);
    }
  };
  make(values.x, 0);
  make(values.y, 1);
  make(values.z, 2);
  make(values.w, 3);
}

template <bool kHalf>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (kHalf) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  } else {
    return sm90::PackBf16(low, high);
  }
}

// sum c_k x^k, k < kSeries.
__device__ __forceinline__ float Polynomial(const float (&c)[kSeries], float x) {
  float y = c[kSeries - 1];
#pragma unroll
  for (int k = kSeries - 2; k >= 0; --k) y = fmaf(x, y, c[k]);
  return y;
}

// What a thread adds up in phase 1. Sums of q L (kForward: of q - p) and what they belong to leave out the column with q > 1/2.
struct Terms {
  float loss = 0.0f;     // in units of ln2; kMixture: of near columns
  float teacher = 0.0f;  // kMixture: p (d - L) of distant columns
  float mean = 0.0f;     // of near columns; kForward and kReverse: of all
  float distant = 0.0f;  // kMixture: of distant columns
  float distant_q = 0.0f;
  float largest = 0.0f;  // of |q L| (kForward: |q - p|)
  float q_largest = 0.0f;
};

// What a row's log-sum-exps give.
struct RowOffsets {
  float student, teacher;  // minus log2 of the sums
  float difference;        // teacher - student, and - log2(1 - beta) for kMixture
};

// The column that has more than half of q, in the one thread that has it.
struct Top {
  int32_t index = -1;       // in the thread's registers; -1: not here
  float slope = 0.0f;       // its L
  float derivative = 1.0f;  // dz/da
};

template <Form kForm, bool kTransformed, bool kHalf>
struct RowTerms {
  // In phase 1 a student's logit becomes q dz/da (kForward: (q - p) dz/da), the teacher's L (kForward: q).
  static __device__ __forceinline__ void Near(const KernelParams& params, float log_q, float d, float& student, float& teacher,
                                              Terms& terms) {
    const float q = Exp2(log_q);
    if constexpr (kForm == Form::kMixture) d += params.log_rest;
    float slope = d * Polynomial(params.slope, d);
    terms.loss = fmaf(q * (d * d), Polynomial(params.excess, d), terms.loss);
    if constexpr (kForm == Form::kMixture) slope -= params.log_rest;
    Keep(params, q, slope, kForm == Form::kForward ? -q * slope : q, false, student, teacher, terms);
  }

  static __device__ __forceinline__ void Far(const KernelParams& params, const RowOffsets& offsets, float log_q, float d,
                                             float& student, float& teacher, Terms& terms) {
    const float log_p = fmaf(teacher, params.log2_scales[1], offsets.teacher);
    const float q = Exp2(log_q);
    const float p = Exp2(log_p);
    if constexpr (kForm == Form::kMixture) {
      // Where p / q is not a number any more, q is 0, and p's share of the loss is p log2(1 / beta).
      d = fminf(d, kLargestDifference);
      float slope;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(slope) : "f"(fmaf(params.beta, Exp2(d), 1.0f)));
      terms.teacher = fmaf(p, d - slope, terms.teacher);
      terms.distant_q += q;
      Keep(params, q, slope, q, true, student, teacher, terms);
    } else if constexpr (kForm == Form::kForward) {
      const float difference = q - p;
      terms.loss += fmaf(difference, static_cast<float>(kLog2E), p * d);
      Keep(params, q, 0.0f, difference, false, student, teacher, terms);
    } else {
      terms.loss += fmaf(p - q, static_cast<float>(kLog2E), -q * d);
      Keep(params, q, d, q, false, student, teacher, terms);
    }
  }

  // `entry`: the factor of M that is kept.
  static __device__ __forceinline__ void Keep(const KernelParams& params, float q, float slope, float entry, bool distant,
                                              float& student, float& teacher, Terms& terms) {
    const float weighted = kForm == Form::kForward ? entry : q * slope;
    if (distant) {
      terms.distant += weighted;
    } else {
      terms.mean += weighted;
    }
    if constexpr (kHalf) {
      terms.largest = fmaxf(terms.largest, fabsf(weighted));
      terms.q_largest = fmaxf(terms.q_largest, q);
    }
    student = kTransformed ? entry * Derivative(params, student) : entry;
    teacher = kForm == Form::kForward ? q : slope;
  }

  // dz/da where a softcap is: 1 - (z / cap)^2.
  static __device__ __forceinline__ float Derivative(const KernelParams& params, float student) {
    const float share = student * params.sides[0].inverse_cap;
    return fmaf(-share, share, 1.0f);
  }

  static __device__ __forceinline__ float Loss(const KernelParams& params, const Terms& terms) {
    if constexpr (kForm != Form::kMixture) return terms.loss;
    return terms.loss +
           (params.beta * terms.teacher - params.one_minus_beta * fmaf(params.log_rest, terms.distant_q, terms.distant));
  }
};

template <Form kForm, bool kTransformed, bool kHalf>
__global__ void __launch_bounds__(cluster_row::kThreads, 1) DivergenceRowsKernel(const __grid_constant__ KernelParams params) {
  using Math = RowTerms<kForm, kTransformed, kHalf>;
  constexpr int kUnits = kHalf ? 3 : 2;
  using LastOperation = std::conditional_t<kHalf, Largest, Sum>;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const uint32_t shared = sm90::SharedAddress(raw_shared);
  const cluster_row::Ring ring{shared, shared + kSlots * kSlotBytes};
  const uint32_t channels = ring.barriers + 16 * kSlots;
  Channel<1> exponentials{channels, 0};
  Channel<1> repeats{channels + cluster_row::kChannelBytes<1>, 0};
  Channel<kUnits> sums{channels + 2 * cluster_row::kChannelBytes<1>, 0};

  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const int32_t cluster = params.cluster;
  const auto cta_rank = static_cast<int32_t>(sm90::ClusterCtaRank());
  const int32_t row_step = static_cast<int32_t>(gridDim.x) / cluster;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) / cluster;
  const int32_t begin = min(cta_rank * params.slice, params.columns);
  const int32_t length = min(params.slice, params.columns - begin);
  const int32_t chunks = (length + kChunk - 1) / kChunk;

  if (thread == 0) {
    ring.Init();
    exponentials.Init();
    repeats.Init();
    sums.Init();
    sm90::FenceBarrierInit();
  }
  sm90::ClusterSync();

  if (thread >= kConsumers) {
    if (lane == 0) {
      const float* const inputs[kInputs] = {params.inputs[0] + begin, params.inputs[1] + begin};
      cluster_row::FillRing(ring, inputs, params.strides, length, first_row, row_step, params.row_count);
    }
    __syncwarp();
  } else {
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
      for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        sm90::BarrierWait(ring.Full(read_slot), read_phase);
        const uint32_t address = ring.Slot(read_slot) + 16 * thread;
        float4 s = LoadVector(address), t = LoadVector(address + 4 * kChunk);
        // A slice's last chunk is filled up, so that nobody has to look at columns' numbers again.
        const int32_t local = chunk * kChunk + 4 * thread;
        if (kTransformed || length - local < 4) {
          MakeLogits<kTransformed>(params.sides[0], begin + local, length - local, params.no_column[0], s);
          MakeLogits<kTransformed>(params.sides[1], begin + local, length - local, params.no_column[1], t);
          StoreVector(address, s);
          StoreVector(address + 4 * kChunk, t);
          sm90::FenceProxyAsync();  // what is stored must not overtake the copy into this slot that comes later
        }
        const float a = params.log2_scales[0], b = params.log2_scales[1];
        own.x += (Exp2(fmaf(s.x, a, -offsets.x)) + Exp2(fmaf(s.y, a, -offsets.x))) +
                 (Exp2(fmaf(s.z, a, -offsets.x)) + Exp2(fmaf(s.w, a, -offsets.x)));
        own.y += (Exp2(fmaf(t.x, b, -offsets.y)) + Exp2(fmaf(t.y, b, -offsets.y))) +
                 (Exp2(fmaf(t.z, b, -offsets.y)) + Exp2(fmaf(t.w, b, -offsets.y)));
        if (++read_slot == kSlots) {
          read_slot = 0;
          read_phase ^= 1;
        }
      }
      float2 partial[1] = {own};
      exponentials.Send<Sum, Sum>(partial, 1, cluster, cta_rank);
    };

    // The row that phase 0 has read, out of its slots, which that frees.
    const auto load_row = [&] {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (vector >= chunks) continue;
        const float4 s = LoadVector(ring.Slot(slot) + 16 * thread);
        const float4 t = LoadVector(ring.Slot(slot) + 16 * thread + 4 * kChunk);
        __syncwarp();
        if (lane == 0) sm90::BarrierArrive(ring.Empty(slot));
        if (++slot == kSlots) slot = 0;
        student[vector][0] = s.x, student[vector][1] = s.y, student[vector][2] = s.z, student[vector][3] = s.w;
        teacher[vector][0] = t.x, teacher[vector][1] = t.y, teacher[vector][2] = t.z, teacher[vector][3] = t.w;
      }
    };

    // Over the row's columns that this thread has in registers.
    const auto for_each = [&](const auto& function) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (vector >= chunks) continue;
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
        if (!(total[0].x > 1e-30f && total[0].x < 1e36f && total[0].y > 1e-30f && total[0].y < 1e36f)) {
          float2 largest[1] = {make_float2(Maximum::kNothing, Maximum::kNothing)};
          for_each([&](float s, float t, int) {
            largest[0].x = fmaxf(largest[0].x, s * params.log2_scales[0]);
            largest[0].y = fmaxf(largest[0].y, t * params.log2_scales[1]);
          });
          repeats.Send<Maximum, Maximum>(largest, 2, cluster, cta_rank);
          repeats.Receive<Maximum, Maximum>(largest, cluster);
          offsets = make_float2(ceilf(largest[0].x), ceilf(largest[0].y));
          own = make_float2(0.0f, 0.0f);
          for_each([&](float s, float t, int) {
            own.x += Exp2(fmaf(s, params.log2_scales[0], -offsets.x));
            own.y += Exp2(fmaf(t, params.log2_scales[1], -offsets.y));
          });
          total[0] = own;
          repeats.Send<Sum, Sum>(total, 2, cluster, cta_rank);
          repeats.Receive<Sum, Sum>(total, cluster);
        }
        const float student_log = log2f(total[0].x), teacher_log = log2f(total[0].y);
        const RowOffsets row_offsets{-(offsets.x + student_log), -(offsets.y + teacher_log),
                                     (offsets.x - offsets.y) + (student_log - teacher_log) - params.log_rest};

        // Phase 1.
        Terms terms;
        float loss = 0.0f;
        // With the log-sum-exp's rounding, as the columns' q have it: means over q are divided by the sum of just these q.
        float q_rest = own.x * Exp2(row_offsets.student + offsets.x);
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
          if (largest > -1.0f) {
            top.index = index_top;
            if constexpr (kTransformed) top.derivative = Math::Derivative(params, s_top);
            const float d = fmaf(fmaf(-params.ratio, s_top, t_top), params.log2_scales[1], row_offsets.difference);
            Terms apart;
            if (fabsf(d + params.log_rest) < kNearLimit) {
              Math::Near(params, largest, d, s_top, t_top, apart);
            } else {
              Math::Far(params, row_offsets, largest, d, s_top, t_top, apart);
            }
            top.slope = t_top;
            loss = Math::Loss(params, apart);
            q_rest = 0.0f;
            for_each([&](float& s, float& t, int index) {
              if (index == top.index) {
                s = params.no_column[0];
                t = params.no_column[1];
              }
              q_rest += Exp2(fmaf(s, params.log2_scales[0], row_offsets.student));
            });
          }
        }
        int32_t tries = 0;  // vectors that were not near: a warp that has seen some does not look any more
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          if (vector >= chunks) continue;
          float log_q[4], d[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            log_q[i] = fmaf(student[vector][i], params.log2_scales[0], row_offsets.student);
            d[i] = fmaf(fmaf(-params.ratio, student[vector][i], teacher[vector][i]), params.log2_scales[1], row_offsets.difference);
          }
          bool near = false;
          if (tries < 2) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(d[i] + params.log_rest));
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
            for (int i = 0; i < 4; ++i) {
              Math::Far(params, row_offsets, log_q[i], d[i], student[vector][i], teacher[vector][i], terms);
            }
          }
        }
        float2 partial[kUnits];
        partial[0] = make_float2(loss + Math::Loss(params, terms), terms.mean + terms.distant);
        partial[1] = make_float2(q_rest, kForm == Form::kForward ? 0.0f : top.slope);
        if constexpr (kHalf) partial[2] = make_float2(terms.largest, terms.q_largest);
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
        const double gradient_factor = params.gradient_scale * static_cast<double>(token_weight);
        const bool has_gradient = token_weight != 0.0f && params.gradient_scale != 0;
        float scale = 1.0f;
        if constexpr (kHalf) {
          const float bound = fmaxf(kForm == Form::kForward ? partial[2].x : fmaf(partial[2].y, fabsf(mean), partial[2].x),
                                    row_has_top ? fabsf(top_entry) : 0.0f);
          // As row_math::MatrixScale(): into [2^12, 2^13), from the exponent's bits; 1 for 0 and what is not finite.
          if (bound > 0.0f && bound < INFINITY) {
            const int32_t exponent = static_cast<int32_t>(__float_as_uint(bound) >> 23) - 127;
            scale = __uint_as_float(static_cast<uint32_t>(127 + min(100, max(-100, 12 - exponent))) << 23);
          }
        }
        if (cta_rank == 0 && thread == 0) {
          RowReport report;
          report.soft = kLn2 * static_cast<double>(loss);
          report.gradient_bound = fabs(gradient_factor) * params.soft_weight;
          params.reports[row] = report;
          if (params.want_gradient != 0) {
            params.row_factor[row] =
                has_gradient ? static_cast<float>(gradient_factor * params.matrix_factor / static_cast<double>(scale)) : 0.0f;
            params.target_factor[row] = 0.0f;
          }
        }

        // Phase 2.
        if (params.want_gradient != 0) {
          if (top.index >= 0) {
            for_each([&](float& s, float& t, int index) {
              if (index != top.index) return;
              s = top_entry * top.derivative;
              t = mean - 1.0f;
            });
          }
          if (!has_gradient) {
            // M is 0, whatever the row holds.
            mean = 0.0f;
            for_each([](float& s, float& t, int) { s = t = 0.0f; });
          }
          uint16_t* const out = params.matrix + static_cast<int64_t>(row) * 2 * params.strides[0];
          const int32_t room = length - 4 * thread;
          const uint64_t own_out = reinterpret_cast<uint64_t>(out + begin + 4 * thread);
#pragma unroll
          for (int vector = 0; vector < kVectors; ++vector) {
            if (room <= vector * kChunk) continue;
            float entries[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              entries[i] = student[vector][i];
              if constexpr (kHalf) entries[i] *= scale;
              if constexpr (kForm != Form::kForward) entries[i] *= mean - teacher[vector][i];
            }
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(own_out + 2 * kChunk * vector),
                         "r"(Pack<kHalf>(entries[0], entries[1])), "r"(Pack<kHalf>(entries[2], entries[3]))
                         : "memory");
          }
          // The last four may have gone past the last column, where a row that is not finite has left NaN: the same thread's zeros.
          if (begin + length == params.columns && length % 4 != 0 && thread == length / 4 % kConsumers) {
            for (int32_t column = params.columns; column % 4 != 0; ++column) out[column] = 0;
          }
          for (int32_t column = (params.columns + 3) / 4 * 4 + cta_rank * kConsumers + thread; column < params.zero_columns;
               column += cluster * kConsumers) {
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

constexpr int kSharedBytes =
    cluster_row::kSlots * (cluster_row::kSlotBytes + 16) + 2 * cluster_row::kChannelBytes<1> + cluster_row::kChannelBytes<3>;
static_assert(kSharedBytes <= 232448, "a CTA of sm_90 has 227 KiB");

using Kernel = void (*)(KernelParams);

Form FormOf(const DivergenceTerm& term) {
  return term.beta <= 0 ? Form::kForward : term.beta >= 1 ? Form::kReverse : Form::kMixture;
}

bool IsTransformed(const LogitsView& logits) { return logits.bias != nullptr || logits.transform.softcap != 0; }

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

struct LaunchShape {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  LaunchShape(int cluster, int64_t clusters, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(cluster * clusters));
    config.blockDim = dim3(cluster_row::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  LaunchShape(const LaunchShape&) = delete;
  LaunchShape& operator=(const LaunchShape&) = delete;
};

// Clusters of this size that the current device holds at once; 0 if none, or if it is not sm_90. Asked once for each kernel, size
// and device; any thread.
int ResidentClusters(Form form, bool transformed, bool half, int cluster) {
  constexpr int kDevices = 16, kSizes = 5;
  static std::atomic<int> known[kDevices][3][2][2][kSizes];  // one more than the number
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int size = 0;
  while ((1 << size) < cluster) ++size;
  std::atomic<int>& entry = known[device][static_cast<int>(form)][transformed ? 1 : 0][half ? 1 : 0][size];
  if (const int value = entry.load(); value != 0) return value - 1;
  int major = 0, minor = 0, clusters = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return 0;
  }
  if (major == 9 && minor == 0) {
    const Kernel kernel = KernelOf(form, transformed, half);
    const LaunchShape shape(cluster, 1, nullptr);
    const bool asked = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) == cudaSuccess &&
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

// Coefficients of the near columns' polynomials, in powers of d = x / ln2. With y = beta (e^x - 1) and K = log1p(y), which is the
// generating function of a coin's cumulants: L = K / ln2, and a column's loss is q (beta x e^x - K (1 + y)), of order x^2. beta =
// 1: q (e^x - 1 - x), L = d. beta = 0: q (x e^x + 1 - e^x), and p - q = q (e^x - 1) is in L's place.
void SetSeries(Form form, double beta, KernelParams* params) {
  constexpr int kOrder = kSeries + 2;
  double y[kOrder] = {}, k[kOrder] = {}, loss[kOrder] = {}, factorial = 1;
  for (int n = 1; n < kOrder; ++n) {
    factorial *= n;
    y[n] = beta / factorial;
    // (1 + y) K' = y'.
    double sum = n * y[n];
    for (int i = 1; i < n; ++i) sum -= i * k[i] * y[n - i];
    k[n] = sum / n;
    const double x_exp = n / factorial;  // of x e^x
    if (form == Form::kForward) {
      loss[n] = x_exp - 1 / factorial;
    } else if (form == Form::kReverse) {
      loss[n] = n == 1 ? 0 : 1 / factorial;
    } else {
      loss[n] = beta * x_exp - k[n];
      for (int i = 1; i < n; ++i) loss[n] -= k[i] * y[n - i];
    }
  }
  double power = 1, inverse_factorial = 1;  // ln2^{n - 1}, 1 / n!
  for (int n = 1; n <= kSeries; ++n, power *= kLn2) {
    inverse_factorial /= n;
    const double slope = form == Form::kForward ? kLn2 * inverse_factorial : form == Form::kReverse ? (n == 1 ? 1.0 : 0.0) : k[n];
    params->slope[n - 1] = static_cast<float>(form == Form::kReverse ? slope : slope * power);
    params->excess[n - 1] = static_cast<float>(loss[n + 1] * power * kLn2);
  }
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
  const int cluster = cluster_row::ClusterFor(term.common_columns);
  return cluster != 0 && ResidentClusters(FormOf(term), IsTransformed(student) || IsTransformed(teacher), half, cluster) > 0;
}

cudaError_t LaunchDivergenceRows(const LogitsView& student, const LogitsView& teacher, const ChunkRows& rows,
                                 const DivergenceTerm& term, double loss_scale, Element matrix_element, bool want_gradient,
                                 RowReport* reports, float* row_factor, float* target_factor, cudaStream_t stream) {
  if (rows.row_count == 0) return cudaSuccess;
  const Form form = FormOf(term);
  const bool transformed = IsTransformed(student) || IsTransformed(teacher);
  const bool half = matrix_element == Element::kFloat16;
  const int cluster = cluster_row::ClusterFor(term.common_columns);
  const int resident = cluster == 0 ? 0 : ResidentClusters(form, transformed, half, cluster);
  if (resident == 0 || rows.row_count > INT32_MAX / 2) return cudaErrorInvalidConfiguration;

  KernelParams params{};
  const LogitsView* const views[kInputs] = {&student, &teacher};
  const double temperatures[kInputs] = {term.student_temperature, term.teacher_temperature};
  double scales[kInputs];
  for (int side = 0; side < kInputs; ++side) {
    const LogitsView& view = *views[side];
    params.inputs[side] = static_cast<const float*>(view.products);
    params.strides[side] = view.stride;
    const double cap = view.transform.softcap;
    params.sides[side] = {view.bias, view.bias_element, static_cast<float>(view.transform.logit_scale), static_cast<float>(cap),
                          cap == 0 ? 0.0f : static_cast<float>(1 / cap)};
    scales[side] = (transformed ? 1.0 : view.transform.logit_scale) * kLog2E / temperatures[side];
    params.log2_scales[side] = static_cast<float>(scales[side]);
    params.no_column[side] = scales[side] < 0 ? kNoColumn : -kNoColumn;
  }
  params.ratio = static_cast<float>(scales[0] / scales[1]);
  params.matrix = static_cast<uint16_t*>(const_cast<void*>(student.products));
  params.token_weights = rows.token_weights;
  params.reports = reports;
  params.row_factor = row_factor;
  params.target_factor = target_factor;
  params.gradient_scale = loss_scale * student.transform.logit_scale;
  params.soft_weight = term.soft_weight;
  params.matrix_factor = term.soft_weight / term.student_temperature;
  if (form == Form::kMixture) params.matrix_factor *= (1 - term.beta);
  if (form != Form::kForward) params.matrix_factor *= kLn2;
  params.beta = static_cast<float>(term.beta);
  params.one_minus_beta = static_cast<float>(1 - term.beta);
  params.log_rest = form == Form::kMixture ? static_cast<float>(std::log2(1 - term.beta)) : 0.0f;
  SetSeries(form, term.beta, &params);
  params.row_count = static_cast<int32_t>(rows.row_count);
  params.columns = static_cast<int32_t>(term.common_columns);
  params.zero_columns = static_cast<int32_t>(RoundUp(student.columns, 8));
  params.slice = static_cast<int32_t>(RoundUp((term.common_columns + cluster - 1) / cluster, 8));
  params.cluster = cluster;
  params.want_gradient = want_gradient ? 1 : 0;

  const int64_t clusters = rows.row_count < resident ? rows.row_count : resident;
  const LaunchShape shape(cluster, clusters, stream);
  const cudaError_t status = cudaLaunchKernelEx(&shape.config, KernelOf(form, transformed, half), params);
  return status != cudaSuccess ? status : cudaGetLastError();
}

}  // namespace headwater::cuda
