// The C interface: every call is one of the library's, with its exceptions turned into a status and a sentence.
#include <stdexcept>

namespace {
[[noreturn]] void refuse_overlap() {
  throw std::invalid_argument("linattn: an output overlaps an input or another output");
}
}  // namespace
// In calls of many tokens the library asserts nothing else; C's callers get it in every build. linattn_step, whose
// call is noexcept, looks for itself.
#define LINATTN_ASSERT(condition) ((condition) ? void() : refuse_overlap())

#include "linattn.h"

#include <linattn/linattn.hpp>
#include <linattn/state_io.hpp>

#include <cstdio>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace {

using linattn::matrix_view;
using linattn::vector_view;

// A buffer of its own: a sentence about missing memory must not need any.
thread_local char last_error[512] = "";

linattn_status fail(linattn_status status, const char* sentence) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", sentence);
  return status;
}

template <class F>
linattn_status guarded(const F& call) noexcept {
  try {
    call();
    return LINATTN_OK;
  } catch (const std::invalid_argument& error) {
    return fail(LINATTN_INVALID_ARGUMENT, error.what());
  } catch (const std::bad_alloc&) {
    return fail(LINATTN_OUT_OF_MEMORY, "linattn: out of memory");
  } catch (const std::exception& error) {
    return fail(LINATTN_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(LINATTN_INTERNAL_ERROR, "linattn: an unknown exception");
  }
}

[[noreturn]] void refuse(const char* function, const std::string& what) {
  throw std::invalid_argument(std::string(function) + ": " + what);
}

void require_pointer(const char* function, const void* pointer, const char* name) {
  if (pointer == nullptr) refuse(function, std::string(name) + " is NULL");
}

template <class T, class Matrix>
matrix_view<T> view_of(const Matrix& x) {
  const matrix_view<T> view(x.data, x.rows, x.cols, x.row_stride);
  if (!linattn::detail::is_addressable(x.rows, x.cols, x.row_stride, sizeof(T))) {
    linattn::detail::refuse("matrix_view", "no memory holds ", linattn::detail::shape_text{x.rows, x.cols},
                            " with row stride ", x.row_stride);
  }
  return view;
}
matrix_view<const float> view(const linattn_input& x) { return view_of<const float>(x); }
matrix_view<float> view(const linattn_output& x) { return view_of<float>(x); }

// The rule's inputs, or the places for their gradients, from what C gives; a member that the rule does not have must
// not be given.
template <class Inputs, class Gates>
Inputs inputs_of(const char* function, const Gates* gates) {
  Inputs x;
  const Gates given = gates != nullptr ? *gates : Gates{};
  if constexpr (requires { x.log_decay; }) {
    x.log_decay = view(given.log_decay);
  } else if (given.log_decay.data != nullptr) {
    refuse(function, "the update rule takes no log_decay");
  }
  if constexpr (requires { x.beta; }) {
    x.beta = view(given.beta);
  } else if (given.beta.data != nullptr) {
    refuse(function, "the update rule takes no beta");
  }
  return x;
}

// ---- what C's handles hold: an operator and its states, whatever their types ----

struct any_state {
  any_state() = default;
  any_state(const any_state&) = default;
  any_state& operator=(const any_state&) = delete;
  virtual ~any_state() = default;
  virtual std::unique_ptr<any_state> copy() const = 0;
  virtual void reset() noexcept = 0;
  virtual int64_t tokens() const noexcept = 0;
  virtual size_t saved_bytes() const = 0;
  virtual void save(void* to, size_t bytes) const = 0;
  virtual void load(const void* from, size_t bytes) = 0;
  virtual void forward_causal(const linattn_input& q, const linattn_input& k, const linattn_input& v,
                              const linattn_gates* gates, const linattn_output& out) = 0;
  virtual void step(const float* q, const float* k, const float* v, const float* log_decay, const float* beta,
                    float* out) = 0;
};

struct any_attention : std::enable_shared_from_this<any_attention> {
  any_attention() = default;
  any_attention(const any_attention&) = delete;
  any_attention& operator=(const any_attention&) = delete;
  virtual ~any_attention() = default;
  virtual std::unique_ptr<any_state> make_state() const = 0;
  virtual void forward(const linattn_input& q, const linattn_input& k, const linattn_input& v,
                       const linattn_output& out) const = 0;
  virtual void vjp_causal(const linattn_input& q, const linattn_input& k, const linattn_input& v,
                          const linattn_gates* gates, const linattn_input& dout, const linattn_output& dq,
                          const linattn_output& dk, const linattn_output& dv,
                          const linattn_gate_gradients* gate_gradients) const = 0;
};

template <class Map, class Rule>
struct attention_of final : any_attention {
  using operator_type = linattn::linear_attention<Map, Rule>;
  using inputs = typename operator_type::inputs;
  using input_gradients = typename operator_type::input_gradients;
  using token_inputs = typename operator_type::token_inputs;

  struct state_of final : any_state {
    std::shared_ptr<const attention_of> attention;
    typename operator_type::state_type state;
    typename operator_type::workspace_type workspace;

    explicit state_of(std::shared_ptr<const attention_of> made_by)
        : attention(std::move(made_by)), state(attn().make_state()), workspace(attn().make_workspace()) {}

    const operator_type& attn() const noexcept { return attention->attn; }
    std::unique_ptr<any_state> copy() const override { return std::make_unique<state_of>(*this); }
    void reset() noexcept override { state.reset(); }
    int64_t tokens() const noexcept override { return state.tokens(); }
    size_t saved_bytes() const override { return static_cast<size_t>(linattn::saved_bytes(attn())); }
    void save(void* to, size_t bytes) const override {
      linattn::save(attn(), state, std::span(static_cast<std::byte*>(to), bytes));
    }
    void load(const void* from, size_t bytes) override {
      linattn::load(attn(), state, std::span(static_cast<const std::byte*>(from), bytes));
    }
    void forward_causal(const linattn_input& q, const linattn_input& k, const linattn_input& v,
                        const linattn_gates* gates, const linattn_output& out) override {
      const auto x = inputs_of<inputs>("linattn_forward_causal", gates);
      attn().forward_causal(state, view(q), view(k), view(v), x, view(out), workspace);
    }
    void step(const float* q, const float* k, const float* v, const float* log_decay, const float* beta,
              float* out) override {
      const Eigen::Index keys = attn().heads() * attn().head_dim(), values = attn().heads() * attn().value_dim();
      token_inputs x;
      const auto gate = [&](bool is_taken, const float* data, const char* name) {
        if (is_taken != (data != nullptr)) {
          refuse("linattn_step", std::string("the update rule ") + (is_taken ? "needs " : "takes no ") + name);
        }
        require_apart(out, values, data, attn().heads());
      };
      constexpr bool decays = requires { x.log_decay; }
      , has_beta = requires { x.beta; };
      gate(decays, log_decay, "log_decay");
      gate(has_beta, beta, "beta");
      if constexpr (decays) x.log_decay = vector_view<const float>(log_decay, attn().heads());
      if constexpr (has_beta) x.beta = vector_view<const float>(beta, attn().heads());
      require_apart(out, values, q, keys);
      require_apart(out, values, k, keys);
      require_apart(out, values, v, values);
      attn().step(state, vector_view<const float>(q, keys), vector_view<const float>(k, keys),
                  vector_view<const float>(v, values), x, vector_view<float>(out, values), workspace);
    }
    static void require_apart(const float* out, Eigen::Index out_size, const float* in, Eigen::Index in_size) {
      const std::less<const float*> before;
      if (in != nullptr && before(in, out + out_size) && before(out, in + in_size)) refuse_overlap();
    }
  };

  operator_type attn;

  explicit attention_of(const linattn::options& o) : attn(o) {}

  std::unique_ptr<any_state> make_state() const override {
    return std::make_unique<state_of>(std::static_pointer_cast<const attention_of>(this->shared_from_this()));
  }
  void forward([[maybe_unused]] const linattn_input& q, [[maybe_unused]] const linattn_input& k,
               [[maybe_unused]] const linattn_input& v, [[maybe_unused]] const linattn_output& out) const override {
    if constexpr (std::is_same_v<Rule, linattn::additive>) {
      auto workspace = attn.make_workspace();
      attn.forward(view(q), view(k), view(v), view(out), workspace);
    } else {
      refuse("linattn_forward", "only the additive rule has a non-causal form");
    }
  }
  void vjp_causal(const linattn_input& q, const linattn_input& k, const linattn_input& v, const linattn_gates* gates,
                  const linattn_input& dout, const linattn_output& dq, const linattn_output& dk,
                  const linattn_output& dv, const linattn_gate_gradients* gate_gradients) const override {
    const auto x = inputs_of<inputs>("linattn_vjp_causal", gates);
    const auto dx = inputs_of<input_gradients>("linattn_vjp_causal", gate_gradients);
    auto workspace = attn.make_workspace();
    attn.vjp_causal(view(q), view(k), view(v), x, view(dout), view(dq), view(dk), view(dv), dx, workspace);
  }
};

using maker = std::shared_ptr<const any_attention> (*)(const linattn::options&);

template <class Map, class Rule>
std::shared_ptr<const any_attention> make(const linattn::options& o) {
  return std::make_shared<const attention_of<Map, Rule>>(o);
}

// One line more for each pair that is wanted.
struct entry {
  std::string_view feature_map, rule;
  maker make;
};
constexpr entry entries[] = {
    {"elu_plus_one", "additive", make<linattn::elu_plus_one, linattn::additive>},
    {"relu", "additive", make<linattn::relu, linattn::additive>},
    {"identity", "additive", make<linattn::identity, linattn::additive>},
    {"identity", "gated", make<linattn::identity, linattn::gated<>>},
    {"identity", "delta", make<linattn::identity, linattn::delta>},
    {"identity", "gated_delta", make<linattn::identity, linattn::gated_delta<>>},
};

std::shared_ptr<const any_attention> make_attention(const linattn_options& o) {
  const std::string_view map = o.feature_map != nullptr ? o.feature_map : "elu_plus_one";
  const std::string_view rule = o.rule != nullptr ? o.rule : "additive";
  for (const entry& e : entries) {
    if (e.feature_map == map && e.rule == rule) {
      return e.make({.head_dim = o.head_dim,
                     .value_dim = o.value_dim,
                     .heads = o.heads,
                     .query_scale = o.query_scale == 0 ? 1 : o.query_scale});
    }
  }
  std::string built;
  for (const entry& e : entries) {
    built.append(built.empty() ? "" : ", ").append(e.feature_map).append(" with ").append(e.rule);
  }
  refuse("linattn_attention_create",
         std::string("no feature map '").append(map).append("' with rule '").append(rule) + "'; built are " + built);
}

}  // namespace

