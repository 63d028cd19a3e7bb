// Errors with a machine-readable reason.
//
// Every absl::Status that Headwater's own code makes carries, as payloads, one reason out of ErrorReason and the values that its
// message mentions. The service layer turns them into ErrorInfo (proto/headwater/v1/error.proto); nothing else interprets them.
//
//   return MakeError(ErrorReason::kShapeMismatch, "targets has 4095 entries, the term covers 4096 rows",
//                    {{"field", "terms[0].targets"}, {"expected", "4096"}, {"actual", "4095"}});
#ifndef HEADWATER_KERNELS_ERROR_H_
#define HEADWATER_KERNELS_ERROR_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace headwater {

// X(enumerator, NAME, canonical code): the same names, in the same order, as `ErrorReason` in error.proto; a test compares them.
#define HEADWATER_ERROR_REASONS(X)                                          \
  X(kMissingField, MISSING_FIELD, kInvalidArgument)                         \
  X(kInvalidField, INVALID_FIELD, kInvalidArgument)                         \
  X(kInvalidName, INVALID_NAME, kInvalidArgument)                           \
  X(kShapeMismatch, SHAPE_MISMATCH, kInvalidArgument)                       \
  X(kDataTypeMismatch, DATA_TYPE_MISMATCH, kInvalidArgument)                \
  X(kDataLengthMismatch, DATA_LENGTH_MISMATCH, kInvalidArgument)            \
  X(kTargetOutOfVocab, TARGET_OUT_OF_VOCAB, kInvalidArgument)               \
  X(kVocabSizeMismatch, VOCAB_SIZE_MISMATCH, kInvalidArgument)              \
  X(kProtocolViolation, PROTOCOL_VIOLATION, kInvalidArgument)               \
  X(kChunkOutOfRange, CHUNK_OUT_OF_RANGE, kInvalidArgument)                 \
  X(kLimitExceeded, LIMIT_EXCEEDED, kInvalidArgument)                       \
  X(kInvalidCombination, INVALID_COMBINATION, kInvalidArgument)             \
  X(kHeadNotFound, HEAD_NOT_FOUND, kNotFound)                               \
  X(kCheckpointNotFound, CHECKPOINT_NOT_FOUND, kNotFound)                   \
  X(kMicroBatchNotFound, MICRO_BATCH_NOT_FOUND, kNotFound)                  \
  X(kWeightsNotFound, WEIGHTS_NOT_FOUND, kNotFound)                         \
  X(kSessionNotFound, SESSION_NOT_FOUND, kNotFound)                         \
  X(kRegionNotFound, REGION_NOT_FOUND, kNotFound)                           \
  X(kTransferNotFound, TRANSFER_NOT_FOUND, kNotFound)                       \
  X(kHeadAlreadyExists, HEAD_ALREADY_EXISTS, kAlreadyExists)                \
  X(kHeadSpecMismatch, HEAD_SPEC_MISMATCH, kAlreadyExists)                  \
  X(kCheckpointAlreadyExists, CHECKPOINT_ALREADY_EXISTS, kAlreadyExists)    \
  X(kStepMismatch, STEP_MISMATCH, kFailedPrecondition)                      \
  X(kStepSealed, STEP_SEALED, kFailedPrecondition)                          \
  X(kStepNotSealed, STEP_NOT_SEALED, kFailedPrecondition)                   \
  X(kHeadNotTrainable, HEAD_NOT_TRAINABLE, kFailedPrecondition)             \
  X(kWeightsNotLoaded, WEIGHTS_NOT_LOADED, kFailedPrecondition)             \
  X(kMicroBatchMissing, MICRO_BATCH_MISSING, kFailedPrecondition)           \
  X(kMicroBatchUncommitted, MICRO_BATCH_UNCOMMITTED, kFailedPrecondition)   \
  X(kMicroBatchUnexpected, MICRO_BATCH_UNEXPECTED, kFailedPrecondition)     \
  X(kOptimizerNotConfigured, OPTIMIZER_NOT_CONFIGURED, kFailedPrecondition) \
  X(kHeadInUse, HEAD_IN_USE, kFailedPrecondition)                           \
  X(kStorageNotConfigured, STORAGE_NOT_CONFIGURED, kFailedPrecondition)     \
  X(kCheckpointSpecMismatch, CHECKPOINT_SPEC_MISMATCH, kFailedPrecondition) \
  X(kNonFiniteValues, NON_FINITE_VALUES, kFailedPrecondition)               \
  X(kNonFiniteGradient, NON_FINITE_GRADIENT, kFailedPrecondition)           \
  X(kWeightVersionMismatch, WEIGHT_VERSION_MISMATCH, kFailedPrecondition)   \
  X(kJoinIncomplete, JOIN_INCOMPLETE, kFailedPrecondition)                  \
  X(kTransportUnavailable, TRANSPORT_UNAVAILABLE, kFailedPrecondition)      \
  X(kOrderPassed, ORDER_PASSED, kFailedPrecondition)                        \
  X(kEpochFenced, EPOCH_FENCED, kAborted)                                   \
  X(kStepLost, STEP_LOST, kAborted)                                         \
  X(kStepConflict, STEP_CONFLICT, kAborted)                                 \
  X(kMicroBatchConflict, MICRO_BATCH_CONFLICT, kAborted)                    \
  X(kAttemptSuperseded, ATTEMPT_SUPERSEDED, kAborted)                       \
  X(kMicroBatchDiscarded, MICRO_BATCH_DISCARDED, kAborted)                  \
  X(kMicroBatchInProgress, MICRO_BATCH_IN_PROGRESS, kAborted)               \
  X(kStripeLost, STRIPE_LOST, kAborted)                                     \
  X(kStagingFull, STAGING_FULL, kResourceExhausted)                         \
  X(kQueueFull, QUEUE_FULL, kResourceExhausted)                             \
  X(kMemoryBudgetExceeded, MEMORY_BUDGET_EXCEEDED, kResourceExhausted)      \
  X(kQuotaExceeded, QUOTA_EXCEEDED, kResourceExhausted)                     \
  X(kInFlightBytesExceeded, IN_FLIGHT_BYTES_EXCEEDED, kResourceExhausted)   \
  X(kDiskFull, DISK_FULL, kResourceExhausted)                               \
  X(kOrderedWindowFull, ORDERED_WINDOW_FULL, kResourceExhausted)            \
  X(kDraining, DRAINING, kUnavailable)                                      \
  X(kStarting, STARTING, kUnavailable)                                      \
  X(kShardNotReady, SHARD_NOT_READY, kUnavailable)                          \
  X(kFeatureNotBuilt, FEATURE_NOT_BUILT, kUnimplemented)                    \
  X(kChecksumMismatch, CHECKSUM_MISMATCH, kDataLoss)                        \
  X(kFileCorrupt, FILE_CORRUPT, kDataLoss)                                  \
  X(kCancelled, CANCELLED, kCancelled)                                      \
  X(kDeadlineExceeded, DEADLINE_EXCEEDED, kDeadlineExceeded)                \
  X(kEngineFailed, ENGINE_FAILED, kInternal)                                \
  X(kInternal, INTERNAL, kInternal)                                         \
  X(kUnauthenticated, UNAUTHENTICATED, kUnauthenticated)                    \
  X(kPermissionDenied, PERMISSION_DENIED, kPermissionDenied)                \
  X(kNotSessionOwner, NOT_SESSION_OWNER, kPermissionDenied)

