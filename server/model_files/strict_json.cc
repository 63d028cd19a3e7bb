#include "server/model_files/strict_json.h"

#include <limits>
#include <unordered_set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::model_files {
namespace {

// The formats read here nest three deep, and have about a dozen values for each tensor.
constexpr size_t kMaxDepth = 8;
constexpr int64_t kMaxValues = 1 << 22;

// Checks a text without keeping it: depth, number of values, repeated keys. (The parser's own callbacks take quadratic time in the
// members of an object.)
class Checker : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::string& problem() const { return problem_; }

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool string(string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Value(); }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return Nested();
  }
  bool key(string_t& name) override { return keys_.back().insert(name).second || Refuse("has a repeated key"); }
  bool end_object() override {
    keys_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override {
    keys_.emplace_back();
    return Nested();
  }
  bool end_array() override { return end_object(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return Refuse("is not JSON"); }

 private:
  bool Refuse(const char* problem) {
    problem_ = problem;
    return false;
  }
  bool Value() { return ++value_count_ <= kMaxValues || Refuse("has too many values"); }
  bool Nested() { return Value() && (keys_.size() <= kMaxDepth || Refuse("nests too deep")); }

  std::string problem_;
  int64_t value_count_ = 0;
  std::vector<std::unordered_set<std::string>> keys_;  // of the objects (and, empty, arrays) that are open
};

// Python writes numbers that JSON does not have: NaN, Infinity, -Infinity. Each becomes null.
std::string WithoutNonFinite(const std::string& text) {
  std::string result;
  result.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    size_t length = 0;
    if (!in_string) {
      for (const absl::string_view word : {"NaN", "-Infinity", "Infinity"}) {
        if (text.compare(i, word.size(), word.data(), word.size()) == 0) length = word.size();
      }
    }
    if (length > 0) {
      result += "null";
      i += length - 1;
      continue;
    }
    result += text[i];
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      result += text[++i];
    } else if (text[i] == '"') {
      in_string = !in_string;
    }
  }
  return result;
}

absl::StatusOr<std::string> ReadText(const ReadableFile& file) {
  std::string text(static_cast<size_t>(file.size()), '\0');
  HEADWATER_RETURN_IF_ERROR(file.ReadAt(0, file.size(), text.data()));
  return text;
}

absl::StatusOr<nlohmann::json> ParseObject(const std::string& text, const std::string& what) {
  // The parser would take a NUL for the end of the text, and ignore the rest.
  if (text.find('\0') != std::string::npos) return CorruptError(absl::StrCat(what, " is not JSON"));
  nlohmann::json value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) return CorruptError(absl::StrCat(what, " is not a JSON object"));
  return value;
}

}  // namespace

absl::Status CorruptError(const std::string& message) { return MakeError(ErrorReason::kFileCorrupt, message); }

absl::Status LimitError(const std::string& limit, const std::string& what, int64_t actual, int64_t maximum) {
  const std::string unit = limit.substr(limit.rfind('_') + 1);
  return MakeError(ErrorReason::kLimitExceeded, absl::StrCat(what, " has ", actual, " ", unit, ", at most ", maximum, " are read"),
                   {{"limit", limit}, {"maximum", absl::StrCat(maximum)}, {"actual", absl::StrCat(actual)}});
}

absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text, const std::string& what) {
  Checker checker;
  if (!nlohmann::json::sax_parse(text, &checker)) return CorruptError(absl::StrCat(what, " ", checker.problem()));
  return ParseObject(text, what);
}

absl::StatusOr<nlohmann::json> ReadStrictJson(const ReadableFile& file, int64_t max_bytes, const std::string& what) {
  if (file.size() > max_bytes) return CorruptError(absl::StrCat(what, " has ", file.size(), " bytes, the maximum is ", max_bytes));
  HEADWATER_ASSIGN_OR_RETURN(const std::string text, ReadText(file));
  return ParseStrictJson(text, what);
}

absl::StatusOr<nlohmann::json> ReadLenientJson(const ReadableFile& file, const std::string& what) {
  if (file.size() > kMaxLenientJsonBytes) return LimitError("json_bytes", what, file.size(), kMaxLenientJsonBytes);
  HEADWATER_ASSIGN_OR_RETURN(const std::string text, ReadText(file));
  return ParseObject(WithoutNonFinite(text), what);
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

}  // namespace headwater::model_files
