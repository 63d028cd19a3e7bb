// Where results and errors go: text for people, or one JSON document with --json.
#ifndef HEADWATER_CLIENT_CTL_OUTPUT_H_
#define HEADWATER_CLIENT_CTL_OUTPUT_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "headwater/client/types.h"

// Absent values are null in JSON.
template <typename Value>
struct nlohmann::adl_serializer<std::optional<Value>> {
  static void to_json(json& document, const std::optional<Value>& value) { document = value.has_value() ? json(*value) : json(); }
};

namespace headwater::client {

// As JSON, by the fields' names.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceInfo, name, model, memory_budget_bytes, memory_planned_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(VocabShard, vocab_start, vocab_end, device)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemoryPlan::Item, purpose, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemoryPlan, items, total_bytes, available_bytes, token_chunk_rows)
// Bytes become hexadecimal.
void to_json(nlohmann::json& document, const HeadSpec& spec);
void to_json(nlohmann::json& document, const HeadInfo& head);

}  // namespace headwater::client

namespace headwater::ctl {

// Prints to stdout at once, as it is. Failures are reported by OutputError(), not here.
void PrintRaw(absl::string_view text);
// The errno of the first output that was lost, because the disk is full or the reader has gone; 0 if nothing was lost.
int OutputError();

// Prints to stdout; errors also to stderr.
class Output {
 public:
  explicit Output(bool json) : json_(json) {}

  bool json() const { return json_; }
  // The result of a command: the lines of `text`, control characters shown as Printable() does, or `document`.
  void Print(const std::string& text, const nlohmann::json& document) const;
  // A line about work under way, on stderr; nothing with --json.
  void Progress(const std::string& line) const;
  // Code, reason, message and a hint what to do, on stderr; with --json also {"error": {...}} on stdout.
  void PrintError(const absl::Status& status) const;

 private:
  const bool json_;
};

// An error with a remedy that is more precise than its code and reason suggest.
absl::Status WithHint(absl::Status status, const std::string& hint);

// An error as JSON: code, reason, message, metadata and a hint what to do, which is empty if there is none.
nlohmann::json ToJson(const absl::Status& error);
// "adamw", "sgd", "none".
const char* OptimizerName(const client::Optimizer& optimizer);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_OUTPUT_H_
