// Which recurrence is whose: the oracle's rule for each of the library's, by its traits alone.
#pragma once

#include "support/rule_oracle.hpp"

#include <linattn/update_rules/rule_traits.hpp>

namespace support {

/// `additive` normalizes or not by its operator; the oracle of rules knows the form that does not.
template <class Rule>
constexpr rule_kind rule_kind_of() {
  using linattn::correction;
  using linattn::decay_kind;
  constexpr linattn::rule_traits rule = Rule::traits;
  constexpr bool per_feature = rule.decay == decay_kind::per_feature;
  if constexpr (rule.corrects == correction::rank_one) return rule_kind::generalized_delta;
  if constexpr (!rule.reads_after_write) return rule_kind::gated_bonus;
  if constexpr (rule.corrects == correction::delta) {
    if constexpr (rule.decay == decay_kind::none) return rule_kind::delta;
    return per_feature ? rule_kind::gated_delta_per_feature : rule_kind::gated_delta_per_head;
  }
  if constexpr (rule.decay == decay_kind::none) return rule_kind::additive;
  if constexpr (rule.fixed_decay) return rule_kind::decay;
  return per_feature ? rule_kind::gated_per_feature : rule_kind::gated_per_head;
}

}  // namespace support
