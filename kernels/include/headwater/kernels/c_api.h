/* The C ABI of the engines: what `headwater.local` and `headwaterctl bench` use without a server.
 *
 * Every function returns NULL for success, or an error that the caller frees with hw_error_free(). Structs are plain data whose
 * first member is their size in bytes, so that later versions can append members; zero means "default" for appended ones. A size
 * smaller than this version's, or a member beyond it that is not zero, is refused (INVALID_FIELD). Structs inside structs
 * (optimizer, settings, hard_loss) never grow: their struct_bytes is their sizeof, or 0. Elements of `terms` are
 * terms[0].struct_bytes apart. No C++ exception leaves a function; one thrown inside is an error of code 13 (INTERNAL), or 8
 * (RESOURCE_EXHAUSTED, MEMORY_BUDGET_EXCEEDED) if memory ran out. A null handle is refused (MISSING_FIELD), except by the
 * functions that free.
 * Memory that is passed in stays the caller's and must live until the call returns. The threading rules are those of engine.h:
 * calls on one head must not overlap. Shapes, ranges and errors: types.h and engine.h.
 */
#ifndef HEADWATER_KERNELS_C_API_H_
#define HEADWATER_KERNELS_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HW_API __attribute__((visibility("default")))
/* 2: hw_head_add_gradient. 3: the engine "cuda". */
#define HW_ABI_VERSION 3

typedef struct hw_engine hw_engine; /* a LossEngine */
typedef struct hw_head hw_head;     /* an EngineHead */
typedef struct hw_staged hw_staged; /* a StagedContribution */
typedef struct hw_error hw_error;   /* a status that is not OK */

/* HW_ABI_VERSION of the library; refuse to go on if it differs from the header's. */
HW_API int32_t hw_abi_version(void);

/* Canonical gRPC code (3: INVALID_ARGUMENT, ...); reason ("SHAPE_MISMATCH"); sentence. Strings live as long as the error. */
HW_API int32_t hw_error_code(const hw_error* error);
HW_API const char* hw_error_reason(const hw_error* error);
HW_API const char* hw_error_message(const hw_error* error);
/* The values that the message mentions, in the order of their keys ("expected", "field"); NULL for an index out of range. */
HW_API int32_t hw_error_metadata_count(const hw_error* error);
HW_API const char* hw_error_metadata_key(const hw_error* error, int32_t index);
HW_API const char* hw_error_metadata_value(const hw_error* error, int32_t index);
HW_API void hw_error_free(hw_error* error);

/* EngineOptions; 0 is the engine's default everywhere. */
typedef struct hw_engine_options {
  int64_t struct_bytes;
  const char* engine;  /* "cpu" or NULL, or "cuda": FEATURE_NOT_BUILT, saying why, where it cannot be had */
  int32_t shard_count; /* 0: 1 */
  int32_t thread_count;
  int64_t memory_budget_bytes;
  int64_t workspace_bytes;
  int64_t token_chunk_rows;
  const int64_t* shard_weights;     /* shard_count relative sizes, or NULL: even */
  int32_t device_index;             /* "cuda": the GPU, as CUDA counts the visible ones */
  int32_t no_timed_search;          /* "cuda": not 0: algorithms as the library proposes them */
  const char* algorithm_cache_path; /* "cuda": file that keeps the products' algorithms; NULL or "": none is kept */
} hw_engine_options;

HW_API hw_error* hw_engine_create(const hw_engine_options* options, hw_engine** out);
/* All heads must have been destroyed. */
HW_API void hw_engine_destroy(hw_engine* engine);

#define HW_OPTIMIZER_NONE 0
#define HW_OPTIMIZER_ADAMW 1
#define HW_OPTIMIZER_SGD 2

/* OptimizerSpec. */
typedef struct hw_optimizer_spec {
  int64_t struct_bytes;
  int32_t kind; /* HW_OPTIMIZER_* */
  int32_t nesterov;
  double beta1, beta2, epsilon;
  double momentum, dampening;
  double weight_decay;
} hw_optimizer_spec;

/* HeadSpec. */
typedef struct hw_head_spec {
  int64_t struct_bytes;
  int64_t vocab_size;
  int64_t hidden_size;
  int32_t data_type; /* 1 float32, 2 bfloat16, 3 float16 */
  int32_t has_bias;
  double logit_scale;       /* 1 for none */
  double softcap;           /* 0: none */
  int64_t valid_vocab_size; /* 0: vocab_size */
  int32_t trainable;
  int32_t staging_slots;
  hw_optimizer_spec optimizer;
} hw_head_spec;

HW_API hw_error* hw_head_create(hw_engine* engine, const hw_head_spec* spec, hw_head** out);
/* Its staged contributions must have been committed or discarded. */
HW_API void hw_head_destroy(hw_head* head);
/* What the head takes, MemoryPlan::total_bytes, and the rows that are computed at once. Either pointer may be NULL. */
HW_API hw_error* hw_head_plan(const hw_head* head, int64_t* total_bytes, int64_t* token_chunk_rows);

