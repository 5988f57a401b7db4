// How a batch is cut into tasks.
#pragma once

#include <linattn/version.hpp>

#include <Eigen/Core>
#include <algorithm>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// Parts of the sequences (heads, or columns of heads) in the order of their sequences, cut into slices that weigh
/// about the same: a part belongs to the slice in which its middle lies. Of equal sequences, part t of n goes to slice
/// (2 t + 1) slices / (2 n).
template <class Weight>
class batch_slices {
 public:
  /// weight(b): of each of the `parts` parts of sequence b.
  batch_slices(Eigen::Index sequences, Eigen::Index parts, Eigen::Index slices, const Weight& weight)
      : m_sequences(sequences), m_parts(parts), m_slices(slices), m_weight(weight) {
    for (Eigen::Index b = 0; b < sequences; ++b) m_total += parts * weight(b);
  }

  /// f(b, first, last) for the parts [first, last) of each sequence b that slice w has some of.
  template <class F>
  void for_each(Eigen::Index w, const F& f) const {
    Eigen::Index before = 0;
    for (Eigen::Index b = 0; b < m_sequences; ++b) {
      const Eigen::Index weight = m_weight(b);
      const auto slice_of = [&](Eigen::Index part) {
        return (2 * (before + part * weight) + weight) * m_slices / (2 * m_total);
      };
      const Eigen::Index low = slice_of(0), high = slice_of(m_parts - 1);
      if (low > w) return;
      if (low == w && high == w) {
        f(b, Eigen::Index(0), m_parts);
      } else if (high >= w) {
        Eigen::Index first = 0;
        while (slice_of(first) < w) ++first;
        Eigen::Index last = first;
        while (last < m_parts && slice_of(last) == w) ++last;
        if (first < last) f(b, first, last);
      }
      before += m_parts * weight;
    }
  }

 private:
  Eigen::Index m_sequences;
  Eigen::Index m_parts;
  Eigen::Index m_slices;
  Weight m_weight;
  Eigen::Index m_total = 0;
};

}  // namespace detail
LINATTN_NAMESPACE_END
