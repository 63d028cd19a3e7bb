/*  The C ABI of the client core: messages to a Headwater server and back. The core repeats calls that may be repeated, waits for an
 *  absent server, keeps sent rows and follows a restarted server. Libraries in other languages build requests and read answers. C++
 *  programs use client.h instead.
 *
 *  Errors. Functions that can fail return NULL for success, or an error that the caller frees with hw_client_error_free(). Where
 *  there is no memory for rows, weights or the log, the error is RESOURCE_EXHAUSTED (8) / MEMORY_BUDGET_EXCEEDED; a small
 *  allocation that fails ends the process. A null handle is refused (INVALID_ARGUMENT, MISSING_FIELD), except by the functions that
 *  free.
 *
 * Versions. Structs are plain data whose first member is their size in bytes, so that later versions can append members; zero means
 * "default" for appended ones. A size smaller than this version's, or a member beyond it that is not zero, is refused. Structs
 * inside structs never grow; their struct_bytes is their sizeof, or 0.
 *
 * Threads. Everything is thread-safe, except that nothing may be used while or after it is freed. A child process made by fork()
 * must not use handles of its parent.
 *
 *  Memory. Memory that the caller passes in stays the caller's. Text, messages and structs are read before the function returns.
 *  Rows and the memory for results are used until the call has ended. A call has ended when hw_client_call_wait() says so, its tag
 *  has come out of the completion queue, or hw_client_call_free() has returned. Then the library refers to none of it any more,
 *  whatever the result.
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
#define HW_CLIENT_ABI_VERSION 2

typedef struct hw_client hw_client;               /* a connection */
typedef struct hw_client_call hw_client_call;     /* a call that is under way, then its result */
typedef struct hw_client_memory hw_client_memory; /* memory that hw_client_allocate() handed out */
typedef struct hw_client_error hw_client_error;   /* a status that is not OK */

/*  HW_CLIENT_ABI_VERSION of the library; a program must stop if it differs from the header's. */
HW_CLIENT_API int32_t hw_client_abi_version(void);

/* ---- errors ---- */

/* Canonical gRPC code (3: INVALID_ARGUMENT, ...) and sentence, which lives as long as the error. */
HW_CLIENT_API int32_t hw_client_error_code(const hw_client_error* error);
HW_CLIENT_API const char* hw_client_error_message(const hw_client_error* error);
/*  A serialized google.rpc.Status with code, message and details (ErrorInfo with reason and metadata, RetryInfo), also for errors
 *  that this side found. A server sends the same bytes in `grpc-status-details-bin`. A connection that could not be made or broke
 *  is UNAVAILABLE (14) without details. Lives as long as the error; `size` gets its bytes. */
HW_CLIENT_API const void* hw_client_error_details(const hw_client_error* error, int64_t* size);
HW_CLIENT_API void hw_client_error_free(hw_client_error* error);

/* ---- connections ---- */

/* Connects to `target` (`host:port` or `unix:/path`) and waits until the server is reached. `options`: lines `key=value`, or NULL;
 * an unknown key or a value out of range is INVALID_ARGUMENT.
 *
 *   transport=auto           auto, grpc, shared_memory or cuda_ipc; except for `auto`, a micro-batch that cannot go that way is
 *                            FAILED_PRECONDITION / TRANSPORT_UNAVAILABLE with the reason
 *   stripes=8                connections that rows are spread over at most, [1, 64]
 *   chunk_bytes=1048576      bytes of rows in one message, at least one row
 *   max_message_bytes=67108864
 *   connect_timeout_ms=10000 > 0
 *   timeout_ms=300000        of calls that the library makes on its own behalf, > 0
 *   session_lease_ms=30000   lease of the session that is asked for; the server may grant less. 0: no session
 *   max_attempts=5           how often a call is made at most, >= 1; an absent server is waited for beyond that if there is a log
 *   initial_backoff_ms=100   pause before the second attempt, > 0; doubled after each attempt
 *   max_backoff_ms=5000      >= initial_backoff_ms
 *   replay_bytes=0           room for what is kept to follow a server that was started again, >= 0; 0: nothing is
 *   replay_steps=COUNT       closed steps that are kept beside the open one, >= 0; without it as many as there is room for
 *   client_name=headwater-c  shown in the server's logs; at most 128 bytes
 *   tls=0                    1: TLS, also by any of the next four
 *   ca_certificate=PATH      authorities, in PEM, that may have signed the server's certificate; without it those of the system
 *   client_certificate=PATH  the certificate for a server that asks for one, in PEM,
 *   client_key=PATH          and its key
 *   server_name=NAME         the name that the server's certificate must be for; without it the host of `target`
 *   token=TOKEN              sent with every call; not in plain text but to loopback addresses and Unix sockets, unless
 *   allow_plaintext_token=0  is 1
 *   traceparent=PARENT       sent with every call: the caller's span, as W3C Trace Context says it
 */
