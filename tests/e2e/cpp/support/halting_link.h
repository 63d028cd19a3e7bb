// HaltingLink: a port of loopback whose connections lead to a Unix socket, until the link halts: then they stay open, and nothing
// comes through any more, as when a cable is pulled.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_HALTING_LINK_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_HALTING_LINK_H_

#include <atomic>
#include <list>
#include <string>
#include <thread>
#include <vector>

namespace headwater::e2e {

class HaltingLink {
 public:
  // Ends the test program if it cannot listen.
  explicit HaltingLink(std::string socket_path);
  ~HaltingLink();
  HaltingLink(const HaltingLink&) = delete;
  HaltingLink& operator=(const HaltingLink&) = delete;

  // host:port.
  std::string address() const { return address_; }
  // For good. Any thread.
  void Halt() { is_halted_.store(true); }

 private:
  // Both ends of a connection, and what has been read of each and not been written to the other.
  struct Connection {
    int ends[2] = {-1, -1};
    std::string waiting[2];
    bool is_over = false;
  };

  void Run();
  void Accept();
  // Moves what is there from one end to the other.
  void Move(Connection* connection, int from);

  const std::string socket_path_;
  int listener_ = -1;
  std::string address_;
  std::atomic<bool> is_halted_{false};
  std::atomic<bool> is_stopping_{false};
  std::list<Connection> connections_;  // of the thread
  std::thread thread_;                 // last: it uses the members above
};

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_HALTING_LINK_H_
