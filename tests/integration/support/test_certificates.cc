#include "tests/integration/support/test_certificates.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <fstream>
#include <random>
#include <stdexcept>

namespace headwater::testing {
namespace {

struct Free {
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(BIO* memory) const { BIO_free(memory); }
};
using Certificate = std::unique_ptr<X509, Free>;
using Key = std::unique_ptr<EVP_PKEY, Free>;

void Require(bool works, const char* what) {
  if (!works) throw std::runtime_error(what);
}

std::string Text(BIO* memory) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(memory, &data);
  return std::string(data, static_cast<size_t>(size));
}

std::string Pem(X509* certificate) {
  const std::unique_ptr<BIO, Free> memory(BIO_new(BIO_s_mem()));
  Require(PEM_write_bio_X509(memory.get(), certificate) == 1, "PEM_write_bio_X509");
  return Text(memory.get());
}

std::string Pem(EVP_PKEY* key) {
  const std::unique_ptr<BIO, Free> memory(BIO_new(BIO_s_mem()));
  Require(PEM_write_bio_PrivateKey(memory.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1, "PEM_write_bio_PrivateKey");
  return Text(memory.get());
}

void AddExtension(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
  Require(extension != nullptr, "X509V3_EXT_conf_nid");
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// From `begin` to `end`, in seconds from now. `issuer` null: signs itself.
Certificate Make(const std::string& name, EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key, long begin, long end) {
  Certificate certificate(X509_new());
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate.get()), std::random_device()());
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), begin);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), end);
  X509_set_pubkey(certificate.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509* const signer = issuer == nullptr ? certificate.get() : issuer;
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(signer));
  if (issuer == nullptr) {
    AddExtension(certificate.get(), signer, NID_basic_constraints, "critical,CA:TRUE");
    AddExtension(certificate.get(), signer, NID_key_usage, "critical,keyCertSign,cRLSign");
  } else {
    AddExtension(certificate.get(), signer, NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1,IP:::1");
  }
  Require(X509_sign(certificate.get(), issuer_key, EVP_sha256()) > 0, "X509_sign");
  return certificate;
}

Key MakeKey() {
  Key key(EVP_EC_gen("P-256"));
  Require(key != nullptr, "EVP_EC_gen");
  return key;
}

}  // namespace

struct TestAuthority::State {
  Key key;
  Certificate certificate;
};

TestAuthority::TestAuthority(const std::string& name) : state_(std::make_unique<State>()) {
  state_->key = MakeKey();
  state_->certificate = Make(name, state_->key.get(), nullptr, state_->key.get(), -7200, 86400);
  certificate_ = Pem(state_->certificate.get());
}

TestAuthority::~TestAuthority() = default;

Credentials TestAuthority::Issue(const std::string& name, bool expired) const {
  const Key key = MakeKey();
  const Certificate certificate =
      Make(name, key.get(), state_->certificate.get(), state_->key.get(), -7200, expired ? -3600 : 86400);
  return {Pem(certificate.get()), Pem(key.get())};
}

void ReplaceFile(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".new";
  {
    std::ofstream file(temporary);
    file << text;
    Require(static_cast<bool>(file.flush()), "cannot write a file");
  }
  Require(std::rename(temporary.c_str(), path.c_str()) == 0, "cannot rename a file");
}

}  // namespace headwater::testing
