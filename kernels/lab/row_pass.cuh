// The R form: one pass over a row of fp32 logits that lives, whole, in the shared memory of a cluster, so that memory sees each
// logit once: the loss needs the whole row before the first gradient can be written, and a second read would cost 4 of then 10
// bytes an element.
//
// Mapping   A cluster of kCluster CTAs owns a row, each CTA a slice; clusters stride over rows. 512 consumer threads and a producer
// warp. Pipeline  A ring of chunks of 4096 elements a CTA. The producer fills slots with bulk copies as they become free, running
// ahead into
//           the next row while this one is reduced. Phase 1 reads a slice's chunks as they land; the CTAs exchange partial results
//           by asynchronous stores into each other's shared memory; phase 2 reads the chunks again, writes the gradient, frees the
//           slots.
// Traffic   cross entropy reads 4 and writes 2 bytes an element: N4096 V128256 is 3.15 GB, 0.74 ms at 4.26 TB/s. JSD 8 and 2: 1.24
// ms. Order     Every sum has a fixed order: bitwise repeatable. Requires  sm_90a; vocab a multiple of 8 and at most kCluster *
// kSlots * kChunk; 16-byte aligned arrays.
//
// A policy computes on four consecutive elements a thread:
//   kInputs                            arrays read per element, 1 or 2
//   struct Params { ... }              inputs[kInputs], grad, and what the policy needs
//   struct State                       a thread's running values for the row
//   struct Head, Prefetch(params, row)         what it needs of a row from memory, loaded a row ahead: in place these loads
//   cost 1.2 us a row Begin(params, row, head)           -> State Consume(state, params, first, float4 (&values)[kInputs])   phase
//   1; may replace the values, which are then stored back (kStoreBack) Reduce(state) / Merge(a, b)        State -> float2 partial
//   result, and two partial results into one Finish(state, params, row, total)  after the exchange; called by every thread of the
//   cluster Gradient(state, params, first, values) -> float4 phase 2 Report(state, params, row)         by one thread a row

#ifndef HEADWATER_KERNELS_LAB_ROW_PASS_CUH_
#define HEADWATER_KERNELS_LAB_ROW_PASS_CUH_

#include "kernels/cuda/device/sm90_ptx.cuh"

