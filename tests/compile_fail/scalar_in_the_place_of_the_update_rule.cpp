// expect: the second template argument must be an update rule, such as linattn::additive; Scalar is the third
#include <linattn/linattn.hpp>

void scalar_in_the_place_of_the_update_rule() {
#ifdef LINATTN_MUST_FAIL
  linattn::linear_attention<linattn::elu_plus_one, double> attention({.head_dim = 4});
#else
  linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double> attention({.head_dim = 4});
#endif
}
