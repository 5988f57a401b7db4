// The laws of linear attention with trigonometric random features: signed, with parameters.
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::random_fourier<T>, T, Sizes...>;

using types = support::subjects<with<double>, with<float, 7, 8, 3>>;
INSTANTIATE_TYPED_TEST_SUITE_P(random_fourier, Laws, types, support::subject_names);

}  // namespace
