// LineWriter: writes lines to a descriptor without blocking on a reader that is gone, full or stalled.
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

  // Writes whole lines with their line ends. False if they are lost: a pipe's reader is gone, a disk is full, or there is no room.
  // Waits at most 100 ms for room, and not at all after lines were lost for lack of room, until there is some.
  bool Write(std::string_view lines);

 private:
  // Writes all of `text`; false if that fails. *written: the bytes written.
  bool WriteAll(std::string_view text, size_t* written);

  const int fd_;
  bool has_room_ = true;    // when last tried
  bool is_midway_ = false;  // the last line written is cut off
};

}  // namespace headwater::observability

#endif  // HEADWATER_SERVER_OBSERVABILITY_LINE_WRITER_H_
