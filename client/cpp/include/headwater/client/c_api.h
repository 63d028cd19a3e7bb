/* The C ABI of the client core: rows of micro-batches to a Headwater server and back, by the best path there is. For languages
 * whose own layer keeps steps, retries and replays; C++ programs use client.h instead.
 *
 * Errors. Functions that can fail return NULL for success, or an error that the caller frees with hw_client_error_free(). No C++
 * exception leaves a function; one thrown inside is an error of code 13 (INTERNAL), or 8 (RESOURCE_EXHAUSTED) if memory ran out. A
 * null handle is refused (INVALID_ARGUMENT, MISSING_FIELD), except by the functions that free.
 *
 * Versions. Structs are plain data whose first member is their size in bytes, so that later versions can append members; zero means
 * "default" for appended ones. A size smaller than this version's, or a member beyond it that is not zero, is refused. Structs
 * inside structs never grow; their struct_bytes is their sizeof, or 0.
 *
 * Threads. Everything is thread-safe, except that nothing may be used while or after it is freed. A child process made by fork()
 * must not use handles of its parent.
 *
 * Memory. What is passed in stays the caller's. Text, headers and structs are read before the function returns; rows and the memory
 * for gradients are used until the call has ended: its `done` has been called, hw_client_call_wait() has said so, or
 * hw_client_call_free() has returned. Then the library refers to none of it any more, whatever the result.
 *
 * "Serialized" is protobuf's encoding of the message of that name in proto/headwater/v1. Texts are UTF-8 and end with a 0.
 */
#ifndef HEADWATER_CLIENT_C_API_H_
#define HEADWATER_CLIENT_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HW_CLIENT_API __attribute__((visibility("default")))
#define HW_CLIENT_ABI_VERSION 1

typedef struct hw_client hw_client;               /* a connection */
typedef struct hw_client_call hw_client_call;     /* a call that is under way, then its result */
typedef struct hw_client_memory hw_client_memory; /* memory that hw_client_allocate() handed out */
typedef struct hw_client_error hw_client_error;   /* a status that is not OK */

/* HW_CLIENT_ABI_VERSION of the library; refuse to go on if it differs from the header's. */
HW_CLIENT_API int32_t hw_client_abi_version(void);

/* ---- errors ---- */

/* Canonical gRPC code (3: INVALID_ARGUMENT, ...) and sentence, which lives as long as the error. */
HW_CLIENT_API int32_t hw_client_error_code(const hw_client_error* error);
HW_CLIENT_API const char* hw_client_error_message(const hw_client_error* error);
/* A serialized google.rpc.Status with code, message and details (ErrorInfo with reason and metadata, RetryInfo), as a server sends
 * it in `grpc-status-details-bin`; also for errors that this side found. A connection that could not be made or broke is
 * UNAVAILABLE (14) without details. Lives as long as the error; `size` gets its bytes. */
HW_CLIENT_API const void* hw_client_error_details(const hw_client_error* error, int64_t* size);
HW_CLIENT_API void hw_client_error_free(hw_client_error* error);

/* ---- connections ---- */

/* Connects to `target` (`host:port` or `unix:/path`) and waits until the server is reached. `options`: lines `key=value`, or NULL;
 * an unknown key or a value out of range is INVALID_ARGUMENT.
 *
 *   transport=auto           auto, grpc, shared_memory or cuda_ipc; but for `auto`, a micro-batch that cannot go that way is
 *                            FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE with the reason
 *   stripes=8                connections that rows are spread over at most, [1, 64]
 *   chunk_bytes=1048576      bytes of rows in one message, at least one row
 *   max_message_bytes=67108864
 *   connect_timeout_ms=10000 > 0
 *   session_lease_ms=30000   lease that the library's own sessions ask for, > 0
 *   client_name=headwater-c  shown in the server's logs; at most 128 bytes
 *   tls=0                    1: TLS, also by any of the next four
 *   ca_certificate=PATH      authorities, in PEM, that may have signed the server's certificate; without it those of the system
 *   client_certificate=PATH  what is shown to a server that asks for it, in PEM,
 *   client_key=PATH          and its key
 *   server_name=NAME         the name that the server's certificate must be for; without it the host of `target`
 *   token=TOKEN              sent with every call; not in plain text but to loopback addresses and Unix sockets, unless
 *   allow_plaintext_token=0  is 1
 *   traceparent=PARENT       sent with every call: the caller's span, as W3C Trace Context says it
 */
HW_CLIENT_API hw_client_error* hw_client_connect(const char* target, const char* options, hw_client** out);
/* Lets go of the connection; NULL is fine. Calls that are under way and memory that was allocated stay valid; the connection and
 * its session end with the last of them. Not from a `done` callback. */
HW_CLIENT_API void hw_client_free(hw_client* client);

/* Regions of shared memory are registered for the session that a header names, or, where it names none, for one of the library's
 * own, which is opened when it is needed and kept alive. This forgets what was registered for a session of the caller's that has
 * ended. */
HW_CLIENT_API hw_client_error* hw_client_forget_session(hw_client* client, const void* id, int64_t size);

/* What is known of the paths and what went over them, as lines `key=value`; counts are of calls that succeeded:
 *
 *   host_transport          path of rows in host memory: grpc or shared_memory; empty before the first micro-batch
 *   cuda_transport          likewise for device memory; empty before the first micro-batch with such rows
 *   why_not_better          one sentence why a better path is not taken; empty: there is no better one, or nothing is known yet
 *   stripes                 streams of the last micro-batch that went over gRPC; 0 before the first
 *   micro_batches.grpc      and .shared_memory, .cuda_ipc: micro-batches by path
 *   bytes.grpc              likewise: bytes of rows, both ways
 *
 * Writes at most `size` bytes into `text`, the final 0 included, and returns the length of the whole text without it; -1 for a null
 * handle. */
