#include "client/core/link/random_id.h"

#include <unistd.h>

#include <random>

#include "absl/strings/escaping.h"

namespace headwater::client::internal {
namespace {

constexpr size_t kIdBytes = 16;

}  // namespace

std::string RandomId() {
  std::string id(kIdBytes, '\0');
  if (getentropy(id.data(), id.size()) != 0) {  // forbidden by a sandbox, or unknown to a Linux before 3.17
    std::random_device device;
    for (char& byte : id) byte = static_cast<char>(device());
  }
  return id;
}

std::string RandomHexId() { return absl::BytesToHexString(RandomId()); }

}  // namespace headwater::client::internal