namespace headwater::sm90 {

using namespace headwater::cuda::sm90;

constexpr int kRowConsumers = 512;
constexpr int kRowThreads = kRowConsumers + 32;
constexpr int kRowVectors = 2;                              // of four elements, a thread and chunk
constexpr int kRowChunk = 4 * kRowConsumers * kRowVectors;  // elements
// Slots of kRowChunk elements of each input, as many as shared memory holds.
template <int kInputs>
constexpr int kRowSlots = (232448 - 2048) / (kRowChunk * 4 * kInputs);
template <int kInputs>
constexpr int kRowSharedBytes = kRowSlots<kInputs>* kRowChunk * 4 * kInputs + 2048;

__device__ __forceinline__ float4 LoadShared4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void StoreShared4(uint32_t address, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Eight bytes into another CTA's shared memory; they complete on its barrier.
__device__ __forceinline__ void StoreRemote(uint32_t remote_address, float2 value, uint32_t remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(remote_address),
               "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(remote_barrier)
               : "memory");
}

template <class Policy, int kCluster>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kRowThreads, 1)
    RowPassKernel(const typename Policy::Params params, const int32_t rows, const int32_t vocab) {
  constexpr int kInputs = Policy::kInputs;
  constexpr int kChunk = kRowChunk, kSlots = kRowSlots<kInputs>, kSlotBytes = kChunk * 4 * kInputs;
  extern __shared__ __align__(128) uint8_t raw_row_shared[];
  const uint32_t ring = SharedAddress(raw_row_shared);
  const uint32_t full = ring + kSlots * kSlotBytes;
  const uint32_t empty = full + 8 * kSlots;
  const uint32_t exchange = empty + 8 * kSlots;                // two barriers: rows alternate
  const uint32_t partials = exchange + 16;                     // [2][kCluster] float2
  const uint32_t warp_partials = partials + 2 * 8 * kCluster;  // [2][kRowConsumers / 32] float2

  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto cta_rank = static_cast<int32_t>(ClusterCtaRank());
  const int32_t clusters = static_cast<int32_t>(gridDim.x) / kCluster, cluster_id = static_cast<int32_t>(blockIdx.x) / kCluster;
  const int32_t slice = (vocab / 8 + kCluster - 1) / kCluster * 8;
  const int32_t begin = min(cta_rank * slice, vocab), length = min(slice, vocab - begin);
  const int32_t chunks = (length + kChunk - 1) / kChunk;

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      BarrierInit(full + 8 * slot, 1);
      BarrierInit(empty + 8 * slot, kRowConsumers / 32);
    }
    BarrierInit(exchange, 1);
    BarrierInit(exchange + 8, 1);
    FenceBarrierInit();
  }
  ClusterSync();

  if (warp == kRowConsumers / 32) {
    if (lane == 0) {
      uint32_t slot = 0, phase = 0;
      for (int32_t row = cluster_id; row < rows; row += clusters) {
        for (int32_t chunk = 0; chunk < chunks; ++chunk) {
          const int32_t first = chunk * kChunk;
          const auto bytes = static_cast<uint32_t>(min(kChunk, length - first)) * 4;
          BarrierWait(empty + 8 * slot, phase ^ 1);
          BarrierArriveExpect(full + 8 * slot, bytes * kInputs);
#pragma unroll
          for (int input = 0; input < kInputs; ++input) {
            BulkLoad(ring + slot * kSlotBytes + input * kChunk * 4,
                     params.inputs[input] + static_cast<int64_t>(row) * vocab + begin + first, bytes, full + 8 * slot, kEvictFirst);
          }
          if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {
    // A row is summed (phase 1) in slots from read_slot on, and written (phase 2) from slots from `slot` on, which that frees.
    uint32_t slot = 0, read_slot = 0, read_phase = 0, parity = 0, exchange_phase = 0;
    const auto write_gradient = [&](const typename Policy::State& state, int32_t row) {
      for (int32_t chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
        for (int vector = 0; vector < kRowVectors; ++vector) {
          const int32_t local = 4 * (static_cast<int32_t>(threadIdx.x) + vector * kRowConsumers);
          if (chunk * kChunk + local < length) {
            const uint32_t address = ring + slot * kSlotBytes + local * 4;
            float4 values[kInputs];
#pragma unroll
            for (int input = 0; input < kInputs; ++input) values[input] = LoadShared4(address + input * kChunk * 4);
            const int32_t first = begin + chunk * kChunk + local;
            const float4 grad = Policy::Gradient(state, params, first, values);
            uint2 packed = make_uint2(PackBf16(grad.x, grad.y), PackBf16(grad.z, grad.w));
            *reinterpret_cast<uint2*>(params.grad + static_cast<int64_t>(row) * vocab + first) = packed;
          }
        }
        // What was stored back must not be overtaken by the next bulk copy into the slot.
        if constexpr (Policy::kStoreBack) FenceProxyAsync();
        __syncwarp();
        if (lane == 0) BarrierArrive(empty + 8 * slot);
        if (++slot == kSlots) slot = 0;
      }
    };
    // With room for two rows the next one is summed before this one is written, which hides the exchange.
    const bool overlapped = 2 * chunks <= kSlots;
    typename Policy::State waiting{};
    typename Policy::Head head{};
    if (cluster_id < rows) head = Policy::Prefetch(params, cluster_id);
    int32_t waiting_row = -1;
    for (int32_t row = cluster_id; row < rows; row += clusters) {
      typename Policy::State state = Policy::Begin(params, row, head);
      if (row + clusters < rows) head = Policy::Prefetch(params, row + clusters);
      for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        BarrierWait(full + 8 * read_slot, read_phase);
#pragma unroll
        for (int vector = 0; vector < kRowVectors; ++vector) {
          const int32_t local = 4 * (static_cast<int32_t>(threadIdx.x) + vector * kRowConsumers);
          if (chunk * kChunk + local < length) {
            const uint32_t address = ring + read_slot * kSlotBytes + local * 4;
            float4 values[kInputs];
#pragma unroll
            for (int input = 0; input < kInputs; ++input) values[input] = LoadShared4(address + input * kChunk * 4);
            Policy::Consume(state, params, begin + chunk * kChunk + local, values);
            if constexpr (Policy::kStoreBack) {
#pragma unroll
              for (int input = 0; input < kInputs; ++input) StoreShared4(address + input * kChunk * 4, values[input]);
            }
          }
        }
        if (++read_slot == kSlots) {
          read_slot = 0;
          read_phase ^= 1;
        }
      }
      // Threads to warp, warps to CTA, CTAs to cluster.
      float2 partial = Policy::Reduce(state);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        const float2 other =
            make_float2(__shfl_xor_sync(0xffffffffu, partial.x, distance), __shfl_xor_sync(0xffffffffu, partial.y, distance));
        partial = Policy::Merge(partial, other);
      }
      if (lane == 0)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(warp_partials + 8 * (parity * (kRowConsumers / 32) + warp)),
                     "f"(partial.x), "f"(partial.y)
                     : "memory");
      NamedBarrierSync(1, kRowConsumers);
      if (warp == 0) {
        partial = Policy::Nothing();
        if (lane < kRowConsumers / 32) {
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(partial.x), "=f"(partial.y)
                       : "r"(warp_partials + 8 * (parity * (kRowConsumers / 32) + lane))
                       : "memory");
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          const float2 other =
              make_float2(__shfl_xor_sync(0xffffffffu, partial.x, distance), __shfl_xor_sync(0xffffffffu, partial.y, distance));
          partial = Policy::Merge(partial, other);
        }
        if (lane == 0) BarrierArriveExpect(exchange + 8 * parity, 8 * kCluster);
        if (lane < kCluster) {
          StoreRemote(ClusterAddress(partials + 8 * (parity * kCluster + cta_rank), lane), partial,
                      ClusterAddress(exchange + 8 * parity, lane));
        }
      }
      if (overlapped && waiting_row >= 0) write_gradient(waiting, waiting_row);
      // A CTA sends for the row after next only when it has read everybody's results of the next: two buffers are enough.
      BarrierWaitCluster(exchange + 8 * parity, exchange_phase);
      float2 total;
#pragma unroll
      for (int cta = 0; cta < kCluster; ++cta) {
        float2 value;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(value.x), "=f"(value.y)
                     : "r"(partials + 8 * (parity * kCluster + cta))
                     : "memory");
        total = cta == 0 ? value : Policy::Merge(total, value);
      }
      exchange_phase ^= parity;
      parity ^= 1;
      Policy::Finish(state, params, total);
      if (cta_rank == 0 && threadIdx.x == 0) Policy::Report(state, params, row);
      if (overlapped) {
        waiting = state;
        waiting_row = row;
      } else {
        write_gradient(state, row);
      }
    }
    if (waiting_row >= 0) write_gradient(waiting, waiting_row);
  }
  ClusterSync();  // no CTA leaves while another may still store into it
}

