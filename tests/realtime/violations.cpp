// What must be found: -Wfunction-effects refuses this file, and the realtime sanitizer ends every one of its modes.
#include <linattn/linattn.hpp>

#include <string_view>

namespace {

using linattn::row_matrix;

/// A map that breaks the contract: its forward asks for memory.
struct allocating_map {
  static constexpr Eigen::Index dimension(Eigen::Index head_dim) noexcept { return head_dim; }
  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const {
    const row_matrix<T> copy = x;
    phi = copy.cwiseAbs();
  }
};

template <class Operator>
void callback(const Operator& attn, typename Operator::state_type& s, typename Operator::workspace_type& ws,
              const row_matrix<float>& x, row_matrix<float>& out) noexcept LINATTN_NONBLOCKING {
  attn.forward_causal(s, x, x, x, out, ws);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  const row_matrix<float> x = row_matrix<float>::Ones(3, 16), wrong = row_matrix<float>::Ones(3, 15);
  row_matrix<float> out(3, 16);
  if (mode == "refusal") {  // hidden from -Wfunction-effects, not from the sanitizer
    const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 16});
    auto s = attn.make_state();
    auto ws = attn.make_workspace();
    callback(attn, s, ws, wrong, out);
    return 0;
  }
  const linattn::linear_attention<allocating_map> attn({.head_dim = 16});
  auto s = attn.make_state();
  auto ws = attn.make_workspace();
  if (mode == "step")
    attn.step(s, x.row(0), x.row(0), x.row(0), out.row(0), ws);  // its own promise, without a callback
  if (mode == "forward_causal") callback(attn, s, ws, x, out);
}