/* `tensor` is a HeadTensor value (1 weight, 2 bias, 3 master_weight, ..., 10 moment2_bias). */
/* 0 for a tensor that the head does not have; its type is then 0 as well. */
HW_API int64_t hw_head_element_count(const hw_head* head, int32_t tensor);
HW_API int32_t hw_head_tensor_data_type(const hw_head* head, int32_t tensor);
HW_API hw_error* hw_head_read(const hw_head* head, int32_t tensor, int64_t element_start, int64_t element_count, void* out);
HW_API hw_error* hw_head_write(hw_head* head, int32_t tensor, int64_t element_start, int64_t element_count, const void* in);
HW_API hw_error* hw_head_zero_gradient(hw_head* head);
/* Adds factor x in[element_count] (fp32) to elements of the accumulator: `tensor` is 5 (grad_weight) or 6 (grad_bias). Two
 * roundings for each element: gradient + (factor * in). */
HW_API hw_error* hw_head_add_gradient(hw_head* head, int32_t tensor, int64_t element_start, int64_t element_count, double factor,
                                      const float* in);
HW_API hw_error* hw_head_reset_optimizer_state(hw_head* head);
HW_API hw_error* hw_head_gradient_stats(const hw_head* head, double* norm_squared, int64_t* non_finite_count);
HW_API int32_t hw_head_free_staging_slots(const hw_head* head);

/* OptimizerStep; `settings` has the head's kind. Zeroes the accumulator afterwards. */
typedef struct hw_optimizer_step {
  int64_t struct_bytes;
  double learning_rate;
  double gradient_multiplier;
  int64_t update_count;
  hw_optimizer_spec settings;
} hw_optimizer_step;

HW_API hw_error* hw_head_apply_optimizer(hw_head* head, const hw_optimizer_step* step);

/* CrossEntropySpec. */
typedef struct hw_cross_entropy {
  int64_t struct_bytes;
  double label_smoothing;
  double z_loss;
  const float* class_weights; /* [class_weight_count], or NULL */
  int64_t class_weight_count; /* valid_vocab_size, or vocab_size (the rest is not looked at); 0 with NULL */
} hw_cross_entropy;

/* JsdSpec. */
typedef struct hw_jsd {
  int64_t struct_bytes;
  double beta;
  double student_temperature;
  double teacher_temperature;
  double hard_loss_weight;
  int32_t truncate_to_common;
  int32_t reserved;
  hw_cross_entropy hard_loss;
} hw_jsd;

/* LossTerm: exactly one of cross_entropy and jsd is not NULL. */
typedef struct hw_loss_term {
  int64_t struct_bytes;
  hw_head* head;
  int64_t row_start;
  int64_t row_count;
  const int32_t* targets;     /* [row_count], or NULL */
  const float* token_weights; /* [row_count], or NULL */
  int32_t ignore_index;
  int32_t teacher_data_type;
  double loss_scale;
  const hw_cross_entropy* cross_entropy;
  const hw_jsd* jsd;
  hw_head* teacher_head;
  const void* teacher_hidden; /* [row_count, teacher's hidden_size] */
  float* token_loss;          /* outputs, [row_count] or NULL */
  float* lse;
  float* target_log_probability;
  float* entropy;
  int32_t* argmax;
} hw_loss_term;

#define HW_GRAD_WEIGHT_NONE 0
#define HW_GRAD_WEIGHT_ACCUMULATE 1
#define HW_GRAD_WEIGHT_STAGE 2

/* MicroBatch. */
typedef struct hw_micro_batch {
  int64_t struct_bytes;
  const void* hidden; /* [row_count, hidden_size] */
  int64_t row_count;
  int64_t hidden_size;
  int32_t hidden_data_type;
  int32_t backward;
  const hw_loss_term* terms;
  int64_t term_count;
  void* grad_hidden; /* [row_count, hidden_size], or NULL */
  int32_t grad_hidden_data_type;
  int32_t grad_weight; /* HW_GRAD_WEIGHT_* */
  double grad_hidden_scale;
  int32_t refuse_non_finite;
  int32_t reserved;
} hw_micro_batch;

/* LossSums. */
typedef struct hw_loss_sums {
  double loss_sum, soft_loss_sum, hard_loss_sum, z_loss_sum;
  double token_weight_sum, target_weight_sum;
  int64_t valid_token_count, non_finite_row_count;
} hw_loss_sums;

/* `sums` has room for term_count entries. `staged` gets the contribution with HW_GRAD_WEIGHT_STAGE, if at least one term's head
 * is trainable, else NULL; the pointer itself may be NULL in the other modes. */
HW_API hw_error* hw_compute(hw_engine* engine, const hw_micro_batch* micro_batch, hw_loss_sums* sums, hw_staged** staged);
/* Adds factor x contribution, and frees it, whatever comes back: one that could not be committed is dropped. */
HW_API hw_error* hw_staged_commit(hw_staged* staged, double factor);
/* Drops the contribution, and frees it. */
HW_API void hw_staged_discard(hw_staged* staged);

#ifdef __cplusplus
}
#endif

#endif /* HEADWATER_KERNELS_C_API_H_ */
