/* The C ABI of the client core from C, against a server that runs. Arguments: target, serialized MicroBatchHeader of a micro-batch
 * of rows x hidden_size float32 with gradients, rows, hidden_size, file for the summary. The Python client runs the rest of the
 * ABI. Exit code 0 if everything was as it should be; otherwise the first thing that was not is on stderr. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "headwater/client/c_api.h"

#define SECOND 1000000000LL

static void fail(int line, const char* what) {
  fprintf(stderr, "line %d: %s\n", line, what);
  exit(1);
}
#define EXPECT(condition)                         \
  do {                                            \
    if (!(condition)) fail(__LINE__, #condition); \
  } while (0)

/* Whether the details name a reason: the details are protobuf, the reason stands in them as it is. */
static int has_reason(const hw_client_error* error, const char* reason) {
  int64_t size = 0;
  const char* details = hw_client_error_details(error, &size);
  const int64_t length = (int64_t)strlen(reason);
  for (int64_t i = 0; i + length <= size; ++i) {
    if (memcmp(details + i, reason, (size_t)length) == 0) return 1;
  }
  return 0;
}

static void expect_error(int line, hw_client_error* error, int32_t code, const char* reason) {
  if (error == NULL) fail(line, "expected an error, got none");
  if (hw_client_error_code(error) != code || (reason != NULL && !has_reason(error, reason))) {
    fprintf(stderr, "expected code %d, %s; got %d: ", code, reason == NULL ? "" : reason, hw_client_error_code(error));
    fail(line, hw_client_error_message(error));
  }
  if (strlen(hw_client_error_message(error)) < 5) fail(line, "an error without a sentence");
  hw_client_error_free(error);
}
#define EXPECT_ERROR(call, code, reason) expect_error(__LINE__, (call), (code), (reason))

static void expect_ok(int line, hw_client_error* error) {
  if (error != NULL) fail(line, hw_client_error_message(error));
}
#define EXPECT_OK(call) expect_ok(__LINE__, (call))

static char* read_file(const char* path, int64_t* size) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) fail(__LINE__, path);
  char* data = malloc(1 << 20);
  *size = (int64_t)fread(data, 1, 1 << 20, file);
  fclose(file);
  return data;
}

/* A request with one change is refused. */
#define EXPECT_BAD(change, reason)                                 \
  do {                                                             \
    hw_client_request bad = *good;                                 \
    change;                                                        \
    EXPECT_ERROR(hw_client_start(client, &bad, &call), 3, reason); \
  } while (0)

static hw_client_rows make_rows(float* data, int64_t rows, int64_t hidden_size) {
  return (hw_client_rows){.struct_bytes = sizeof(hw_client_rows),
                          .data = data,
                          .row_count = rows,
                          .hidden_size = hidden_size,
                          .data_type = HW_CLIENT_FLOAT32,
                          .memory = HW_CLIENT_HOST};
}

