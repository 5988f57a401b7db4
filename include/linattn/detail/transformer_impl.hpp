// How transformer.hpp's model runs: layers, whole sequences, tokens.
#pragma once

#include <linattn/detail/layer_checks.hpp>
#include <linattn/detail/layer_functions.hpp>
#include <linattn/transformer.hpp>

#include <algorithm>
#include <utility>

LINATTN_NAMESPACE_BEGIN

// ---- the layers ----------------------------------------------------------------------------------------------------

template <class A, class C>
void transformer<A, C>::add_position(scalar* row, Eigen::Index position) const noexcept {
  switch (m_options.positions) {
    case position_encoding::none:
      return;
    case position_encoding::sinusoid_added:
      return detail::sinusoid(position, m_frequencies.data(), row, width(), true);
    case position_encoding::sinusoid_concatenated:
      return detail::sinusoid(position, m_frequencies.data(), row + m_input_width, width() - m_input_width, false);
    case position_encoding::learned:
      for (Eigen::Index c = 0; c < width(); ++c) row[c] += m_tables->positions(position, c);
  }
}

/// Row `row` of x into a row of F, with what is known of its place.
template <class A, class C>
void transformer<A, C>::embed(symbols x, Eigen::Index row, scalar* to, Eigen::Index position) const noexcept {
  const scalar* const from = m_tables->embedding.data() + x[std::size_t(row)] * m_input_width;
  std::copy(from, from + m_input_width, to);
  add_position(to, position);
}
template <class A, class C>
void transformer<A, C>::embed(const input& x, Eigen::Index row, scalar* to, Eigen::Index position) const noexcept {
  std::copy(x.row(row), x.row(row) + m_input_width, to);
  add_position(to, position);
}

template <class A, class C>
void transformer<A, C>::normalize(const norm& n, matrix_view<const scalar> x, matrix_view<scalar> y) const noexcept {
  detail::layer_norm(x, n.weight.data(), n.bias.data(), scalar(m_options.norm_epsilon), y);
}

/// One branch of a layer into x, as the wiring has it; branch(from, to) computes it, `scratch` is a place for it.
template <class A, class C>
template <class Branch>
void transformer<A, C>::join(matrix_view<scalar> x, matrix_view<scalar> scratch, const norm& n,
                             const Branch& branch) const {
  if (m_options.wiring == wiring::pre_norm) {
    normalize(n, x, scratch);
    branch(scratch, scratch);
  } else {
    branch(x, scratch);
  }
  detail::add_rows(x, matrix_view<const scalar>(scratch));
  if (m_options.wiring == wiring::post_norm) normalize(n, x, x);
}

/// Rows of ws.m_x through all layers. attend(l, inputs, out): the attention of layer l. recall(l, q, out): the
/// cross-attention.
template <class A, class C>
template <class Attend, class Recall>
void transformer<A, C>::run_layers(Eigen::Index rows, workspace_type& ws, const Attend& attend,
                                   const Recall& recall) const {
  using rows_in = const matrix_view<scalar>&;
  const matrix_view<scalar> x = ws.m_x.top(rows), scratch = ws.m_branch.top(rows);  // (R, F)
  const matrix_view<scalar> hidden = ws.m_hidden.top(rows);                         // (R, feed-forward)
  for (std::size_t l = 0; l < m_layers.size(); ++l) {
    const self_layer& of = m_layers[l];
    join(x, scratch, of.of_attention, [&](rows_in from, rows_in to) {
      const matrix_view<scalar> out = ws.m_outputs.top(rows, of.out.inputs());     // (R, Ho M)
      const matrix_view<scalar> all = ws.m_inputs.top(rows, of.inputs.outputs());  // (R, H D + Hk D + Hv M + ...)
      of.inputs.apply(from, all);
      const attention_inputs inputs(of.attention, all);
      inputs.activate();
      attend(l, inputs, out);
      of.out.apply(out, to);
    });
    if (!m_cross.empty()) {
      const cross_layer& c = m_cross[l];
      join(x, scratch, c.before, [&](rows_in from, rows_in to) {
        const matrix_view<scalar> q = ws.m_inputs.top(rows, c.query.outputs());
        const matrix_view<scalar> out = ws.m_outputs.top(rows, c.out.inputs());
        c.query.apply(from, q);
        recall(l, q, out);
        c.out.apply(out, to);
      });
    }
    const auto feed_forward = [&](rows_in from, rows_in to) {
      of.linear1.apply(from, hidden);
      if (m_options.activation == activation::relu) {
        detail::relu_rows(hidden);
      } else {
        detail::gelu_rows(hidden);
      }
      of.linear2.apply(hidden, to);
    };
    if (m_options.wiring == wiring::paper) {
      feed_forward(x, x);
    } else {
      join(x, scratch, of.of_feed_forward, feed_forward);
    }
  }
}