// Cross entropy: grad_j = grad_loss * (p_j - [j = y]), the target's as -grad_loss * S / (t + S) from the sum S without it.
struct CrossEntropyRow {
  static constexpr int kInputs = 1;
  static constexpr bool kStoreBack = false;
  struct Params {
    const float* inputs[1];  // logits [rows, vocab]
    __nv_bfloat16* grad;     // [rows, vocab] out
    const int32_t* targets;  // [rows]
    const float* grad_loss;  // [rows]
    float* token_loss;       // [rows] out, nats
    float* lse;              // [rows] out, nats
    int32_t vocab;
  };
  struct State {
    float largest, sum;  // of the other logits: running, then of the whole row
    float target_logit, grad_loss;
    int32_t target;
    float offset_log2, factor, target_grad, loss, lse;
  };
  struct Head {
    int32_t target;
    float grad_loss;
  };
  static __device__ __forceinline__ Head Prefetch(const Params& params, int32_t row) {
    return {params.targets[row], params.grad_loss[row]};
  }
  static __device__ __forceinline__ State Begin(const Params& params, int32_t row, const Head& head) {
    State state;
    state.largest = -1e30f;
    state.sum = 0.0f;
    state.target = head.target;
    state.grad_loss = head.grad_loss;
    state.target_logit = __ldg(params.inputs[0] + static_cast<int64_t>(row) * params.vocab + state.target);
    return state;
  }
  static __device__ __forceinline__ void Consume(State& state, const Params&, int32_t first, float4 (&values)[1]) {
    float4 v = values[0];
    if (static_cast<uint32_t>(state.target - first) < 4u) {
      const int32_t index = state.target - first;
      if (index == 0) v.x = -INFINITY;
      if (index == 1) v.y = -INFINITY;
      if (index == 2) v.z = -INFINITY;
      if (index == 3) v.w = -INFINITY;
    }
    const float largest = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    if (largest > state.largest) {
      state.sum *= Exp2((state.largest - largest) * kLog2E);
      state.largest = largest;
    }
    const float offset = -state.largest * kLog2E;
    state.sum += (Exp2(fmaf(v.x, kLog2E, offset)) + Exp2(fmaf(v.y, kLog2E, offset))) +
                 (Exp2(fmaf(v.z, kLog2E, offset)) + Exp2(fmaf(v.w, kLog2E, offset)));
  }
  static __device__ __forceinline__ float2 Nothing() { return make_float2(-1e30f, 0.0f); }
  static __device__ __forceinline__ float2 Reduce(const State& state) { return make_float2(state.largest, state.sum); }
  static __device__ __forceinline__ float2 Merge(float2 a, float2 b) {
    const float largest = fmaxf(a.x, b.x);
    return make_float2(largest, a.y * Exp2((a.x - largest) * kLog2E) + b.y * Exp2((b.x - largest) * kLog2E));
  }
  static __device__ __forceinline__ void Finish(State& state, const Params&, float2 total) {
    const float largest = fmaxf(total.x, state.target_logit);
    const float rest = total.y * Exp2((total.x - largest) * kLog2E), target = Exp2((state.target_logit - largest) * kLog2E);
    state.offset_log2 = -largest * kLog2E;
    state.factor = state.grad_loss / (rest + target);
    state.target_grad = -state.factor * rest;
    state.loss = state.target_logit >= total.x ? log1pf(rest) : (largest - state.target_logit) + logf(rest + target);
    state.lse = largest + logf(rest + target);
  }
  static __device__ __forceinline__ void Report(const State& state, const Params& params, int32_t row) {
    params.token_loss[row] = state.loss;
    params.lse[row] = state.lse;
  }
  static __device__ __forceinline__ float4 Gradient(const State& state, const Params&, int32_t first, const float4 (&values)[1]) {
    const float4 v = values[0];
    float4 grad = make_float4(
        state.factor * Exp2(fmaf(v.x, kLog2E, state.offset_log2)), state.factor * Exp2(fmaf(v.y, kLog2E, state.offset_log2)),
        state.factor * Exp2(fmaf(v.z, kLog2E, state.offset_log2)), state.factor * Exp2(fmaf(v.w, kLog2E, state.offset_log2)));
    if (static_cast<uint32_t>(state.target - first) < 4u) {
      const int32_t index = state.target - first;
      if (index == 0) grad.x = state.target_grad;
      if (index == 1) grad.y = state.target_grad;
      if (index == 2) grad.z = state.target_grad;
      if (index == 3) grad.w = state.target_grad;
    }
    return grad;
  }
};

