// JSON from outside: bounded depth and number of values, no repeated keys, errors as kFileCorrupt. Nothing here throws.
#ifndef HEADWATER_SERVER_CHECKPOINT_STRICT_JSON_H_
#define HEADWATER_SERVER_CHECKPOINT_STRICT_JSON_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/file_system.h"

namespace headwater::checkpoint {

// Parses one JSON object. `what` names the text in messages.
absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text, const std::string& what);

// The same with all of `file`, which may have at most `max_bytes`.
absl::StatusOr<nlohmann::json> ReadStrictJson(const ReadableFile& file, int64_t max_bytes, const std::string& what);

// kFileCorrupt with this message.
absl::Status CorruptError(const std::string& message);

// The member `key` of `object` if it is there and of the wanted kind, else null.
const nlohmann::json* FindMember(const nlohmann::json& object, const char* key, nlohmann::json::value_t kind);

// An integer member in [0, 2^63); false if there is none.
bool GetCount(const nlohmann::json& value, int64_t* out);

}  // namespace headwater::checkpoint

#endif  // HEADWATER_SERVER_CHECKPOINT_STRICT_JSON_H_
