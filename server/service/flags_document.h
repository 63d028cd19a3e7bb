// The table of flags in docs/operations.md, from the flags themselves.
#ifndef HEADWATER_SERVER_SERVICE_FLAGS_DOCUMENT_H_
#define HEADWATER_SERVER_SERVICE_FLAGS_DOCUMENT_H_

#include <string>

namespace headwater::service {

// A Markdown table of the flags that the source file `file_name` (as __FILE__ gives it) defines, by name.
std::string FlagsDocument(const char* file_name);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_FLAGS_DOCUMENT_H_
