// LineWriter: writes lines to a descriptor whose reader may be gone, full, or standing still, and waits for none of these.
#ifndef HEADWATER_SERVER_OBSERVABILITY_LINE_WRITER_H_
#define HEADWATER_SERVER_OBSERVABILITY_LINE_WRITER_H_

#include <cstddef>
#include <string_view>

namespace headwater::observability {

// One thread at a time. The process must ignore SIGPIPE and SIGXFSZ.
class LineWriter {
 public:
  // `fd` stays the caller's.
  explicit LineWriter(int fd) : fd_(fd) {}

  // Writes whole lines, whose ends are among `lines`. False if they are lost: a pipe's reader is gone, a disk is full, or there is
  // no room. Room is waited for 100 ms at most, and not at all after lines were lost for lack of it, until there is some.
  bool Write(std::string_view lines);

 private:
  // All of `text`; false if not. *written: the bytes that are.
  bool WriteAll(std::string_view text, size_t* written);

  const int fd_;
  bool has_room_ = true;    // when last tried
  bool is_midway_ = false;  // the last line written is cut off
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_LINE_WRITER_H_
