// linattn for numpy, without a copy:
//
//   import linattn_numpy as linattn
//   attn = linattn.attention(head_dim=64, heads=8)       # float32; linattn.attention64 is float64's
//   y = attn.forward_causal(q, k, v)                     # (N, H D) arrays; or out=y, written in place
//   s = attn.make_state()                                # streaming: one token at a time, nothing allocates
//   s.step(q_t, k_t, v_t, y_t)
//
// Arrays are read and written where they lie, row by row: slices of rows and of columns will do, column-major arrays,
// other types and read-only outputs are refused. What the library refuses is a ValueError with its sentence.
#include <stdexcept>

namespace {
[[noreturn]] void refuse_overlap() {
  throw std::invalid_argument("linattn: an output overlaps an input or another output");
}
}  // namespace
// In calls of many tokens the library asserts nothing else; Python gets it in every build. `step`, which is noexcept,
// is checked here.
#define LINATTN_ASSERT(condition) ((condition) ? void() : refuse_overlap())

#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/state_io.hpp>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

namespace py = pybind11;

namespace {

using Eigen::Index;
using linattn::matrix_view;
using linattn::vector_view;

// Not py::array::c_style, which would refuse slices, too; with .noconvert() on the argument nothing is converted.
template <class T>
using array = py::array_t<T, 0>;

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw std::invalid_argument("linattn: " + name + " " + what);
}

// An array's memory as it is, for const T or T.
template <class T, class U>
T* data(const array<U>& x, const char* name) {
  if (!std::is_const_v<T> && !x.writeable()) refuse(name, "is read-only, but would be written to");
  auto* const first = static_cast<T*>(const_cast<void*>(static_cast<const void*>(x.data())));
  if (reinterpret_cast<std::uintptr_t>(first) % alignof(U) != 0) refuse(name, "is not aligned; pass a copy of it");
  return first;
}

// The distance of neighbours along an axis in elements; of axes of one index it may be anything.
template <class U>
Index stride(const array<U>& x, int axis, const char* name) {
  if (x.shape(axis) <= 1) return axis == 0 && x.ndim() == 2 ? x.shape(1) : 1;
  if (x.strides(axis) % Index(sizeof(U)) != 0) refuse(name, "has strides that are no whole elements");
  return x.strides(axis) / Index(sizeof(U));
}

template <class T, class U>
matrix_view<T> matrix(const array<U>& x, const char* name) {
  if (x.ndim() != 2)
    refuse(name, "has " + std::to_string(x.ndim()) + " dimensions, not the 2 of (tokens, heads * dim)");
  if (x.size() > 0 && stride(x, 1, name) != 1) {
    refuse(name,
           "has rows that are not contiguous (column-major?); pass numpy.ascontiguousarray(" + std::string(name) + ")");
  }
  return matrix_view<T>(data<T>(x, name), x.shape(0), x.shape(1), stride(x, 0, name));
}

template <class T, class U>
vector_view<T> token(const array<U>& x, const char* name, Index size) {
  if (x.ndim() != 1 || x.shape(0) != size) {
    refuse(name, "must be one token of " + std::to_string(size) + " elements (heads * dim)");
  }
  if (stride(x, 0, name) != 1) refuse(name, "is not contiguous");
  return vector_view<T>(data<T>(x, name), size);
}

template <class T>
void require_apart(vector_view<T> out, vector_view<const T> in) {
  const std::less<const T*> before;
  if (before(in.data(), out.data() + out.size()) && before(out.data(), in.data() + in.size())) refuse_overlap();
}

template <class T>
class attention;

// A sequence's state, with the scratch of its calls. The lock is for Python's threads, which run while a call does.
template <class T>
class stream {
 public:
  explicit stream(std::shared_ptr<const attention<T>> made_by);

  array<T> forward_causal(const array<T>& q, const array<T>& k, const array<T>& v, std::optional<array<T>> out);
  void step(const array<T>& q, const array<T>& k, const array<T>& v, array<T>& out);
  void reset() {
    const py::gil_scoped_release unlocked;
    const std::lock_guard lock(m_lock);
    m_state.reset();
  }
  Index tokens() const {
    const py::gil_scoped_release unlocked;
    const std::lock_guard lock(m_lock);
    return m_state.tokens();
  }
  py::bytes save() const;
  void load(const py::bytes& record);

 private:
  std::shared_ptr<const attention<T>> m_attention;
  typename attention<T>::operator_type::state_type m_state;
  typename attention<T>::operator_type::workspace_type m_workspace;
  mutable std::mutex m_lock;
};

template <class T>
class attention : public std::enable_shared_from_this<attention<T>> {
 public:
  using operator_type = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;

  attention(Index head_dim, Index heads, Index value_dim)
      : attn({.head_dim = head_dim, .value_dim = value_dim, .heads = heads}) {}

  // Of the right shape if none is given: the library refuses wrong ones.
  array<T> result(const array<T>& rows, Index dim, std::optional<array<T>> out) const {
    if (out) return *std::move(out);
    return array<T>({rows.ndim() == 2 ? rows.shape(0) : 0, attn.heads() * dim});
  }

