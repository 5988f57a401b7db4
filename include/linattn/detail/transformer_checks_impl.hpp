// How transformer.hpp's model is made from weights, and what its calls refuse.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/transformer.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

LINATTN_NAMESPACE_BEGIN

// ---- made from weights ---------------------------------------------------------------------------------------------

template <class A, class C>
transformer<A, C>::transformer(const transformer_options& o, const transformer_weights<scalar>& weights, const A& attn)
    : transformer(o, weights, std::vector<A>(weights.layers.size(), attn)) {}

template <class A, class C>
transformer<A, C>::transformer(const transformer_options& o, const transformer_weights<scalar>& weights, const A& attn,
                               const C& cross)
    : transformer(o, weights, std::vector<A>(weights.layers.size(), attn),
                  std::vector<C>(weights.layers.size(), cross)) {}

template <class A, class C>
transformer<A, C>::transformer(const transformer_options& o, const transformer_weights<scalar>& weights,
                               std::vector<A> attn, std::vector<C> cross)
    : m_options(o), m_sizes(detail::sizes_of(weights)) {
  constexpr const char* function = "transformer";
  const std::size_t layers = weights.layers.size();
  if (layers == 0) detail::refuse(function, "there are weights of no layer");
  if (attn.size() != layers) {
    detail::refuse(function, Eigen::Index(attn.size()), " attention operators for ", Eigen::Index(layers),
                   " layers: one for all, or one each");
  }
  if (!cross.empty() && cross.size() != layers) {
    detail::refuse(function, Eigen::Index(cross.size()), " cross-attention operators for ", Eigen::Index(layers),
                   " layers");
  }
  if (!(scalar(o.norm_epsilon) > 0)) {
    detail::refuse(function, "norm_epsilon is ", o.norm_epsilon, ", in the model's type not above 0");
  }
  const auto require_alike = [](const auto& all, const char* what) {
    for (const auto& a : all) {
      if (a.heads() != all[0].heads() || a.head_dim() != all[0].head_dim() || a.key_heads() != all[0].key_heads() ||
          a.value_heads() != all[0].value_heads() || a.value_dim() != all[0].value_dim() ||
          a.state_bytes() != all[0].state_bytes()) {
        detail::refuse(function, "the layers' ", what, " operators differ in their sizes");
      }
    }
  };
  require_alike(attn, "attention");
  require_alike(cross, "cross-attention");

  m_sizes.query_width = attn[0].heads() * attn[0].head_dim();
  m_sizes.key_width = attn[0].key_heads() * attn[0].head_dim();
  m_sizes.value_width = attn[0].value_heads() * attn[0].value_dim();
  m_sizes.output_width = attn[0].output_heads() * attn[0].value_dim();
  m_sizes.log_decays = attention_inputs::log_decays(attn[0]);
  m_sizes.betas = attention_inputs::betas(attn[0]);
  m_sizes.norms = o.wiring != wiring::paper;
  m_input_width = weights.embedding.size() > 0 ? weights.embedding.cols()
                  : o.input_width != 0         ? o.input_width
                                               : width();
  check_sizes(weights);
  if (cross.empty() != (m_sizes.memory_width == 0)) {
    detail::refuse(function, cross.empty() ? "a decoder's weights need cross-attention operators"
                                           : "cross-attention operators need weights of a memory");
  }

  for (const C& c : cross) {
    const auto require = [](const char* what, Eigen::Index is, Eigen::Index should_be) {
      if (is != should_be) {
        detail::refuse(function, "the cross-attention has ", is, " columns of ", what, ", the attention ", should_be);
      }
    };
    require("queries", c.heads() * c.head_dim(), m_sizes.query_width);
    require("keys", c.key_heads() * c.head_dim(), m_sizes.key_width);
    require("values", c.value_heads() * c.value_dim(), m_sizes.value_width);
    require("outputs", c.output_heads() * c.value_dim(), m_sizes.output_width);
  }

  const auto norm_of = [](const norm_weights<scalar>& n) {
    return norm{n.weight, n.bias.size() > 0 ? n.bias : row_vector<scalar>::Zero(n.weight.size())};
  };
  m_tables = std::make_shared<const tables>(tables{weights.embedding, weights.positions});
  for (std::size_t l = 0; l < layers; ++l) {
    const layer_weights<scalar>& w = weights.layers[l];
    const multi_head_weights<scalar>& a = w.attention;
    m_layers.push_back({.attention = std::move(attn[l]),
                        .inputs = {{&a.query, &a.key, &a.value, &a.log_decay, &a.beta}},
                        .out = {{&a.out}},
                        .linear1 = {{&w.linear1}},
                        .linear2 = {{&w.linear2}},
                        .of_attention = norm_of(w.norm_attention),
                        .of_feed_forward = norm_of(w.norm_feed_forward)});
    if (cross.empty()) continue;
    m_cross.push_back({.attention = std::move(cross[l]),
                       .query = {{&w.cross.query}},
                       .memory = {{&w.cross.key, &w.cross.value}},
                       .out = {{&w.cross.out}},
                       .before = norm_of(w.norm_cross)});
  }
  m_norm = norm_of(weights.norm);
  if (m_sizes.outputs > 0) m_predictor = {{&weights.predictor}};

  const Eigen::Index waves = o.positions == position_encoding::sinusoid_added ? width() : width() - m_input_width;
  for (Eigen::Index i = 0; 2 * i < waves; ++i) {
    m_frequencies.push_back(std::pow(10000.0, -2.0 * double(i) / double(waves)));
  }
}

