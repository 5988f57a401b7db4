// How many pairs does a state keep apart?
//
// P pairs of a key ~ N(0, I) (D = 64) and a value ~ N(0, I) (M = 64) are absorbed, one after the other; then each key
// is read with and should give its value. Of the (P, M) outputs and values, as vectors:
//
//   error  sqrt(1 - cos^2) of the angle between them, which is |a out - v| / |v| for the best factor a: 0 for perfect
//          retrieval, 1 for outputs that have nothing to do with the values. Rules and maps differ in scale, and the
//          next layer's weights can undo a common factor.
//   wrong  share of the outputs to which another stored value is closer in angle than the right one
//
// Medians over seeds 1 to 15, none left out; a seed draws the pairs and the map's directions. Softmax attention keeps
// all pairs and is what there is to compare with. Nothing is timed; it takes seconds.
//
//   bench_capacity          a table a rule: error and, in percent, wrong
//   bench_capacity --json   one line a map and P
#include "common.hpp"

#include <linattn/detail/guarded_tile.hpp>
#include <linattn/detail/map_under_test.hpp>

#include <cmath>
#include <cstring>
#include <functional>

using namespace linattn;
using linattn_bench::Index;
using linattn_bench::normal_matrix;

namespace {

constexpr Index dim = 64;  // D = M
constexpr int seeds = 15;
constexpr Index pair_counts[] = {8, 16, 32, 64, 128, 256, 512};

struct pairs {
  row_matrix<float> k, v;  // (P, D), (P, M)

  pairs(Index count, int seed)
      : k(normal_matrix<float>(count, dim, 2 * std::uint64_t(seed))),
        v(normal_matrix<float>(count, dim, 2 * std::uint64_t(seed) + 1)) {}
};

struct retrieval {
  double error = 0;
  double wrong = 0;
};

retrieval judge(const row_matrix<float>& out, const row_matrix<float>& v) {
  const row_matrix<double> got = out.cast<double>(), want = v.cast<double>();
  const double along = got.cwiseProduct(want).sum();
  const double squared_cosine = along * along / std::max(got.squaredNorm() * want.squaredNorm(), 1e-300);
  const row_matrix<double> similarity = got * want.rowwise().normalized().transpose();  // (P, P)
  Index wrong = 0;
  for (Index i = 0; i < v.rows(); ++i) {
    Index closest = 0;
    similarity.row(i).maxCoeff(&closest);
    wrong += closest != i;
  }
  return {std::sqrt(std::max(0.0, 1 - squared_cosine)), double(wrong) / double(v.rows())};
}

// ---- rules and maps -------------------------------------------------------------------------------------------------

/// Another update rule is another overload of this, which writes all pairs into the state, and a line in main.
template <class Operator>
void write_pairs(additive, const Operator& attention, typename Operator::state_type& s, const pairs& p,
                 typename Operator::workspace_type& ws) {
  attention.absorb(s, p.k, p.v, ws);
}

/// beta_i = 1 / |phi(k_i)|^2: what the state holds under a key becomes its value exactly, until other keys come.
template <class Operator>
void write_pairs(delta, const Operator& attention, typename Operator::state_type& s, const pairs& p,
                 typename Operator::workspace_type& ws) {
  detail::guarded_tile<float> k(p.k.rows(), dim), phi(p.k.rows(), attention.features());
  k.view() = p.k;
  tile<float> features = phi.view();
  const auto described = detail::describe_map<float>(attention.feature_map(), dim, attention.features());
  described.forms.back().original(std::as_const(k).view(), features, tile_position{});  // of an asymmetric map the keys
  const row_matrix<float> beta = features.rowwise().squaredNorm().cwiseInverse();       // (P, 1)
  attention.absorb(s, p.k, p.v, {.beta = beta}, ws);
}

template <class Rule, class Map>
retrieval retrieve(const Map& map, const pairs& p) {
  const linear_attention<Map, Rule> attention({.head_dim = dim}, map);
  auto s = attention.make_state();
  auto ws = attention.make_workspace();
  write_pairs(Rule(), attention, s, p, ws);
  return judge(attention.read(s, p.k), p.v);
}

struct candidate {
  std::string name;
  Index features;
  std::function<retrieval(const pairs& p, int seed)> draw;
};

/// One rule with every map it goes with: rules that correct need features themselves, not logarithms. `hedgehog` is
/// untrained; learned_linear would be generalized_relu then.
template <class Rule>
class candidates {
 public:
  candidates() {
    fixed("identity", identity());
    fixed("relu", relu());
    fixed("squared_relu", squared_relu());
    fixed("elu_plus_one", elu_plus_one());
    fixed("exponential", exponential());
    fixed("softmax_normalized", softmax_normalized());
    fixed("hedgehog", hedgehog<float>(dim));
    fixed("cosformer", cosformer(1024));
    fixed("dpfp<1>", dpfp<1>());
    fixed("dpfp<3>", dpfp<3>());
    fixed("taylor", taylor());
    drawn<random_fourier<float>>("random_fourier");
    drawn<positive_random<float>>("positive_random");
    drawn<hyperbolic<float>>("hyperbolic");
    const pairs sample(512, 1);
    const double a = gerf<float>::optimal(sample.k, sample.k);
    made("gerf", [a](std::uint64_t seed) { return gerf<float>(dim, random_features, seed, a, orthogonal); });
    drawn<gaussian_fourier<float>>("gaussian_fourier");
    drawn<rfa<float>>("rfa");
    drawn<generalized_relu<float>>("generalized_relu");
  }
  const std::vector<candidate>& all() const { return m_all; }

