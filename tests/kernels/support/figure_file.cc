#include "tests/kernels/support/figure_file.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

namespace headwater::testing {
namespace {

constexpr char kHeader[] = "case,value,unit,sense,required,machine,commit";

std::string FromEnvironmentOr(const char* name, const char* standard) {
  const char* value = std::getenv(name);
  return value == nullptr ? standard : value;
}

std::string Number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

std::string CaseOf(const std::string& line) { return line.substr(0, line.find(',')); }

}  // namespace

FigureFile::FigureFile(std::string path, std::string machine, std::string commit)
    : path_(std::move(path)), machine_(std::move(machine)), commit_(std::move(commit)) {
  std::replace(machine_.begin(), machine_.end(), ',', ';');
  std::replace(commit_.begin(), commit_.end(), ',', ';');
}

FigureFile FigureFile::FromEnvironment(const std::string& machine) {
  return FigureFile(FromEnvironmentOr("HEADWATER_FIGURES", ""), machine, FromEnvironmentOr("HEADWATER_FIGURES_COMMIT", "unknown"));
}

void FigureFile::Add(Figure figure) { figures_.push_back(std::move(figure)); }

std::string FigureFile::Write() const {
  if (path_.empty() || figures_.empty()) return "";
  std::vector<std::string> lines;
  {
    std::ifstream in(path_);
    for (std::string line; std::getline(in, line);) {
      if (!line.empty() && line != kHeader) lines.push_back(line);
    }
  }
  for (const Figure& figure : figures_) {
    const std::string line = figure.name + "," + Number(figure.value) + "," + figure.unit + "," + (figure.at_most ? "le," : ",") +
                             (figure.at_most ? Number(*figure.at_most) : "") + "," + machine_ + "," + commit_;
    const auto same =
        std::find_if(lines.begin(), lines.end(), [&](const std::string& other) { return CaseOf(other) == figure.name; });
    if (same != lines.end()) {
      *same = line;
    } else {
      lines.push_back(line);
    }
  }
  const std::string next = path_ + ".next";
  std::ofstream out(next, std::ios::trunc);
  out << kHeader << "\n";
  for (const std::string& line : lines) out << line << "\n";
  out.close();
  if (!out || std::rename(next.c_str(), path_.c_str()) != 0) return path_ + " could not be written";
  return "";
}

}  // namespace headwater::testing
