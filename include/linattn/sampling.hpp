// From logits to a symbol, and to likelihoods. Not part of linattn.hpp: include it where a model's output is read.
//
//   linattn::sampler draw({.temperature = 0.8, .top_p = 0.95, .seed = 7}, 256);
//   for (Eigen::Index t = 0; t < n; ++t) symbols[t] = draw(logits.row(t));      // allocates nothing
//   const double nats = -linattn::log_likelihood(logits.row(0), symbols[0]);
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/random.hpp>
#include <linattn/matrix_view.hpp>

#include <Eigen/Core>
#include <cstdint>
#include <vector>

LINATTN_NAMESPACE_BEGIN

// For all functions here: logits x_0 ... x_(n-1) are what a vector_view accepts, of float or double; p = softmax(x).
// What is computed from them is computed in double.
//
// Infinities.  A logit of -inf is a symbol that does not occur, which is how to forbid one. Where some are +inf, these
//              share all probability equally: the limit of large logits.
// Draws.       The same on every compiler, standard library and processor, to the symbol: random numbers are a function
//              of seed and count, and exponentials and logarithms on the way to a symbol are this library's own, with
//              nothing that a compiler may contract. (Not so under -ffast-math.) Likelihoods use the standard
//              library's, and may differ in their last bits.
// Errors.      std::invalid_argument, before a random number is used: no logits; all of them -inf; for a draw, a NaN,
//              with its index. Likelihoods keep a NaN instead.

/// Random numbers one after the other: number i of a seed and stream is a function of the three (Philox 4x32-10,
/// detail/random.hpp). A value: a copy goes on with the same numbers. Streams of one seed are independent.
class random_stream {
 public:
  explicit random_stream(std::uint64_t seed = 0, std::uint64_t stream = 0) noexcept : m_seed(seed), m_stream(stream) {}

  /// Uniform on the open interval (0, 1).
  double uniform() noexcept { return detail::random_uniform(m_seed, m_stream, m_drawn++); }

  /// How many there were; and those up to number n counted as drawn, so that the next is number n.
  std::uint64_t drawn() const noexcept { return m_drawn; }
  void skip_to(std::uint64_t n) noexcept { m_drawn = n; }

 private:
  std::uint64_t m_seed;
  std::uint64_t m_stream;
  std::uint64_t m_drawn = 0;
};

/// What a sampler does to a distribution before it draws, in this order.
struct sampling_options {
  double temperature = 1;  ///< p = softmax(x / temperature); 0: the largest logit, as `greedy`
  Eigen::Index top_k = 0;  ///< of these, only the k most probable; 0: all
  double top_p = 1;        ///< of these, the fewest most probable that have at least this share; in (0, 1], 1: all
  std::uint64_t seed = 0;
};

/// The symbol of the largest logit; the lowest of several. O(n), no allocation.
template <class Logits>
Eigen::Index greedy(Logits&& logits);

/// Draws symbols from logits. A value: a copy draws the same symbols.
///
/// Ties at the edge of top_k and of top_p go to the lowest symbols, so that min(k, n) remain, whatever the logits; at
/// least one does. Call i of a sampler takes random number i of its seed.
///
/// Cost of a call: n exponentials (some 50 to 100 ns each without hardware fma in the build, less with it); with top_k
/// a selection, O(n); with top_p a heap, O(n + m log n) for m symbols that remain. Memory: 24 bytes a symbol, once.
/// Sources: Fan, Lewis, Dauphin, Hierarchical neural story generation, 2018 (top k); Holtzman et al., The curious case
/// of neural text degeneration, 2020 (top p).
class sampler {
 public:
  /// Throws for a temperature that is negative or not finite, a negative top_k, a top_p outside (0, 1]. `symbols`:
  /// calls with at most so many logits do not allocate; one with more makes room, once.
  explicit sampler(const sampling_options& options = {}, Eigen::Index symbols = 0);

  /// A symbol, 0 ... n - 1.
  template <class Logits>
  Eigen::Index operator()(Logits&& logits);

  const sampling_options& options() const noexcept { return m_options; }

 private:
  void make_room(Eigen::Index symbols);
  Eigen::Index draw(Eigen::Index best);
  Eigen::Index last_of_top_k();
  Eigen::Index last_of_top_p(Eigen::Index last);
  bool before(Eigen::Index a, Eigen::Index b) const;
  double mass(Eigen::Index last) const;

  sampling_options m_options;
  random_stream m_random;
  std::vector<double> m_logits;
  std::vector<double> m_weights;
  std::vector<Eigen::Index> m_order;
};

/// ln p_symbol = x_symbol - ln sum_j exp(x_j), in nats; bits are nats / ln 2. NaN where a logit is NaN or all are -inf.
/// Throws for a symbol outside 0 ... n - 1. Numerics: the largest logit is subtracted first: an absolute error of a few
/// ulp of |x_symbol - max x| + ln n. Cost: n exponentials, no allocation.
template <class Logits>
double log_likelihood(Logits&& logits, Eigen::Index symbol);

/// out_i = ln p_i for all i, rounded once to out's scalar; `out` may be the logits. Throws, before anything is written,
/// for another size.
template <class Logits, class Out>
void log_softmax(Logits&& logits, Out&& out);

LINATTN_NAMESPACE_END

#include <linattn/detail/sampling_impl.hpp>