  array<T> forward(const array<T>& q, const array<T>& k, const array<T>& v, std::optional<array<T>> out) const {
    return run(q, k, v, std::move(out), [&](auto... views) { attn.forward(views...); });
  }
  array<T> forward_causal(const array<T>& q, const array<T>& k, const array<T>& v, std::optional<array<T>> out) const {
    return run(q, k, v, std::move(out), [&](auto... views) { attn.forward_causal(views...); });
  }
  py::tuple vjp_causal(const array<T>& q, const array<T>& k, const array<T>& v, const array<T>& dout) const {
    array<T> dq = result(q, attn.head_dim(), {}), dk = result(k, attn.head_dim(), {});
    array<T> dv = result(v, attn.value_dim(), {});
    const auto q_view = matrix<const T>(q, "q"), k_view = matrix<const T>(k, "k"), v_view = matrix<const T>(v, "v");
    const auto dout_view = matrix<const T>(dout, "dout");
    const auto dq_view = matrix<T>(dq, "dq"), dk_view = matrix<T>(dk, "dk"), dv_view = matrix<T>(dv, "dv");
    {
      const py::gil_scoped_release unlocked;
      auto workspace = attn.make_workspace();
      attn.vjp_causal(q_view, k_view, v_view, dout_view, dq_view, dk_view, dv_view, workspace);
    }
    return py::make_tuple(dq, dk, dv);
  }
  std::unique_ptr<stream<T>> make_state() const { return std::make_unique<stream<T>>(this->shared_from_this()); }

  operator_type attn;

 private:
  template <class F>
  array<T> run(const array<T>& q, const array<T>& k, const array<T>& v, std::optional<array<T>> out,
               const F& call) const {
    array<T> y = result(q, attn.value_dim(), std::move(out));
    const auto q_view = matrix<const T>(q, "q"), k_view = matrix<const T>(k, "k"), v_view = matrix<const T>(v, "v");
    const auto y_view = matrix<T>(y, "out");
    {
      const py::gil_scoped_release unlocked;
      auto workspace = attn.make_workspace();
      call(q_view, k_view, v_view, y_view, workspace);
    }
    return y;
  }
};

template <class T>
stream<T>::stream(std::shared_ptr<const attention<T>> made_by)
    : m_attention(std::move(made_by)),
      m_state(m_attention->attn.make_state()),
      m_workspace(m_attention->attn.make_workspace()) {}

template <class T>
array<T> stream<T>::forward_causal(const array<T>& q, const array<T>& k, const array<T>& v,
                                   std::optional<array<T>> out) {
  array<T> y = m_attention->result(q, m_attention->attn.value_dim(), std::move(out));
  const auto q_view = matrix<const T>(q, "q"), k_view = matrix<const T>(k, "k"), v_view = matrix<const T>(v, "v");
  const auto y_view = matrix<T>(y, "out");
  {
    const py::gil_scoped_release unlocked;
    const std::lock_guard lock(m_lock);
    m_attention->attn.forward_causal(m_state, q_view, k_view, v_view, y_view, m_workspace);
  }
  return y;
}

template <class T>
void stream<T>::step(const array<T>& q, const array<T>& k, const array<T>& v, array<T>& out) {
  const auto& attn = m_attention->attn;
  const Index keys = attn.heads() * attn.head_dim(), values = attn.heads() * attn.value_dim();
  const auto q_view = token<const T>(q, "q", keys), k_view = token<const T>(k, "k", keys);
  const auto v_view = token<const T>(v, "v", values);
  const auto out_view = token<T>(out, "out", values);
  for (const auto& in : {q_view, k_view, v_view}) require_apart(out_view, in);
  const py::gil_scoped_release unlocked;
  const std::lock_guard lock(m_lock);
  attn.step(m_state, q_view, k_view, v_view, out_view, m_workspace);
}

template <class T>
py::bytes stream<T>::save() const {
  std::string record(static_cast<std::size_t>(linattn::saved_bytes(m_attention->attn)), '\0');
  {
    const py::gil_scoped_release unlocked;
    const std::lock_guard lock(m_lock);
    linattn::save(m_attention->attn, m_state, std::as_writable_bytes(std::span(record)));
  }
  return py::bytes(record);
}

template <class T>
void stream<T>::load(const py::bytes& record) {
  const std::string bytes = record;
  const py::gil_scoped_release unlocked;
  const std::lock_guard lock(m_lock);
  linattn::load(m_attention->attn, m_state, std::as_bytes(std::span(bytes)));
}

template <class T>
void bind(py::module_& m, const char* attention_name, const char* stream_name) {
  const auto q = py::arg("q").noconvert(), k = py::arg("k").noconvert(), v = py::arg("v").noconvert();
  const auto out = py::arg("out").noconvert();
  const auto no_out = py::arg_v(py::arg("out").noconvert(), py::none());
  py::class_<stream<T>>(m, stream_name)
      .def("forward_causal", &stream<T>::forward_causal, q, k, v, no_out)
      .def("step", &stream<T>::step, q, k, v, out)
      .def("reset", &stream<T>::reset)
      .def("save", &stream<T>::save)
      .def("load", &stream<T>::load, py::arg("record"))
      .def_property_readonly("tokens", &stream<T>::tokens);
  py::class_<attention<T>, std::shared_ptr<attention<T>>>(m, attention_name)
      .def(py::init<Index, Index, Index>(), py::arg("head_dim"), py::arg("heads") = 1, py::arg("value_dim") = 0)
      .def("forward", &attention<T>::forward, q, k, v, no_out)
      .def("forward_causal", &attention<T>::forward_causal, q, k, v, no_out)
      .def("vjp_causal", &attention<T>::vjp_causal, q, k, v, py::arg("dout").noconvert())
      .def("make_state", &attention<T>::make_state);
}

}  // namespace

PYBIND11_MODULE(linattn_numpy, m) {
  m.doc() = "Linear attention (elu + 1) on numpy arrays, without a copy.";
  bind<float>(m, "attention", "state");
  bind<double>(m, "attention64", "state64");
}