 private:
  static constexpr Index random_features = 256;
  static constexpr random_feature_options orthogonal = {.rows = random_rows::orthogonal};

  template <class Make>
  void made(const char* name, Make make) {
    using map = decltype(make(1));
    if constexpr (!detail::has_log_features<map> || std::is_same_v<Rule, additive>) {
      m_all.push_back({name, make(1).dimension(dim),
                       [make](const pairs& p, int seed) { return retrieve<Rule>(make(std::uint64_t(seed)), p); }});
    }
  }
  template <class Map>
  void fixed(const char* name, const Map& map) {
    made(name, [map](std::uint64_t) { return map; });
  }
  template <class Map>
  void drawn(const char* name) {
    made(name, [](std::uint64_t seed) { return Map(dim, random_features, seed, orthogonal); });
  }

  std::vector<candidate> m_all;
};

// ---- the table ------------------------------------------------------------------------------------------------------

double median_of(const std::vector<retrieval>& all, double retrieval::*which) {
  std::vector<double> values;
  for (const retrieval& r : all) values.push_back(r.*which);
  std::nth_element(values.begin(), values.begin() + std::ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void print(const char* rule, const std::vector<candidate>& maps, bool json) {
  if (!json) {
    std::printf("%-20s%6s", rule, "C");
    for (const Index count : pair_counts) std::printf("  P = %-7td", count);
    std::printf("\n");
  }
  for (const candidate& map : maps) {
    if (!json) std::printf("%-20s%6s", map.name.c_str(), map.features > 0 ? std::to_string(map.features).c_str() : "");
    for (const Index count : pair_counts) {
      std::vector<retrieval> all;
      for (int seed = 1; seed <= seeds; ++seed) all.push_back(map.draw(pairs(count, seed), seed));
      const double error = median_of(all, &retrieval::error), wrong = median_of(all, &retrieval::wrong);
      if (json) {
        std::printf("{\"rule\": \"%s\", \"map\": \"%s\", \"C\": %td, \"P\": %td, \"error\": %.3g, \"wrong\": %.3g}\n",
                    rule, map.name.c_str(), map.features, count, error, wrong);
      } else {
        std::printf("  %5.3f %3.0f %%", error, 100 * wrong);
      }
    }
    if (!json) std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  print("softmax", {{"attention", 0, [](const pairs& p, int) { return judge(softmax_attention(p.k, p.k, p.v), p.v); }}},
        json);
  print("additive", candidates<additive>().all(), json);
  print("delta", candidates<delta>().all(), json);
}
