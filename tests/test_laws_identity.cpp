// The laws of linear attention with phi(x) = x: signed, not normalised unless its denominators are clamped.
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::identity, T, Sizes...>;

using types = support::subjects<with<double>, with<float, 9, 2, 3>>;
INSTANTIATE_TYPED_TEST_SUITE_P(identity, Laws, types, support::subject_names);

}  // namespace