enum class ErrorReason {
#define HEADWATER_REASON_ENUMERATOR(enumerator, name, code) enumerator,
  HEADWATER_ERROR_REASONS(HEADWATER_REASON_ENUMERATOR)
#undef HEADWATER_REASON_ENUMERATOR
};

// Values that a message mentions, by lowerCamel key with the unit in the key ("requestedBytes").
using ErrorMetadata = std::map<std::string, std::string>;

// `STEP_MISMATCH` and the like. The pointer is static.
const char* ErrorReasonName(ErrorReason reason);

// The canonical code that belongs to a reason.
absl::StatusCode ErrorReasonCode(ErrorReason reason);

// A status with the reason's canonical code, the reason and the metadata as payloads. `message` states the expected and the actual
// value, in one sentence without pointers, paths or other tenants' names.
absl::Status MakeError(ErrorReason reason, const std::string& message, ErrorMetadata metadata = {});

// An error about one field of a request: "field: expected ..., got ...", with the three in the metadata.
absl::Status FieldError(ErrorReason reason, const std::string& field, const std::string& expected, const std::string& actual);

// The reason from MakeError(); kInternal for an error made elsewhere. `status` must not be OK.
ErrorReason GetErrorReason(const absl::Status& status);

// The metadata from MakeError(); empty for an error made elsewhere.
ErrorMetadata GetErrorMetadata(const absl::Status& status);

// True if `status` is an error with this reason.
bool HasReason(const absl::Status& status, ErrorReason reason);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_ERROR_H_
