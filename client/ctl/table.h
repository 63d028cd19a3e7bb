// Aligned text for people.
#ifndef HEADWATER_CLIENT_CTL_TABLE_H_
#define HEADWATER_CLIENT_CTL_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/core/link/name_of.h"

namespace headwater::ctl {

// "512 B", "1.5 KiB", "3.9 GiB".
std::string FormatBytes(int64_t bytes);
// "1234567" -> "1,234,567".
std::string FormatCount(int64_t count);
// Bytes as hexadecimal digits.
std::string FormatHex(const std::string& bytes);
// Text from elsewhere as it may be shown on a terminal: control characters, those of ASCII and U+0080 to U+009F, become "\\x1b".
// `lines`: newlines stay.
std::string Printable(const std::string& text, bool lines = false);

using client::internal::NameOf;

// Columns of text, as wide as their widest cell, two spaces apart.
class Table {
 public:
  // One column for each title; a `>` before it, which is not shown, aligns the column to the right. No title line if all are empty.
  explicit Table(std::vector<std::string> titles);

  // REQUIRES: one cell for each column. Control characters of cells are shown as Printable() does.
  void AddRow(std::vector<std::string> cells);
  // Lines that end with a newline, without trailing spaces.
  std::string ToString() const;

 private:
  std::vector<bool> is_right_;  // of each column
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_TABLE_H_
