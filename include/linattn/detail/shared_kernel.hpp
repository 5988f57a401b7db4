// The kernel of heads that share a state: one token, written once and read with the queries of R heads.
//
//     S = a S + k v^T          o_r = q_r S          z = a z + k          denominator_r = q_r . z
//
// A row of S is loaded once and read R times, so that the writing and the traffic are shared, and the R outputs are as
// many independent chains as the blocks of kernel.hpp have tokens. An element of S and of an output is the same chain
// of roundings as there. For rules without correction; the others share the block of correction.hpp.
#pragma once

#include <linattn/detail/kernel.hpp>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Heads that read in one go: with 2 packets each as many accumulators as the reading kernel has. More take several
/// goes, of which all but the last leave the state as it was.
inline constexpr Eigen::Index most_readers = half_block;

/// One token against `rows` rows of `Packets` packets of value columns: as micro_block with B = 1, but q (R, rows) has
/// rows feature_stride apart and out (R, Packets) row_stride; bonus (R). Unless it Keeps, S stays as it was, and only
/// what is read knows what was written.
template <Eigen::Index R, bool Keeps, Eigen::Index Packets, kernel_form Form, class T>
LINATTN_NOINLINE void shared_block(head_rows<T> x, T* S, Eigen::Index feature_stride, Eigen::Index row_stride,
                                   Eigen::Index rows, bool adds, bool clears) {
  static_assert(Form.reads && Form.writes && !Form.once && Form.decay != decay_axis::column);
  using P = packet<T>;
  P value[Packets];      // (Packets)
  P output[R][Packets];  // (R, Packets)
  P factor;
  if constexpr (Form.decay == decay_axis::token) factor = P::broadcast(x.decay);
  unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
    constexpr Eigen::Index m = number<decltype(p)> * P::size;
    value[p] = P::load(x.v + m);
    unroll<R>([&](auto r) LINATTN_INLINE_LAMBDA {
      if (adds) {
        output[r][p] = P::load(x.out + r * row_stride + m);
      } else if constexpr (Form.reads_first) {
        output[r][p] = P::broadcast(x.bonus + r) * value[p];
      } else {
        output[r][p] = P::zero();
      }
    });
  });
  for (; rows > 0; --rows, S += row_stride, ++x.q, ++x.k) {
    P row[Packets];
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = P::load(S + p * P::size); });
    const auto read = [&]() LINATTN_INLINE_LAMBDA {
      unroll<R>([&](auto r) LINATTN_INLINE_LAMBDA {
        const P query = P::broadcast(x.q + r * feature_stride);
        unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[r][p] = fma(query, row[p], output[r][p]); });
      });
    };
    if constexpr (Form.reads_first) read();
    const P key = P::broadcast(x.k);
    if constexpr (Form.decay == decay_axis::row) factor = P::broadcast(x.decay++);
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA {
      if constexpr (Form.decay == decay_axis::none) {
        row[p] = fma(key, value[p], row[p]);
      } else {
        row[p] = fma(factor, row[p], key * value[p]);
      }
    });
    if constexpr (!Form.reads_first) read();
    if constexpr (Keeps) {
      if constexpr (Form.decay != decay_axis::none) {
        if (clears) unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p] = zero_below(row[p], silence<T>); });
      }
      unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { row[p].store(S + p * P::size); });
    }
  }
  unroll<R>([&](auto r) LINATTN_INLINE_LAMBDA {
    unroll<Packets>([&](auto p) LINATTN_INLINE_LAMBDA { output[r][p].store(x.out + r * row_stride + p * P::size); });
  });
}

/// The normaliser's half: z (C), and one denominator for each row of q (R, C).
template <Eigen::Index R, bool Keeps, kernel_form Form, class T>
LINATTN_INLINE void shared_normalizer(const head_rows<T>& x, Eigen::Index stride, T* z, T* denominators) {
  using P = packet<T>;
  P product[R];  // (R)
  unroll<R>([&](auto r) LINATTN_INLINE_LAMBDA { product[r] = P::zero(); });
  for (Eigen::Index c = 0; c < stride; c += P::size) {
    P total = P::load(z + c);
    if constexpr (Form.decay != decay_axis::none) {
      total = fma(decay_of<Form>(x, c, 0), total, P::load(x.k + c));
    } else {
      total = total + P::load(x.k + c);
    }
    unroll<R>([&](auto r)
                  LINATTN_INLINE_LAMBDA { product[r] = fma(P::load(x.q + r * stride + c), total, product[r]); });
    if constexpr (Keeps) total.store(z + c);
  }
  unroll<R>([&](auto r) LINATTN_INLINE_LAMBDA { denominators[r] = sum(product[r]); });
}