struct linattn_attention {
  std::shared_ptr<const any_attention> attention;
};
struct linattn_state {
  std::unique_ptr<any_state> state;
};

namespace {

any_state& in(const char* function, linattn_state* handle) {
  require_pointer(function, handle, "the state");
  return *handle->state;
}
const any_state& in(const char* function, const linattn_state* handle) {
  require_pointer(function, handle, "the state");
  return *handle->state;
}
const any_attention& in(const char* function, const linattn_attention* handle) {
  require_pointer(function, handle, "the attention");
  return *handle->attention;
}

}  // namespace

#define LINATTN_TEXT(x) #x
#define LINATTN_VERSION_TEXT(major, minor, patch) LINATTN_TEXT(major) "." LINATTN_TEXT(minor) "." LINATTN_TEXT(patch)

const char* linattn_version(void) {
  return LINATTN_VERSION_TEXT(LINATTN_VERSION_MAJOR, LINATTN_VERSION_MINOR, LINATTN_VERSION_PATCH);
}

const char* linattn_last_error(void) { return last_error; }

linattn_status linattn_attention_create(const linattn_options* options, linattn_attention** attention) {
  return guarded([&] {
    require_pointer("linattn_attention_create", attention, "the place for the attention");
    require_pointer("linattn_attention_create", options, "options");
    *attention = new linattn_attention{make_attention(*options)};
  });
}

