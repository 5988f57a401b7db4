// The cases of tests/data about update rules, all in one form: fla_*, lightning_*, ort_* and onnx_*. Their layouts,
// names and conventions end here.
//
//   for (const support::rule_reference& c : support::rule_references()) {
//     SCOPED_TRACE(c.name);
//     ... c.kind, c.inputs, c.initial give c.expected
#pragma once

#include "support/reference_data.hpp"
#include "support/rule_gradient_oracle.hpp"
#include "support/rule_oracle.hpp"

#include <Eigen/Core>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

namespace support {

/// One batch element of one case. Heads are as many as those of the output: where several share a state, that state's
/// keys, values, gates and initial value are repeated.
struct rule_reference {
  std::string name;
  rule_kind kind = rule_kind::additive;
  rule_inputs inputs;    ///< float numbers, but for log-decays that are computed here
  rule_state initial;    ///< zeros where the case has none
  rule_result expected;  ///< in double
  /// What the named implementation gave in float, where that is another computation than `expected`.
  std::optional<rule_result> peer_in_float;

  struct gradient_part {
    wide_matrix dout;
    rule_state dstate;
    rule_gradients expected;
  };
  std::optional<gradient_part> gradients;
};

namespace detail {

inline rule_state reference_state(const reference_case& data, const std::string& name, Eigen::Index b) {
  rule_state s;
  for (Eigen::Index h = 0; h < data.array(name).shape.at(1); ++h) s.push_back(data.head<long double>(name, b, h));
  return s;
}

inline rule_state zero_state(Eigen::Index heads, Eigen::Index features, Eigen::Index value_dim) {
  return rule_state(static_cast<std::size_t>(heads), wide_matrix::Zero(features, value_dim));
}

/// Column blocks repeated so that there are `heads` of them, each of the old ones that many times in a row.
inline wide_matrix repeat_heads(const wide_matrix& x, Eigen::Index old_heads, Eigen::Index heads) {
  const Eigen::Index cols = x.cols() / old_heads;
  wide_matrix repeated(x.rows(), heads * cols);
  for (Eigen::Index h = 0; h < heads; ++h) {
    repeated.middleCols(h * cols, cols) = x.middleCols(h * old_heads / heads * cols, cols);
  }
  return repeated;
}
inline rule_state repeat_heads(const rule_state& s, Eigen::Index heads) {
  rule_state repeated;
  for (Eigen::Index h = 0; h < heads; ++h) {
    repeated.push_back(s.at(std::size_t(h * Eigen::Index(s.size()) / heads)));
  }
  return repeated;
}

/// log_decay = -exp(w): RWKV-7 hands over w.
inline wide_matrix minus_exp(const wide_matrix& w) {
  return w.unaryExpr([](long double x) { return -std::exp(x); });
}

}  // namespace detail

/// Arrays [batch, position, head, dim], their names and rule told by `kind` and what there is.
inline rule_reference rule_reference_by_position(const std::string& name, rule_kind kind, Eigen::Index b) {
  const auto data = reference_case::load(name);
  const auto packed = [&](const char* array) { return data.packed<long double>(array, b); };
  const rule_traits rule = traits_of(kind);
  const auto& k_shape = data.array("k").shape;
  rule_reference c;
  c.name = name + ", batch element " + std::to_string(b);
  c.kind = kind;
  c.inputs.heads = k_shape.at(2);
  c.inputs.query_scale = data.number("scale");
  c.inputs.q = packed("q");
  c.inputs.k = packed("k");
  c.inputs.v = packed("v");
  if (data.has("g")) c.inputs.log_decay = packed("g");
  if (data.has("gamma")) c.inputs.log_decay = data.row<long double>("gamma").array().log();
  if (data.has("slopes")) c.inputs.log_decay = -data.row<long double>("slopes");
  if (kind == rule_kind::gated_bonus) c.inputs.log_decay = packed("w");
  if (kind == rule_kind::generalized_delta) c.inputs.log_decay = detail::minus_exp(packed("w"));
  if (rule.corrects) c.inputs.beta = packed("beta");
  if (rule.transforms) {
    c.inputs.a = packed("a");
    c.inputs.b = packed("b");
  }
  if (rule.reads_first) c.inputs.bonus = data.row<long double>("u");
  const auto zeros = detail::zero_state(c.inputs.heads, k_shape.at(3), data.array("v").shape.at(3));
  c.initial = data.has("S0") ? detail::reference_state(data, "S0", b) : zeros;
  c.expected = {packed("o"), detail::reference_state(data, "S", b)};

  // Gradients summed over the batch (of u) are not those of one element and are left out.
  if (data.has("dq")) {
    const bool own_names = rule.transforms || rule.reads_first;  // w is their decay, the loss has c and no final state
    c.gradients.emplace();
    c.gradients->dout = packed(own_names ? "c" : "w");
    c.gradients->dstate = data.has("wS") ? detail::reference_state(data, "wS", b) : zeros;
    rule_gradients& d = c.gradients->expected;
    d.dq = packed("dq");
    d.dk = packed("dk");
    d.dv = packed("dv");
    if (data.has("dg")) d.dlog_decay = packed("dg");
    if (kind == rule_kind::gated_bonus) d.dlog_decay = packed("dw");
    if (kind == rule_kind::generalized_delta) {  // dw = dlog_decay dlog_decay/dw
      d.dlog_decay = packed("dw").cwiseQuotient(c.inputs.log_decay);
    }
    if (rule.corrects) d.dbeta = packed("dbeta");
    if (rule.transforms) {
      d.da = packed("da");
      d.db = packed("db");
    }
    d.dinitial = detail::reference_state(data, "dS0", b);
  }
  return c;
}

/// The operator LinearAttention: [batch, position, head dim], query heads that share states.
inline rule_reference rule_reference_of_operator(const std::string& name, rule_kind kind, Eigen::Index b) {
  const auto data = reference_case::load(name);
  const auto q_heads = static_cast<Eigen::Index>(data.number("q_num_heads"));
  const auto state_heads = static_cast<Eigen::Index>(data.number("kv_num_heads"));
  const auto repeated = [&](const char* array) {
    return detail::repeat_heads(data.packed<long double>(array, b), state_heads, q_heads);
  };
  rule_reference c;
  c.name = name + ", batch element " + std::to_string(b);
  c.kind = kind;
  c.inputs.heads = q_heads;
  const long double features = data.number("dk");
  // As an attribute the scale is a float; by default it is computed.
  c.inputs.query_scale =
      data.text("scale").starts_with("default") ? 1 / std::sqrt(features) : static_cast<float>(data.number("scale"));
  c.inputs.q = data.packed<long double>("query", b);
  c.inputs.k = repeated("key");
  c.inputs.v = repeated("value");
  if (data.has("decay")) c.inputs.log_decay = repeated("decay");
  if (data.has("beta")) c.inputs.beta = repeated("beta");
  c.initial = data.has("past_state")
                  ? detail::repeat_heads(detail::reference_state(data, "past_state", b), q_heads)
                  : detail::zero_state(q_heads, c.inputs.k.cols() / q_heads, c.inputs.v.cols() / q_heads);
  const auto result = [&](const std::string& suffix) {
    return rule_result{data.packed<long double>("output" + suffix, b),
                       detail::repeat_heads(detail::reference_state(data, "present_state" + suffix, b), q_heads)};
  };
  c.expected = result("");
  c.peer_in_float = result(data.has("output_ref") ? "_ref" : "_f32");
  return c;
}

/// Every case there is, one entry a batch element.
inline std::vector<rule_reference> rule_references() {
  struct source {
    const char* name;
    rule_kind kind;
    rule_reference (*read)(const std::string& name, rule_kind kind, Eigen::Index b);
    Eigen::Index batch;
  };
  using kind = rule_kind;
  constexpr auto* by_position = rule_reference_by_position;
  constexpr auto* of_operator = rule_reference_of_operator;
  std::vector<rule_reference> all;
  for (const source& from : {
           source{"fla_retention_01", kind::decay, by_position, 1},
           {"lightning_orig_01", kind::decay, by_position, 1},
           {"fla_simple_gla_02", kind::gated_per_head, by_position, 2},
           {"fla_gla_02_grad", kind::gated_per_feature, by_position, 2},
           {"fla_delta_02_grad", kind::delta, by_position, 2},
           {"fla_gateddelta_02_grad", kind::gated_delta_per_head, by_position, 2},
           {"fla_kda_01_grad", kind::gated_delta_per_feature, by_position, 2},
           {"fla_rwkv6_02_grad", kind::gated_bonus, by_position, 2},
           {"fla_rwkv7_01_grad", kind::generalized_delta, by_position, 2},
           {"onnx_linear", kind::additive, of_operator, 2},
           {"onnx_gated", kind::gated_per_feature, of_operator, 2},
           {"onnx_delta", kind::delta, of_operator, 2},
           {"onnx_gated_delta", kind::gated_delta_per_feature, of_operator, 2},
           {"onnx_gated_delta_gqa", kind::gated_delta_per_feature, of_operator, 2},
           {"onnx_prefill_with_past", kind::gated_delta_per_feature, of_operator, 2},
           {"ort_linear_mha_past", kind::additive, of_operator, 2},
           {"ort_gated_head_mha", kind::gated_per_head, of_operator, 2},
           {"ort_gated_dim_mha_past", kind::gated_per_feature, of_operator, 1},
           {"ort_delta_gqa_past", kind::delta, of_operator, 2},
           {"ort_gateddelta_head_mha_past", kind::gated_delta_per_head, of_operator, 1},
       }) {
    for (Eigen::Index b = 0; b < from.batch; ++b) all.push_back(from.read(from.name, from.kind, b));
  }
  return all;
}

}  // namespace support
