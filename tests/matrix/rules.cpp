// The update rules: blocks of tokens against steps, a saved state and a draft against the one they come from.
#include "matrix.hpp"

#include "support/inputs.hpp"

#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/state_io.hpp>

#include <cmath>
#include <sstream>
#include <utility>

namespace matrix::of_rules {

constexpr Index N = 37, D = 6, M = 5, H = 2;

/// Decays, betas and bonus of all tokens, of which `rows` takes what a verb wants.
template <class Attention>
struct gates {
  using T = typename Attention::scalar;
  using row_matrix = linattn::row_matrix<T>;
  static constexpr bool per_feature = Attention::rule.decay == linattn::decay_kind::per_feature;
  row_matrix log_decay = -support::uniform_matrix<T>(N, per_feature ? H* D : H, 5);
  row_matrix beta = support::uniform_matrix<T>(N, H, 6);
  row_matrix bonus = support::normal_matrix<T>(N, H* D, 7);

  template <class Inputs>
  Inputs of(const auto& rows) const {
    Inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = rows(log_decay);
    if constexpr (requires { x.beta; }) x.beta = rows(beta);
    if constexpr (requires { x.bonus; }) x.bonus = rows(bonus);
    return x;
  }
};

template <class T, bool Gradients = false, class Rule>
bool rule(const char* name, const Rule& value) {
  using attention = linattn::linear_attention<linattn::identity, Rule, T>;
  using row_matrix = linattn::row_matrix<T>;
  const attention attn({.head_dim = D, .value_dim = M, .heads = H}, {}, value);
  const row_matrix q = support::normal_matrix<T>(N, H * D, 1), v = support::normal_matrix<T>(N, H * M, 3);
  const row_matrix k = support::normal_matrix<T>(N, H * D, 2, 0.3);
  const gates<attention> g;
  const auto whole = [](const row_matrix& x) { return typename attention::input(x); };
  const auto x = g.template of<typename attention::inputs>(whole);
  row_matrix out(N, H * M), stepped(N, H * M);
  auto ws = attn.make_workspace();
  auto bulk = attn.make_state();
  auto s = attn.make_state();
  const auto step = [&](auto& at, Index i) {
    const auto row = [i](const row_matrix& rows) { return typename attention::token(rows.row(i)); };
    attn.step(at, q.row(i), k.row(i), v.row(i), g.template of<typename attention::token_inputs>(row), stepped.row(i),
              ws);
  };
  for (Index i = 0; i < N; ++i) step(s, i);
  attn.forward_causal(bulk, q, k, v, x, out, ws);
  bool good = check(close(out.template cast<float>(), stepped.template cast<float>()), name, "forward_causal, step");
  good &= check(close(bulk.kv(1), s.kv(1)), name, "state");

  std::stringstream file;
  linattn::save(attn, bulk, file);
  auto loaded = attn.make_state();
  linattn::load(attn, loaded, file);
  good &= check(loaded.kv(0) == bulk.kv(0) && loaded.tokens() == N, name, "save, load");

  auto d = attn.make_draft();
  const auto head = [](const row_matrix& rows) { return typename attention::input(rows.topRows(4)); };
  attn.forward_causal(std::as_const(loaded), q.topRows(4), k.topRows(4), v.topRows(4),
                      g.template of<typename attention::inputs>(head), out.topRows(4), d, ws);
  attn.accept(loaded, d, 2, ws);
  step(s, 0), step(s, 1);
  good &= check(close(loaded.kv(0), s.kv(0)), name, "draft, accept");

  if constexpr (Gradients) {
    // An output is linear in v, so <dout, out> = <dv, v>.
    attn.forward_causal(q, k, v, x, out, ws);
    const row_matrix dout = support::normal_matrix<T>(N, H * M, 4);
    const auto gradients = attn.vjp_causal(q, k, v, x, dout);
    const T difference = gradients.dv.cwiseProduct(v).sum() - dout.cwiseProduct(out).sum();
    good &= check(std::abs(difference) <= rounding * dout.norm() * out.norm(), name, "vjp_causal");
    good &= check(gradients.dq.norm() > 0 && gradients.dk.norm() > 0, name, "vjp_causal");
  }
  return good;
}

}  // namespace matrix::of_rules

// One of each kind: constant decays, decays per feature, corrections, both; numbers kept in 16 bits.
bool matrix::rules() {
  using linattn::decay_kind;
  using namespace of_rules;
  bool good = rule<float>("decay", linattn::decay({-0.1, -0.7}));
  good &= rule<float>("gated_bonus", linattn::gated_bonus());
  good &= rule<Eigen::bfloat16>("delta, bfloat16", linattn::delta());
  good &= rule<float, true>("gated_delta, per feature", linattn::gated_delta<decay_kind::per_feature>());
  return good;
}
