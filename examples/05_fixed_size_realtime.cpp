// 05_fixed_size_realtime: every size known at compile time, nothing on the heap, ever.
//
//     audio callback:   | 64 samples |  ->  per sample: step(state, q, k, v, out)  ->  | 64 samples |
//
// linear_attention<Map, Rule, Scalar, D, M, H> with D = M = 16, H = 2. State and workspace are plain objects: members
// of a plug-in, on the stack, in shared memory. `step` is noexcept, allocates nothing and takes the same time at every
// sample, however long the stream is.

#include <linattn/linattn.hpp>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <type_traits>
#include <utility>

using attention_type = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 16, 16, 2>;
using token = Eigen::Matrix<float, 1, 32>;  // (1, H*D)

// S (16, 16) and z (16) of two heads: what a pointer to a heap could not hold.
static_assert(sizeof(attention_type::state_type) >= 2 * (16 * 16 + 16) * sizeof(float));
static_assert(sizeof(attention_type::state_type) <= 3 * 1024);
static_assert(std::is_trivially_copyable_v<attention_type::state_type>);
static_assert(noexcept(std::declval<const attention_type&>().step(
    std::declval<attention_type::state_type&>(), std::declval<const token&>(), std::declval<const token&>(),
    std::declval<const token&>(), std::declval<token&>(), std::declval<attention_type::workspace_type&>())));

/// An effect that answers each sample with an average of the past, weighted by likeness to the present.
class effect {
 public:
  void process(const float* in, float* out, int samples) noexcept {
    for (int n = 0; n < samples; ++n) {
      for (Eigen::Index i = m_window.size() - 1; i > 0; --i) m_window[i] = m_window[i - 1];
      m_window[0] = in[n];  // query, key and value: the last 32 samples, newest first
      m_attention.step(m_state, m_window, m_window, m_window, m_answer, m_workspace);
      out[n] = m_answer[0];
    }
  }
  Eigen::Index tokens() const noexcept { return m_state.tokens(); }

 private:
  attention_type m_attention;
  attention_type::state_type m_state = m_attention.make_state();
  attention_type::workspace_type m_workspace = m_attention.make_workspace();
  token m_window = token::Zero();
  token m_answer = token::Zero();
};

int main() {
  constexpr int block = 64, blocks = 750;  // one second at 48 kHz
  static effect instance;
  float in[block], out[block], peak = 0;
  bool correct = true;
  for (int b = 0; b < blocks; ++b) {
    for (int n = 0; n < block; ++n) in[n] = std::sin(0.0576F * static_cast<float>(b * block + n));  // 440 Hz
    instance.process(in, out, block);
    for (const float y : out) {
      correct = correct && std::abs(y) <= 1.0F;  // an average of samples stays among them; NaN fails
      peak = std::max(peak, std::abs(y));
    }
  }
  correct = correct && instance.tokens() == block * blocks && peak > 0;
  std::cout << instance.tokens() << " samples, peak " << peak << ", state " << sizeof(attention_type::state_type)
            << " bytes, workspace " << sizeof(attention_type::workspace_type) << " bytes, no heap\n";
  return correct ? 0 : 1;
}
