// expect: this output is const; pass a mutable matrix, block or Map
#include <linattn/linattn.hpp>

void const_output(const linattn::linear_attention<linattn::elu_plus_one>& attention,
                  const linattn::row_matrix<float>& q) {
  auto workspace = attention.make_workspace();
#ifdef LINATTN_MUST_FAIL
  const linattn::row_matrix<float> out(3, 4);
#else
  linattn::row_matrix<float> out(3, 4);
#endif
  attention.forward(q, q, q, out, workspace);
}
