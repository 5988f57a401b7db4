// What a program that ships should say and catch: its version, what it was built for, and errors as sentences.
#include <linattn/linattn.hpp>
#include <linattn/state_io.hpp>

#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#define STRING_OF(x) #x
#define VALUE_OF(x) STRING_OF(x)

int main() {
  std::cout << "linattn " << LINATTN_VERSION_MAJOR << "." << LINATTN_VERSION_MINOR << "." << LINATTN_VERSION_PATCH
            << ", namespace " << VALUE_OF(LINATTN_ABI_NAMESPACE) << "\n";  // which packet width this file was built for

  using matrix = linattn::row_matrix<float>;
  const linattn::linear_attention<linattn::elu_plus_one> attn({.head_dim = 16, .heads = 2});
  std::string said;
  try {
    attn.forward_causal(matrix(5, 32), matrix(4, 32), matrix(5, 32));
  } catch (const std::invalid_argument& error) {  // before anything was written
    said = error.what();
  }
  std::cout << said << "\n";

  auto s = attn.make_state();
  std::vector<std::byte> record(static_cast<std::size_t>(linattn::saved_bytes(attn)));
  linattn::save(attn, s, record);
  record[8] = std::byte{2};  // as a later version of the format would have it
  std::string refused;
  try {
    linattn::load(attn, s, record);
  } catch (const std::invalid_argument& error) {  // the state is as it was
    refused = error.what();
  }
  std::cout << refused << "\n";
  return said.empty() || refused.empty() ? 1 : 0;
}
