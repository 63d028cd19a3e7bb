#include "server/observability/line_writer.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace headwater::observability {
namespace {

constexpr int kPatienceMs = 100;

// Whether a write of PIPE_BUF bytes does not block.
bool AwaitRoom(int fd, int timeout_ms) {
  pollfd polled = {fd, POLLOUT, 0};
  int ready = 0;
  do {
    ready = poll(&polled, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;  // also for what fails at once, as without a reader
}

}  // namespace

bool LineWriter::WriteAll(std::string_view text, size_t* written) {
  while (*written < text.size()) {
    has_room_ = AwaitRoom(fd_, has_room_ ? kPatienceMs : 0);
    if (!has_room_) return false;
    // A pipe that is ready takes so much at once.
    const ssize_t count = write(fd_, text.data() + *written, std::min<size_t>(text.size() - *written, PIPE_BUF));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    *written += static_cast<size_t>(count);
  }
  return true;
}

bool LineWriter::Write(std::string_view lines) {
  size_t written = 0;
  if (is_midway_ && !WriteAll("\n", &written)) return false;
  is_midway_ = false;
  written = 0;
  const bool is_done = WriteAll(lines, &written);
  is_midway_ = !is_done && written > 0;
  return is_done;
}

}  // namespace headwater::observability
