// Notices of a client to its user.
#ifndef HEADWATER_CLIENT_CORE_LINK_NOTICE_H_
#define HEADWATER_CLIENT_CORE_LINK_NOTICE_H_

#include <cstdio>
#include <string>

#include "headwater/client/options.h"

namespace headwater::client::internal {

// Hands a notice to ClientOptions::on_notice, or prints it to the standard error output.
inline void GiveNotice(const ClientOptions& options, const std::string& sentence) {
  if (options.on_notice) return options.on_notice(sentence);
  std::fprintf(stderr, "headwater: %s\n", sentence.c_str());
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_LINK_NOTICE_H_
