#include "client/core/link/notice.h"

#include <cstdio>

namespace headwater::client::internal {

void GiveNotice(const ClientOptions& options, const std::string& sentence) {
  if (options.on_notice) {
    options.on_notice(sentence);
  } else {
    std::fprintf(stderr, "headwater: %s\n", sentence.c_str());
  }
}

}  // namespace headwater::client::internal