template <class A, class C>
void transformer<A, C>::check_sizes(const transformer_weights<scalar>& weights) const {
  constexpr const char* function = "transformer";
  std::string wrong;
  const auto compare = [&](const std::string& name, const auto& tensor, Eigen::Index rows, Eigen::Index cols) {
    const bool may_be_left_out = name.ends_with(".bias");
    if (tensor.size() == 0 && (rows == 0 || may_be_left_out)) return;
    if (tensor.size() != 0 && tensor.rows() == rows && tensor.cols() == cols) return;
    const detail::shape_text is{tensor.rows(), tensor.cols()};
    wrong += rows == 0 ? detail::sentence("\n  ", name, " is ", is, ", but has no place")
                       : detail::sentence("\n  ", name, " is ", is, ", but should be ", detail::shape_text{rows, cols});
  };
  transformer_sizes with_all_biases = m_sizes;
  with_all_biases.biases = true;
  detail::visit_tensors(weights, with_all_biases, compare);
  if (m_sizes.feed_forward == 0 || m_sizes.width == 0)
    wrong += "\n  layers.0.linear1.weight and layers.0.linear2.weight are missing";
  if (!wrong.empty()) {
    detail::refuse(function, "weights do not fit the first layer's width and the attention:", wrong);
  }
  const bool is_concatenated = m_options.positions == position_encoding::sinusoid_concatenated;
  if (is_concatenated ? m_input_width < 1 || m_input_width >= width() : m_input_width != width()) {
    detail::refuse(function, "inputs of ", m_input_width, " columns do not fit layers of width ", width(),
                   is_concatenated ? ": positions are concatenated" : "");
  }
  if ((m_options.positions == position_encoding::learned) != (weights.positions.rows() > 0)) {
    detail::refuse(function,
                   "positions are learned where there are weights of them, and only there: ", weights.positions.rows(),
                   " rows are given");
  }
}

template <class A, class C>
Eigen::Index transformer<A, C>::weight_bytes() const noexcept {
  Eigen::Index bytes = m_predictor.bytes();
  for (const self_layer& l : m_layers)
    bytes += l.inputs.bytes() + l.out.bytes() + l.linear1.bytes() + l.linear2.bytes();
  for (const cross_layer& l : m_cross) bytes += l.query.bytes() + l.out.bytes();
  return bytes;
}

template <class A, class C>
auto transformer<A, C>::make_state() const -> state_type {
  state_type s;
  for (const self_layer& l : m_layers) s.m_layers.push_back(l.attention.make_state());
  for (const cross_layer& l : m_cross) s.m_memories.push_back(l.attention.make_state());
  return s;
}

/// Columns of what attention takes of a row, side by side.
template <class A, class C>
Eigen::Index transformer<A, C>::most_inputs() const noexcept {
  Eigen::Index inputs = m_layers[0].inputs.outputs();
  if (!m_cross.empty()) inputs = std::max({inputs, m_cross[0].query.outputs(), m_cross[0].memory.outputs()});
  return inputs;
}

