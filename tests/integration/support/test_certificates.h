// Certificates and keys for tests, made when they run: an authority, a server's, clients'.
#ifndef HEADWATER_TESTS_INTEGRATION_SUPPORT_TEST_CERTIFICATES_H_
#define HEADWATER_TESTS_INTEGRATION_SUPPORT_TEST_CERTIFICATES_H_

#include <memory>
#include <string>

namespace headwater::testing {

struct Credentials {
  std::string certificate;  // PEM
  std::string key;          // PEM
};

// Signs certificates. Throws what goes wrong.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name);
  ~TestAuthority();

  const std::string& certificate() const { return certificate_; }  // PEM
  // For localhost, 127.0.0.1 and ::1. With `expired` it has ended an hour ago.
  Credentials Issue(const std::string& name, bool expired = false) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::string certificate_;
};

// Replaces the file at once.
void ReplaceFile(const std::string& path, const std::string& text);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_INTEGRATION_SUPPORT_TEST_CERTIFICATES_H_
