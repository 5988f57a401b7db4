// The laws of linear attention with dpfp<2>: more features than coordinates, most of them zero, and zero denominators.
#include <linattn/feature_maps/dpfp.hpp>

#include "support/oracle.hpp"

namespace support {

inline oracle_map oracle_for(const linattn::dpfp<2>&) {
  return oracle_map([](const wide_vector& x, Eigen::Index, Eigen::Index) {
    const Eigen::Index size = 2 * x.size();
    wide_vector y(size);
    y << x.cwiseMax(0), (-x).cwiseMax(0);
    wide_vector phi(2 * size);
    for (Eigen::Index i = 0; i < size; ++i) {
      phi[i] = y[i] * y[(i + size - 1) % size];
      phi[size + i] = y[i] * y[(i + 2 * size - 2) % size];
    }
    return phi;
  });
}

}  // namespace support

#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::dpfp<2>, T, Sizes...>;

using types = support::subjects<with<double>, with<float, 3, 7, 2>>;
INSTANTIATE_TYPED_TEST_SUITE_P(dpfp, Laws, types, support::subject_names);

}  // namespace
