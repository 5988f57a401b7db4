// expect: the feature map's parameters are of another scalar type than the operator's features
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/linear_attention.hpp>

void feature_map_of_another_scalar(const linattn::positive_random<double>& map) {
#ifdef LINATTN_MUST_FAIL
  using attention_type = linattn::linear_attention<linattn::positive_random<double>>;
#else
  using attention_type = linattn::linear_attention<linattn::positive_random<double>, linattn::additive, double>;
#endif
  attention_type attention({.head_dim = map.head_dim()}, map);
}
