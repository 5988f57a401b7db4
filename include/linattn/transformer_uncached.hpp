// Decoding as it was before caches: all the tokens so far go through the model again for every new one.
//
//   const linattn::uncached_transformer uncached(model, 784);      // of up to 784 tokens; the model's weights
//   auto s = uncached.make_state();
//   auto ws = uncached.make_workspace(64);
//   uncached.step(s, symbol, logits, ws);                          // = model.step(...), to rounding
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/transformer.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

LINATTN_NAMESPACE_BEGIN

/// The slowest of the paper's three ways to generate, as a baseline: token i costs a forward pass over i + 1 tokens, so
/// a sequence of N costs O(N^2) passes through the weights, and O(N^3) of softmax attention. Calls are those of
/// `transformer`; outputs of the head are computed for the last token alone, and the passes are products of many rows.
/// The model is the caller's and outlives this. Its inputs are symbols; a decoder, whose memory has no place here, is
/// refused.
template <class Model>
class uncached_transformer {
 public:
  using scalar = typename Model::scalar;
  using output = typename Model::output;
  using symbols = typename Model::symbols;

  /// One sequence: its symbols so far.
  class state_type {
   public:
    Eigen::Index tokens() const noexcept { return m_tokens; }
    void reset() noexcept { m_tokens = 0; }

   private:
    friend class uncached_transformer;
    std::vector<Eigen::Index> m_symbols;
    Eigen::Index m_tokens = 0;
  };
  /// Scratch for one thread: all tokens of a sequence, and the states they go through.
  class workspace_type {
   private:
    friend class uncached_transformer;
    workspace_type(typename Model::workspace_type ws, typename Model::state_type s)
        : model(std::move(ws)), state(std::move(s)) {}
    typename Model::workspace_type model;
    typename Model::state_type state;
  };

  uncached_transformer(const Model& model, Eigen::Index max_tokens) : m_model(&model), m_max_tokens(max_tokens) {
    if (max_tokens < 1) detail::refuse("uncached_transformer", max_tokens, " tokens at most, at least 1 is needed");
    if (model.sizes().memory_width > 0) detail::refuse("uncached_transformer", "the model is a decoder with a memory");
  }
  uncached_transformer(const Model&&, Eigen::Index) = delete;  // a temporary would be gone before the first call

  Eigen::Index outputs() const noexcept { return m_model->outputs(); }
  /// 8 bytes a token, of max_tokens.
  state_type make_state() const {
    state_type s;
    s.m_symbols.resize(static_cast<std::size_t>(m_max_tokens));
    return s;
  }
  /// For passes of `rows` tokens at once.
  workspace_type make_workspace(Eigen::Index rows = 64) const {
    return workspace_type(m_model->make_workspace(rows), m_model->make_state());
  }

  /// A prompt, and the output behind its last token: out (1, outputs()). Throws where there is no room for it, and as
  /// the model does; s keeps what it had then.
  void forward_causal(state_type& s, symbols x, output out, workspace_type& ws) const {
    run(s, x, out, ws);
    s.m_tokens += static_cast<Eigen::Index>(x.size());
  }

  /// The next token of a sequence, and of many, one after the other. Throws as forward_causal does; all states keep
  /// what they had then, but rows of `out` may have been written.
  void step(state_type& s, Eigen::Index x, vector_view<scalar> out, workspace_type& ws) const {
    forward_causal(s, symbols(&x, 1), output(out.data(), 1, out.size()), ws);
  }
  void step(std::span<state_type> states, symbols x, output out, workspace_type& ws) const {
    if (x.size() != states.size() || out.rows() != static_cast<Eigen::Index>(states.size())) {
      detail::refuse("uncached_transformer::step", static_cast<Eigen::Index>(x.size()), " symbols and ", out.rows(),
                     " outputs for ", static_cast<Eigen::Index>(states.size()), " states");
    }
    for (std::size_t b = 0; b < states.size(); ++b) {
      run(states[b], x.subspan(b, 1), output(out.row(static_cast<Eigen::Index>(b)), 1, out.cols()), ws);
    }
    for (state_type& s : states) ++s.m_tokens;
  }

 private:
  /// What x makes of s, which does not yet count its tokens.
  void run(state_type& s, symbols x, output out, workspace_type& ws) const {
    const auto n = static_cast<Eigen::Index>(x.size());
    if (n < 1 || s.m_tokens + n > static_cast<Eigen::Index>(s.m_symbols.size())) {
      detail::refuse("uncached_transformer::forward_causal", "there is no room for ", n, " tokens behind ", s.m_tokens,
                     ", of ", static_cast<Eigen::Index>(s.m_symbols.size()));
    }
    if (out.rows() != 1) {
      detail::refuse("uncached_transformer::forward_causal", "out has ", out.rows(),
                     " rows, but the last token gives 1");
    }
    std::copy(x.begin(), x.end(), s.m_symbols.begin() + s.m_tokens);
    ws.state.reset();
    m_model->forward_causal(ws.state, symbols(s.m_symbols.data(), static_cast<std::size_t>(s.m_tokens + n)), out,
                            ws.model);
  }

  const Model* m_model;
  Eigen::Index m_max_tokens;
};

LINATTN_NAMESPACE_END
