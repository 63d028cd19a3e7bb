// Measured figures in a CSV file, from run to run: case,value,unit,sense,required,machine,commit.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_FIGURE_FILE_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_FIGURE_FILE_H_

#include <optional>
#include <string>
#include <vector>

namespace headwater::testing {

// A figure and its bound.
struct Figure {
  std::string name;  // the file's key: no commas, no line ends
  double value = 0;
  std::string unit;
  std::optional<double> at_most;  // column `required`, with sense `le`; empty: given for information
};

class FigureFile {
 public:
  // `path` empty: nothing is kept. `machine` and `commit` stand in every line; commas become semicolons.
  FigureFile(std::string path, std::string machine, std::string commit);
  // The file that HEADWATER_FIGURES names, of the commit that HEADWATER_FIGURES_COMMIT names.
  static FigureFile FromEnvironment(const std::string& machine);

  void Add(Figure figure);
  const std::vector<Figure>& figures() const { return figures_; }

  // Writes the figures into the file: a line of the same case is replaced where it stands, others stay, new ones come last. The
  // file is replaced as a whole. Returns the error, or nothing.
  std::string Write() const;

 private:
  std::string path_, machine_, commit_;
  std::vector<Figure> figures_;
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_FIGURE_FILE_H_
