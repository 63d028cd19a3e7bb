// Element types, head specifications and loss options: the vocabulary that the engine, the heads and the C ABI share.
#ifndef HEADWATER_KERNELS_TYPES_H_
#define HEADWATER_KERNELS_TYPES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/types/span.h"

namespace headwater {

// Storage type of tensor elements. The values are those of headwater.v1.DataType and of the C ABI.
enum class DataType : int32_t {
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
};

// 4 or 2.
constexpr int64_t ElementBytes(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// `float32`, `bfloat16`, `float16`.
const char* DataTypeName(DataType type);

// A target value that excludes the row, unless a term has another. PyTorch's default.
inline constexpr int32_t kDefaultIgnoreIndex = -100;

// The least gradient_resolution other than 0; smaller ones are below fp32's rounding.
inline constexpr double kSmallestGradientResolution = 0x1p-24;

// z = softcap * tanh(logit_scale * (x . weight^T + bias) / softcap), or its argument without softcap; columns from
// valid_vocab_size on are -inf after the softcap.
struct LogitTransform {
  double logit_scale = 1.0;       // finite, not 0
  std::optional<double> softcap;  // > 0
  int64_t valid_vocab_size = 0;   // in [1, vocab_size]; never left 0 in a HeadSpec that reaches the engine
  bool operator==(const LogitTransform&) const = default;
};

// Each list of names beside a struct is for codecs, which copy these fields to and from the message or JSON by name. A field
// outside the list needs code of its own in proto/headwater/v1/spec_codec.h.
#define HEADWATER_LOGIT_TRANSFORM_FIELDS logit_scale, softcap, valid_vocab_size

// "Decoupled Weight Decay Regularization", arXiv:1711.05101, in PyTorch's order of operations.
struct AdamWSpec {
  double beta1 = 0.9;          // [0, 1)
  double beta2 = 0.999;        // [0, 1)
  double epsilon = 1e-8;       // >= 0
  double weight_decay = 0.01;  // >= 0
  bool operator==(const AdamWSpec&) const = default;
};
#define HEADWATER_ADAMW_FIELDS beta1, beta2, epsilon, weight_decay

// Stochastic gradient descent as torch.optim.SGD defines it.
struct SgdSpec {
  double momentum = 0.0;      // [0, 1); 0 plans no momentum buffer
  double dampening = 0.0;     // [0, 1]
  bool nesterov = false;      // needs momentum > 0 and dampening == 0
  double weight_decay = 0.0;  // >= 0
  bool operator==(const SgdSpec&) const = default;
};
#define HEADWATER_SGD_FIELDS momentum, dampening, nesterov, weight_decay

// std::monostate: no optimizer on the server.
using OptimizerSpec = std::variant<std::monostate, AdamWSpec, SgdSpec>;

// How the engines of a group share a head's work; without a group both are the same.
enum class Parallelism : int32_t {
  kVocabulary = 1,  // each rank holds a shard of the vocabulary, and all of them compute each micro-batch
  kRows = 2,        // each rank holds all weights and an accumulator of its own; a micro-batch is computed by one rank
};

// `vocabulary`, `rows`.
const char* ParallelismName(Parallelism parallelism);

// The definition of a head, fixed for its life. Validated by ValidateHeadSpec() before anything is planned.
struct HeadSpec {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  DataType data_type = DataType::kFloat32;  // of weight and bias
  bool has_bias = false;
  LogitTransform transform;
  bool trainable = false;
  OptimizerSpec optimizer;    // monostate unless trainable
  int32_t staging_slots = 0;  // 0 unless trainable
  int64_t initial_step = 0;
  Parallelism parallelism = Parallelism::kVocabulary;
  // A frozen head of 16 bits: as a teacher of 16-bit rows its logits are those of an int8 copy (products/int8_product.h). Their
  // expected error is LossSums::teacher_mean_square_error. The CUDA engine's on Hopper alone (kFeatureNotBuilt).
  bool int8_teacher = false;
  bool operator==(const HeadSpec&) const = default;
};
// hidden_size of a head with int8_teacher, at most.
inline constexpr int64_t kMaxInt8HiddenSize = 32768;
// All but the transform, the optimizer, the staging slots, the parallelism and int8_teacher.
#define HEADWATER_HEAD_SPEC_FIELDS vocab_size, hidden_size, data_type, has_bias, trainable, initial_step

// Cross entropy with PyTorch's joint definition of label smoothing and class weights, plus z_loss * lse^2, of the logits
// u = z / temperature.
struct CrossEntropySpec {
  double label_smoothing = 0.0;             // [0, 1]
  double z_loss = 0.0;                      // >= 0
  absl::Span<const float> class_weights{};  // [valid_vocab_size], or empty: all 1. Any sign. Host memory of the caller
  double temperature = 1.0;                 // > 0, and its reciprocal a float32 > 0; 1 in JsdSpec::hard_loss
  bool token_scaling = false;               // loss and gradient times the target's probability, a constant; not in hard_loss
};
// All but the class weights. The order is for good: digests of micro-batches follow it (server/service/request/canonical_header.h).
#define HEADWATER_CROSS_ENTROPY_OPTIONS label_smoothing, z_loss, temperature, token_scaling

// beta * KL(P||M) + (1 - beta) * KL(Q||M), M = beta P + (1 - beta) Q, P teacher, Q student; beta 0 is KL(P||Q), beta 1 KL(Q||P).
// A row's loss is (1 - hard_loss_weight) * JSD + hard_loss_weight * CE(hard_loss); CE sees no temperature.
struct JsdSpec {
  double beta = 0.5;                 // [0, 1]
  double student_temperature = 1.0;  // > 0
  double teacher_temperature = 1.0;  // > 0
  double hard_loss_weight = 0.0;     // [0, 1]
  CrossEntropySpec hard_loss{};      // used if hard_loss_weight > 0
  bool truncate_to_common = false;   // renormalize over the common prefix of unequal vocabularies
};
// All but the hard loss and truncate_to_common; the order as above.
#define HEADWATER_JSD_OPTIONS beta, student_temperature, teacher_temperature, hard_loss_weight

// The most entries of a top-k teacher's row.
inline constexpr int32_t kMaxTopK = 1024;
// A smaller rest mass is the rounding of float32 log-probabilities, and counts as 0.
inline constexpr double kLeastRestMass = 1e-6;

// KL(P
// Q), coarsened. The teacher P gives k columns of each row, and the mass r = 1 - sum p_k of all other columns together. A row's
// loss is sum_k p_k (log p_k - log q_k) + r (log r - log(1 - sum_k q_k)), Q of the logits u = z / temperature.
struct TopKSpec {
  int32_t k = 0;                      // [1, kMaxTopK]
  absl::Span<const int32_t> ids;      // [row_count, k], distinct within a row; -1: an entry that is not used. Host memory
  absl::Span<const float> log_probs;  // [row_count, k], finite where used; sum p_k <= 1 + 1e-3
  double student_temperature = 1.0;   // > 0, and its reciprocal a float32 > 0
};

// A tensor of a head that can be read or written.
enum class HeadTensor : int32_t {
  kWeight = 1,         // [vocab_size, hidden_size], storage type
  kBias = 2,           // [vocab_size], storage type
  kMasterWeight = 3,   // fp32; the stored weight itself where there is no separate master
  kMasterBias = 4,     // fp32
  kGradWeight = 5,     // [vocab_size, hidden_size] fp32, the accumulator
  kGradBias = 6,       // [vocab_size] fp32
  kMoment1Weight = 7,  // fp32: AdamW's first moment, or SGD's momentum buffer
  kMoment1Bias = 8,
  kMoment2Weight = 9,  // fp32: AdamW's second moment
  kMoment2Bias = 10,
};

// `weight`, `bias`, `master_weight`, ...
const char* HeadTensorName(HeadTensor tensor);

// Rows [vocab_start, vocab_end) of a head on one executor.
struct VocabShard {
  int64_t vocab_start = 0;
  int64_t vocab_end = 0;
  std::string device;  // "cpu", "cuda:0", ...
};

// A head's memory by purpose. Filled in by LossEngine::PlanHead() without allocating.
struct MemoryPlan {
  struct Item {
    // weight, bias, int8_weight, reference_row, grad_weight, grad_bias, master_weight, optimizer_state, staging or workspace
    std::string purpose;
    int64_t bytes = 0;  // over all shards
  };
  std::vector<Item> items;
  int64_t total_bytes = 0;       // saturates at INT64_MAX instead of wrapping
  int64_t token_chunk_rows = 0;  // rows computed at once
  std::string ToString() const;  // one line, for messages: "weight 2.0 GiB + grad_weight 3.9 GiB + ... = 9.1 GiB"
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_TYPES_H_
