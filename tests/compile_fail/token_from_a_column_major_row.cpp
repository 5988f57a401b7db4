// expect: the elements of this vector are not contiguous (a row of a column-major matrix
#include <linattn/linattn.hpp>

void token_from_a_column_major_row(const linattn::linear_attention<linattn::elu_plus_one>& attention,
                                   const Eigen::MatrixXf& columns, const linattn::row_matrix<float>& rows) {
  auto state = attention.make_state();
  auto workspace = attention.make_workspace();
  linattn::row_vector<float> out(4);
#ifdef LINATTN_MUST_FAIL
  attention.step(state, columns.row(0), rows.row(0), rows.row(0), out, workspace);
#else
  attention.step(state, columns.col(0), rows.row(0), rows.row(0), out, workspace);
#endif
}
