// How many instructions does a token take? Callgrind counts them between count_begin() and count_end(), which
// instruction_counts.py tells it to watch; it also holds the counts against the committed table.
//
// Prints the compiler and Eigen, which decide the counts, then a line for each case, in the order they are counted.
#include <linattn/linattn.hpp>

#include <linattn/update_rules/delta.hpp>
#include <linattn/update_rules/gated.hpp>

#include <cstdio>
#include <span>
#include <vector>

using namespace linattn;
using Eigen::Index;

#if !defined(__AVX2__) || !defined(__FMA__) || defined(__AVX512F__)
#error "The table holds for -march=x86-64-v3; callgrind does not know AVX-512"
#endif

// Watched by name. The bodies are not empty, so that no optimiser takes the calls away.
extern "C" [[gnu::noinline]] void count_begin() { asm volatile("" ::: "memory"); }
extern "C" [[gnu::noinline]] void count_end() { asm volatile("" ::: "memory"); }

namespace {

#if defined(__clang__)
constexpr const char* compiler = "Clang";
constexpr int compiler_version[] = {__clang_major__, __clang_minor__, __clang_patchlevel__};
#else
constexpr const char* compiler = "GNU";
constexpr int compiler_version[] = {__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__};
#endif

/// An operator with N tokens to work on, and whatever its calls need.
template <class Operator>
struct bench {
  using T = typename Operator::scalar;

  const Operator& attention;
  row_matrix<T> q;    // (N, H D)
  row_matrix<T> k;    // (N, H D)
  row_matrix<T> v;    // (N, H M)
  row_matrix<T> out;  // (N, H M)
  typename Operator::state_type state;
  typename Operator::workspace_type ws;

  bench(const Operator& a, Index n)
      : attention(a),
        q(row_matrix<T>::Random(n, a.heads() * a.head_dim())),
        k(row_matrix<T>::Random(n, a.heads() * a.head_dim())),
        v(row_matrix<T>::Random(n, a.heads() * a.value_dim())),
        out(row_matrix<T>::Zero(n, a.heads() * a.value_dim())),
        state(a.make_state()),
        ws(a.make_workspace()) {}
};

/// With what a rule takes beside q, k and v, and a state for each token where they belong to as many sequences.
template <class Operator>
struct rule_bench : bench<Operator> {
  using T = typename Operator::scalar;

  row_matrix<T> log_decay;  // (N, H), or (N, H D) per feature
  row_matrix<T> beta;       // (N, H)
  std::vector<typename Operator::state_type> states;

  rule_bench(const Operator& a, Index n)
      : bench<Operator>(a, n),
        log_decay(row_matrix<T>::Random(n, a.heads() * decays(a)).cwiseAbs() * T(-0.05)),
        beta(row_matrix<T>::Random(n, a.heads()).cwiseAbs()),
        states(std::size_t(n), a.make_state()) {}

