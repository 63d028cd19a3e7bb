// W3C Trace Context (https://www.w3.org/TR/trace-context/): the metadata `traceparent`, by which a call belongs to a trace.
#ifndef HEADWATER_SERVER_OBSERVABILITY_TRACE_CONTEXT_H_
#define HEADWATER_SERVER_OBSERVABILITY_TRACE_CONTEXT_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace headwater::observability {

// Metadata key.
inline constexpr char kTraceparentKey[] = "traceparent";

// The caller's span.
struct TraceContext {
  std::string trace_id;   // 32 lower-case hexadecimal digits, not all 0
  std::string parent_id;  // 16 of them, not all 0
  bool sampled = false;   // the caller records this trace
};

// Empty for values that the standard says to ignore: another form, ids of zeros, version ff. Unknown versions are parsed as version
// 00.
std::optional<TraceContext> ParseTraceparent(absl::string_view text);

// Random: 16 digits, not all 0.
std::string NewSpanId();

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_TRACE_CONTEXT_H_
