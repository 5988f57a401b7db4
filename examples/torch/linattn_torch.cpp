// Causal linear attention (elu + 1) as an operator of PyTorch, with its gradient:
//
//   torch.ops.load_library("liblinattn_torch.so")
//   out = torch.ops.linattn.causal(q, k, v)      # q, k (B, H, N, D), v (B, H, N, M); float32 or float64, on the CPU
//
// The tensors are read where they lie: any strides will do, as long as the elements of a head of a token lie side by
// side. One workspace, whose size does not depend on N, is all that the backward pass allocates beside its results.
#include <linattn/batch.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

namespace {

using at::Tensor;
using gradients = std::tuple<Tensor, Tensor, Tensor>;

// Sizes of a (B, H, N, D) tensor, and its strides with those of dimensions of one index as they would be: they say
// nothing, and may be anything.
template <class T>
linattn::batch_view<T> view(const Tensor& x) {
  using batch = linattn::batch_view<T>;
  const auto stride = [&](int d) { return x.size(d) > 1 ? x.stride(d) : 0; };
  return batch(x.data_ptr<std::remove_const_t<T>>(), typename batch::sizes{x.size(0), x.size(2), x.size(1), x.size(3)},
               typename batch::strides{stride(0), stride(2), stride(1)});
}

// What the library cannot know of a tensor. It checks the sizes, and PyTorch that all of them are dense and on the CPU.
void require(const char* name, const Tensor& x, const Tensor& q) {
  TORCH_CHECK_VALUE(x.dim() == 4, "linattn::causal: ", name, " has ", x.dim(),
                    " dimensions, not the 4 of (B, H, N, D)");
  TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), "linattn::causal: ", name, " is ", x.scalar_type(),
                   ", but q is ", q.scalar_type());
  TORCH_CHECK_VALUE(x.numel() == 0 || x.size(3) <= 1 || x.stride(3) == 1, "linattn::causal: the last dimension of ",
                    name, " is not contiguous; pass ", name, ".contiguous()");
}

template <class T>
auto attention(const Tensor& q, const Tensor& v) {
  TORCH_CHECK_VALUE(q.size(1) > 0 && q.size(3) > 0 && v.size(3) > 0, "linattn::causal: q is ", q.sizes(), " and v ",
                    v.sizes(), ", but heads and the last dimensions must be at least 1");
  return linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>(
      {.head_dim = q.size(3), .value_dim = v.size(3), .heads = q.size(1)});
}

// float and double alone. What the library refuses reaches Python as a ValueError.
template <class F>
void dispatch(const Tensor& q, const F& f) {
  if (q.scalar_type() == at::kFloat) return f(float());
  if (q.scalar_type() == at::kDouble) return f(double());
  TORCH_CHECK_TYPE(false, "linattn::causal: q is ", q.scalar_type(), "; built are Float and Double");
}

Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v) {
  require("q", q, q);
  require("k", k, q);
  require("v", v, q);
  Tensor out = at::empty_like(v, at::MemoryFormat::Contiguous);
  dispatch(q, [&](auto scalar) {
    using T = decltype(scalar);
    const auto attn = attention<T>(q, v);
    auto states = linattn::make_states(attn, q.size(0));
    auto workspaces = linattn::make_workspaces(attn, 1);
    linattn::forward_causal(attn, states, view<const T>(q), view<const T>(k), view<const T>(v), view<T>(out),
                            workspaces);
  });
  return out;
}

gradients backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gradient) {
  require("q", q, q);
  require("k", k, q);
  require("v", v, q);
  // Broadcast gradients, as those of sum() are, have strides of 0.
  const Tensor dout =
      gradient.dim() == 4 && gradient.size(3) > 1 && gradient.stride(3) != 1 ? gradient.contiguous() : gradient;
  require("dout", dout, q);
  Tensor dq = at::empty_like(q, at::MemoryFormat::Contiguous);
  Tensor dk = at::empty_like(k, at::MemoryFormat::Contiguous);
  Tensor dv = at::empty_like(v, at::MemoryFormat::Contiguous);
  dispatch(q, [&](auto scalar) {
    using T = decltype(scalar);
    const auto attn = attention<T>(q, v);
    auto workspaces = linattn::make_workspaces(attn, 1);
    linattn::vjp_causal(attn, {}, view<const T>(q), view<const T>(k), view<const T>(v), {}, view<const T>(dout), {},
                        view<T>(dq), view<T>(dk), view<T>(dv), {}, workspaces);
  });
  return {dq, dk, dv};
}

// The operators below autograd, by their names: between the two PyTorch resolves what is not plain memory, such as
// tensors whose sign is pending.
template <class Function, class... Tensors>
auto call(const char* name, const Tensors&... tensors) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>().call(tensors...);
}

struct causal : torch::autograd::Function<causal> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({q, k, v});
    return call<decltype(::forward)>("linattn::causal", q, k, v);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list dout) {
    // With create_graph=True these gradients would be constants to the next derivative: wrong without a word.
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "linattn::causal: second derivatives are not built");
    const auto saved = context->get_saved_variables();
    const auto [dq, dk, dv] = call<decltype(::backward)>("linattn::causal_vjp", saved[0], saved[1], saved[2], dout[0]);
    return {dq, dk, dv};
  }
};

Tensor differentiable(const Tensor& q, const Tensor& k, const Tensor& v) { return causal::apply(q, k, v); }

// The gradients alone, of what asks for none.
gradients constant_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout) {
  const bool asks = q.requires_grad() || k.requires_grad() || v.requires_grad() || dout.requires_grad();
  TORCH_CHECK_NOT_IMPLEMENTED(!asks || !at::GradMode::is_enabled(),
                              "linattn::causal_vjp: second derivatives are not built");
  const at::AutoDispatchBelowADInplaceOrView below;
  return call<decltype(::backward)>("linattn::causal_vjp", q, k, v, dout);
}

}  // namespace

TORCH_LIBRARY(linattn, m) {
  m.def("causal(Tensor q, Tensor k, Tensor v) -> Tensor");
  m.def("causal_vjp(Tensor q, Tensor k, Tensor v, Tensor dout) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(linattn, CPU, m) {
  m.impl("causal", &forward);
  m.impl("causal_vjp", &backward);
}
TORCH_LIBRARY_IMPL(linattn, Autograd, m) {
  m.impl("causal", &differentiable);
  m.impl("causal_vjp", &constant_gradients);
}
