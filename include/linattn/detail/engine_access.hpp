// The one door through the privacy of operators, states, drafts and workspaces.
#pragma once

#include <linattn/version.hpp>

#include <Eigen/Core>

LINATTN_NAMESPACE_BEGIN
namespace detail {

struct engine_access {
  template <class State, class Layout>
  static State make_state(const Layout& layout, Eigen::Index first_position) {
    return State(layout, first_position);
  }
  template <class State, class Layout, class T>
  static State attach_state(const Layout& layout, T* memory) noexcept {
    return State(layout, memory);
  }
  template <class Workspace, class Layout>
  static Workspace make_workspace(const Layout& layout) {
    return Workspace(layout);
  }
  template <class State>
  static auto* data(State& state) noexcept {
    return state.m_slab.data();
  }
  template <class State>
  static bool is_empty(const State& state) noexcept {
    return state.m_slab.size() == 0;
  }
  template <class State>
  static void add_tokens(State& state, Eigen::Index n) noexcept {
    state.add_tokens(n);
  }
  /// Adds what `later`, without a decay of its own, holds of a head.
  template <class State, class T>
  static void append_head(State& state, Eigen::Index head, const T* later) {
    state.append_head(state.head_data(head), later);
  }
  template <class Draft>
  static void set_tokens(Draft& draft, Eigen::Index n, Eigen::Index position) noexcept {
    draft.m_tokens = n;
    draft.m_position = position;
  }
  template <class Workspace>
  static auto& slab(Workspace& workspace) noexcept {
    return workspace.m_slab;
  }

  // What batch.hpp needs of an operator and of the states it is given.

  template <class Attention>
  static const auto& layout(const Attention& attn) noexcept {
    return attn.m_layout;
  }
  template <class Attention>
  static auto engine(const Attention& attn) noexcept {
    return attn.engine();
  }
  template <class Attention, class Inputs, class F>
  static void for_each_input(const Attention& attn, const Inputs& x, const F& f) {
    attn.for_each_input(x, f);
  }
  template <class Attention>
  static auto no_inputs() {
    return Attention::no_inputs();
  }
  template <class Attention, class Workspace>
  static void require_workspace(const Attention& attn, const char* function, Workspace& ws) {
    attn.require_workspace(function, ws);
  }
  template <class Attention, class State>
  static void require_state(const Attention& attn, const char* function, const State& s) {
    attn.require_state(function, s);
  }
  template <class Attention>
  static void require_differentiable() {
    Attention::require_differentiable();
  }
  template <class Attention, class Engine, class Arguments>
  static void run_vjp(const Attention& attn, const Engine& constants, const Arguments& a,
                      typename Attention::workspace_type& ws) {
    attn.run_vjp(constants, a, ws);
  }
  template <class Attention, class Engine, class Arguments, class State>
  static void run_vjp_causal(const Attention& attn, const Engine& constants, const Arguments& a, const State* initial,
                             State* dstate, typename Attention::workspace_type& ws) {
    attn.run_vjp_causal(constants, a, initial, dstate, ws);
  }
  /// f(span of states) or f(pool), or neither where there are none.
  template <class States, class F>
  static void visit(const States& states, const F& f) {
    if (states.m_kind == States::kind::states) f(states.m_states);
    if (states.m_kind == States::kind::pool) f(states.m_pool);
  }
};

}  // namespace detail
LINATTN_NAMESPACE_END
