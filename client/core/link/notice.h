// What a client says aloud.
#ifndef HEADWATER_CLIENT_CORE_LINK_NOTICE_H_
#define HEADWATER_CLIENT_CORE_LINK_NOTICE_H_

#include <string>

#include "headwater/client/options.h"

namespace headwater::client::internal {

// Hands a sentence about what works but is slow to ClientOptions::on_notice, or prints it to the standard error output.
void GiveNotice(const ClientOptions& options, const std::string& sentence);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_NOTICE_H_
