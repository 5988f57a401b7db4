// Images as sequences of grey levels: what a weights file says of them, and those that it was not trained on.
#pragma once

#include <linattn/matrix_view.hpp>
#include <linattn/safetensors.hpp>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using Eigen::Index;
using image_rows = linattn::row_matrix<Index>;  // (images, N), levels, one image a row

/// What a weights file says of its images.
struct image_format {
  explicit image_format(const linattn::safetensors_metadata& of)
      : metadata(of), side(number("side")), levels(number("levels", 2)), classes(number("classes")) {}

  std::string text(std::string_view key) const {
    const auto found = metadata.find(key);
    if (found != metadata.end()) return found->second;
    throw std::invalid_argument("these are no weights of an image model: the metadata have no '" + std::string(key) +
                                "'");
  }
  Index number(std::string_view key, Index least = 1) const {
    const Index n = std::atol(text(key).c_str());
    if (n >= least && n <= 1024) return n;
    throw std::invalid_argument("the metadata say " + std::string(key) + " = '" + text(key) + "'");
  }
  Index pixels() const { return side * side; }  // N
  bool is_like(const image_format& o) const { return side == o.side && levels == o.levels && classes == o.classes; }
  Index class_symbol(Index c) const { return levels + c; }

  linattn::safetensors_metadata metadata;
  Index side, levels, classes;
};

struct labelled_images {
  image_rows images;
  std::vector<Index> labels;
};

/// Images that the model was not trained on; none where we have none for it.
inline labelled_images load_held_out(const image_format& format, const std::string& folder) {
  const bool is_fashion = format.text("dataset") == "Fashion-MNIST";
  const std::string path = folder + (is_fashion ? "fashion_held_out.safetensors" : "digits.safetensors");
  if (!std::filesystem::exists(path)) return {};
  const auto file = linattn::safetensors_file::open(path);
  const auto* const images = file.tensor("held_out.images");
  const auto* const labels = file.tensor("held_out.labels");
  if (images == nullptr || labels == nullptr || !format.is_like(image_format(file.metadata()))) return {};
  const Index count = images->shape.at(0), per_byte = format.pixels() / images->shape.at(1);  // 1, or 2 of 16 levels
  labelled_images held_out{image_rows(count, format.pixels()), {}};
  for (Index i = 0; i < held_out.images.size(); ++i) {
    const Index byte = std::to_integer<Index>(images->data[std::size_t(i / per_byte)]);
    held_out.images.data()[i] = per_byte == 1 ? byte : i % 2 == 0 ? byte % 16 : byte / 16;
  }
  for (const std::byte label : labels->data) held_out.labels.push_back(std::to_integer<Index>(label));
  return held_out;
}