template <class A, class C>
auto transformer<A, C>::make_workspace(Eigen::Index rows) const -> workspace_type {
  if (rows < 1) detail::refuse("transformer::make_workspace", rows, " rows are asked for, at least 1 is needed");
  using buffer = typename workspace_type::buffer;
  workspace_type ws(rows, m_layers[0].attention);
  if (!m_cross.empty()) ws.m_cross.push_back(m_cross[0].attention.make_workspace());
  ws.m_x = buffer(rows, width());
  ws.m_branch = buffer(rows, width());
  ws.m_inputs = buffer(rows, most_inputs());
  ws.m_outputs = buffer(rows, m_sizes.output_width);
  ws.m_hidden = buffer(rows, m_sizes.feed_forward);
  return ws;
}

// ---- checks --------------------------------------------------------------------------------------------------------

template <class A, class C>
bool transformer<A, C>::fits(const state_type& s) const noexcept {
  return s.m_layers.size() == m_layers.size() && s.m_memories.size() == m_cross.size();
}
template <class A, class C>
bool transformer<A, C>::fits(const workspace_type& ws) const noexcept {
  return ws.m_x.has(width()) && ws.m_inputs.has(most_inputs()) && ws.m_outputs.has(m_sizes.output_width) &&
         ws.m_hidden.has(m_sizes.feed_forward) && ws.m_cross.empty() == m_cross.empty();
}

template <class A, class C>
void transformer<A, C>::check_state(const char* function, const state_type& s) const {
  if (fits(s)) return;
  detail::refuse(function, "the state has ", Eigen::Index(s.m_layers.size()), " layers and ",
                 Eigen::Index(s.m_memories.size()), " memories, the model ", layers(), " and ",
                 Eigen::Index(m_cross.size()), ": take it from this model's make_state()");
}

template <class A, class C>
void transformer<A, C>::check_workspace(const char* function, const workspace_type& ws) const {
  if (fits(ws)) return;
  if (ws.m_x.slab.empty()) detail::refuse(function, "the workspace is moved from");
  detail::refuse(function, "the workspace has rows of ", ws.m_x.cols, ", ", ws.m_inputs.cols, ", ", ws.m_outputs.cols,
                 " and ", ws.m_hidden.cols, " columns", ws.m_cross.empty() ? "" : " and is a decoder's",
                 ", the model needs ", width(), ", ", most_inputs(), ", ", m_sizes.output_width, " and ",
                 m_sizes.feed_forward, m_cross.empty() ? "" : ", a decoder's",
                 ": take it from this model's make_workspace()");
}

/// Inputs and outputs of tokens first ... of a sequence. Returns how many have keys.
template <class A, class C>
template <class X>
Eigen::Index transformer<A, C>::check_call(const char* function, const X& x, Eigen::Index first, const output& out,
                                           Eigen::Index keys) const {
  const Eigen::Index rows = count(x);
  if constexpr (std::is_same_v<X, symbols>) {
    for (Eigen::Index i = 0; i < rows; ++i) {
      if (x[std::size_t(i)] >= 0 && x[std::size_t(i)] < m_tables->embedding.rows()) continue;
      detail::refuse(function, "x has symbol ", x[std::size_t(i)], " at ", i, ", the embedding has ",
                     m_tables->embedding.rows());
    }
  } else if (x.cols() != m_input_width) {
    detail::refuse(function, "x is ", detail::shape_text{x.rows(), x.cols()}, ", but the model takes ", m_input_width,
                   " columns");
  }
  if (out.cols() != outputs() || (out.rows() != rows && !(out.rows() == 1 && rows > 0))) {
    detail::refuse(function, "out is ", detail::shape_text{out.rows(), out.cols()}, ", but ", rows, " tokens give ",
                   detail::shape_text{rows, outputs()}, ", or the last of them ", detail::shape_text{1, outputs()});
  }
  if (keys < -1 || keys > rows) detail::refuse(function, keys, " keys are asked for, of ", rows, " tokens");
  if (m_options.positions == position_encoding::learned && first + rows > m_tables->positions.rows()) {
    detail::refuse(function, "tokens up to number ", first + rows, ", but positions are learned for ",
                   m_tables->positions.rows());
  }
  return keys < 0 ? rows : keys;
}

LINATTN_NAMESPACE_END
