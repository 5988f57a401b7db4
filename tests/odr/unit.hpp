#pragma once

#include <all_headers.hpp>

using odr_attention = linattn::linear_attention<linattn::elu_plus_one>;

// Defined in the second unit: takes a state that the first one made.
void absorb_one(const odr_attention& attention, odr_attention::state_type& state);
