// Certificates and keys for tests, made when they run: an authority, a server's, clients'.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_TEST_CERTIFICATES_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_TEST_CERTIFICATES_H_

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

namespace headwater::testing {

inline void RequireThat(bool works, const char* what) {
  if (!works) throw std::runtime_error(what);
}

struct Credentials {
  std::string certificate;  // PEM
  std::string key;          // PEM
};

// Signs certificates. Throws what goes wrong.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name) : certificate_(Make(name, key_.get(), /*issuer=*/nullptr, -7200, 86400)) {}

  std::string certificate() const { return Pem(certificate_.get()); }
  // For localhost, 127.0.0.1 and ::1. With `expired` it has ended an hour ago.
  Credentials Issue(const std::string& name, bool expired = false) const {
    const Key key = MakeKey();
    return {Pem(Make(name, key.get(), certificate_.get(), -7200, expired ? -3600 : 86400).get()), Pem(key.get())};
  }

 private:
  struct Free {
    void operator()(X509* certificate) const { X509_free(certificate); }
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(BIO* memory) const { BIO_free(memory); }
  };
  using Certificate = std::unique_ptr<X509, Free>;
  using Key = std::unique_ptr<EVP_PKEY, Free>;

  static Key MakeKey() {
    Key key(EVP_EC_gen("P-256"));
    RequireThat(key != nullptr, "EVP_EC_gen");
    return key;
  }
  static std::string Text(bool written, BIO* memory) {
    RequireThat(written, "PEM_write_bio");
    char* data = nullptr;
    const long size = BIO_get_mem_data(memory, &data);
    return std::string(data, static_cast<size_t>(size));
  }
  static std::string Pem(X509* certificate) {
    const std::unique_ptr<BIO, Free> memory(BIO_new(BIO_s_mem()));
    return Text(PEM_write_bio_X509(memory.get(), certificate) == 1, memory.get());
  }
  static std::string Pem(EVP_PKEY* key) {
    const std::unique_ptr<BIO, Free> memory(BIO_new(BIO_s_mem()));
    return Text(PEM_write_bio_PrivateKey(memory.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1, memory.get());
  }
  static void AddExtension(X509* certificate, X509* issuer, int nid, const char* value) {
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
    RequireThat(extension != nullptr, "X509V3_EXT_conf_nid");
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }
  // From `begin` to `end`, in seconds from now, signed by this authority. `issuer` null: the authority's own.
  Certificate Make(const std::string& name, EVP_PKEY* key, X509* issuer, long begin, long end) const {
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
    RequireThat(X509_sign(certificate.get(), key_.get(), EVP_sha256()) > 0, "X509_sign");
    return certificate;
  }

  const Key key_ = MakeKey();
  const Certificate certificate_;
};

// Replaces the file at once.
inline void ReplaceFile(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".new";
  {
    std::ofstream file(temporary);
    file << text;
    RequireThat(static_cast<bool>(file.flush()), "cannot write a file");
  }
  RequireThat(std::rename(temporary.c_str(), path.c_str()) == 0, "cannot rename a file");
}

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_TEST_CERTIFICATES_H_
