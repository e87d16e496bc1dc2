#include "svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace language_model {
namespace {

constexpr double kWidth = 760, kHeight = 440, kLeft = 60, kRight = 170, kTop = 44, kBottom = 50;

struct Axis {
  double low, high, step;
};

// Round steps that cut [low, high] into about `pieces`.
Axis axis_for(double low, double high, int pieces) {
  double rough = std::max(high - low, 1e-9) / pieces, power = std::pow(10, std::floor(std::log10(rough)));
  double step = power;
  for (double factor : {1.0, 2.0, 5.0, 10.0}) {
    step = factor * power;
    if (step >= rough) break;
  }
  return {std::floor(low / step) * step, std::ceil(high / step) * step, step};
}

double place(const Axis& axis, double value, double from, double to) {
  return from + (value - axis.low) / (axis.high - axis.low) * (to - from);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return out;
}

// Labels at the right edge, moved apart where they would overlap.
struct Label {
  double y;
  std::string text, colour;
};
void spread(std::vector<Label>& labels) {
  std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
  for (size_t i = 1; i < labels.size(); ++i) labels[i].y = std::max(labels[i].y, labels[i - 1].y + 16);
  double limit = kHeight - kBottom;
  for (size_t i = labels.size(); i-- > 0; limit = labels[i].y - 16) labels[i].y = std::min(labels[i].y, limit);
}

class Chart {
 public:
  Chart(Axis x, Axis y) : x_(x), y_(y) {
    svg_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
        "font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
        kWidth, kHeight);
  }
  double x_at(double x) const { return place(x_, x, kLeft, kWidth - kRight); }
  double y_at(double y) const { return std::max(kTop, place(y_, y, kHeight - kBottom, kTop)); }

  void grid() {
    for (int i = 0; y_.low + i * y_.step < y_.high + y_.step / 2; ++i) {
      double value = y_.low + i * y_.step, y = y_at(value);
      line(kLeft, y, kWidth - kRight, y, "#e4e4e4", "");
      text(kLeft - 8, y + 4, "end", "#333", fmt::format("{:g}", value));
    }
    for (int i = 0; x_.low + i * x_.step < x_.high + x_.step / 2; ++i) {
      double value = x_.low + i * x_.step, x = x_at(value);
      line(x, kHeight - kBottom, x, kHeight - kBottom + 4, "#333", "");
      text(x, kHeight - kBottom + 18, "middle", "#333", fmt::format("{:g}", value));
    }
    line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "#333", "");
  }
  void line(double x1, double y1, double x2, double y2, const std::string& colour, const std::string& more) {
    add("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" {}/>\n", x1, y1, x2, y2, colour, more);
  }
  void text(double x, double y, const char* anchor, const std::string& colour, const std::string& words,
            const std::string& more = "") {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\" {}>{}</text>\n", x, y, anchor, colour, more,
        escaped(words));
  }
  void curve(const Series& s) {
    std::string points;
    for (size_t i = 0; i < s.x.size(); ++i)
      fmt::format_to(std::back_inserter(points), "{:.1f},{:.1f} ", x_at(s.x[i]), y_at(s.y[i]));
    add("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" points=\"{}\"/>\n", s.colour, points);
    for (size_t i = 0; i < s.x.size(); ++i)
      add("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\" fill=\"{}\"/>\n", x_at(s.x[i]), y_at(s.y[i]), s.colour);
  }
  std::string finish() { return svg_ + "</svg>\n"; }

 private:
  template <class... Values>
  void add(fmt::format_string<Values...> format, Values&&... values) {
    svg_ += fmt::format(format, std::forward<Values>(values)...);
  }
  Axis x_, y_;
  std::string svg_;
};

}  // namespace

std::string draw_chart(const std::string& title, const std::string& x_label, const std::string& y_label,
                       const std::vector<Series>& series, const std::vector<Level>& levels) {
  double right = 0, low = 1e9, high = 0;
  for (const Series& s : series) {
    for (double x : s.x) right = std::max(right, x);
    for (double y : s.y) low = std::min(low, y), high = std::max(high, y);
  }
  for (const Level& level : levels) low = std::min(low, level.y), high = std::max(high, level.y);
  Chart chart(axis_for(0, std::max(right, 1e-3), 6), axis_for(std::min(low, high), high, 6));
  chart.grid();
  chart.text(kLeft, 24, "start", "#111", title, "font-size=\"15\" font-weight=\"bold\"");
  chart.text((kLeft + kWidth - kRight) / 2, kHeight - 12, "middle", "#333", x_label);
  double middle = (kTop + kHeight - kBottom) / 2;
  chart.text(16, middle, "middle", "#333", y_label, fmt::format("transform=\"rotate(-90 16 {:.1f})\"", middle));
  std::vector<Label> labels;
  for (const Level& level : levels) {
    double y = chart.y_at(level.y);
    chart.line(kLeft, y, kWidth - kRight, y, "#888", "stroke-dasharray=\"5 4\"");
    labels.push_back({y, fmt::format("{} {:.2f}", level.label, level.y), "#666"});
  }
  for (const Series& s : series) {
    chart.curve(s);
    if (!s.y.empty()) labels.push_back({chart.y_at(s.y.back()), fmt::format("{} {:.2f}", s.label, s.y.back()), s.colour});
  }
  spread(labels);
  for (const Label& label : labels) chart.text(kWidth - kRight + 8, label.y + 4, "start", label.colour, label.text);
  return chart.finish();
}

}  // namespace language_model
