// The transformer over the rules that correct.
#include <linattn/linattn.hpp>
#include <linattn/transformer.hpp>

#include "support/transformer_rule_laws.hpp"

namespace support {
namespace {

using rules = testing::Types<linattn::delta, linattn::gated_delta<linattn::decay_kind::per_head>>;
INSTANTIATE_TYPED_TEST_SUITE_P(correcting, TransformerOfRule, rules);

}  // namespace
}  // namespace support