/// The final norm and the head, for rows of ws.m_x.
template <class A, class C>
void transformer<A, C>::predict(matrix_view<scalar> x, output out) const noexcept {
  if (m_sizes.final_norm) normalize(m_norm, x, x);
  if (!m_predictor.is_empty()) return m_predictor.apply(x, out);
  for (Eigen::Index r = 0; r < x.rows(); ++r) std::copy(x.row(r), x.row(r) + x.cols(), out.row(r));
}

// ---- whole sequences -----------------------------------------------------------------------------------------------

template <class A, class C>
template <class X>
void transformer<A, C>::run_causal(state_type& s, const X& x, output out, workspace_type& ws, Eigen::Index keys) const {
  constexpr const char* function = "transformer::forward_causal";
  check_state(function, s);
  check_workspace(function, ws);
  const Eigen::Index with_keys = check_call(function, x, s.m_tokens, out, keys);
  for (const auto& layer : s.m_layers) detail::check_room(function, layer, with_keys);
  if constexpr (std::is_same_v<X, input>) {
    if (out.rows() == x.rows()) detail::assert_apart_or_same(x, out);  // one row is written when all of x was read
  }
  for (std::size_t l = 0; l < m_cross.size(); ++l) {
    // No rows: a memory of another model is refused before layer 0 is written.
    m_cross[l].attention.read(s.m_memories[l], input(nullptr, 0, m_cross[l].query.outputs()),
                              output(nullptr, 0, m_cross[l].out.inputs()), ws.m_cross[0]);
  }
  const Eigen::Index n = count(x), first = s.m_tokens;
  for (Eigen::Index begin = 0; begin < n; begin += ws.rows()) {
    const Eigen::Index rows = std::min(ws.rows(), n - begin);
    const Eigen::Index kept = std::clamp<Eigen::Index>(with_keys - begin, 0, rows);
    const matrix_view<scalar> in = ws.m_x.top(rows);
    for (Eigen::Index r = 0; r < rows; ++r) embed(x, begin + r, in.row(r), first + begin + r);
    run_layers(
        rows, ws,
        [&](std::size_t l, const attention_inputs& inputs, matrix_view<scalar> o) {
          inputs.forward_causal(s.m_layers[l], kept, o, ws.m_attention);
        },
        [&](std::size_t l, matrix_view<scalar> q, matrix_view<scalar> o) {
          m_cross[l].attention.read(s.m_memories[l], q, o, ws.m_cross[0]);
        });
    s.m_tokens += kept;
    if (out.rows() == n) {
      predict(in, output(out.row(begin), rows, out.cols(), out.row_stride()));
    } else if (begin + rows == n) {
      predict(matrix_view<scalar>(in.row(rows - 1), 1, in.cols()), out);
    }
  }
}

template <class A, class C>
template <class X>
void transformer<A, C>::run_bidirectional(const X& x, output out, workspace_type& ws, Eigen::Index keys) const {
  constexpr const char* function = "transformer::forward";
  if (!m_cross.empty()) detail::refuse(function, "a decoder's tokens see those before them: use forward_causal");
  check_workspace(function, ws);
  const Eigen::Index with_keys = check_call(function, x, 0, out, keys);
  ws.m_state.reset();
  detail::check_room(function, ws.m_state, with_keys);
  const Eigen::Index n = count(x);
  if (n > ws.rows()) {
    detail::refuse(function, "a sequence of ", n, " tokens needs a workspace of as many rows, not ", ws.rows(),
                   ": make_workspace(", n, ")");
  }
  if (n == 0) return;
  const matrix_view<scalar> in = ws.m_x.top(n);
  for (Eigen::Index r = 0; r < n; ++r) embed(x, r, in.row(r), r);
  run_layers(
      n, ws,
      [&](std::size_t, const attention_inputs& inputs, matrix_view<scalar> o) {
        ws.m_state.reset();
        inputs.forward(ws.m_state, with_keys, o, ws.m_attention);
      },
      [](std::size_t, matrix_view<scalar>, matrix_view<scalar>) {});
  predict(out.rows() == n ? in : matrix_view<scalar>(in.row(n - 1), 1, in.cols()), out);
}

