// The single header has every part of the library, but for those that need another one than Eigen.
#include <linattn_all.hpp>

int main() {
  using linattn::cached_softmax;
  using linattn::check_feature_map;
  using linattn::kernel_attention;
  using linattn::linear_attention;
  using linattn::positive_random;
  using linattn::sampler;
  using linattn::state_pool;
  using linattn::thread_pool;
  using linattn::transformer;
  using linattn::onnx::attributes;
  return linear_attention<linattn::elu_plus_one>({.head_dim = 4}).head_dim() == 4 ? 0 : 1;
}