void linattn_attention_destroy(linattn_attention* attention) { delete attention; }

linattn_status linattn_forward(const linattn_attention* attention, linattn_input q, linattn_input k, linattn_input v,
                               linattn_output out) {
  return guarded([&] { in("linattn_forward", attention).forward(q, k, v, out); });
}

linattn_status linattn_vjp_causal(const linattn_attention* attention, linattn_input q, linattn_input k, linattn_input v,
                                  const linattn_gates* gates, linattn_input dout, linattn_output dq, linattn_output dk,
                                  linattn_output dv, const linattn_gate_gradients* gate_gradients) {
  return guarded(
      [&] { in("linattn_vjp_causal", attention).vjp_causal(q, k, v, gates, dout, dq, dk, dv, gate_gradients); });
}

linattn_status linattn_state_create(const linattn_attention* attention, linattn_state** state) {
  return guarded([&] {
    require_pointer("linattn_state_create", state, "the place for the state");
    *state = new linattn_state{in("linattn_state_create", attention).make_state()};
  });
}

linattn_status linattn_state_copy(const linattn_state* state, linattn_state** copy) {
  return guarded([&] {
    require_pointer("linattn_state_copy", copy, "the place for the copy");
    *copy = new linattn_state{in("linattn_state_copy", state).copy()};
  });
}

linattn_status linattn_state_reset(linattn_state* state) {
  return guarded([&] { in("linattn_state_reset", state).reset(); });
}

void linattn_state_destroy(linattn_state* state) { delete state; }

int64_t linattn_state_tokens(const linattn_state* state) { return state != nullptr ? state->state->tokens() : -1; }

size_t linattn_state_saved_bytes(const linattn_state* state) {
  size_t bytes = 0;
  guarded([&] { bytes = in("linattn_state_saved_bytes", state).saved_bytes(); });
  return bytes;
}

linattn_status linattn_state_save(const linattn_state* state, void* to, size_t bytes) {
  return guarded([&] {
    require_pointer("linattn_state_save", to, "the memory for the record");
    in("linattn_state_save", state).save(to, bytes);
  });
}

linattn_status linattn_state_load(linattn_state* state, const void* from, size_t bytes) {
  return guarded([&] {
    require_pointer("linattn_state_load", from, "the record");
    in("linattn_state_load", state).load(from, bytes);
  });
}

linattn_status linattn_forward_causal(linattn_state* state, linattn_input q, linattn_input k, linattn_input v,
                                      const linattn_gates* gates, linattn_output out) {
  return guarded([&] { in("linattn_forward_causal", state).forward_causal(q, k, v, gates, out); });
}

linattn_status linattn_step(linattn_state* state, const float* q, const float* k, const float* v,
                            const float* log_decay, const float* beta, float* out) {
  return guarded([&] {
    any_state& s = in("linattn_step", state);
    require_pointer("linattn_step", q, "q");
    require_pointer("linattn_step", k, "k");
    require_pointer("linattn_step", v, "v");
    require_pointer("linattn_step", out, "out");
    s.step(q, k, v, log_decay, beta, out);
  });
}
