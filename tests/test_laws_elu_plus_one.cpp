// The laws of linear attention with phi(x) = elu(x) + 1, the paper's map; here also sizes that are fixed but for heads.
#include "support/laws.hpp"

namespace {

template <class T, Eigen::Index... Sizes>
using with = support::subject<linattn::elu_plus_one, T, Sizes...>;

using types = support::subjects<with<float>, with<double, 16, 9, 3>, with<double>, with<float, 7, 16, 3>,
                                with<float, 64, 65, Eigen::Dynamic>>;
INSTANTIATE_TYPED_TEST_SUITE_P(elu_plus_one, Laws, types, support::subject_names);

}  // namespace
