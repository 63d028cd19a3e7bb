#include "client/ctl/table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

namespace headwater::ctl {

std::string FormatBytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrFormat("%d B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatCount(int64_t count) {
  const std::string digits = absl::StrFormat("%d", count);
  const size_t sign = digits[0] == '-' ? 1 : 0;
  std::string text;
  for (size_t place = 0; place < digits.size(); ++place) {
    if (place > sign && (digits.size() - place) % 3 == 0) text += ',';
    text += digits[place];
  }
  return text;
}

std::string FormatHex(const std::string& bytes) { return absl::BytesToHexString(bytes); }

std::string Printable(const std::string& text, bool lines) {
  std::string shown;
  shown.reserve(text.size());
  for (size_t at = 0; at < text.size(); ++at) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const auto next = at + 1 < text.size() ? static_cast<unsigned char>(text[at + 1]) : 0;
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // two bytes of UTF-8
      absl::StrAppendFormat(&shown, "\\x%02x", next);
      ++at;
    } else if ((byte < 0x20 && !(lines && byte == '\n')) || byte == 0x7f) {
      absl::StrAppendFormat(&shown, "\\x%02x", byte);
    } else {
      shown += text[at];
    }
  }
  return shown;
}

Table::Table(std::vector<std::string> titles) {
  for (std::string& title : titles) {
    is_right_.push_back(title.starts_with('>'));
    if (is_right_.back()) title.erase(0, 1);
  }
  if (std::any_of(titles.begin(), titles.end(), [](const std::string& title) { return !title.empty(); })) {
    rows_.push_back(std::move(titles));
  }
}

void Table::AddRow(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<size_t> widths(is_right_.size());
  for (const std::vector<std::string>& row : rows_) {
    for (size_t column = 0; column < widths.size(); ++column) widths[column] = std::max(widths[column], row[column].size());
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t column = 0; column < widths.size(); ++column) {
      const std::string padding(widths[column] - row[column].size(), ' ');
      if (column > 0) line += "  ";
      line += is_right_[column] ? padding + row[column] : row[column] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace headwater::ctl
