// Which closed form is whose: the oracle's map for each of the library's, by type alone.
#pragma once

#include "support/oracle.hpp"

#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>
#include <linattn/feature_maps/relu.hpp>
#include <linattn/feature_maps/squared_relu.hpp>
#include <linattn/options.hpp>

namespace support {

inline oracle_map oracle_for(const linattn::elu_plus_one&) { return oracle_elu_plus_one(); }
inline oracle_map oracle_for(const linattn::exponential&) { return oracle_exponential(); }
inline oracle_map oracle_for(const linattn::identity&) { return oracle_identity(); }
inline oracle_map oracle_for(const linattn::relu&) { return oracle_relu(); }
inline oracle_map oracle_for(const linattn::squared_relu&) { return oracle_squared_relu(); }

/// The random maps: W is the map's own, everything after it is the oracle's.
template <class T>
oracle_map oracle_for(const linattn::positive_random<T>& map) {
  return oracle_positive_random(map.projection().template cast<long double>());
}
template <class T>
oracle_map oracle_for(const linattn::random_fourier<T>& map) {
  return oracle_random_fourier(map.projection().template cast<long double>());
}

inline oracle_denominator oracle_for(const linattn::denominator_policy& policy) {
  using guard = oracle_denominator::guard;
  using kind = linattn::denominator_policy::kind;
  const guard how = policy.how == kind::add ? guard::add : policy.how == kind::clamp ? guard::clamp : guard::none;
  return {how, static_cast<long double>(policy.epsilon)};
}

}  // namespace support