HW_CLIENT_API hw_client_error* hw_client_connect(const char* target, const char* options, hw_client** out);
/* Cancels the calls that are under way, and ends the session on the server, for which it waits at most `timeout_ns`. Later calls
 * are FAILED_PRECONDITION. Idempotent. */
HW_CLIENT_API hw_client_error* hw_client_close(hw_client* client, int64_t timeout_ns);
/*  The program is about to end: calls with HW_CLIENT_BACKGROUND, present and later ones, stop waiting for an absent server. They
 *  end with CANCELLED. They still wait for a server that answers or asks for a repetition. Returns at once. */
HW_CLIENT_API void hw_client_stop_waiting(hw_client* client);
/*  Frees the connection; NULL is fine. Calls that are under way and memory that was allocated stay valid; the connection and its
 *  session end with the last of them. */
HW_CLIENT_API void hw_client_free(hw_client* client);

/*  Describes the paths and their traffic, as lines `key=value`; counts are of calls that succeeded:
 *
 *   host_transport          path of rows in host memory: grpc or shared_memory; empty before the first micro-batch
 *   cuda_transport          path of rows in device memory; empty before the first micro-batch with such rows
 *   why_not_better          one sentence why a better path is not taken; empty: there is no better one, or nothing is known yet
 *   stripes                 streams of the last micro-batch that went over gRPC; 0 before the first
 *   micro_batches.grpc      and .shared_memory, .cuda_ipc: micro-batches by path
 *   bytes.grpc              and the other two: bytes of rows, both ways
 *
 *  Writes at most `size` bytes into `text`, the final 0 included. Returns the length of the whole text without it, or -1 for a null
 *  handle. */
HW_CLIENT_API int64_t hw_client_info(hw_client* client, char* text, int64_t size);

/*  Takes the oldest notice for people that was not taken yet: what the replay log cannot keep, and why. Writes at most `size`
 *  bytes, the final 0 included; returns its length without it, 0 if there is none, -1 for a null handle. A client keeps 16 at most.
 *  Cheap if there is none; one that does not fit into `size` is not taken. */
HW_CLIENT_API int64_t hw_client_notice(hw_client* client, char* text, int64_t size);

/* ---- memory ---- */

/*  Memory for rows, aligned to 4096 bytes. Where the system has shared memory, the block lies in a region that the server can map.
 *  Micro-batches whose rows or gradients lie in it are not copied on this side. Elsewhere it is ordinary memory. `size_bytes` >
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
/*  Device memory in an allocation that the server must not open, such as a framework allocator's pool. Rows are copied on the
 *  device, into memory of the library and back. */
#define HW_CLIENT_CUDA_PRIVATE 2

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
  int32_t memory;    /* HW_CLIENT_HOST, ... */
} hw_client_rows;

#define HW_CLIENT_DO_NOT_WAIT 1 /* an absent server is not waited for, whatever the options say */
#define HW_CLIENT_OWNED 2       /* StreamTeacher: the rows are the session's, and end with it */
#define HW_CLIENT_BACKGROUND 4  /* hw_client_stop_waiting() reaches this call */

/*  The library fills in some fields, whatever they contain: epochs after recoveries, session_id, transfer_id, stripe_count, regions
 *  of shared memory. It also fills in total_bytes and checksum of an upload, and its upload_id if that is empty. `attempt`: the
 *  first attempt, as the caller counts them. With 0 the library chooses: a decision is about the last submission, and a micro-batch
 *  gets a new number where an earlier try may have reached the server. */
