// What every gradient sweep is made of: tiles of tokens forwards and backwards, transposed states, and decays.
//
// The gradient of a log-decay needs no stored state. With R_t the gradient with respect to S_t, as it stands when token
// t has been reached from behind, and a_t S_(t-1) = S_t minus what token t wrote,
//
//     dlog_decay_t = rowsum(R_t * a_t S_(t-1)) = dlog_decay_(t+1) + x_t       dlog_decay_(N+1) = rowsum(S_N * dS_N)
//     x_t          = phi(q_t) dphi(q_t) - phi(k_t) dphi(k_t)
//
// per feature, or summed over the features of a head; gradient_correction.hpp has the x_t of rules that correct. The
// terms wait in the rows of dlog_decay; their sum cancels where decays are strong, and is kept in two numbers. A decay
// of exactly 0 has the gradient 0, and the sum starts anew.
#pragma once

#include <linattn/detail/engine.hpp>
#include <linattn/detail/gradient_packing.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Rules whose gradient is built.
constexpr bool has_gradient(const rule_traits& rule) {
  return rule.corrects != correction::rank_one && rule.reads_after_write;
}

/// The arguments of a vjp, rows as in sequence_rows; dq, dk, dv are as q, k, v. `gradient` may be null, and so may the
/// data of the gradients of the rule's inputs. With a mask `queries` and `keys` are the numbers of tokens that count,
/// and rows of the others are neither read nor written. The causal forms have as many keys as queries, and one mask.
template <class T, rule_traits Rule, class Gradient>
struct gradient_arguments {
  static_assert(!is_narrow<T>,
                "linattn: gradients are not built for half and bfloat16, which would round what the sweeps leave in "
                "dk and dv for each other; convert q, k, v and dout with .cast<float>(), and use a float operator");

  Eigen::Index queries = 0;
  Eigen::Index keys = 0;
  token_rows<const T> q, k, v, dout;
  token_rows<T> dq, dk, dv;
  Gradient* gradient = nullptr;
  rule_inputs<token_rows<const T>, Rule> gates = {};
  token_rows<T> dlog_decay = {};               // (N, H), or (N, H C) per feature
  token_rows<T> dbeta = {};                    // (N, H)
  const std::uint8_t* kept_queries = nullptr;  // not 0: this token counts; null: all do
  const std::uint8_t* kept_keys = nullptr;
  // Numbers of query and key heads, for maps that know them, minus that of their state.
  Eigen::Index query_from_state = 0;
  Eigen::Index key_from_state = 0;
  group_range groups = {};  // those that this is about, where heads share; where they do not, the engine's states are
};

template <class Map, class T, class Layout>
class gradient_sweeps {
 protected:
  using P = packet<T>;
  using forward_engine = engine<Map, T, Layout>;
  static constexpr rule_traits rule = forward_engine::rule;
  using arguments = gradient_arguments<T, rule, typename gradient_of<Map>::type>;
  static constexpr bool decays = rule.decay != decay_kind::none;
  static constexpr bool per_feature = rule.decay == decay_kind::per_feature;

  gradient_sweeps(const forward_engine& forward, const arguments& a, T* scratch)
      : m_layout(forward.layout),
        m_states(forward.states),
        m_a(a),
        m_packing(forward.map, forward.layout, forward.query_scale, a, scratch),
        m_queries(scratch + m_layout.queries()),
        m_keys(scratch + m_layout.keys()),
        m_values(scratch + m_layout.values()),
        m_douts(scratch + m_layout.outputs()),
        m_decay(scratch + m_layout.decay()),
        m_dphi(scratch + m_layout.feature_outputs()),
        m_dvalues(scratch + m_layout.value_outputs()),
        m_sums(scratch + m_layout.sums()),
        m_decay_sums(scratch + m_layout.decay_sums()),
        m_transposed(scratch + m_layout.own_transposed()) {}