static void pause_ms(long ms) {
  const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static void check_wrong_arguments(hw_client* client, const hw_client_request* good) {
  hw_client* other = NULL;
  hw_client_call* call = NULL;
  hw_client_memory* memory = NULL;
  const void* answer = NULL;
  int64_t size = 0;
  EXPECT_ERROR(hw_client_connect(NULL, NULL, &other), 3, "MISSING_FIELD");
  EXPECT_ERROR(hw_client_connect("localhost:1", NULL, NULL), 3, "MISSING_FIELD");
  static const char* const options[] = {"no_such_option=1",    "stripes=many",      "stripes=99999999999",
                                        "stripes=0",           "stripes",           "transport=pigeon",
                                        "session_lease_ms=-1", "max_attempts=0",    "initial_backoff_ms=9\nmax_backoff_ms=8",
                                        "replay_bytes=-1",     "replay_steps=some", "connect_timeout_ms=0"};
  for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); ++i) {
    EXPECT_ERROR(hw_client_connect("localhost:1", options[i], &other), 3, "INVALID_FIELD");
  }
  EXPECT_ERROR(hw_client_connect("unix:/nonexistent/socket", "connect_timeout_ms=50", &other), 14, NULL);
  EXPECT(other == NULL);
  hw_client_free(NULL);
  hw_client_call_free(NULL);
  hw_client_call_cancel(NULL);
  hw_client_memory_free(NULL);
  hw_client_error_free(NULL);
  EXPECT(hw_client_info(NULL, NULL, 0) == -1);
  EXPECT(hw_client_memory_data(NULL) == NULL);
  EXPECT_ERROR(hw_client_allocate(NULL, 1, &memory), 3, "MISSING_FIELD");
  EXPECT_ERROR(hw_client_allocate(client, 0, &memory), 3, "INVALID_FIELD");
  EXPECT_ERROR(hw_client_allocate(client, 1, NULL), 3, "MISSING_FIELD");
  EXPECT_ERROR(hw_client_close(NULL, 0), 3, "MISSING_FIELD");
  EXPECT(hw_client_completion_fd(NULL) == -1);
  EXPECT(hw_client_notice(NULL, NULL, 0) == -1);
  EXPECT(hw_client_notice(client, NULL, 0) == 0);
  hw_client_stop_waiting(NULL);
  EXPECT(hw_client_completions(NULL, NULL, 1) == 0);
  EXPECT(hw_client_head_epoch(NULL, "h", "e", 1, &size, 8) == -1);
  EXPECT(hw_client_call_data(NULL, &size) == NULL && size == 0);
  EXPECT(hw_client_call_attempt(NULL) == 0);
  hw_client_abandon(NULL, "", 0);
  EXPECT_ERROR(hw_client_call_wait(NULL, 0, NULL), 3, "MISSING_FIELD");
  EXPECT_ERROR(hw_client_call_result(NULL, &answer, &size), 3, "MISSING_FIELD");

  EXPECT_ERROR(hw_client_start(NULL, good, &call), 3, "MISSING_FIELD");
  EXPECT_ERROR(hw_client_start(client, NULL, &call), 3, "MISSING_FIELD");
  EXPECT_ERROR(hw_client_start(client, good, NULL), 3, "MISSING_FIELD");
  EXPECT_BAD(bad.struct_bytes = 8, "struct_bytes");
  struct {
    hw_client_request known;
    int64_t beyond;
  } longer = {*good, 0};
  longer.known.struct_bytes = sizeof(longer);
  longer.beyond = 1;
  EXPECT_ERROR(hw_client_start(client, &longer.known, &call), 3, "struct_bytes");
  EXPECT_BAD(bad.timeout_ns = 0, "timeout_ns");
  EXPECT_BAD(bad.message = NULL, "MISSING_FIELD");
  EXPECT_BAD(bad.message_bytes = 3, "INVALID_FIELD");
  EXPECT_BAD(bad.message_bytes = -1, "INVALID_FIELD");
  EXPECT_BAD(bad.rows.row_count -= 1, "SHAPE_MISMATCH");
  EXPECT_BAD(bad.rows.row_count = INT64_MAX / 2, "INVALID_FIELD");
  EXPECT_BAD(bad.rows.hidden_size += 1, "SHAPE_MISMATCH");
  EXPECT_BAD(bad.rows.data_type = HW_CLIENT_BFLOAT16, "DATA_TYPE_MISMATCH");
  EXPECT_BAD(bad.rows.data_type = 9, "data_type");
  EXPECT_BAD(bad.rows.memory = 7, "memory");
  EXPECT_BAD(bad.rows.data = NULL, "INVALID_FIELD");
  EXPECT_BAD(bad.rows.struct_bytes = 1, "struct_bytes");
  EXPECT_BAD(bad.result_rows.row_count -= 1, "result_rows");
  EXPECT_BAD(bad.flags = 1 << 20, "flags");
  EXPECT_BAD(bad.method = NULL, "MISSING_FIELD");
  hw_client_request wrong = *good;
  wrong.method = "/headwater.v1.LossService/TransferRows";
  EXPECT_ERROR(hw_client_start(client, &wrong, &call), 12, NULL);
  EXPECT_BAD(bad.teacher_count = 2, "teachers");
  EXPECT_BAD((bad.teachers = &bad.rows, bad.teacher_count = 1), "teachers");
  wrong = *good;
  wrong.method = "/headwater.v1.LossService/StreamTeacher";
  wrong.message = "\xff";
  wrong.message_bytes = 1;
  EXPECT_ERROR(hw_client_start(client, &wrong, &call), 3, "INVALID_FIELD");
  EXPECT(call == NULL);
}

static void check_gradient(const float* gradient, int64_t count) {
  int64_t written = 0;
  for (int64_t i = 0; i < count; ++i) {
    EXPECT(gradient[i] != 12345.0F);
    written += gradient[i] != 0.0F;
  }
  EXPECT(written > count / 2);
}

