// HEADWATER_RETURN_IF_ERROR(expression): returns from the function if `expression`, a status, is an error.
#ifndef HEADWATER_KERNELS_RETURN_IF_ERROR_H_
#define HEADWATER_KERNELS_RETURN_IF_ERROR_H_

#include "absl/status/status.h"

// The variable's name is new each time: `expression` may hold a lambda that does the same.
#define HEADWATER_STATUS_NAME(line) HEADWATER_STATUS_NAME_OF(line)
#define HEADWATER_STATUS_NAME_OF(line) status_of_step_##line
#define HEADWATER_RETURN_IF_ERROR_AS(status, expression) \
  do {                                                   \
    absl::Status status = (expression);                  \
    if (!status.ok()) return status;                     \
  } while (false)
#define HEADWATER_RETURN_IF_ERROR(expression) HEADWATER_RETURN_IF_ERROR_AS(HEADWATER_STATUS_NAME(__COUNTER__), expression)

#endif  // HEADWATER_KERNELS_RETURN_IF_ERROR_H_
