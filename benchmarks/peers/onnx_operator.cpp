// linattn's half of the comparison with ONNX Runtime's LinearAttention. One process that is told what to do line by
// line, so that the other one can take its turns in between; run.py speaks to both.
//
//   prepare <form> <rule> <D> <H> <N> <threads> <folder>   draws inputs and leaves them in the folder as raw floats;
//                                                          answers the useful flops of a call
//   compare                                                answers the relative error of the other's output.f32 and
//                                                          present_state.f32 in the folder, or refuses them
//   time <way> <seconds>                                   calls for that long; answers the median of their wall
//                                                          seconds and the mean of their CPU seconds
//   peak                                                   FLOP/s of one thread
//
// form: prefill, N tokens a call from a state of zeros; or decode, one token a call, N of them in turn.
// way: operator, which keeps its state; or onnx, onnx::linear_attention, which as the peer does copies it in and out.
#include "../common.hpp"
#include "../paired.hpp"

#include <linattn/batch.hpp>
#include <linattn/executors.hpp>
#include <linattn/onnx.hpp>

#include <cmath>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>

using namespace linattn;
using namespace linattn_bench;

namespace {

struct settings {
  std::string form, rule;
  Index d = 0, h = 0, n = 0;
  int threads = 1;
  std::string folder;

  bool decodes() const { return form == "decode"; }
};

/// Both round in float, in another order, over chains of 4,096 tokens. Another scale, a decay on the other side of the
/// write or a mistaken head change a part in ten.
constexpr double same_operator_tolerance = 1e-5;

// ---- the inputs, as in models: keys of length 1, betas in (0, 1), decays around 0.96 --------------------------------

struct operator_problem : problem<float> {
  row_matrix<float> decay, beta;  // (N, H) or (N, H D), (N, H); empty where the rule has none

  explicit operator_problem(const settings& s) : problem<float>(s.n, s.d, s.d, s.h) {
    for (Index i = 0; i < n; ++i) {
      for (Index head = 0; head < h; ++head) k.row(i).segment(head * d, d).normalize();
    }
    if (s.rule.find("gated") == 0) {
      const bool per_feature = s.rule.find("per_feature") != std::string::npos;
      decay = normal_matrix<float>(n, per_feature ? h * d : h, 4).cwiseAbs() * -0.05F;
    }
    if (s.rule.find("delta") != std::string::npos) {
      beta = (normal_matrix<float>(n, h, 6).array().tanh() * 0.5F + 0.5F).matrix();
    }
  }
};

void save(const std::string& folder, const char* name, const row_matrix<float>& x) {
  std::ofstream file(folder + "/" + name + ".f32", std::ios::binary);
  file.write(reinterpret_cast<const char*>(x.data()), std::streamsize(x.size() * Index(sizeof(float))));
  if (!file.flush()) throw std::runtime_error("cannot write " + folder + "/" + name + ".f32");
}

row_matrix<float> load(const std::string& folder, const char* name, Index rows, Index cols) {
  row_matrix<float> x(rows, cols);
  std::ifstream file(folder + "/" + name + ".f32", std::ios::binary);
  file.read(reinterpret_cast<char*>(x.data()), std::streamsize(x.size() * Index(sizeof(float))));
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error(std::string(name) + ".f32 is not of " + std::to_string(x.size()) + " floats");
  }
  return x;
}

double relative_error(const row_matrix<float>& got, const row_matrix<float>& want) {
  return double((got - want).norm()) / std::max(double(want.norm()), 1e-300);
}

// ---- both ways ------------------------------------------------------------------------------------------------------

class any_subject {
 public:
  virtual ~any_subject() = default;
  virtual double flops() const = 0;
  virtual void restart() = 0;
  virtual void call(const std::string& way) = 0;
  virtual std::pair<double, double> compare() = 0;
};

template <class Rule>
class subject : public any_subject {
 public:
  explicit subject(const settings& s)
      : m_settings(s),
        m_problem(s),
        m_attention({.head_dim = s.d, .heads = s.h, .query_scale = 1 / std::sqrt(double(s.d))}),
        m_pool(s.threads),
        m_workspaces(make_workspaces(m_attention, s.threads)),
        m_states(make_states(m_attention, 1)),
        m_state(s.h * s.d, s.d) {
    save(s.folder, "query", m_problem.q), save(s.folder, "key", m_problem.k), save(s.folder, "value", m_problem.v);
    save(s.folder, "decay", m_problem.decay), save(s.folder, "beta", m_problem.beta);
    restart();
  }

  double flops() const override {
    const double n = m_settings.decodes() ? 1 : double(m_settings.n), d = double(m_settings.d);
    return rule_flops(Rule::traits, n, d, d, double(m_settings.h));
  }

  void restart() override {
    m_token = 0;
    m_states[0].reset();
    m_state.setZero();
  }

  void call(const std::string& way) override {
    const Index tokens = m_settings.decodes() ? 1 : m_settings.n;
    if (!m_settings.decodes()) restart();
    way == "onnx" ? call_onnx(tokens) : call_operator(tokens);
    if (m_settings.decodes()) m_token = (m_token + 1) % m_settings.n;
  }