  Eigen::Index tokens() const { return m_a.keys; }
  /// The heads that this is about: all, or those of a task.
  Eigen::Index heads() const { return m_states.size(); }
  template <class F>
  void for_each_head(const F& f) const {
    for (Eigen::Index h = m_states.first(); h < m_states.first() + m_states.size(); ++h) f(h);
  }
  Eigen::Index head_dim() const { return m_layout.head_dim; }
  Eigen::Index features() const { return m_layout.state.features; }
  Eigen::Index value_dim() const { return m_layout.state.value_dim; }
  Eigen::Index feature_stride() const { return m_layout.state.feature_stride(); }
  Eigen::Index row_stride() const { return m_layout.state.row_stride(); }
  T* transposed(Eigen::Index head) const { return m_transposed + head * m_layout.transposed().head_stride(); }
  Eigen::Index place_of(Eigen::Index head) const { return head * m_layout.state.head_stride(); }  // in a state

  /// f(tile, the one after it): heads within tiles of `count` tokens, the last tokens first where Backwards. Without
  /// the tile after it where all rows are taken to be in the cache, and where tokens are masked.
  template <bool Backwards, class F>
  void for_each_tile(Eigen::Index count, const std::uint8_t* mask, const F& f) const {
    const Eigen::Index most = m_layout.tokens();
    const Eigen::Index tiles = (count + most - 1) / most;
    const Eigen::Index row_bytes = heads() * (head_dim() + value_dim()) * Eigen::Index(sizeof(T));
    const bool far = mask == nullptr && 2 * count * row_bytes > forward_engine::near_bytes;
    const auto tile_at = [&](Eigen::Index i) -> head_tile {
      if (i >= tiles * heads()) return {};
      const Eigen::Index first = (Backwards ? tiles - 1 - i / heads() : i / heads()) * most;
      return {{first, std::min(most, count - first)}, m_states.first() + i % heads()};
    };
    kept_tokens<> kept(mask);
    if constexpr (Backwards) kept.go_behind(count);
    const Eigen::Index* numbers = nullptr;
    for (Eigen::Index i = 0; i < tiles * heads(); ++i) {
      head_tile t = tile_at(i);
      if (i % heads() == 0) numbers = (Backwards ? kept.previous(t.first, t.rows) : kept.next(t.first, t.rows)).numbers;
      t.numbers = numbers;
      f(t, far ? tile_at(i + 1) : head_tile());
    }
  }

  /// What the kernel fetches of a tile while it computes the one before it.
  template <class... Rows>
  rows_ahead ahead(const head_tile& next, const Rows&... rows) const {
    rows_ahead all(next.rows);
    if (next.rows > 0) (all.add(rows.data, rows.stride, rows.size, next.head == 0), ...);
    return all;
  }

  /// S^T of all heads: that of the initial state, or 0.
  void begin_transposed(const T* initial) const {
    const Eigen::Index size = m_layout.transposed().head_stride();
    for_each_head([&](Eigen::Index h) { std::fill_n(transposed(h), size, T(0)); });
    if (initial != nullptr) transpose_all(initial);
  }

  void transpose_all(const T* state) const {
    for_each_head([&](Eigen::Index h) {
      transpose(state + place_of(h), row_stride(), m_layout.state.features, value_dim(), transposed(h),
                feature_stride());
    });
  }

  void pack_rows(const tile_rows<const T>& x, Eigen::Index rows, Eigen::Index block, T* to) const {
    pack_values(m_layout, x, rows, block, to);
  }

  // ---- decays -------------------------------------------------------------------------------------------------------

  /// A kernel's form with the rule's decays, those of features along `axis`.
  static constexpr kernel_form with_decay(kernel_form form, decay_axis axis) {
    form.decay = per_feature || rule.log_scaled ? axis : decays ? decay_axis::token : decay_axis::none;
    return form;
  }