int main(int argc, char** argv) {
  EXPECT(argc == 6);
  EXPECT(hw_client_abi_version() == HW_CLIENT_ABI_VERSION);
  int64_t header_bytes = 0;
  char* header = read_file(argv[2], &header_bytes);
  const int64_t rows = atoll(argv[3]);
  const int64_t hidden_size = atoll(argv[4]);
  const int64_t count = rows * hidden_size;

  float* hidden = malloc((size_t)count * sizeof(float));
  float* gradient = malloc((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    hidden[i] = (float)(i % 13) / 13.0F - 0.4F;
    gradient[i] = 12345.0F;
  }
  hw_client_request request = {.struct_bytes = sizeof(request),
                               .method = "/headwater.v1.LossService/ComputeLoss",
                               .message = header,
                               .message_bytes = header_bytes,
                               .timeout_ns = 60 * SECOND,
                               .rows = make_rows(hidden, rows, hidden_size),
                               .result_rows = make_rows(gradient, rows, hidden_size)};
  hw_client* client = NULL;
  EXPECT_OK(hw_client_connect(argv[1], "transport=auto\nstripes=4\nclient_name=program\n", &client));
  check_wrong_arguments(client, &request);

  /* Waiting. */
  hw_client_call* call = NULL;
  EXPECT_OK(hw_client_start(client, &request, &call));
  int32_t ended = 0;
  EXPECT_OK(hw_client_call_wait(call, 60 * SECOND, &ended));
  EXPECT(ended == 1);
  const void* summary = NULL;
  int64_t summary_bytes = 0;
  EXPECT_OK(hw_client_call_result(call, &summary, &summary_bytes));
  EXPECT(summary_bytes > 16);
  FILE* file = fopen(argv[5], "wb");
  EXPECT(file != NULL && fwrite(summary, 1, (size_t)summary_bytes, file) == (size_t)summary_bytes);
  fclose(file);
  hw_client_call_cancel(call); /* too late, and no harm */
  EXPECT_OK(hw_client_call_result(call, &summary, &summary_bytes));
  hw_client_call_free(call);
  check_gradient(gradient, count);
  char info[1000];
  EXPECT(hw_client_info(client, info, sizeof(info)) < (int64_t)sizeof(info));
  EXPECT(strstr(info, "host_transport=") != NULL && strstr(info, "bytes.cuda_ipc=0\n") != NULL);
  EXPECT(strstr(info, "micro_batches.grpc=1\n") != NULL || strstr(info, "micro_batches.shared_memory=1\n") != NULL);
  char few[8];
  EXPECT(hw_client_info(client, few, sizeof(few)) == (int64_t)strlen(info) && strlen(few) == 7);

  /* Gradients in memory of the library's. */
  memset(&request.result_rows, 0, sizeof(request.result_rows));
  EXPECT_OK(hw_client_start(client, &request, &call));
  EXPECT_OK(hw_client_call_wait(call, -1, &ended));
  int64_t gradient_bytes = 0;
  check_gradient(hw_client_call_data(call, &gradient_bytes), count);
  EXPECT(gradient_bytes == count * (int64_t)sizeof(float));
  hw_client_call_free(call);
  request.result_rows = make_rows(gradient, rows, hidden_size);
  char epoch[4];
  EXPECT(hw_client_head_epoch(client, "tenants/default/heads/none", "abcd", 4, epoch, 4) == 4 && memcmp(epoch, "abcd", 4) == 0);
  EXPECT(hw_client_head_epoch(client, "tenants/default/heads/none", "abcd", 4, epoch, 3) == -1);

  /* Cancelled and freed: `gradient` may be written until the call is free, and not after. */
  for (int i = 0; i < 20; ++i) {
    EXPECT_OK(hw_client_start(client, &request, &call));
    if (i % 2 == 0) hw_client_call_cancel(call);
    if (i % 4 < 2) pause_ms(i % 3);
    hw_client_call_free(call);
    for (int64_t j = 0; j < count; ++j) gradient[j] = 12345.0F;
    pause_ms(1);
    for (int64_t j = 0; j < count; ++j) EXPECT(gradient[j] == 12345.0F);
  }

  /* Memory of the library's, which outlives the handle; so does a call. */
  hw_client_memory* rows_memory = NULL;
  hw_client_memory* gradient_memory = NULL;
  EXPECT_OK(hw_client_allocate(client, count * (int64_t)sizeof(float), &rows_memory));
  EXPECT_OK(hw_client_allocate(client, count * (int64_t)sizeof(float), &gradient_memory));
  memcpy(hw_client_memory_data(rows_memory), hidden, (size_t)count * sizeof(float));
  EXPECT(((uintptr_t)hw_client_memory_data(rows_memory)) % 4096 == 0);
  request.rows.data = hw_client_memory_data(rows_memory);
  request.result_rows.data = hw_client_memory_data(gradient_memory);
  float* in_place = hw_client_memory_data(gradient_memory);
  for (int64_t i = 0; i < count; ++i) in_place[i] = 12345.0F;
  EXPECT_OK(hw_client_start(client, &request, &call));
  hw_client_free(client);
  EXPECT_OK(hw_client_call_wait(call, -1, &ended));
  EXPECT_OK(hw_client_call_result(call, &summary, &summary_bytes));
  check_gradient(in_place, count);
  hw_client_call_free(call);

  /* A closed client takes no calls. */
  EXPECT_OK(hw_client_connect(argv[1], NULL, &client));
  for (int i = 0; i < 2; ++i) EXPECT_OK(hw_client_close(client, SECOND));
  const hw_client_request unary = {
      .struct_bytes = sizeof(unary), .method = "/headwater.v1.SessionService/GetServerInfo", .timeout_ns = 60 * SECOND};
  EXPECT_OK(hw_client_start(client, &unary, &call));
  EXPECT_OK(hw_client_call_wait(call, -1, &ended));
  EXPECT_ERROR(hw_client_call_result(call, &summary, &summary_bytes), 9, NULL);
  hw_client_call_free(call);
  hw_client_free(client);
  hw_client_memory_free(rows_memory);
  hw_client_memory_free(gradient_memory);

  free(header);
  free(hidden);
  free(gradient);
  return 0;
}
