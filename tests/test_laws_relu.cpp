// The laws of linear attention with phi(x) = max(x, 0): zero denominators.
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::relu, T, Sizes...>;

using types = support::subjects<with<float>, with<double, 15, 16, 1>>;
INSTANTIATE_TYPED_TEST_SUITE_P(relu, Laws, types, support::subject_names);

}  // namespace