  /// What the state of a sweep decays by before each row of a tile: forwards by the decay of the row's token, backwards
  /// by that of the token after it, and before the last token not at all.
  template <bool Backwards>
  const T* pack_decays(const head_tile& t, Eigen::Index block) const {
    if constexpr (decays) {
      const Eigen::Index padded_rows = round_up(t.rows, block);
      const Eigen::Index none = Backwards && t.first + t.rows == tokens() ? 1 : 0;
      head_tile decaying = t;  // the tokens whose decays these are, but for the one that is none
      if constexpr (Backwards) decaying = {t.shifted(t.rows - none), t.head};
      if constexpr (per_feature) {
        T* const rest = m_decay + none * feature_stride();
        std::fill(m_decay, rest, T(1));
        if (decaying.rows > 0) {
          transform_rows(rows_of<Backwards>(m_a.gates.log_decay, decaying, features()), decaying.rows, features(), rest,
                         feature_stride(), [](const P& value) LINATTN_INLINE_LAMBDA { return exp(value); });
        }
        std::fill(m_decay + t.rows * feature_stride(), m_decay + padded_rows * feature_stride(), T(1));
      } else {
        std::fill(m_decay, m_decay + none, T(0));
        for (Eigen::Index r = 0; r < decaying.rows; ++r) {
          if constexpr (rule.fixed_decay) {
            m_decay[none + r] = T(m_a.gates.fixed_log_decay[t.head]);
          } else {
            m_decay[none + r] = *m_a.gates.log_decay.at(token_of<Backwards>(decaying, r), t.head);
          }
        }
        std::fill(m_decay + t.rows, m_decay + round_up(padded_rows, P::size), T(0));
        for (Eigen::Index r = 0; r < padded_rows; r += P::size) exp(P::load(m_decay + r)).store(m_decay + r);
      }
    }
    return m_decay;
  }

  /// The gradient with respect to S before the first token: that token's decay is still to come.
  void decay_initial(T* dstate) const {
    if constexpr (decays) {
      if (tokens() == 0) return;
      kept_tokens<> kept(m_a.kept_keys);
      const token_tile first = kept.next(0, 1);
      for_each_head([&](Eigen::Index h) {
        const T* const decay = pack_decays<false>({first, h}, 1);
        for (Eigen::Index c = 0; c < features(); ++c) {
          T* const row = dstate + place_of(h) + c * row_stride();
          const P factor(decay[per_feature ? c : 0]);
          for (Eigen::Index m = 0; m < row_stride(); m += P::size) (factor * P::load(row + m)).store(row + m);
          if (rule.normalizes) dstate[place_of(h) + m_layout.state.z_offset() + c] *= decay[per_feature ? c : 0];
        }
      });
    }
  }

  /// z or dz (C) before row r is added to it, by the rule's decay or where log scales move.
  LINATTN_INLINE void decay_by(Eigen::Index r, T* z) const {
    constexpr decay_axis axis = with_decay(reads_only, decay_axis::row).decay;
    for (Eigen::Index c = 0; axis != decay_axis::none && c < features(); c += P::size) {
      const P decay = axis == decay_axis::row ? P::load(m_decay + r * feature_stride() + c) : P(m_decay[r]);
      (decay * P::load(z + c)).store(z + c);
    }
  }

  /// to (C) += from (C).
  LINATTN_INLINE void add(const T* from, T* to) const {
    for (Eigen::Index c = 0; c < feature_stride(); c += P::size) (P::load(to + c) + P::load(from + c)).store(to + c);
  }
  /// The same of row r, after the decay that comes with it.
  LINATTN_INLINE void add(Eigen::Index r, const T* from, T* to) const {
    decay_by(r, to);
    add(from, to);
  }

  /// z and S^T of a head, as detail::clear_silent_features.
  void clear_silent_features(Eigen::Index head) const {
    T* const z = sums(head);
    for (Eigen::Index c = 0; c < features(); ++c) {
      z[c] = without_silence(z[c]);
      for (Eigen::Index m = 0; forward_engine::clears_rows && z[c] == T(0) && m < value_dim(); ++m) {
        transposed(head)[m * feature_stride() + c] = T(0);
      }
    }
  }

  // ---- gradients of log-decays --------------------------------------------------------------------------------------

  static constexpr bool has_log_decay = decltype(arguments::gates)::has_log_decay;

  bool wants_decays() const { return has_log_decay && m_a.dlog_decay.data != nullptr; }

