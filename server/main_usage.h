// headwaterd's command line: help, version, and the flags.
#ifndef HEADWATER_SERVER_MAIN_USAGE_H_
#define HEADWATER_SERVER_MAIN_USAGE_H_

#include <vector>

namespace headwater {

// Sets the flags and returns the other arguments, the program's name first. `file_name`: as __FILE__ gives it, of the source file
// that defines the flags. Ends the process with status 0 for --help, which prints the flags by section, and for --version; with
// status 1, and a word on --help, for a flag that is unknown or has no such value.
std::vector<char*> ParseFlags(int argc, char** argv, const char* file_name);

}  // namespace headwater

#endif  // HEADWATER_SERVER_MAIN_USAGE_H_