  std::pair<double, double> compare() override {
    const Index h = m_settings.h, d = m_settings.d;
    const auto output = load(m_settings.folder, "output", m_settings.n, h * d);
    const auto state = load(m_settings.folder, "present_state", h * d, d);
    std::pair<double, double> worst;
    for (const std::string way : {"operator", "onnx"}) {
      restart();
      m_problem.out.setZero();
      for (Index calls = m_settings.decodes() ? m_settings.n : 1; calls > 0; --calls) call(way);
      if (way == "operator") {
        for (Index head = 0; head < h; ++head) m_state.middleRows(head * d, d) = m_states[0].kv(head);
      }
      worst.first = std::max(worst.first, relative_error(output, m_problem.out));
      worst.second = std::max(worst.second, relative_error(state, m_state));
    }
    restart();
    return worst;
  }

 private:
  using attention = linear_attention<identity, Rule>;

  void call_operator(Index tokens) {
    const auto view = [&](auto& x) {
      return bnhd(x.row(m_token).data(), 1, tokens, m_settings.h, x.cols() / m_settings.h);
    };
    batch_inputs<attention> x;
    if constexpr (requires { x.log_decay; }) x.log_decay = view(m_problem.decay);
    if constexpr (requires { x.beta; }) x.beta = view(m_problem.beta);
    auto& p = m_problem;
    if (m_settings.decodes()) {
      step(m_attention, m_states, view(p.q), view(p.k), view(p.v), x, view(p.out), m_workspaces, m_pool);
    } else {
      forward_causal(m_attention, m_states, view(p.q), view(p.k), view(p.v), x, view(p.out), m_workspaces, m_pool);
    }
  }

  void call_onnx(Index tokens) {
    const Index h = m_settings.h, d = m_settings.d;
    const auto tensor_of = [&](auto& x) {
      return onnx::tensor<std::remove_pointer_t<decltype(x.data())>, 3>{x.row(m_token).data(), {1, tokens, x.cols()}};
    };
    const auto input = [&](const row_matrix<float>& x) { return tensor_of(x); };
    const std::string name = m_settings.rule.substr(0, m_settings.rule.find("_per_feature"));
    onnx::inputs<float> x{.query = input(m_problem.q), .key = input(m_problem.k), .value = input(m_problem.v)};
    x.past_state = {m_state.data(), {1, h, d, d}};
    if (m_problem.decay.size() > 0) x.decay = input(m_problem.decay);
    if (m_problem.beta.size() > 0) x.beta = input(m_problem.beta);
    onnx::linear_attention<float>({.q_num_heads = h, .kv_num_heads = h, .update_rule = onnx::rule_of(name)}, x,
                                  {tensor_of(m_problem.out), {m_state.data(), {1, h, d, d}}});
  }

  settings m_settings;
  operator_problem m_problem;
  attention m_attention;
  thread_pool m_pool;
  std::vector<typename attention::workspace_type> m_workspaces;
  std::vector<typename attention::state_type> m_states;
  row_matrix<float> m_state;  // (H D, M), the copy that onnx passes in and out
  Index m_token = 0;
};

std::unique_ptr<any_subject> make_subject(const settings& s) {
  constexpr decay_kind per_feature = decay_kind::per_feature;
  if (s.rule == "linear") return std::make_unique<subject<additive>>(s);
  if (s.rule == "gated") return std::make_unique<subject<gated<>>>(s);
  if (s.rule == "gated_per_feature") return std::make_unique<subject<gated<per_feature>>>(s);
  if (s.rule == "delta") return std::make_unique<subject<delta>>(s);
  if (s.rule == "gated_delta") return std::make_unique<subject<gated_delta<>>>(s);
  if (s.rule == "gated_delta_per_feature") return std::make_unique<subject<gated_delta<per_feature>>>(s);
  throw std::runtime_error("no rule " + s.rule);
}

// ---- the conversation -----------------------------------------------------------------------------------------------

std::string answer(const std::string& line, std::unique_ptr<any_subject>& current) {
  std::istringstream words(line);
  std::ostringstream reply;
  std::string verb;
  words >> verb;
  if (verb == "prepare") {
    settings s;
    words >> s.form >> s.rule >> s.d >> s.h >> s.n >> s.threads >> s.folder;
    current.reset();
    current = make_subject(s);
    reply << current->flops();
  } else if (verb == "compare") {
    const auto [output, state] = current->compare();
    if (!(output <= same_operator_tolerance && state <= same_operator_tolerance)) {
      reply << "error: it computes something else: relative differences " << output << " of outputs, " << state
            << " of the state";
    } else {
      reply << output << ' ' << state;
    }
  } else if (verb == "time") {
    std::string way;
    double limit = 0;
    words >> way >> limit;
    std::vector<double> walls;
    const double cpu = process_seconds(), start = wall_seconds();
    for (double now = start; now < start + limit;) {
      const double before = now;
      current->call(way);
      now = wall_seconds();
      walls.push_back(now - before);
    }
    const double calls = double(walls.size());
    reply << median(walls) << ' ' << (process_seconds() - cpu) / calls;
  } else if (verb == "peak") {
    reply << fma_peak<float>();
  } else {
    reply << "error: no command '" << verb << "'";
  }
  return reply.str();
}

}  // namespace

int main() {
  std::unique_ptr<any_subject> current;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << answer(line, current) << std::endl;
    } catch (const std::exception& e) {
      std::cout << "error: " << e.what() << std::endl;
    }
  }
}
