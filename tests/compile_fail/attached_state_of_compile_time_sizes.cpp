// expect: a state of compile-time sizes is its own memory and attaches to none
#include <linattn/linattn.hpp>

#include <cstddef>
#include <new>

void attached_state_of_compile_time_sizes() {
  using operator_type = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 4, 4, 2>;
  const operator_type attention;
  alignas(operator_type::state_alignment()) std::byte memory[sizeof(operator_type::state_type)];
#ifdef LINATTN_MUST_FAIL
  auto s = attention.make_state(memory);
  s.reset();
#else
  auto* const s = new (memory) operator_type::state_type(attention.make_state());
  s->reset();
#endif
}
