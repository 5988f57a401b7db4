// expect: a transformer's Scalar must be float or double
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#ifdef LINATTN_MUST_FAIL
using transformer_scalar = Eigen::half;
#else
using transformer_scalar = float;
#endif

void transformer_of_half_storage(const linattn::transformer_weights<transformer_scalar>& weights) {
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, transformer_scalar>;
  const linattn::transformer<attention> model({}, weights, attention({.head_dim = 4}));
}
