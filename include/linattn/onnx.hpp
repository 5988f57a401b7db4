// The ONNX operator LinearAttention (opset 27) as one function. Not part of linattn.hpp: include it where you need it.
//
//   linattn::onnx::linear_attention<float>(
//       {.q_num_heads = 8, .kv_num_heads = 2, .update_rule = linattn::onnx::rule::gated_delta},
//       {.query = {q, {B, T, 8 * dk}}, .key = {k, {B, T, 2 * dk}}, .value = {v, {B, T, 2 * dv}},
//        .past_state = {{past, {B, 2, dk, dv}}}, .decay = {{g, {B, T, 2}}}, .beta = {{b, {B, T, 2}}}},
//       {.output = {out, {B, T, 8 * dv}}, .present_state = {present, {B, 2, dk, dv}}});
//
// For streams of calls use the operator itself: it keeps its state, where ONNX copies it in and out of every call.
#pragma once

#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>

#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace onnx {

/// A dense tensor in C order: the caller's memory, and its dimensions. Data may be null where there are no elements.
template <class T, std::size_t Rank>
struct tensor {
  T* data = nullptr;
  std::array<Eigen::Index, Rank> shape = {};
};

/// The attribute update_rule.
enum class rule {
  linear,       ///< S_t = S_(t-1) + k_t v_t^T
  gated,        ///< S_t = exp(g_t) S_(t-1) + k_t v_t^T
  delta,        ///< S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T
  gated_delta,  ///< S' = exp(g_t) S_(t-1);  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
};

/// The rule that a model's attribute names. Throws std::invalid_argument for any other name.
inline rule rule_of(std::string_view name) {
  if (name == "linear") return rule::linear;
  if (name == "gated") return rule::gated;
  if (name == "delta") return rule::delta;
  if (name == "gated_delta") return rule::gated_delta;
  detail::refuse("onnx::rule_of", "update_rule is '", std::string(name),
                 "', expected linear, gated, delta or gated_delta");
}

/// The operator's attributes, with its defaults.
struct attributes {
  Eigen::Index q_num_heads = 0;          ///< H_q, required
  Eigen::Index kv_num_heads = 0;         ///< H_kv, required; one of H_q and H_kv divides the other
  rule update_rule = rule::gated_delta;  ///< see rule_of
  float scale = 0;                       ///< multiplies q; 0 stands for 1/sqrt(d_k)
  Eigen::Index chunk_size = 64;          ///< a hint, which this implementation does not need: of no effect
};

/// The operator's inputs. d_k is what query's last dimension says, d_v what value's does.
template <class T, class State = float>
struct inputs {
  tensor<const T, 3> query;                               ///< (B, T, H_q d_k)
  tensor<const T, 3> key;                                 ///< (B, T, H_kv d_k); or fewer heads that divide H_kv
  tensor<const T, 3> value;                               ///< (B, T, H_kv d_v)
  std::optional<tensor<const State, 4>> past_state = {};  ///< (B, H_kv, d_k, d_v); zeros where not given
  std::optional<tensor<const T, 3>> decay = {};           ///< log-decay, (B, T, H_kv) or (B, T, H_kv d_k)
  std::optional<tensor<const T, 3>> beta = {};            ///< (B, T, H_kv) or (B, T, 1)
};

/// The operator's outputs. present_state may be past_state's memory.
template <class T, class State = float>
struct outputs {
  tensor<T, 3> output;             ///< (B, T, max(H_q, H_kv) d_v)
  tensor<State, 4> present_state;  ///< (B, H_kv, d_k, d_v)
};

