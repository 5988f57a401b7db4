// The laws of linear attention with phi(x) = max(x, 0)^2: zero denominators.
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::squared_relu, T, Sizes...>;

using types = support::subjects<with<float>, with<double, 2, 3, 3>>;
INSTANTIATE_TYPED_TEST_SUITE_P(squared_relu, Laws, types, support::subject_names);

}  // namespace
