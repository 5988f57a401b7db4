#include <linattn/feature_maps/identity.hpp>
#include <linattn/mpi.hpp>

void non_causal_form_of_an_ordered_rule(const linattn::mpi::ranks& ranks, const linattn::row_matrix<float>& x,
                                        linattn::row_matrix<float>& out) {
  const linattn::linear_attention<linattn::identity, linattn::gated<>> attention({.head_dim = 4});
  auto ws = attention.make_workspace();
  linattn::mpi::forward(ranks, attention, x, x, x, out, ws);
}
