// expect: a gated rule decays; write gated<decay_kind::per_head>
#include <linattn/linattn.hpp>
#include <linattn/update_rules/gated.hpp>

#ifdef LINATTN_MUST_FAIL
constexpr auto kind_of_gated_rule_without_decay = linattn::decay_kind::none;
#else
constexpr auto kind_of_gated_rule_without_decay = linattn::decay_kind::per_head;
#endif

static_assert(linattn::gated<kind_of_gated_rule_without_decay>::traits.decay != linattn::decay_kind::none);
