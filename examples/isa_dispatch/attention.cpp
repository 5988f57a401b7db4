// Compiled once per level, each time into a shared object of its own. All of linattn and Eigen is in here.

#include "attention.hpp"

#include <linattn/linattn.hpp>
#include <linattn/state_io.hpp>

#include <span>
#include <stdexcept>

struct attention_session {
  using operator_type = linattn::linear_attention<linattn::elu_plus_one>;

  operator_type attention;
  operator_type::state_type state = attention.make_state();
  operator_type::workspace_type workspace = attention.make_workspace();
};

namespace {

attention_session* open_session(std::int64_t head_dim, std::int64_t heads) {
  return new attention_session{attention_session::operator_type({.head_dim = head_dim, .heads = heads})};
}

void close_session(attention_session* session) noexcept { delete session; }

void forward(attention_session* session, const float* q, const float* k, const float* v, float* out,
             std::int64_t tokens) {
  const Eigen::Index width = session->attention.heads() * session->attention.head_dim();
  const auto rows = [=](auto* data) { return linattn::matrix_view(data, tokens, width, width); };
  session->attention.forward_causal(session->state, rows(q), rows(k), rows(v), rows(out), session->workspace);
}

std::size_t saved_bytes(const attention_session* session) {
  return static_cast<std::size_t>(linattn::saved_bytes(session->attention));
}

void save(const attention_session* session, std::byte* to) {
  linattn::save(session->attention, session->state, std::span(to, saved_bytes(session)));
}

bool load(attention_session* session, const std::byte* from, std::size_t bytes) {
  try {
    linattn::load(session->attention, session->state, std::span(from, bytes));
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace

// As Eigen's own functions are: a template of the same name in every level. Were it visible, all levels would have one.
template <class T>
int packet_bytes() noexcept {
  return EIGEN_MAX_ALIGN_BYTES;
}

static const attention_table table = {
    packet_bytes<float>, open_session, close_session, forward, saved_bytes, save, load,
};
LINATTN_ISA_TABLE(table)
