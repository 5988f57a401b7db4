// expect: normalized<Rule>: a rule that corrects, or reads before it writes, has no weights to divide by
#include <linattn/linattn.hpp>

#ifdef LINATTN_MUST_FAIL
using normalized_rule_that_corrects = linattn::normalized<linattn::gated_delta<>>;
#else
using normalized_rule_that_corrects = linattn::normalized<linattn::gated<>>;
#endif

bool call_normalized_rule_that_corrects() { return normalized_rule_that_corrects::traits.normalizes; }
