// expect: this output is a temporary matrix that would be lost
#include <linattn/linattn.hpp>

void temporary_output(const linattn::linear_attention<linattn::elu_plus_one>& attention,
                      const linattn::row_matrix<float>& q) {
  auto workspace = attention.make_workspace();
#ifdef LINATTN_MUST_FAIL
  attention.forward(q, q, q, linattn::row_matrix<float>(3, 4), workspace);
#else
  linattn::row_matrix<float> out(3, 4);
  attention.forward(q, q, q, out, workspace);
#endif
}