HW_CLIENT_API int64_t hw_client_info(hw_client* client, char* text, int64_t size);

/* ---- memory ---- */

/* Memory for rows, aligned to 4096 bytes. Where the system has shared memory it lies in a region that the server can map, and
 * micro-batches whose rows or gradients lie in it are not copied on this side; anywhere else it is ordinary memory. `size_bytes` >
 * 0. RESOURCE_EXHAUSTED if there is no memory. */
HW_CLIENT_API hw_client_error* hw_client_allocate(hw_client* client, int64_t size_bytes, hw_client_memory** out);
/* The first byte; NULL for a null handle. */
HW_CLIENT_API void* hw_client_memory_data(const hw_client_memory* memory);
/* Whether it lies in a shared region: 1 or 0. */
HW_CLIENT_API int32_t hw_client_memory_shared(const hw_client_memory* memory);
/* No call may use it any more. NULL is fine. */
HW_CLIENT_API void hw_client_memory_free(hw_client_memory* memory);

/* ---- calls ---- */

#define HW_CLIENT_HOST 0 /* ordinary, page-locked or hw_client_allocate()'s memory */
#define HW_CLIENT_CUDA 1 /* device memory of this process, of one allocation */

#define HW_CLIENT_FLOAT32 1
#define HW_CLIENT_BFLOAT16 2
#define HW_CLIENT_FLOAT16 3

/* Rows [row_count, hidden_size], row-major, without padding. */
typedef struct hw_client_rows {
  int64_t struct_bytes;
  void* data; /* NULL: there are none; rows that are sent are only read */
  int64_t row_count;
  int64_t hidden_size;
  int32_t data_type; /* HW_CLIENT_FLOAT32, ... */
  int32_t memory;    /* HW_CLIENT_HOST or HW_CLIENT_CUDA */
} hw_client_rows;

/* Called exactly once, by a thread of the library, after the last access to the caller's memory. It may use the call (wait,
 * result), start others, and free this one; it must not block. */
typedef void (*hw_client_done)(void* context);

/* One attempt of one micro-batch. */
typedef struct hw_client_micro_batch {
  int64_t struct_bytes;
  /* Serialized MicroBatchHeader, complete but for what says how rows travel, which the library fills in: transfer_id, stripe_count,
   * hidden_rows, grad_hidden_rows, TeacherHidden.rows; if it uses shared memory and `session_id` is empty, that too. Sizes and
   * types that contradict the rows below are INVALID_ARGUMENT. */
  const void* header;
  int64_t header_bytes;
  int64_t timeout_ns;             /* > 0; the call ends by then */
  hw_client_rows hidden;          /* [row_count, hidden_size] of the header, in its data_type */
  const hw_client_rows* teachers; /* one for each term of the header, without data where it has no teacher_hidden; or NULL */
  int64_t teacher_count;          /* 0, or the number of terms */
  /* Memory for [row_count, hidden_size] of grad_hidden_data_type; without data exactly if the header does not want it. Undefined if
   * the call fails. It must not overlap the other rows. */
  hw_client_rows grad_hidden;
  /* With device memory: a CUstream (cudaStream_t) of its device's primary context. The rows are ready, and the memory for gradients
   * is free, when the work that was put into it before this call is done. NULL: the default stream. */
  void* cuda_stream;
  hw_client_done done; /* or NULL */
  void* context;
} hw_client_micro_batch;

/* Starts the call. An error here has used nothing and calls nothing; later ones are the call's result. */
HW_CLIENT_API hw_client_error* hw_client_submit(hw_client* client, const hw_client_micro_batch* micro_batch, hw_client_call** out);

/* A stream of teacher rows. Its rows are in host memory, or are copied there. */
typedef struct hw_client_teacher_rows {
  int64_t struct_bytes;
  const void* header; /* serialized StreamTeacherHeader */
  int64_t header_bytes;
  int64_t timeout_ns; /* > 0 */
  hw_client_rows rows;
  void* cuda_stream;   /* as above */
  hw_client_done done; /* or NULL */
  void* context;
} hw_client_teacher_rows;

/* Starts the call. Its result is a serialized StreamTeacherResponse. */
HW_CLIENT_API hw_client_error* hw_client_stream_teacher(hw_client* client, const hw_client_teacher_rows* rows,
                                                        hw_client_call** out);

/* Waits for the end; `ended` gets 1, or 0 if `timeout_ns` passed first. Negative: as long as it takes. Not without end from a
 * `done` callback of another call. */
HW_CLIENT_API hw_client_error* hw_client_call_wait(hw_client_call* call, int64_t timeout_ns, int32_t* ended);
/* The error of a call that failed (a new one each time), or NULL and the result: a serialized MicroBatchSummary, which lives as
 * long as the call. FAILED_PRECONDITION while the call is under way. */
HW_CLIENT_API hw_client_error* hw_client_call_result(const hw_client_call* call, const void** result, int64_t* size);
/* Asks the call to end with CANCELLED; returns at once. A micro-batch whose commit has begun on the server is committed all the
 * same. */
HW_CLIENT_API void hw_client_call_cancel(hw_client_call* call);
/* Cancels a call that is under way, waits until it has ended, and frees it; `done` has been called by then, unless this is called
 * from it. The wait takes milliseconds, a second if the server stands still; where rows lie in shared memory the server must let
 * go of them first: 10 s at most. NULL is fine. */
HW_CLIENT_API void hw_client_call_free(hw_client_call* call);

#ifdef __cplusplus
}
#endif

#endif /* HEADWATER_CLIENT_C_API_H_ */
