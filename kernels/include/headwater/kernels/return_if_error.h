// HEADWATER_RETURN_IF_ERROR(expression): returns from the function if `expression`, a status, is an error.
// HEADWATER_ASSIGN_OR_RETURN(declaration, expression): returns from the function if `expression`, a StatusOr, is an error.
// Otherwise the declared variable gets its value.
#ifndef HEADWATER_KERNELS_RETURN_IF_ERROR_H_
#define HEADWATER_KERNELS_RETURN_IF_ERROR_H_

#include <utility>

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

#define HEADWATER_ASSIGN_OR_RETURN_AS(result, declaration, ...) \
  auto result = (__VA_ARGS__);                                  \
  if (!result.ok()) return result.status();                     \
  declaration = *std::move(result)
#define HEADWATER_ASSIGN_OR_RETURN(declaration, ...) \
  HEADWATER_ASSIGN_OR_RETURN_AS(HEADWATER_STATUS_NAME(__COUNTER__), declaration, __VA_ARGS__)

#endif  // HEADWATER_KERNELS_RETURN_IF_ERROR_H_
