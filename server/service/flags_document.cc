#include "server/service/flags_document.h"

#include <map>
#include <string>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace headwater::service {

std::string FlagsDocument(const char* file_name) {
  std::string text = "| Flag | Default | Meaning |\n|---|---|---|\n";
  std::map<std::string, const absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) flags[std::string(name)] = flag;
  for (const auto& [name, flag] : flags) {
    // Flags know the file that defined them; those of libraries are not ours to document.
    if (!absl::EndsWith(file_name, flag->Filename()) && !absl::EndsWith(flag->Filename(), file_name)) continue;
    const std::string default_value = flag->DefaultValue();
    text += "| `--" + name + "` | " + (default_value.empty() ? "empty" : "`" + default_value + "`") + " | " + flag->Help() + " |\n";
  }
  return text;
}

}  // namespace headwater::service
