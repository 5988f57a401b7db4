// The maps, on the additive rule: both forms against plain loops, steps and gradients against other verbs.
#include "matrix.hpp"

#include "support/inputs.hpp"

#include <linattn/linattn.hpp>

#include <cmath>

namespace matrix::of_maps {

constexpr Index N = 37, D = 6, M = 5, H = 2;

template <class T>
struct inputs {
  linattn::row_matrix<T> q = support::normal_matrix<T>(N, H* D, 1, 0.7);
  linattn::row_matrix<T> k = support::normal_matrix<T>(N, H* D, 2, 0.7);
  linattn::row_matrix<T> v = support::normal_matrix<T>(N, H* M, 3);
  linattn::row_matrix<T> dout = support::normal_matrix<T>(N, H* M, 4);
};

template <class T = float, class Map>
bool map(const char* name, const Map& phi) {
  using attention = linattn::linear_attention<Map, linattn::additive, T>;
  const attention attn({.head_dim = D, .value_dim = M, .heads = H, .normalize = true}, phi);
  const inputs<T> x;
  linattn::row_matrix<T> out(N, H * M), stepped(N, H * M);
  auto ws = attn.make_workspace();
  attn.forward(x.q, x.k, x.v, out, ws);
  bool good = check(close(out, linattn::kernel_attention(phi, x.q, x.k, x.v, {.heads = H})), name, "forward");
  attn.forward_causal(x.q, x.k, x.v, out, ws);
  good &= check(close(out, linattn::kernel_attention(phi, x.q, x.k, x.v, {.heads = H, .causal = true})), name,
                "forward_causal");
  auto s = attn.make_state();
  for (Index i = 0; i < N; ++i) attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), stepped.row(i), ws);
  good &= check(close(stepped, out), name, "step");
  auto merged = attn.make_state();
  auto later = attn.make_state(9);
  attn.absorb(merged, x.k.topRows(9), x.v.topRows(9), ws);
  attn.absorb(later, x.k.bottomRows(N - 9), x.v.bottomRows(N - 9), ws);
  merged.merge(later);
  good &= check(close(attn.read(merged, x.q), attn.read(s, x.q)), name, "absorb, merge, read");

  if constexpr (linattn::detail::is_differentiable<Map, T>) {
    // An output is linear in v, so <dout, out> = <dv, v>.
    const auto d = attn.vjp_causal(x.q, x.k, x.v, x.dout);
    const T inner = d.dv.cwiseProduct(x.v).sum(), outer = x.dout.cwiseProduct(out).sum();
    good &=
        check(std::abs(inner - outer) <= rounding * x.dout.norm() * out.norm() && d.dq.norm() > 0 && d.dk.norm() > 0,
              name, "vjp_causal");
  }
  return good;
}

}  // namespace matrix::of_maps

// One of each kind: elementwise, of a whole row, by position, with weights, with log features.
bool matrix::maps() {
  using namespace of_maps;
  bool good = map("elu_plus_one", linattn::elu_plus_one());
  good &= map("softmax_normalized", linattn::softmax_normalized());
  good &= map("cosformer", linattn::cosformer(N));
  good &= map("hedgehog", linattn::hedgehog<float>(D));
  good &= map<double>("positive_random, double", linattn::positive_random<double>(D, 16, 1));
  return good;
}