typedef struct hw_client_request {
  int64_t struct_bytes;
  const char* method;  /* "/headwater.v1.HeadService/SealStep"; one that the library does not know is UNIMPLEMENTED */
  const void* message; /* serialized request; of a streaming method its header: MicroBatchHeader, StreamTeacherHeader,
                          UploadWeightsHeader, AddGradientHeader, DownloadWeightsRequest, DownloadGradientRequest */
  int64_t message_bytes;
  int64_t timeout_ns; /* > 0; of the call with all its attempts, waits and recoveries */
  int32_t flags;      /* HW_CLIENT_DO_NOT_WAIT, ... */
  int32_t reserved;   /* 0 */
  /*  The rows to send: hidden states, teacher rows, the tensor of an upload ([row_count, hidden_size] elements in all), rows of a
   *  gradient. Sizes and types that contradict the message are INVALID_ARGUMENT. Tensors and gradients lie in host memory. */
  hw_client_rows rows;
  const hw_client_rows* teachers; /* ComputeLoss: one for each term, without data where it has no teacher_hidden; or NULL */
  int64_t teacher_count;          /* 0, or the number of terms */
  /* Where gradients for hidden states or a downloaded tensor go. Undefined if the call fails; it must not overlap the other rows.
   * Without data: into memory of the library's (hw_client_call_data). A bias is [row_count, 1]. */
  hw_client_rows result_rows;
  /* With device memory: a CUstream (cudaStream_t) of its device's primary context. The rows are ready, and the memory for gradients
   * is free, when the work that was put into it before this call is done. NULL: the default stream. */
  void* cuda_stream;
  uint64_t tag; /* not 0: put into the completion queue when the call has ended */
} hw_client_request;

/* Starts the call; blocks no longer than sending a message takes. An error here has used nothing; later ones are the call's result.
 * At most 16 micro-batches are under way at once, more wait their turn; other calls do not. */
HW_CLIENT_API hw_client_error* hw_client_start(hw_client* client, const hw_client_request* request, hw_client_call** out);

/* Waits for the end; `ended` gets 1, or 0 if `timeout_ns` passed first. Negative: as long as it takes. */
HW_CLIENT_API hw_client_error* hw_client_call_wait(hw_client_call* call, int64_t timeout_ns, int32_t* ended);
/*  The error of a call that failed (a new one each time), or NULL and the result. The result is the serialized answer
 *  (MicroBatchSummary, Head, ...; of a download DownloadTensorHeader), which lives as long as the call. FAILED_PRECONDITION while
 *  the call is under way. */
HW_CLIENT_API hw_client_error* hw_client_call_result(const hw_client_call* call, const void** result, int64_t* size);
/* A result in the library's memory, which lives as long as the call. NULL and 0 elsewhere. */
HW_CLIENT_API void* hw_client_call_data(const hw_client_call* call, int64_t* size);
/* Attempt of the micro-batch that the answer is about; 0 where there is none. */
HW_CLIENT_API int64_t hw_client_call_attempt(const hw_client_call* call);
/* Bytes of an upload that are on their way, and all of them; 0 for other calls. */
HW_CLIENT_API void hw_client_call_progress(const hw_client_call* call, int64_t* sent_bytes, int64_t* total_bytes);
/* Asks the call to end with CANCELLED; returns at once. A micro-batch whose commit has begun on the server is committed all the
 * same. */
HW_CLIENT_API void hw_client_call_cancel(hw_client_call* call);
/*  Cancels a call that is under way, waits until it has ended, and frees it. The wait takes milliseconds, or a second if the server
 *  hangs. Where rows lie in shared memory the server must release them first: 10 s at most. NULL is fine. */
HW_CLIENT_API void hw_client_call_free(hw_client_call* call);

/* ---- completion queue ---- */

/* An eventfd that is readable while tags of ended calls wait to be taken. It is the client's until that is freed; -1 for a null
 * handle, or where the system has none. */
HW_CLIENT_API int32_t hw_client_completion_fd(hw_client* client);
/* Takes up to `most` tags, oldest first, and returns how many. Never blocks. */
HW_CLIENT_API int64_t hw_client_completions(hw_client* client, uint64_t* tags, int64_t most);

/* ---- heads ---- */

/*  The epoch that calls now carry if they name `epoch` of the head `head` (its full name). It is `epoch` itself until a recovery
 *  replaces it. Returns its size; -1 if `out` is too small, or for a null handle. */
HW_CLIENT_API int64_t hw_client_head_epoch(hw_client* client, const char* head, const void* epoch, int64_t epoch_bytes, void* out,
                                           int64_t out_bytes);
/*  Discards a micro-batch that no call can decide any more: a serialized DiscardMicroBatchRequest. Returns at once and makes no
 *  call on this thread, so that a garbage collector's finalizer may use it. ComputeLoss, GetStep, SealStep, ApplyOptimizerStep,
 *  AddGradient, DiscardGradient, DeleteHead and uploads that close a step wait until earlier abandoned micro-batches of their heads
 *  are discarded. */
HW_CLIENT_API void hw_client_abandon(hw_client* client, const void* message, int64_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif /* HEADWATER_CLIENT_C_API_H_ */
