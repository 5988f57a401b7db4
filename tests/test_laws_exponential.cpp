// The laws of linear attention with phi(x) = exp(x).
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::exponential, T, Sizes...>;

using types = support::subjects<with<float>, with<double, 65, 64, 1>>;
INSTANTIATE_TYPED_TEST_SUITE_P(exponential, Laws, types, support::subject_names);

}  // namespace
