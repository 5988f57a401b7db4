// Sheets of small grey pictures: in the terminal, and as a PNG where stb is there.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#ifdef LINATTN_EXAMPLE_STB
#include <stb_image_write.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sys/ioctl.h>
#include <unistd.h>
#endif

namespace pictures {

using Eigen::Index;

/// `rows` rows of `columns` square pictures, with a line of dark grey around each.
class sheet {
 public:
  sheet(Index side, Index columns, Index rows)
      : m_side(side),
        m_width(columns * (side + 1) + 1),
        m_height(rows * (side + 1) + 1),
        m_grey(std::size_t(m_width * m_height), 40) {}

  Index width() const { return m_width; }
  Index height() const { return m_height; }
  /// 0 (black) ... 255; what lies below the sheet is black.
  std::uint8_t at(Index y, Index x) const { return y < m_height ? m_grey[std::size_t(y * m_width + x)] : 0; }

  /// Pixels 0 ... levels - 1, row by row. Those below 0 are unknown, and stay dark grey.
  void put(Index row, Index column, const Index* pixels, Index levels) {
    for (Index i = 0; i < m_side * m_side; ++i) {
      const Index y = row * (m_side + 1) + 1 + i / m_side, x = column * (m_side + 1) + 1 + i % m_side;
      if (pixels[i] >= 0) m_grey[std::size_t(y * m_width + x)] = std::uint8_t(255 * pixels[i] / (levels - 1));
    }
  }

 private:
  Index m_side, m_width, m_height;
  std::vector<std::uint8_t> m_grey;
};

/// 0 where the output is no terminal.
inline Index terminal_columns() {
#if defined(__unix__) || defined(__APPLE__)
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) return size.ws_col;
#endif
  return 0;
}

/// Pictures of this side that fit beside each other, `most` at most.
inline Index columns_that_fit(Index side, Index most) {
  const Index columns = terminal_columns() > 0 ? terminal_columns() : 120;
  return std::clamp<Index>((columns - 1) / (side + 1), 1, most);
}

/// Two pixels a character, one above the other: in 24 greys on a terminal, elsewhere their mean in five shades.
inline void print(const sheet& s) {
  static constexpr std::array shades = {" ", "░", "▒", "▓", "█"};
  const bool has_colours = terminal_columns() > 0;
  std::string text;
  for (Index y = 0; y < s.height(); y += 2) {
    for (Index x = 0; x < s.width(); ++x) {
      const int upper = s.at(y, x), lower = s.at(y + 1, x);
      if (has_colours) {
        text += "\033[38;5;" + std::to_string(232 + upper * 23 / 255);
        text += ";48;5;" + std::to_string(232 + lower * 23 / 255) + "m▀";
      } else {
        text += shades[std::size_t((upper + lower) * 5 / 511)];
      }
    }
    text += has_colours ? "\033[0m\n" : "\n";
  }
  std::fputs(text.c_str(), stdout);
}

/// Sheets below each other, every pixel `scale` pixels wide and high. False where it cannot be written; without stb,
/// nothing is.
inline bool write_png(const std::string& path, const std::vector<sheet>& sheets, Index scale) {
#ifdef LINATTN_EXAMPLE_STB
  Index width = 0, height = 0;
  for (const sheet& s : sheets) {
    width = std::max(width, s.width() * scale);
    height += s.height() * scale;
  }
  std::vector<std::uint8_t> grey(std::size_t(width * height), 0);
  Index top = 0;
  for (const sheet& s : sheets) {
    for (Index y = 0; y < s.height() * scale; ++y) {
      for (Index x = 0; x < s.width() * scale; ++x) {
        grey[std::size_t((top + y) * width + x)] = s.at(y / scale, x / scale);
      }
    }
    top += s.height() * scale;
  }
  return stbi_write_png(path.c_str(), int(width), int(height), 1, grey.data(), int(width)) != 0;
#else
  (void)path, (void)sheets, (void)scale;
  return false;
#endif
}

}  // namespace pictures
