// 13_attention_maps: who looks at whom. The matrix of attention weights of softmax, of elu + 1 and of positive random
// features, side by side as a picture, and in a table.
//
//     p_ij = sim(q_i, k_j) / sum over l <= i of sim(q_i, k_l),   sim = exp(q.k / sqrt(D))  or  phi(q).phi(k)
//
// Linear attention never forms this matrix; attention_weights does, for looking at. Tokens are points that wander along
// sines, so that neighbours are alike, and softmax looks at what is near. elu + 1 is hardly more than an average of the
// past. Random features follow softmax with the noise of their draw.
//
//   13_attention_maps [directory]     writes attention_maps.svg and attention_maps.csv there, or here

#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

using matrix = linattn::row_matrix<float>;
using Eigen::Index;

constexpr Index tokens = 24, head_dim = 16;

struct picture {
  std::string title, name;
  matrix weights;  // (N, N), zero above the diagonal
};

/// D / 2 points on circles of one radius, the c-th with a period of 6, 9, 12 ... tokens.
matrix wandering_tokens(float radius) {
  matrix x(tokens, head_dim);
  for (Index i = 0; i < tokens; ++i) {
    for (Index c = 0; c < head_dim / 2; ++c) {
      const float turn = 6.2831853F * float(i) / float(6 + 3 * c);
      x(i, 2 * c) = radius * std::cos(turn);
      x(i, 2 * c + 1) = radius * std::sin(turn);
    }
  }
  return x;
}

void write_csv(std::ostream& out, const std::vector<picture>& pictures) {
  out << "query,key";
  for (const picture& p : pictures) out << ',' << p.name;
  out << '\n';
  for (Index i = 0; i < tokens; ++i) {
    for (Index j = 0; j <= i; ++j) {
      out << i << ',' << j;
      for (const picture& p : pictures) out << ',' << p.weights(i, j);
      out << '\n';
    }
  }
}

/// A square a weight, the darker the larger within its row: queries downwards, keys to the right.
void write_svg(std::ostream& out, const std::vector<picture>& pictures) {
  constexpr Index cell = 10, gap = 30, top = 40, side = tokens * cell;
  const Index width = Index(pictures.size()) * (side + gap) + gap;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << top + side + gap
      << "\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  Index left = gap;
  for (const picture& p : pictures) {
    out << "<g transform=\"translate(" << left << ' ' << top << ")\">\n<text y=\"-12\">" << p.title << "</text>\n"
        << "<rect width=\"" << side << "\" height=\"" << side << "\" fill=\"none\" stroke=\"#999999\"/>\n"
        << "<g fill=\"#08306b\">\n";
    for (Index i = 0; i < tokens; ++i) {
      const float largest = p.weights.row(i).maxCoeff();
      for (Index j = 0; j <= i; ++j) {
        const float shade = std::round(100 * p.weights(i, j) / largest) / 100;
        if (shade <= 0) continue;
        out << "<path d=\"M" << j * cell << ' ' << i * cell << 'h' << cell << 'v' << cell << 'h' << -cell
            << "z\" opacity=\"" << shade << "\"/>\n";
      }
    }
    out << "</g>\n</g>\n";
    left += side + gap;
  }
  out << "</svg>\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : ".";
  const matrix x = wandering_tokens(0.9F);  // queries and keys are the same
  const linattn::reference_options causal = {.causal = true};
  constexpr Index features = 256;
  const linattn::positive_random<float> positive(head_dim, features, 1, {.rows = linattn::random_rows::orthogonal});

  const std::vector<picture> pictures = {
      {"softmax", "softmax", linattn::attention_weights(x, x, causal)},
      {"elu + 1", "elu_plus_one", linattn::attention_weights(linattn::elu_plus_one(), x, x, causal)},
      {"positive random features, C = 256", "positive_random", linattn::attention_weights(positive, x, x, causal)},
  };

  constexpr float rounding = 1e-5F;
  bool sound = true;
  std::printf("%-36s%24s%24s\n", "", "largest weight, last row", "difference from softmax");
  for (const picture& p : pictures) {
    const float sums = (p.weights.rowwise().sum().array() - 1).abs().maxCoeff();
    const float difference = (p.weights - pictures[0].weights).rowwise().lpNorm<1>().mean();
    sound = sound && sums <= rounding && p.weights.minCoeff() >= 0;
    std::printf("%-36s%24.3f%24.3f\n", p.title.c_str(), double(p.weights.row(tokens - 1).maxCoeff()),
                double(difference));
  }

  std::ofstream csv(directory + "/attention_maps.csv"), svg(directory + "/attention_maps.svg");
  write_csv(csv, pictures);
  write_svg(svg, pictures);
  csv.close();
  svg.close();
  if (!csv || !svg) {
    std::cerr << "cannot write to " << directory << "\n";
    return 2;
  }
  std::cout << "written: " << directory << "/attention_maps.svg and .csv\n";
  return sound ? 0 : 1;
}
