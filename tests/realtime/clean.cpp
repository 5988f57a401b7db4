// The real-time promise, checked by clang: everything here compiles without a word from -Wfunction-effects, and runs
// without a report of the realtime sanitizer, which ends the program.
#include <linattn/linattn.hpp>

#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>
#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include <cstdio>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>

namespace {

using Eigen::Index;
using linattn::row_matrix;

/// One sequence and what its calls write.
template <class T>
struct buffers {
  row_matrix<T> q, k, v, out, denominators;
  row_matrix<T> dq = q, dk = k, dv = v;
};

/// What an audio callback may do: every verb that takes a state or a workspace.
template <class Operator, class T>
void callback(const Operator& attn, typename Operator::state_type& s, typename Operator::state_type& ds,
              typename Operator::draft_type& d, typename Operator::workspace_type& ws,
              buffers<T>& x) noexcept LINATTN_NONBLOCKING {
  attn.forward_causal(s, x.q, x.k, x.v, x.out, ws);
  attn.forward_causal(x.q, x.k, x.v, x.out, ws);
  attn.forward(s, x.q, x.k, x.v, x.out, ws);
  attn.forward(x.q, x.k, x.v, x.out, ws);
  attn.absorb(s, x.k, x.v, ws);
  attn.read(s, x.q, x.out, ws);
  attn.read(s, x.q, x.out, ws, x.denominators);
  for (Index i = 0; i < x.q.rows(); ++i) attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), x.out.row(i), ws);
  if constexpr (!Operator::rule.log_scaled) {
    attn.forward_causal(s, x.q.topRows(7), x.k.topRows(7), x.v.topRows(7), x.out.topRows(7), d, ws);
    attn.accept(s, d, 5, ws);
    d.clear();
    for (Index i = 0; i < x.q.rows(); ++i) attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), x.out.row(i), d, ws);
    attn.accept(s, d, ws);
  }
  attn.step(std::span(&s, 1), x.q.topRows(1), x.k.topRows(1), x.v.topRows(1), x.out.topRows(1), ws);
  attn.vjp(x.q, x.k, x.v, x.out, x.dq, x.dk, x.dv, ws);
  attn.vjp_causal(x.q, x.k, x.v, x.out, x.dq, x.dk, x.dv, ws);
  attn.vjp_causal(s, x.q, x.k, x.v, x.out, ds, x.dq, x.dk, x.dv, ws);
  s.merge(s);
  s.kv(0)(0, 0) += s.k_sum(0)[0];
  s.reset();
}

template <class Operator>
void run(const Operator& attn) {
  using T = typename Operator::scalar;
  const Index tokens = 70;  // whole packing passes and a ragged one
  buffers<T> x{row_matrix<T>::Random(tokens, attn.heads() * attn.head_dim()),
               row_matrix<T>::Random(tokens, attn.heads() * attn.head_dim()),
               row_matrix<T>::Random(tokens, attn.heads() * attn.value_dim()),
               row_matrix<T>(tokens, attn.heads() * attn.value_dim()), row_matrix<T>(tokens, attn.heads())};
  auto s = attn.make_state();
  auto ds = attn.make_state();
  auto d = attn.make_draft();
  auto ws = attn.make_workspace();
  callback(attn, s, ds, d, ws, x);
}

template <class Map, class T = float>
using attention = linattn::linear_attention<Map, linattn::additive, T>;

const linattn::options sizes = {.head_dim = 5, .value_dim = 19, .heads = 2, .normalize = true};

template <class Map, class T = float>
void run_map(const Map& map = Map()) {
  run(attention<Map, T>(sizes, map));
}