// Generalised Jensen-Shannon divergence, 0 < beta < 1, P teacher, Q student, M = beta P + (1 - beta) Q, in log space:
//   d = log p - log q, u = expm1(-|d|), L = log1p((d <= 0 ? beta : 1 - beta) * u)
//   r = log(q/m) = -max(d, 0) - L          s = log(p/m) = min(d, 0) - L
//   KL(Q||M) = sum q (r + expm1(-r)), KL(P||M) = sum p (s + expm1(-s)): non-negative terms, no cancellation when P is near Q
//   loss = beta KL(P||M) + (1 - beta) KL(Q||M); grad_j = grad_loss * (1 - beta) * q_j * (r_j - KL(Q||M))
// No exponential has a positive argument, so nothing overflows. The log-sum-exps come from the products' epilogues.
struct JsdRow {
  static constexpr int kInputs = 2;
  static constexpr bool kStoreBack = true;
  struct Params {
    const float* inputs[2];    // student logits, teacher logits [rows, vocab]
    __nv_bfloat16* grad;       // [rows, vocab] out: of the student's logits
    const float* student_lse;  // [rows]
    const float* teacher_lse;  // [rows]
    const float* grad_loss;    // [rows]
    float* token_loss;         // [rows] out, nats
    float beta;
  };
  struct State {
    float student_offset, teacher_offset;  // minus the log-sum-exps
    float student_kl, teacher_kl;
    float factor;  // grad_loss, and from Finish() on grad_loss * (1 - beta)
  };
  struct Head {
    float student_lse, teacher_lse, grad_loss;
  };
  static __device__ __forceinline__ Head Prefetch(const Params& params, int32_t row) {
    return {params.student_lse[row], params.teacher_lse[row], params.grad_loss[row]};
  }
  static __device__ __forceinline__ State Begin(const Params&, int32_t, const Head& head) {
    return {-head.student_lse, -head.teacher_lse, 0.0f, 0.0f, head.grad_loss};
  }
  // expm1(x) for x <= 0: relative error 2e-7.
  static __device__ __forceinline__ float Expm1Negative(float x) {
    const float far = Exp2(x * kLog2E) - 1.0f;
    float near = fmaf(x, 1.0f / 5040.0f, 1.0f / 720.0f);
    near = fmaf(x, near, 1.0f / 120.0f);
    near = fmaf(x, near, 1.0f / 24.0f);
    near = fmaf(x, near, 1.0f / 6.0f);
    near = fmaf(x, near, 0.5f);
    near = fmaf(x * x, near, x);
    return x > -0.35f ? near : far;
  }
  // log1p(y) for -1 < y <= 0: near zero as 2 atanh(y / (2 + y)), else by the approximate logarithm (absolute error 2e-7).
  static __device__ __forceinline__ float Log1pNegative(float y) {
    float far;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(far) : "f"(1.0f + y));
    const float t = y * ReciprocalApprox(2.0f + y), t2 = t * t;
    float near = fmaf(t2, 2.0f / 9.0f, 2.0f / 7.0f);
    near = fmaf(t2, near, 2.0f / 5.0f);
    near = fmaf(t2, near, 2.0f / 3.0f);
    near = fmaf(t2 * t, near, 2.0f * t);
    return y > -0.25f ? near : far * 0.69314718f;
  }
  // x + expm1(-x), given expm1(-x): non-negative, without cancellation near zero.
  static __device__ __forceinline__ float Excess(float x, float expm1_minus) {
    float near = fmaf(x, 1.0f / 720.0f, -1.0f / 120.0f);
    near = fmaf(x, near, 1.0f / 24.0f);
    near = fmaf(x, near, -1.0f / 6.0f);
    near = fmaf(x, near, 0.5f) * x * x;
    return fabsf(x) < 0.2f ? near : x + expm1_minus;
  }
  static __device__ __forceinline__ void One(State& state, float beta, float& student, float& teacher) {
    const float log_q = student + state.student_offset, log_p = teacher + state.teacher_offset;
    const float d = log_p - log_q;
    const float q = Exp2(log_q * kLog2E), p = Exp2(log_p * kLog2E);
    const float u = Expm1Negative(-fabsf(d));
    const bool below = d <= 0.0f;
    const float l = Log1pNegative((below ? beta : 1.0f - beta) * u);
    const float r = -fmaxf(d, 0.0f) - l, s = fminf(d, 0.0f) - l;
    // q expm1(-r) = m - q = beta (p - q), p expm1(-s) = m - p = (1 - beta) (q - p): the far branches need no further exponential.
    state.student_kl += fabsf(r) < 0.2f ? q * Excess(r, 0.0f) : fmaf(q, r, beta * (p - q));
    state.teacher_kl += fabsf(s) < 0.2f ? p * Excess(s, 0.0f) : fmaf(p, s, (1.0f - beta) * (q - p));
    student = q;
    teacher = r;
  }
  static __device__ __forceinline__ void Consume(State& state, const Params& params, int32_t, float4 (&values)[2]) {
    One(state, params.beta, values[0].x, values[1].x);
    One(state, params.beta, values[0].y, values[1].y);
    One(state, params.beta, values[0].z, values[1].z);
    One(state, params.beta, values[0].w, values[1].w);
  }
  static __device__ __forceinline__ float2 Nothing() { return make_float2(0.0f, 0.0f); }
  static __device__ __forceinline__ float2 Reduce(const State& state) { return make_float2(state.student_kl, state.teacher_kl); }
  static __device__ __forceinline__ float2 Merge(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
  static __device__ __forceinline__ void Finish(State& state, const Params& params, float2 total) {
    state.student_kl = total.x;
    state.teacher_kl = total.y;
    state.factor *= 1.0f - params.beta;
  }
  static __device__ __forceinline__ void Report(const State& state, const Params& params, int32_t row) {
    params.token_loss[row] = params.beta * state.teacher_kl + (1.0f - params.beta) * state.student_kl;
  }
  static __device__ __forceinline__ float4 Gradient(const State& state, const Params&, int32_t, const float4 (&values)[2]) {
    return make_float4(state.factor * values[0].x * (values[1].x - state.student_kl),
                       state.factor * values[0].y * (values[1].y - state.student_kl),
                       state.factor * values[0].z * (values[1].z - state.student_kl),
                       state.factor * values[0].w * (values[1].w - state.student_kl));
  }
};

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_ROW_PASS_CUH_
