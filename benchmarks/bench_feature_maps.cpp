// What does a feature map cost, and how much of causal attention is that?
//
//   BM_feature_map/<map>   the map on tiles of 64 tokens in L1, as the engine calls it, and forward_causal with it, in
//                          turns: the machine may be shared, and what slows one then slows the other
//
// D = M = 64, one head, float. The time is forward_causal's a token.
//
//   map_ns        a token through the map once (for asymmetric maps the mean of queries and keys). Of a map that writes
//                 log features exp is taken, too; the engine takes it after running maxima, which are in total_ns only.
//   total_ns      a token through forward_causal, which maps its query and its key
//   share         2 map_ns / total_ns. An elementwise map is fused into the packing pass, which loads and stores, too:
//                 its map_ns has them in it, and the share is that of the whole pass.
//
// and, again in turns with the map,
//
//   of_copy_exp   elementwise maps: speed, relative to out = exp(x) by Eigen on as many contiguous floats
//   of_eigen      random maps: time, relative to the product x W^T alone, (R, D) times (D, m), by Eigen
//   of_projection random maps: time, relative to the same product by the library's own projection
//
// The bars fail the binary: elu_plus_one and relu have 0.7 of the speed of copy-plus-exp; positive_random takes 1.3
// times the projection it cannot do without, by either measure.
#include "common.hpp"

#include <linattn/detail/guarded_tile.hpp>
#include <linattn/detail/map_under_test.hpp>
#include <linattn/detail/random_projection.hpp>
#include <linattn/detail/registers.hpp>

#include <cmath>
#include <functional>
#include <limits>
#include <utility>

using namespace linattn;
using namespace linattn_bench;

namespace {

constexpr Index tokens = 1024, dim = 64;  // N, D = M
constexpr Index rows = 64;                // of a tile
constexpr Index turns = 100;              // fixed: no trial runs of one turn, which would be judged, too
constexpr double least_of_copy_exp = 0.7;
constexpr double most_of_projection = 1.3;

using call = std::function<void()>;

/// Seconds a run of each of `calls`, which take turns of a tenth of a millisecond or one run: the quickest turns, which
/// nothing interrupted.
std::vector<double> take_turns(benchmark::State& state, const std::vector<call>& calls) {
  const auto seconds_of = [](const call& run, Index times) {
    const double start = seconds();
    for (Index i = 0; i < times; ++i) run();
    benchmark::ClobberMemory();
    return (seconds() - start) / double(times);
  };
  std::vector<Index> repeats;
  for (const call& run : calls) {
    seconds_of(run, 1);
    repeats.push_back(Index(1 + 1e-4 / seconds_of(run, 10)));
  }
  std::vector<double> quickest(calls.size(), std::numeric_limits<double>::infinity());
  for (auto _ : state) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      quickest[i] = std::min(quickest[i], seconds_of(calls[i], repeats[i]));
    }
    state.SetIterationTime(quickest[0]);
  }
  return quickest;
}

/// A map's tiles, and functions that fill them.
class tiles {
 public:
  tiles(Index features) : m_in(rows, dim), m_out(rows, features), m_contiguous(rows * dim), m_exp(rows * dim) {
    const row_matrix<float> x = normal_matrix<float>(rows, dim, 4);
    m_in.view() = x;
    m_contiguous = Eigen::Map<const Eigen::ArrayXf>(x.data(), x.size());
  }

  call map(const detail::map_form<float>& form, bool writes_log) {
    return [this, form, writes_log] {
      tile<float> phi = m_out.view();
      form.original(std::as_const(m_in).view(), phi, tile_position{});
      for (Index r = 0; writes_log && r < rows; ++r) {
        detail::transform_in_place(m_out.row(r), phi.cols(),
                                   [](const auto& x) LINATTN_INLINE_LAMBDA { return exp(x); });
      }
    };
  }
  call copy_exp() {
    return [this] { m_exp = m_contiguous.exp(); };
  }
  call eigen_product(const Eigen::MatrixXf& w_transposed) {  // (D, m)
    return [this, w_transposed] {
      m_out.view().leftCols(w_transposed.cols()).noalias() = std::as_const(m_in).view() * w_transposed;
    };
  }
  call projection(const detail::random_projection<float>& w) {
    return [this, w] {
      tile<float> u = m_out.view();
      w.apply(std::as_const(m_in).view(), u);
    };
  }

 private:
  detail::guarded_tile<float> m_in, m_out;
  Eigen::ArrayXf m_contiguous, m_exp;
};

/// As fail, but the figures are printed: repetitions without counters beside others with them are more than Google
/// Benchmark 1.7 can average.
void miss(const char* what, double figure) {
  failed() = true;
  std::fprintf(stderr, "FAILED: %s: %g\n", what, figure);
}