/// The verbs of a rule with the inputs that it takes.
template <class Operator, class T>
void callback_with_rule(const Operator& attn, typename Operator::state_type& s, typename Operator::draft_type& d,
                        typename Operator::workspace_type& ws, buffers<T>& x, const typename Operator::inputs& gates,
                        const typename Operator::inputs& gates_1,
                        const typename Operator::token_inputs& gates_t) noexcept LINATTN_NONBLOCKING {
  attn.forward_causal(s, x.q, x.k, x.v, gates, x.out, ws);
  attn.forward_causal(x.q, x.k, x.v, gates, x.out, ws);
  attn.absorb(s, x.k, x.v, gates, ws);
  attn.read(s, x.q, x.out, ws);
  attn.step(s, x.q.row(0), x.k.row(0), x.v.row(0), gates_t, x.out.row(0), ws);
  for (Index i = 0; i < x.q.rows(); ++i) {
    attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), gates_t, x.out.row(i), d, ws);
  }
  attn.accept(s, d, ws);
  attn.step(std::span(&s, 1), x.q.topRows(1), x.k.topRows(1), x.v.topRows(1), gates_1, x.out.topRows(1), ws);
  if constexpr (Operator::rule.corrects == linattn::correction::none) s.merge(s);
  if constexpr (Operator::rule.decay != linattn::decay_kind::none) s.kv(0)(0, 0) += s.log_decay(0)[0];
  s.reset();
}

template <class Rule>
void run_rule() {
  using linattn::matrix_view;
  using linattn::vector_view;
  const linattn::linear_attention<linattn::identity, Rule> attn({.head_dim = 5, .value_dim = 19, .heads = 2});
  const Index tokens = 70, D = 5, M = 19, H = 2;
  buffers<float> x{row_matrix<float>::Random(tokens, H * D),
                   row_matrix<float>::Random(tokens, H * D),
                   row_matrix<float>::Random(tokens, H * M),
                   row_matrix<float>(tokens, H * M),
                   {}};
  // One row of gates for all tokens.
  const bool per_feature = Rule::traits.decay == linattn::decay_kind::per_feature;
  const row_matrix<float> log_decay = row_matrix<float>::Constant(1, per_feature ? H * D : H, -0.1F);
  const row_matrix<float> beta = row_matrix<float>::Constant(1, H, 0.5F);
  const auto gates_of = [&]<class Inputs>(Inputs gates, const auto& as) {
    if constexpr (requires { gates.log_decay; }) gates.log_decay = as(log_decay);
    if constexpr (requires { gates.beta; }) gates.beta = as(beta);
    return gates;
  };
  using attention = std::remove_const_t<decltype(attn)>;
  const auto rows_of = [&](Index n) {
    return gates_of(typename attention::inputs(), [n](const row_matrix<float>& one) {
      return matrix_view<const float>(one.data(), n, one.cols(), 0);
    });
  };
  const auto token = gates_of(typename attention::token_inputs(), [](const row_matrix<float>& one) {
    return vector_view<const float>(one.data(), one.cols());
  });
  auto s = attn.make_state();
  auto d = attn.make_draft();
  auto ws = attn.make_workspace();
  callback_with_rule(attn, s, d, ws, x, rows_of(tokens), rows_of(1), token);
}

/// A refusal outside of real time is an ordinary exception, and leaves no real-time context behind.
bool refusal_can_be_caught() {
  const attention<linattn::elu_plus_one> attn(sizes);
  auto ws = attn.make_workspace();
  const row_matrix<float> x = row_matrix<float>::Zero(3, 1);
  row_matrix<float> out(3, 1);
  try {
    attn.forward_causal(x, x, x, out, ws);
  } catch (const std::invalid_argument&) {
    return std::make_unique<row_matrix<float>>(3, 1)->size() == 3;
  }
  return false;
}

}  // namespace

int main() {
  run_map<linattn::elu_plus_one>();
  run_map<linattn::elu_plus_one, double>();
  run_map<linattn::identity>();
  run_map<linattn::relu>();
  run_map<linattn::squared_relu>();
  run_map<linattn::exponential>();
  run_map(linattn::positive_random<float>(5, 37, 1));
  run_map(linattn::random_fourier<float>(5, 38, 1));
  run(linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 16, 16, 2>());
  run(linattn::linear_attention<linattn::exponential, linattn::additive, double, 7, 3, 1>());
  // Beyond 128 KiB, where Eigen's scratch would move from stack to heap.
  run(attention<linattn::elu_plus_one>({.head_dim = 256, .heads = 2}));
  run_rule<linattn::gated<>>();
  run_rule<linattn::delta>();
  run_rule<linattn::gated_delta<linattn::decay_kind::per_feature>>();
  if (!refusal_can_be_caught()) return 1;
  std::puts("real time throughout");
}
