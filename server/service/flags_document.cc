#include "server/service/flags_document.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace headwater::service {
namespace {

constexpr size_t kHelpColumns = 100;

struct Section {
  const char* title;
  std::set<std::string> before;  // flags that were there when it began
};

std::vector<Section>& Sections() {
  static auto* const sections = new std::vector<Section>();
  return *sections;
}

using Flags = std::map<std::string, const absl::CommandLineFlag*>;

// The flags of each of Sections().
std::vector<Flags> FlagsBySection(const char* file_name) {
  std::vector<Flags> found(Sections().size());
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    // Flags know the file that defined them; those of libraries are not ours to document.
    if (!absl::EndsWith(file_name, flag->Filename()) && !absl::EndsWith(flag->Filename(), file_name)) continue;
    size_t count = 0;  // of sections that had begun
    while (count < Sections().size() && Sections()[count].before.count(std::string(name)) == 0) ++count;
    if (count > 0) found[count - 1][std::string(name)] = flag;
  }
  return found;
}

// The words in lines, each with the indent before it.
std::string Wrapped(const std::string& text, const std::string& indent) {
  std::string lines;
  size_t column = kHelpColumns;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column + 1 + word.size() > kHelpColumns) {
      absl::StrAppend(&lines, lines.empty() ? "" : "\n", indent, word);
      column = indent.size() + word.size();
    } else {
      absl::StrAppend(&lines, " ", word);
      column += 1 + word.size();
    }
  }
  return lines + "\n";
}

}  // namespace

FlagSection::FlagSection(const char* title) {
  Section section = {title, {}};
  for (const auto& [name, flag] : absl::GetAllFlags()) section.before.insert(std::string(name));
  Sections().push_back(std::move(section));
}

std::string FlagsHelp(const char* file_name) {
  std::string text;
  const std::vector<Flags> flags = FlagsBySection(file_name);
  for (size_t i = 0; i < flags.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : "\n", Sections()[i].title, "\n\n");
    for (const auto& [name, flag] : flags[i]) {
      absl::StrAppend(&text, "  --", name, "=", flag->DefaultValue(), "\n", Wrapped(flag->Help(), "      "));
    }
  }
  return text;
}

std::string FlagsDocument(const char* file_name) {
  std::string text;
  const std::vector<Flags> flags = FlagsBySection(file_name);
  for (size_t i = 0; i < flags.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : "\n", "**", Sections()[i].title, "**\n\n| Flag | Default | Meaning |\n|---|---|---|\n");
    for (const auto& [name, flag] : flags[i]) {
      const std::string default_value = flag->DefaultValue();
      const std::string shown = default_value.empty() ? "empty" : absl::StrCat("`", default_value, "`");
      absl::StrAppend(&text, "| `--", name, "` | ", shown, " | ", flag->Help(), " |\n");
    }
  }
  return text;
}

}  // namespace headwater::service
