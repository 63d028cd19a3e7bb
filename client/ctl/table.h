// Aligned text for people.
#ifndef HEADWATER_CLIENT_CTL_TABLE_H_
#define HEADWATER_CLIENT_CTL_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace headwater::ctl {

// "512 B", "1.5 KiB", "3.9 GiB".
std::string FormatBytes(int64_t bytes);
// "1234567" -> "1,234,567".
std::string FormatCount(int64_t count);
// Bytes as hexadecimal digits.
std::string FormatHex(const std::string& bytes);

// Columns of text, as wide as their widest cell, two spaces apart.
class Table {
 public:
  enum class Align { kLeft, kRight };

  // One column for each entry. An empty title in every column: no title line.
  explicit Table(std::vector<std::string> titles, std::vector<Align> alignment);

  // REQUIRES: one cell for each column.
  void AddRow(std::vector<std::string> cells);
  // Lines that end with a newline, without trailing spaces.
  std::string ToString() const;

 private:
  const std::vector<Align> alignment_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_TABLE_H_
