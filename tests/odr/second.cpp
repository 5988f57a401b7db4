#include "unit.hpp"

void absorb_one(const odr_attention& attention, odr_attention::state_type& state) {
  const linattn::row_matrix<float> ones = linattn::row_matrix<float>::Ones(1, 2);
  attention.absorb(state, ones, ones);
}
