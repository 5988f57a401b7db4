// The transformer over the rules that decay.
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#include "support/transformer_rule_laws.hpp"

namespace support {
namespace {

using linattn::decay_kind;
using rules = testing::Types<linattn::gated<decay_kind::per_head>, linattn::gated<decay_kind::per_feature>>;
INSTANTIATE_TYPED_TEST_SUITE_P(decaying, TransformerOfRule, rules);

}  // namespace
}  // namespace support
