// The loss curve as an SVG picture.
#ifndef LANGUAGE_MODEL_SVG_H
#define LANGUAGE_MODEL_SVG_H

#include <string>
#include <vector>

namespace language_model {

struct Series {
  std::string label, colour;
  std::vector<double> x, y;
};
// A level to compare with, drawn across.
struct Level {
  std::string label;
  double y;
};

std::string draw_chart(const std::string& title, const std::string& x_label, const std::string& y_label,
                       const std::vector<Series>& series, const std::vector<Level>& levels);

}  // namespace language_model
#endif
