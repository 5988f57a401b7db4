#include "unit.hpp"

int main() {
  const odr_attention attention({.head_dim = 2});
  auto state = attention.make_state();
  absorb_one(attention, state);
  return state.tokens() == 1 ? 0 : 1;
}