/// f(number of the first, how many, whether they are the last) for the goes in which `readers` heads read one token;
/// the latter two are constants.
template <Eigen::Index Most = most_readers, class F>
LINATTN_INLINE void for_each_go(Eigen::Index readers, const F& f, Eigen::Index first = 0) {
  using count = std::integral_constant<Eigen::Index, Most>;
  if constexpr (Most > 1) {
    for (; first + Most < readers; first += Most) f(first, count(), std::false_type());
  }
  if (first + Most == readers) {
    f(first, count(), std::true_type());
  } else if constexpr (Most > 1) {
    for_each_go<Most / 2>(readers, f, first);
  }
}

/// `tokens` tokens of the heads that share one S (C, M), and the z (C) behind it where the layout keeps one: as
/// attend_head. x.q (T, R, C), x.out (T, R, M), x.bonus and denominators (T, R).
template <kernel_form Form, bool Normalizes, class T, class Layout>
LINATTN_NOINLINE void attend_shared(const Layout& layout, Eigen::Index tokens, Eigen::Index readers,
                                    const head_rows<T>& x, T* S, T* denominators, const rows_ahead& next) {
  constexpr Eigen::Index size = packet<T>::size;
  const Eigen::Index features = layout.features;
  const Eigen::Index stride = layout.feature_stride();
  const Eigen::Index row_stride = layout.row_stride();
  if constexpr (Layout::rule.normalizes) {
    for (Eigen::Index i = 0; i < tokens; ++i) {
      head_rows<T> token{x.q + i * readers * stride, x.k + i * stride};
      if constexpr (Form.decay == decay_axis::token) token.decay = x.decay + i;
      if constexpr (Form.decay == decay_axis::row) token.decay = x.decay + i * stride;
      if constexpr (Normalizes) {
        for_each_go(readers, [&](Eigen::Index first, auto count, auto last) LINATTN_INLINE_LAMBDA {
          head_rows<T> go = token;
          go.q += first * stride;
          shared_normalizer<number<decltype(count)>, decltype(last)::value, Form, T>(
              go, stride, S + layout.z_offset(), denominators + i * readers + first);
        });
      } else {
        normalizer_block<1, false, Form, T>(token, stride, S + layout.z_offset(), denominators);
      }
    }
  }
  for_each_panel<2, T>(
      row_stride, [&](auto packets, Eigen::Index m, Eigen::Index panel, Eigen::Index panels) LINATTN_INLINE_LAMBDA {
        constexpr Eigen::Index lines = (packets * size + line<T> - 1) / line<T>;
        const rows_ahead::share<1, lines> ahead(next, panel, panels);
        for (Eigen::Index c = 0; c < features; c += feature_tile<T>) {
          const Eigen::Index rows = std::min(feature_tile<T>, features - c);
          for (Eigen::Index i = 0; i < tokens; ++i) {
            if (c == 0) ahead.fetch(i);
            for_each_go(readers, [&](Eigen::Index first, auto count, auto last) LINATTN_INLINE_LAMBDA {
              const Eigen::Index row = i * readers + first;
              head_rows<T> go{x.q + row * stride + c, x.k + i * stride + c, x.v + i * row_stride + m,
                              x.out + row * row_stride + m};
              if constexpr (Form.decay == decay_axis::token) go.decay = x.decay + i;
              if constexpr (Form.decay == decay_axis::row) go.decay = x.decay + i * stride + c;
              if constexpr (Form.reads_first) go.bonus = x.bonus + row;
              shared_block<number<decltype(count)>, decltype(last)::value, number<decltype(packets)>, Form, T>(
                  go, S + c * row_stride + m, stride, row_stride, rows, c > 0, x.clears && i + 1 == tokens);
            });
          }
        }
      });
}

}  // namespace detail
LINATTN_NAMESPACE_END
