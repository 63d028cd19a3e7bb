// JSON from outside. Our own files are read strictly: bounded depth and number of values, no repeated keys, errors as kFileCorrupt.
// Other programs' files are read as those programs read them. Throws no exceptions.
#ifndef HEADWATER_SERVER_MODEL_FILES_STRICT_JSON_H_
#define HEADWATER_SERVER_MODEL_FILES_STRICT_JSON_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "server/model_files/file_source.h"

namespace headwater::model_files {

// Parses one JSON object. `what` names the text in messages.
absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text, const std::string& what);

// Parses all of `file`, of at most `max_bytes`, as ParseStrictJson() does.
absl::StatusOr<nlohmann::json> ReadStrictJson(const ReadableFile& file, int64_t max_bytes, const std::string& what);

// The largest file that ReadLenientJson() reads.
inline constexpr int64_t kMaxLenientJsonBytes = int64_t{64} << 20;

// Parses all of `file`, one JSON object in the dialect of Python's json module. The last value of a repeated key counts; NaN and
// Infinity become null. `what` names the file in messages. kLimitExceeded for a file of more than kMaxLenientJsonBytes, else
// kFileCorrupt.
absl::StatusOr<nlohmann::json> ReadLenientJson(const ReadableFile& file, const std::string& what);

// kFileCorrupt with this message.
absl::Status CorruptError(const std::string& message);

// kLimitExceeded: `what` has `actual` units, more than the `maximum` of the limit of this name. `limit` ends in the unit.
absl::Status LimitError(const std::string& limit, const std::string& what, int64_t actual, int64_t maximum);

// The member `key` of `object` if it is present and of the wanted kind, else null.
const nlohmann::json* FindMember(const nlohmann::json& object, const char* key, nlohmann::json::value_t kind);

// An integer in [0, 2^63); false for other values.
bool GetCount(const nlohmann::json& value, int64_t* out);

}  // namespace headwater::model_files

#endif  // HEADWATER_SERVER_MODEL_FILES_STRICT_JSON_H_
