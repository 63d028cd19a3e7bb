// CallLabel: method, request id and head of the call that a thread runs, for code that knows no RPC. Never contents.
#ifndef HEADWATER_SERVER_SERVICE_CALL_CALL_LABEL_H_
#define HEADWATER_SERVER_SERVICE_CALL_CALL_LABEL_H_

#include <string>
#include <utility>

namespace headwater::service {

// Lives on the stack of the thread that runs the call.
class CallLabel {
 public:
  CallLabel(const char* method, std::string request_id) : method_(method), request_id_(std::move(request_id)), outer_(current_) {
    current_ = this;
  }
  ~CallLabel() { current_ = outer_; }
  CallLabel(const CallLabel&) = delete;
  CallLabel& operator=(const CallLabel&) = delete;

  // Names the head of this thread's call, if it runs one.
  static void NameHead(const std::string& head) {
    if (current_ != nullptr) current_->head_ = head;
  }
  // The label of this thread's call; empty without a call, or before it has named a head.
  static std::string Method() { return current_ == nullptr ? "" : current_->method_; }
  static std::string RequestId() { return current_ == nullptr ? "" : current_->request_id_; }
  static std::string Head() { return current_ == nullptr ? "" : current_->head_; }

 private:
  static inline thread_local CallLabel* current_ = nullptr;
  const char* const method_;
  const std::string request_id_;
  CallLabel* const outer_;
  std::string head_;
};

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_CALL_CALL_LABEL_H_