enum class bar { none, copy_exp, projection };

template <class Map>
void bench(benchmark::State& state, const Map& map, bar judged) {
  const linear_attention<Map> attention({.head_dim = dim}, map);
  problem<float> p(tokens, dim, dim, 1);
  auto ws = attention.make_workspace();
  const call total = [&] { attention.forward_causal(p.q, p.k, p.v, p.out, ws); };
  total();
  if constexpr (!requires { typename Map::scalar; }) {  // the parameters of others are float: no reference in double
    const double error = check_rows(attention, p, true);
    if (!(error <= row_tolerance<float>)) return fail(state, "rows differ from the reference by ", error);
  }

  const auto described = detail::describe_map<float>(map, dim, attention.features());
  tiles scratch(attention.features());
  std::vector<call> calls = {total};
  for (const auto& form : described.forms) calls.push_back(scratch.map(form, described.writes_log));
  const std::size_t baselines = calls.size();
  if (detail::has_packet<Map, float>) calls.push_back(scratch.copy_exp());
  if constexpr (requires { map.projection(); }) {
    const detail::random_projection<float> w("bench", dim, map.projection().rows(), map.seed());
    calls.push_back(scratch.eigen_product(w.matrix().transpose()));
    calls.push_back(scratch.projection(w));
  }
  const std::vector<double> spent = take_turns(state, calls);

  double map_time = 0;
  for (std::size_t i = 1; i < baselines; ++i) map_time += spent[i] / double(baselines - 1);
  const double map_ns = 1e9 * map_time / double(rows), total_ns = 1e9 * spent[0] / double(tokens);
  state.counters["C"] = double(attention.features());
  state.counters["map_ns"] = map_ns;
  state.counters["total_ns"] = total_ns;
  state.counters["share"] = 2 * map_ns / total_ns;
  if (detail::has_packet<Map, float>) {
    const double ratio = spent[baselines] / map_time;
    state.counters["of_copy_exp"] = ratio;
    if (judged == bar::copy_exp && !(ratio >= least_of_copy_exp)) miss("less than 0.7 of copy-plus-exp speed", ratio);
  } else if (calls.size() > baselines) {
    const double of_eigen = map_time / spent[baselines], of_projection = map_time / spent[baselines + 1];
    state.counters["of_eigen"] = of_eigen;
    state.counters["of_projection"] = of_projection;
    const double worse = std::max(of_eigen, of_projection);
    if (judged == bar::projection && !(worse <= most_of_projection)) miss("more than 1.3 times the projection", worse);
  }
}

template <class Map>
void add(const std::string& name, const Map& map, bar judged = bar::none) {
  benchmark::RegisterBenchmark(("BM_feature_map/" + name).c_str(),
                               [map, judged](benchmark::State& state) { bench(state, map, judged); })
      ->UseManualTime()
      ->Iterations(turns)
      ->Unit(benchmark::kMicrosecond);
}

void register_all() {
  add("identity", identity());
  add("relu", relu(), bar::copy_exp);
  add("squared_relu", squared_relu());
  add("elu_plus_one", elu_plus_one(), bar::copy_exp);
  add("exponential", exponential());
  add("softmax_normalized", softmax_normalized());
  add("cosformer", cosformer(tokens));
  add("dpfp<1>", dpfp<1>());
  add("dpfp<3>", dpfp<3>());
  add("taylor", taylor());
  add("hedgehog", hedgehog<float>(dim));
  const row_matrix<float> w = normal_matrix<float>(dim, dim, 5) / std::sqrt(float(dim));
  const row_vector<float> b = row_vector<float>::Zero(dim);
  add("learned_linear<relu>", learned_linear<float>(w, b));
  add("learned_linear<exponential>", learned_linear<float, exponential>(w, b));
  constexpr std::uint64_t seed = 1;
  for (const Index c : {64, 256, 1024}) {
    const auto with = [c](const char* name) { return name + ("/C:" + std::to_string(c)); };
    add(with("random_fourier"), random_fourier<float>(dim, c, seed));
    add(with("positive_random"), positive_random<float>(dim, c, seed), bar::projection);
    add(with("hyperbolic"), hyperbolic<float>(dim, c, seed));
    add(with("gerf"), gerf<float>(dim, c, seed, -0.1));
    add(with("gaussian_fourier"), gaussian_fourier<float>(dim, c, seed));
    add(with("rfa"), rfa<float>(dim, c, seed));
    add(with("generalized_relu"), generalized_relu<float>(dim, c, seed));
  }
}

}  // namespace

int main(int argc, char** argv) {
  register_all();
  return run(argc, argv, default_flags);
}