namespace onnx_detail {

inline constexpr const char* name = "onnx::linear_attention";

template <std::size_t Rank>
std::string text(const std::array<Eigen::Index, Rank>& shape) {
  std::string all;
  for (const Eigen::Index n : shape) all += (all.empty() ? "(" : ", ") + std::to_string(n);
  return all + ")";
}

template <class T, std::size_t Rank>
void require(const char* what, const tensor<T, Rank>& x, const std::array<Eigen::Index, Rank>& shape,
             const char* letters) {
  if (x.shape != shape) {
    detail::refuse(name, what, " is ", text(x.shape), ", expected ", text(shape), ": ", letters);
  }
  Eigen::Index size = 1;
  for (const Eigen::Index n : shape) size *= n;
  if (x.data == nullptr && size > 0) detail::refuse(name, what, " is a null pointer to ", text(shape), " elements");
}

/// The dimension of one of `heads` heads that are packed in a tensor's last dimension.
template <class T>
Eigen::Index head_size(const char* what, const tensor<T, 3>& x, const char* heads_name, Eigen::Index heads) {
  const Eigen::Index last = x.shape[2];
  if (last < 1 || last % heads != 0) {
    detail::refuse(name, "the last dimension of ", what, " is ", last, ", not a multiple of ", heads_name, " = ",
                   heads);
  }
  return last / heads;
}

/// Batch element b of an input (B, T, columns) as rows of tokens.
template <class T>
matrix_view<const T> rows_of(const tensor<const T, 3>& x, Eigen::Index b) {
  return matrix_view<const T>(x.data + b * x.shape[1] * x.shape[2], x.shape[1], x.shape[2]);
}

/// Sizes of one call, once they have been found to agree.
struct sizes {
  Eigen::Index batch, tokens, head_dim, value_dim, key_heads, output_heads;
  bool decay_per_feature;
};

template <class T, class State>
sizes require_all(const attributes& a, const inputs<T, State>& x, const outputs<T, State>& y) {
  const Eigen::Index hq = a.q_num_heads, hkv = a.kv_num_heads;
  if (hq < 1 || hkv < 1 || (hq % hkv != 0 && hkv % hq != 0)) {
    detail::refuse(name, "q_num_heads is ", hq, " and kv_num_heads is ", hkv,
                   ": both must be positive, and one must divide the other");
  }
  const bool gated = a.update_rule == rule::gated || a.update_rule == rule::gated_delta;
  const bool delta = a.update_rule == rule::delta || a.update_rule == rule::gated_delta;
  const auto require_presence = [](const char* what, bool wanted, bool given) {
    if (wanted == given) return;
    detail::refuse(name, wanted ? "this update_rule requires the input " : "this update_rule forbids the input ", what);
  };
  require_presence("decay", gated, x.decay.has_value());
  require_presence("beta", delta, x.beta.has_value());

  sizes n{};
  n.batch = x.query.shape[0], n.tokens = x.query.shape[1];
  n.head_dim = head_size("query", x.query, "q_num_heads", hq);
  n.value_dim = head_size("value", x.value, "kv_num_heads", hkv);
  n.key_heads = x.key.shape[2] / n.head_dim;
  if (n.key_heads < 1 || x.key.shape[2] != n.key_heads * n.head_dim || hkv % n.key_heads != 0) {
    detail::refuse(name, "the last dimension of key is ", x.key.shape[2], ", expected kv_num_heads d_k = ", hkv, " * ",
                   n.head_dim, ", or that of fewer heads which divide kv_num_heads");
  }
  n.output_heads = std::max(hq, hkv);
  if (n.batch < 0 || n.tokens < 0) detail::refuse(name, "query is ", text(x.query.shape), ", with a negative size");
  require("query", x.query, {n.batch, n.tokens, hq * n.head_dim}, "(B, T, H_q d_k)");
  require("key", x.key, {n.batch, n.tokens, n.key_heads * n.head_dim}, "(B, T, H_kv d_k)");
  require("value", x.value, {n.batch, n.tokens, hkv * n.value_dim}, "(B, T, H_kv d_v)");
  if (x.decay) {
    n.decay_per_feature = x.decay->shape[2] != hkv;
    if (n.decay_per_feature && x.decay->shape[2] != hkv * n.head_dim) {
      detail::refuse(name, "the last dimension of decay is ", x.decay->shape[2], ", expected kv_num_heads = ", hkv,
                     " or kv_num_heads d_k = ", hkv * n.head_dim);
    }
    require("decay", *x.decay, {n.batch, n.tokens, x.decay->shape[2]}, "(B, T, ...)");
  }
  if (x.beta) {
    if (x.beta->shape[2] != hkv && x.beta->shape[2] != 1) {
      detail::refuse(name, "the last dimension of beta is ", x.beta->shape[2], ", expected kv_num_heads = ", hkv,
                     " or 1");
    }
    require("beta", *x.beta, {n.batch, n.tokens, x.beta->shape[2]}, "(B, T, ...)");
  }
  const std::array<Eigen::Index, 4> state = {n.batch, hkv, n.head_dim, n.value_dim};
  if (x.past_state) require("past_state", *x.past_state, state, "(B, H_kv, d_k, d_v)");
  require("output", y.output, {n.batch, n.tokens, n.output_heads * n.value_dim}, "(B, T, H_q d_v)");
  require("present_state", y.present_state, state, "(B, H_kv, d_k, d_v)");
  return n;
}

template <class Rule, class T, class State>
void run(const attributes& a, const sizes& n, const inputs<T, State>& x, const outputs<T, State>& y) {
  using operator_type = linattn::linear_attention<identity, Rule, T>;
  const operator_type attention({.head_dim = n.head_dim,
                                 .value_dim = n.value_dim,
                                 .heads = a.q_num_heads,
                                 .key_heads = n.key_heads,
                                 .value_heads = a.kv_num_heads,
                                 .query_scale = a.scale == 0 ? 1 / std::sqrt(double(n.head_dim)) : double(a.scale)});
  auto s = attention.make_state();
  auto ws = attention.make_workspace();
  const Eigen::Index columns = n.output_heads * n.value_dim;
  for (Eigen::Index b = 0; b < n.batch; ++b) {
    const auto head_of = [&](const auto& state, Eigen::Index h) {
      using element = std::remove_pointer_t<decltype(state.data)>;
      using matrix = row_matrix<std::remove_const_t<element>>;
      using map = Eigen::Map<std::conditional_t<std::is_const_v<element>, const matrix, matrix>>;
      return map(state.data + (b * a.kv_num_heads + h) * n.head_dim * n.value_dim, n.head_dim, n.value_dim);
    };
    if (b > 0) s.reset();
    for (Eigen::Index h = 0; x.past_state && h < a.kv_num_heads; ++h) {
      s.kv(h) = head_of(*x.past_state, h).template cast<typename operator_type::accumulator_type>();
    }
    typename operator_type::inputs gates;
    row_matrix<T> beta;
    if constexpr (requires { gates.log_decay; }) gates.log_decay = rows_of(*x.decay, b);
    if constexpr (requires { gates.beta; }) {
      gates.beta = rows_of(*x.beta, b);
      if (gates.beta.cols() != a.kv_num_heads) {
        beta = Eigen::Map<const row_matrix<T>>(gates.beta.data(), n.tokens, 1).replicate(1, a.kv_num_heads);
        gates.beta = beta;
      }
    }
    const matrix_view<T> out(y.output.data + b * n.tokens * columns, n.tokens, columns);
    const auto q = rows_of(x.query, b), k = rows_of(x.key, b), v = rows_of(x.value, b);
    if (n.tokens == 1) {  // of one token's blocks, padding would be most
      attention.step({&s, 1}, q, k, v, gates, out, ws);
    } else {
      attention.forward_causal(s, q, k, v, gates, out, ws);
    }
    for (Eigen::Index h = 0; h < a.kv_num_heads; ++h) {
      head_of(y.present_state, h) = s.kv(h).template cast<State>();
    }
  }
}

}  // namespace onnx_detail