  /// rowsum(S_N * dS_N), the first term of the sums, z a column of S; S(head, c, m).
  template <class State>
  void begin_decay_sums(const T* dstate, const State& S) const {
    if (!wants_decays()) return;
    for_each_head([&](Eigen::Index h) {
      double total = 0;
      for (Eigen::Index c = 0; c < features(); ++c) {
        const T* const row = dstate + place_of(h) + c * row_stride();
        for (Eigen::Index m = 0; m < value_dim(); ++m) total += double(S(h, c, m)) * double(row[m]);
        if (rule.normalizes) total += double(sums(h)[c]) * double(dstate[place_of(h) + m_layout.state.z_offset() + c]);
        const Eigen::Index place = per_feature ? c : 0;
        decay_sums(h)[place] = T(total);
        decay_sums(h)[sum_stride() + place] = T(total - double(T(total)));
        if (per_feature) total = 0;
      }
    });
  }

  /// A token's term of the sums: sign x y, features (C), set or added to what it has.
  template <bool Adds>
  LINATTN_INLINE void add_to_decays(Eigen::Index token, Eigen::Index head, T sign, const T* x, const T* y) const {
    T* const to = m_a.dlog_decay.at(token, head);
    const auto product = [&](Eigen::Index c)
                             LINATTN_INLINE_LAMBDA { return P(sign) * P::load(x + c) * P::load(y + c); };
    if constexpr (per_feature) {
      for_each_register<T>(features(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        store_up_to(to + c, Adds ? load_up_to(to + c, left) + product(c) : product(c), left);
      });
    } else {
      P total = P::zero();
      for (Eigen::Index c = 0; c < feature_stride(); c += P::size) total = total + product(c);
      *to = Adds ? *to + sum(total) : sum(total);
    }
  }

  /// A token's terms become its gradients: tokens come from the last to the first.
  LINATTN_INLINE void sum_decays(Eigen::Index token, Eigen::Index head) const {
    if constexpr (has_log_decay) {
      T* const to = m_a.dlog_decay.at(token, head);
      const T* const log_decay = m_a.gates.log_decay.at(token, head);
      for_each_register<T>(m_layout.state.decays(), [&](Eigen::Index c, Eigen::Index left) LINATTN_INLINE_LAMBDA {
        T* const high = decay_sums(head) + c;
        T* const low = high + sum_stride();
        const P decay = exp(load_up_to(log_decay + c, left)), term = load_up_to(to + c, left), before = P::load(high);
        const P after = before + term;
        const P share = after - before;  // of the term; what rounding took goes to `low`
        const P lost = (before - (after - share)) + (term - share);
        const P nothing = decay * P::zero();  // or NaN, which shows, where the decay is NaN
        const P rest = where_positive(decay, P::load(low) + lost) + nothing;
        const P total = where_positive(decay, after);
        total.store(high);
        rest.store(low);
        store_up_to(to + c, total + rest, left);
      });
    }
  }

  Eigen::Index sum_stride() const { return m_layout.sum_stride(); }
  T* sums(Eigen::Index head) const { return m_sums + head * sum_stride(); }                  // z (C)
  T* decay_sums(Eigen::Index head) const { return m_decay_sums + 2 * head * sum_stride(); }  // (2, C)

  const Layout& m_layout;
  [[no_unique_address]] decltype(forward_engine::states) m_states;
  const arguments& m_a;
  gradient_packing<Map, T, Layout> m_packing;
  T* m_queries;     // (T, C)
  T* m_keys;        // (T, C)
  T* m_values;      // (T, M)
  T* m_douts;       // (T, M)
  T* m_decay;       // (T, C) or (T)
  T* m_dphi;        // (T, C), what the kernel reads for dq and dk
  T* m_dvalues;     // (T, M), what it reads for dv
  T* m_sums;        // (H, C), z
  T* m_decay_sums;  // (H, 2, C)
  T* m_transposed;  // (H, M, C)
};

}  // namespace detail
LINATTN_NAMESPACE_END
