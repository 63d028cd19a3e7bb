// How two ranks that have a TCP connection show each other that they know their group's secret.
//
//   called -> caller   Challenge   a random number
//   caller -> called   Claim       who it is, a random number of its own, and the proof that it knows the secret
//   called -> caller   Verdict     whether it is taken, and the proof that the other one knows the secret too
//
// A proof is the HMAC-SHA256, keyed by the secret, of both sides' roles and of both numbers. It reveals nothing about the secret,
// and is valid for no other connection.
#ifndef HEADWATER_KERNELS_COMM_TCP_HANDSHAKE_H_
#define HEADWATER_KERNELS_COMM_TCP_HANDSHAKE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace headwater::comm {

inline constexpr size_t kSecretBytes = 32;

using Nonce = std::array<uint8_t, 32>;
using Proof = std::array<uint8_t, 32>;

struct Challenge {
  std::array<char, 8> magic{};
  Nonce nonce{};
};

struct Claim {
  int32_t rank = 0;  // of the caller
  Nonce nonce{};
  Proof proof{};
};

struct Verdict {
  int32_t is_taken = 0;
  Proof proof{};  // only if it is
};

// All of one connection; `called`: the rank that was called. kEngineFailed if the system gives no random bytes.
absl::StatusOr<Challenge> MakeChallenge();
// kEngineFailed also if that is no rank's challenge.
absl::StatusOr<Claim> MakeClaim(const std::string& secret, int32_t caller, int32_t called, const Challenge& challenge);
bool IsTrue(const std::string& secret, int32_t called, const Challenge& challenge, const Claim& claim);
// The verdict on a valid claim.
Verdict MakeVerdict(const std::string& secret, int32_t called, const Challenge& challenge, const Claim& claim);
bool IsTrue(const std::string& secret, int32_t called, const Challenge& challenge, const Claim& claim, const Verdict& verdict);

}  // namespace headwater::comm

#endif  // HEADWATER_KERNELS_COMM_TCP_HANDSHAKE_H_