template <class A, class C>
template <class X>
auto transformer<A, C>::causal_of(const X& x) const -> row_matrix<scalar> {
  row_matrix<scalar> out(count(x), outputs());
  state_type s = make_state();
  workspace_type ws = make_workspace(std::clamp<Eigen::Index>(count(x), 1, 64));
  run_causal(s, x, out, ws, -1);
  return out;
}
template <class A, class C>
template <class X>
auto transformer<A, C>::bidirectional_of(const X& x) const -> row_matrix<scalar> {
  row_matrix<scalar> out(count(x), outputs());
  workspace_type ws = make_workspace(std::max<Eigen::Index>(count(x), 1));
  run_bidirectional(x, out, ws, -1);
  return out;
}
template <class A, class C>
void transformer<A, C>::absorb_memory(state_type& s, input memory, workspace_type& ws) const {
  constexpr const char* function = "transformer::absorb_memory";
  check_state(function, s);
  check_workspace(function, ws);
  if (m_cross.empty() || memory.cols() != m_sizes.memory_width) {
    detail::refuse(function, "the memory is ", detail::shape_text{memory.rows(), memory.cols()},
                   ", but the model takes ", m_sizes.memory_width, " columns");
  }
  for (const auto& remembered : s.m_memories) detail::check_room(function, remembered, memory.rows());
  for (std::size_t l = 0; l < m_cross.size(); ++l) {
    const cross_layer& c = m_cross[l];
    const Eigen::Index keys = c.attention.key_heads() * c.attention.head_dim();
    for (Eigen::Index begin = 0; begin < memory.rows(); begin += ws.rows()) {
      const Eigen::Index rows = std::min(ws.rows(), memory.rows() - begin);
      const matrix_view<scalar> kv = ws.m_inputs.top(rows, c.memory.outputs());
      c.memory.apply(input(memory.row(begin), rows, memory.cols(), memory.row_stride()), kv);
      c.attention.absorb(s.m_memories[l], input(kv.data(), rows, keys, kv.row_stride()),
                         input(kv.data() + keys, rows, kv.cols() - keys, kv.row_stride()), ws.m_cross[0]);
    }
  }
}

// ---- token by token ------------------------------------------------------------------------------------------------

template <class A, class C>
template <class X>
void transformer<A, C>::run_step(std::span<state_type> states, const X& x, output out,
                                 workspace_type& ws) const noexcept {
  const auto rows = static_cast<Eigen::Index>(states.size());
  LINATTN_ASSERT(count(x) == rows && out.rows() == rows && out.cols() == outputs() &&
                 "linattn::transformer::step: x and out need a row for each state");
  LINATTN_ASSERT(fits(ws) && "linattn::transformer::step: the workspace is of another model");
  LINATTN_ASSERT(rows <= ws.rows() && "linattn::transformer::step: the workspace has rows for fewer sequences");
  if (rows == 0) return;
  const matrix_view<scalar> in = ws.m_x.top(rows);
  for (Eigen::Index b = 0; b < rows; ++b) {
    LINATTN_ASSERT(fits(states[std::size_t(b)]) && "linattn::transformer::step: the state is of another model");
    LINATTN_ASSERT(fits(x, b) && "linattn::transformer::step: x has another width, or is no symbol of the embedding");
    Eigen::Index& tokens = states[std::size_t(b)].m_tokens;
    LINATTN_ASSERT((m_tables->positions.rows() == 0 || tokens < m_tables->positions.rows()) &&
                   "linattn::transformer::step: no position is learned for this token");
    embed(x, b, in.row(b), tokens);
    ++tokens;
  }
  run_layers(
      rows, ws,
      [&](std::size_t l, const attention_inputs& inputs, matrix_view<scalar> o) {
        for (Eigen::Index b = 0; b < rows; ++b) {
          inputs.step(states[std::size_t(b)].m_layers[l], b, o, ws.m_attention);
        }
      },
      [&](std::size_t l, matrix_view<scalar> q, matrix_view<scalar> o) {
        for (Eigen::Index b = 0; b < rows; ++b) {
          m_cross[l].attention.read(states[std::size_t(b)].m_memories[l], input(q.row(b), 1, q.cols()),
                                    output(o.row(b), 1, o.cols()), ws.m_cross[0]);
        }
      });
  predict(in, out);
}

LINATTN_NAMESPACE_END
