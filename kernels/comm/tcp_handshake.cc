#include "kernels/comm/tcp_handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <optional>

#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::comm {
namespace {

constexpr std::array<char, 8> kMagic = {'h', 'w', 'g', 'r', 'o', 'u', 'p', '2'};

// Keeps the proofs of both sides distinct.
enum class Side : int32_t { kCaller = 1, kCalled = 2 };

absl::StatusOr<Nonce> MakeNonce() {
  Nonce nonce;
  if (RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1) return nonce;
  return MakeError(ErrorReason::kEngineFailed, "the system gives no random bytes");
}

// Empty if the library fails.
std::optional<Proof> Prove(const std::string& secret, Side side, int32_t called, const Challenge& challenge, const Claim& claim) {
  std::string text(kMagic.begin(), kMagic.end());
  for (const int32_t number : {static_cast<int32_t>(side), claim.rank, called}) {
    text.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  for (const Nonce* nonce : {&challenge.nonce, &claim.nonce})
    text.append(reinterpret_cast<const char*>(nonce->data()), nonce->size());
  Proof proof{};
  const unsigned char* const made = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                                         reinterpret_cast<const unsigned char*>(text.data()), text.size(), proof.data(), nullptr);
  return made == nullptr ? std::nullopt : std::optional<Proof>(proof);
}

bool AreEqual(const Proof& proof, const std::optional<Proof>& expected) {
  return expected.has_value() && CRYPTO_memcmp(proof.data(), expected->data(), proof.size()) == 0;
}

}  // namespace

absl::StatusOr<Challenge> MakeChallenge() {
  HEADWATER_ASSIGN_OR_RETURN(const Nonce nonce, MakeNonce());
  return Challenge{kMagic, nonce};
}

absl::StatusOr<Claim> MakeClaim(const std::string& secret, int32_t caller, int32_t called, const Challenge& challenge) {
  if (challenge.magic != kMagic) return MakeError(ErrorReason::kEngineFailed, "what answers is no rank of a group");
  HEADWATER_ASSIGN_OR_RETURN(const Nonce nonce, MakeNonce());
  Claim claim{caller, nonce, {}};
  const std::optional<Proof> proof = Prove(secret, Side::kCaller, called, challenge, claim);
  if (!proof.has_value()) return MakeError(ErrorReason::kEngineFailed, "OpenSSL makes no HMAC-SHA256");
  claim.proof = *proof;
  return claim;
}

bool IsTrue(const std::string& secret, int32_t called, const Challenge& challenge, const Claim& claim) {
  return AreEqual(claim.proof, Prove(secret, Side::kCaller, called, challenge, claim));
}

Verdict MakeVerdict(const std::string& secret, int32_t called, const Challenge& challenge, const Claim& claim) {
  const std::optional<Proof> proof = Prove(secret, Side::kCalled, called, challenge, claim);
  return proof.has_value() ? Verdict{1, *proof} : Verdict();
}

bool IsTrue(const std::string& secret, int32_t called, const Challenge& challenge, const Claim& claim, const Verdict& verdict) {
  return verdict.is_taken == 1 && AreEqual(verdict.proof, Prove(secret, Side::kCalled, called, challenge, claim));
}

}  // namespace headwater::comm
