#include "server/checkpoint/strict_json.h"

#include <limits>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::checkpoint {
namespace {

// The formats read here nest three deep.
constexpr int kMaxDepth = 8;

}  // namespace

absl::Status CorruptError(const std::string& message) { return MakeError(ErrorReason::kFileCorrupt, message); }

absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text, const std::string& what) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  bool too_deep = false;
  bool repeated = false;
  const auto watch = [&](int depth, Event event, nlohmann::json& parsed) {
    if (depth > kMaxDepth) too_deep = true;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get_ref<const std::string&>()).second) repeated = true;
    return !too_deep;  // what lies deeper is not kept
  };
  nlohmann::json value = nlohmann::json::parse(text, watch, /*allow_exceptions=*/false);
  if (too_deep) return CorruptError(absl::StrCat(what, " nests deeper than ", kMaxDepth));
  if (repeated) return CorruptError(absl::StrCat(what, " has a repeated key"));
  if (!value.is_object()) return CorruptError(absl::StrCat(what, " is not a JSON object"));
  return value;
}

absl::StatusOr<nlohmann::json> ReadStrictJson(const ReadableFile& file, int64_t max_bytes, const std::string& what) {
  if (file.size() > max_bytes) return CorruptError(absl::StrCat(what, " has ", file.size(), " bytes, the maximum is ", max_bytes));
  std::string text(static_cast<size_t>(file.size()), '\0');
  if (absl::Status status = file.ReadAt(0, file.size(), text.data()); !status.ok()) return status;
  return ParseStrictJson(text, what);
}

const nlohmann::json* FindMember(const nlohmann::json& object, const char* key, nlohmann::json::value_t kind) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found != object.end() && found->type() == kind ? &*found : nullptr;
}

bool GetCount(const nlohmann::json& value, int64_t* out) {
  if (!value.is_number_unsigned()) return false;
  const uint64_t count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
  *out = static_cast<int64_t>(count);
  return true;
}

}  // namespace headwater::checkpoint