/// LinearAttention, for every batch element and output head,
///
///     out_t = scale S_t^T q_t      S_t by the update rule, from past_state      present_state = S_(T-1)
///
/// Output head h reads state h H_kv / H_out with query head h H_q / H_out, rounded down, H_out = max(H_q, H_kv); state
/// s is written with the key head s H_k / H_kv, H_k being the heads that key has. ONNX asks for H_k = H_kv and for H_q
/// a multiple of H_kv (grouped-query heads; multi-query for H_kv = 1); fewer key heads, and fewer query heads than
/// states, are what ONNX Runtime's operator of the same name adds.
///
/// T is float, double, Eigen::half or Eigen::bfloat16; so is State, whatever T. Computed in float, or double where T
/// is, with one rounding of every output. decay <= 0, in log space. Without tokens present_state is past_state.
///
/// Errors: std::invalid_argument, before anything is written, for head counts that do not divide, a decay or beta that
/// the rule needs and lacks or has and forbids, last dimensions that fit neither shape, and every other shape that does
/// not agree. Cost: that of linear_attention::forward_causal, one copy of the state in and out, and memory for a state,
/// a workspace, and where beta is (B, T, 1) for its copies of one batch element.
template <class T, class State = float>
void linear_attention(const attributes& a, const inputs<T, State>& x, const outputs<T, State>& y) {
  const onnx_detail::sizes n = onnx_detail::require_all(a, x, y);
  constexpr decay_kind per_feature = decay_kind::per_feature;
  switch (a.update_rule) {
    case rule::linear:
      return onnx_detail::run<additive>(a, n, x, y);
    case rule::gated:
      return n.decay_per_feature ? onnx_detail::run<gated<per_feature>>(a, n, x, y)
                                 : onnx_detail::run<gated<>>(a, n, x, y);
    case rule::delta:
      return onnx_detail::run<delta>(a, n, x, y);
    case rule::gated_delta:
      return n.decay_per_feature ? onnx_detail::run<gated_delta<per_feature>>(a, n, x, y)
                                 : onnx_detail::run<gated_delta<>>(a, n, x, y);
  }
}

}  // namespace onnx
LINATTN_NAMESPACE_END
