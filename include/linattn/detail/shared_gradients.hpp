// Gradients of heads that share, as sums of those of heads that do not.
//
// An output head g is an attention by itself, of the rows of its query head, and of its state s and that one's key
// head. So the gradient with respect to rows that several output heads use is the sum of what each of them gives:
//
//   dq_h = sum of dq_g, query_of(g) = h      dk_h = sum of dk_g, key_of(s) = h      dv_s, dgates_s, dS_s = sum over g
//
// The first one's is written to the caller's rows, where the sweeps leave numbers for each other besides; the others'
// are written to rows of one head, aside, and then added. The order is that of the states and their readers, so that
// the bits do not depend on tasks, which have whole groups (head_map::groups).
#pragma once

#include <linattn/detail/engine.hpp>
#include <linattn/detail/state_storage.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// One head's rows as those of every head.
template <class U>
token_rows<U> rows_of_head(const token_rows<U>& x, Eigen::Index head) {
  return {x.data == nullptr ? nullptr : x.at(0, head), x.row_stride, 0};
}

/// One of the gradients, or none where its data is null.
template <class T>
class summed_rows {
 public:
  /// With memory for `rows` rows aside.
  summed_rows(const token_rows<T>& all, Eigen::Index dim, Eigen::Index rows)
      : m_all(all), m_dim(dim), m_aside(all.data == nullptr ? 0 : rows * dim) {}

  /// Where the part that comes next is written, the first one of `head` or a later one.
  token_rows<T> part(Eigen::Index head, bool first) {
    m_sum = rows_of_head(m_all, head);
    m_adds = !first && m_sum.data != nullptr;
    return m_adds ? token_rows<T>(m_aside.data(), m_dim, 0) : m_sum;
  }
  /// After it has been written: to its sum. Of `rows` rows those that `kept` does not leave out.
  void add(Eigen::Index rows, const std::uint8_t* kept) const {
    for (Eigen::Index i = 0; m_adds && i < rows; ++i) {
      if (kept != nullptr && kept[i] == 0) continue;
      const T* const from = m_aside.data() + i * m_dim;
      T* const to = m_sum.at(i, 0);
      for (Eigen::Index d = 0; d < m_dim; ++d) to[d] += from[d];
    }
  }

 private:
  token_rows<T> m_all, m_sum;
  Eigen::Index m_dim;
  state_slab<T> m_aside;  // (rows, dim)
  bool m_adds = false;
};

/// for_each_output_head, which says more.
template <class Engine, class Arguments, class Run>
LINATTN_NOINLINE void run_output_heads(const Engine& all, const Arguments& a, const Run& run) {
  using T = typename Engine::T;
  const auto& layout = all.layout;
  const auto& heads = layout.heads;
  const Eigen::Index queries = rows_with(a.queries, a.kept_queries), keys = rows_with(a.keys, a.kept_keys);
  const Eigen::Index outputs = heads.outputs();
  const Eigen::Index sums_of_state = heads.readers > 1 ? keys : 0;
  summed_rows<T> dq(a.dq, layout.head_dim, heads.queries != outputs ? queries : 0);
  summed_rows<T> dk(a.dk, layout.head_dim, heads.keys != outputs ? keys : 0);
  summed_rows<T> dv(a.dv, layout.state.value_dim, sums_of_state);
  summed_rows<T> dlog_decay(a.dlog_decay, layout.state.decays(), sums_of_state);
  summed_rows<T> dbeta(a.dbeta, 1, sums_of_state);
  for (Eigen::Index s = 0; s < heads.states; ++s) {
    if (!a.groups.contains(heads.group_of(s, heads.states))) continue;
    Engine engine = all;
    engine.states = {s, s + 1};
    const Eigen::Index key = heads.key_of(s);
    for (Eigen::Index reader = 0; reader < heads.readers; ++reader) {
      const Eigen::Index output = heads.output_of(s, reader), query = heads.query_of(output);
      Arguments x = a;
      x.q = rows_of_head(a.q, query);
      x.k = rows_of_head(a.k, key);
      x.dout = rows_of_head(a.dout, output);
      x.query_from_state = query - s;
      x.key_from_state = key - s;
      x.dq = dq.part(query, heads.is_first(output, heads.queries, outputs));
      x.dk = dk.part(key, reader == 0 && heads.is_first(s, heads.keys, heads.states));
      x.dv = dv.part(s, reader == 0);
      x.dlog_decay = dlog_decay.part(s, reader == 0);
      x.dbeta = dbeta.part(s, reader == 0);
      run(engine, x, s, reader == 0);
      dq.add(queries, a.kept_queries);
      for (const auto* sum : {&dk, &dv, &dlog_decay, &dbeta}) sum->add(keys, a.kept_keys);
    }
  }
}

/// run(engine, arguments, s, first) for every output head of the groups `a.groups`: an engine of the state s alone,
/// the arguments whose rows of head s are that output head's, and whether it is the first that reads s.
///
/// Allocates the rows aside: those of one head, of each gradient that is a sum. Called through a pointer, as refusals
/// are (checks.hpp): a LINATTN_NONBLOCKING caller whose heads do not share has no allocation.
template <class Engine, class Arguments, class Run>
void for_each_output_head(const Engine& all, const Arguments& a, const Run& run) {
  LINATTN_PUSH_EFFECT_WARNINGS
  void (*const hidden)(const Engine&, const Arguments&, const Run&) LINATTN_NONBLOCKING =
      &run_output_heads<Engine, Arguments, Run>;
  LINATTN_POP_EFFECT_WARNINGS
  hidden(all, a, run);
}

}  // namespace detail
LINATTN_NAMESPACE_END
