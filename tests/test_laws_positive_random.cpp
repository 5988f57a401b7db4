// The laws of linear attention with positive random features: a map with parameters, C from the map.
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::positive_random<T>, T, Sizes...>;

using types = support::subjects<with<float>, with<double, 3, 17, 1>>;
INSTANTIATE_TYPED_TEST_SUITE_P(positive_random, Laws, types, support::subject_names);

}  // namespace
