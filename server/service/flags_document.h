// The flags of a program by section: its --help, and the tables in docs/flags.md.
#ifndef HEADWATER_SERVER_SERVICE_FLAGS_DOCUMENT_H_
#define HEADWATER_SERVER_SERVICE_FLAGS_DOCUMENT_H_

#include <string>

namespace headwater::service {

// Begins a section: the flags that the same source file defines after it and before the next one. A static object among the flags,
// whose constructor looks which of them are there already.
class FlagSection {
 public:
  explicit FlagSection(const char* title);
};

// Both take the flags that the source file `file_name` (as __FILE__ gives it) defines; by name within a section.
//
// What --help prints after the program's usage: each flag with its default and its meaning.
std::string FlagsHelp(const char* file_name);
// A Markdown table for each section.
std::string FlagsDocument(const char* file_name);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_FLAGS_DOCUMENT_H_