  static Index decays(const Operator& a) {
    return Operator::rule.decay == decay_kind::per_feature ? a.features() : Index(1);
  }
  typename Operator::inputs inputs() const {
    typename Operator::inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = log_decay;
    if constexpr (requires { x.beta; }) x.beta = beta;
    return x;
  }
  typename Operator::token_inputs inputs(Index t) const {
    typename Operator::token_inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = log_decay.row(t);
    if constexpr (requires { x.beta; }) x.beta = beta.row(t);
    return x;
  }
};

namespace form {  // the verbs as values

constexpr auto forward = [](auto& b) { b.attention.forward(b.q, b.k, b.v, b.out, b.ws); };
constexpr auto forward_causal = [](auto& b) { b.attention.forward_causal(b.q, b.k, b.v, b.out, b.ws); };
constexpr auto absorb = [](auto& b) { b.attention.absorb(b.state, b.k, b.v, b.ws); };
constexpr auto read = [](auto& b) { b.attention.read(b.state, b.q, b.out, b.ws); };
constexpr auto step = [](auto& b) {
  for (Index t = 0; t < b.q.rows(); ++t) {
    auto out = b.out.row(t);
    b.attention.step(b.state, b.q.row(t), b.k.row(t), b.v.row(t), out, b.ws);
  }
};

constexpr auto rule_forward_causal = [](auto& b) {
  b.attention.forward_causal(b.state, b.q, b.k, b.v, b.inputs(), b.out, b.ws);
};
constexpr auto rule_step = [](auto& b) {
  for (Index t = 0; t < b.q.rows(); ++t) {
    auto out = b.out.row(t);
    b.attention.step(b.state, b.q.row(t), b.k.row(t), b.v.row(t), b.inputs(t), out, b.ws);
  }
};
constexpr auto rule_step_of_states = [](auto& b) {
  b.attention.step(std::span(b.states), b.q, b.k, b.v, b.inputs(), b.out, b.ws);
};

}  // namespace form

/// Counts one call, after one that does what only a first call does.
template <template <class> class Bench = bench, class Operator, class Call>
void count(const char* name, const Operator& attention, Index n, Call call) {
  Bench<Operator> b(attention, n);
  call(b);
  count_begin();
  call(b);
  count_end();
  std::printf("%s/N:%d/D:%d/M:%d/H:%d\n", name, int(n), int(attention.head_dim()), int(attention.value_dim()),
              int(attention.heads()));
}

template <class Map, class T = float>
linear_attention<Map, additive, T> sized(Index d, Index m, Index h) {
  return linear_attention<Map, additive, T>({.head_dim = d, .value_dim = m, .heads = h});
}

template <Index D, Index H>
void count_fixed_step(Index n) {
  count("step<elu_plus_one, float, fixed>", linear_attention<elu_plus_one, additive, float, D, D, H>(), n, form::step);
}

template <Index D, Index H>
void count_fixed_causal(Index n) {
  count("forward_causal<elu_plus_one, float, fixed>", linear_attention<elu_plus_one, additive, float, D, D, H>(), n,
        form::forward_causal);
}

template <class Rule>
void count_rule(const char* causal, const char* step, const char* step_of_states, Index n) {
  for (const Index d : {64, 128}) {
    for (const Index h : {1, 8}) {
      const linear_attention<identity, Rule> attention({.head_dim = d, .heads = h});
      count<rule_bench>(causal, attention, n, form::rule_forward_causal);
      count<rule_bench>(step, attention, n, form::rule_step);
      if (d == 64) count<rule_bench>(step_of_states, attention, n, form::rule_step_of_states);
    }
  }
}

}  // namespace

int main() {
  std::printf("%s %d.%d.%d, Eigen %d.%d.%d\n", compiler, compiler_version[0], compiler_version[1], compiler_version[2],
              EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION);
  constexpr Index n = 128;     // several packing passes, all of them full
  constexpr Index small = 16;  // a block of audio: what a call costs weighs in

  for (const Index d : {8, 16, 64}) {
    for (const Index h : {1, 8}) count("step<elu_plus_one, float>", sized<elu_plus_one>(d, d, h), n, form::step);
  }
  count_fixed_step<8, 1>(n);
  count_fixed_step<8, 8>(n);
  count_fixed_step<16, 1>(n);
  count_fixed_step<16, 8>(n);
  count_fixed_step<64, 1>(n);
  count_fixed_step<64, 8>(n);
  count("step<elu_plus_one, double>", sized<elu_plus_one, double>(64, 64, 8), n, form::step);

  for (const Index d : {16, 32, 64, 128}) {
    for (const Index h : {1, 8}) {
      count("forward_causal<elu_plus_one, float>", sized<elu_plus_one>(d, d, h), n, form::forward_causal);
    }
  }
  count("forward_causal<elu_plus_one, float>", sized<elu_plus_one>(16, 16, 1), small, form::forward_causal);
  count("forward_causal<elu_plus_one, float>", sized<elu_plus_one>(20, 12, 3), 101, form::forward_causal);  // ragged
  count_fixed_causal<16, 1>(small);
  count_fixed_causal<64, 1>(n);
  count_fixed_causal<64, 8>(n);
  count("forward_causal<elu_plus_one, double>", sized<elu_plus_one, double>(64, 64, 8), n, form::forward_causal);
  count("forward_causal<identity, float>", sized<identity>(64, 64, 1), n, form::forward_causal);
  count("forward_causal<identity, float>", sized<identity>(128, 128, 1), n, form::forward_causal);
  count("forward_causal<positive_random(C = 256), float>",
        linear_attention<positive_random<float>>({.head_dim = 64}, positive_random<float>(64, 256, 1)), n,
        form::forward_causal);

  for (const Index h : {1, 8}) {
    const auto attention = sized<elu_plus_one>(64, 64, h);
    count("forward<elu_plus_one, float>", attention, n, form::forward);
    count("absorb<elu_plus_one, float>", attention, n, form::absorb);
    count("read<elu_plus_one, float>", attention, n, form::read);
  }
  count("forward<identity, float>", sized<identity>(64, 64, 1), n, form::forward);

  count_rule<gated<>>("forward_causal<gated, float>", "step<gated, float>", "step of states<gated, float>", n);
  count_rule<gated_delta<>>("forward_causal<gated_delta, float>", "step<gated_delta, float>",
                            "step of states<gated_delta, float>", n);
}
