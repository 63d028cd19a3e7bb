// Ids that no two clients make alike, wherever and however often they are started.
#ifndef HEADWATER_CLIENT_CORE_LINK_RANDOM_ID_H_
#define HEADWATER_CLIENT_CORE_LINK_RANDOM_ID_H_

#include <string>

namespace headwater::client::internal {

// 16 bytes from the kernel's own generator: no state of this process that a fork could repeat. Any thread.
std::string RandomId();
// The same as 32 hexadecimal digits.
std::string RandomHexId();

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_RANDOM_ID_H_
