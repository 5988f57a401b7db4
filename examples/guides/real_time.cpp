// An audio effect with every size in the type: no heap anywhere, the same time for each sample.
#include <linattn/linattn.hpp>

#include <array>
#include <cmath>
#include <iostream>
#include <type_traits>

using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double, 16, 16, 1>;
static_assert(std::is_trivially_copyable_v<attention::state_type>);  // may live in shared memory, be copied as bytes

class effect {  // each sample is answered with an average of the past, weighted by likeness to the present
 public:
  void process(const float* in, float* out, int samples) noexcept {
    for (int n = 0; n < samples; ++n) {
      for (Eigen::Index i = 15; i > 0; --i) m_window[i] = m_window[i - 1];
      m_window[0] = static_cast<double>(in[n]);
      m_attention.step(m_state, m_window, m_window, m_window, m_answer, m_workspace);
      out[n] = static_cast<float>(m_answer[0]);
    }
  }
  void reset() noexcept { m_state = m_silence; }  // silence again, without allocating

 private:
  using token = Eigen::Matrix<double, 1, 16>;
  attention m_attention;
  attention::state_type m_silence = m_attention.make_state();
  attention::state_type m_state = m_silence;
  attention::workspace_type m_workspace = m_attention.make_workspace();
  token m_window = token::Zero(), m_answer = token::Zero();
};

int main() {
  static effect instance;
  std::array<float, 64> block;
  bool correct = true;
  for (int b = 0; b < 750; ++b) {  // a second at 48 kHz
    for (std::size_t n = 0; n < block.size(); ++n) block[n] = std::sin(0.05F * static_cast<float>(n));
    instance.process(block.data(), block.data(), 64);
    for (const float y : block) correct = correct && std::abs(y) <= 1;  // an average stays among its samples
  }
  instance.reset();
  std::cout << "state " << sizeof(attention::state_type) << " bytes, in the object itself\n";
  return correct ? 0 : 1;
}
