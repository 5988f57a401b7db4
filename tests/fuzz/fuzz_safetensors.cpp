// Whatever bytes `safetensors_file::parse` is given, it refuses them with a sentence, or takes a file whose tensors are
// its data: side by side, each as long as its shape says, and each copied or refused.
//
// The length before a header is set anew after most mutations, and a header that libFuzzer has lost is replaced by a
// whole one: the corpus may be empty.
#include <linattn/safetensors.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

using namespace linattn;

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace {

constexpr std::size_t length_size = 8;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

template <class F>
bool refuses(const F& call, std::string_view prefix) {
  try {
    call();
  } catch (const std::invalid_argument& refusal) {
    require(std::string_view(refusal.what()).starts_with(prefix), refusal.what());
    return true;
  }
  return false;
}

void check(const safetensors_file& file, std::size_t data_size) {
  std::size_t data = 0;
  const std::byte* end = nullptr;
  for (const safetensors_tensor& tensor : file.tensors()) {
    require(end == nullptr || tensor.data.data() == end, "tensors do not lie side by side");
    end = tensor.data.data() + tensor.data.size();
    data += tensor.data.size();
    require(file.tensor(tensor.name) == &tensor, "a tensor is not found by its name");
    std::uint64_t bits = detail::info_of(tensor.dtype).bits;
    bool empty = false;
    for (const Eigen::Index n : tensor.shape) {
      require(n >= 0 && (n == 0 || bits <= std::numeric_limits<std::uint64_t>::max() / std::uint64_t(n)),
              "a shape overflows");
      empty = empty || n == 0;
      if (n != 0) bits *= std::uint64_t(n);
    }
    require((empty ? 0 : bits) == 8 * tensor.data.size(), "a tensor's bytes are not those of its shape");
    if (tensor.shape.size() > 2) continue;
    const Eigen::Index rows = tensor.shape.size() == 2 ? tensor.shape[0] : 1;
    const Eigen::Index cols = tensor.shape.empty() ? 1 : tensor.shape.back();
    if (tensor.data.empty()) continue;
    row_matrix<double> x(rows, cols);
    refuses([&] { file.copy(tensor, x); }, "linattn::safetensors_file::copy: ");
  }
  require(data == data_size, "data that are no tensor's");
}

/// A whole file: each kind of entry once.
const std::string& seed() {
  static const std::string bytes = [] {
    const std::string header =
        R"({"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
        R"("y":{"dtype":"F16","shape":[],"data_offsets":[8,10]},"z":{"dtype":"F4","shape":[0,4],"data_offsets":[8,8]}})";
    std::string all(length_size, '\0');
    all[0] = static_cast<char>(header.size());
    return all + header + "0123456789";
  }();
  return bytes;
}

/// Words that a header is made of, and numbers that sums and products of sizes fail for.
constexpr std::array<std::string_view, 26> words = {"\"dtype\":",
                                                    "\"shape\":",
                                                    "\"data_offsets\":",
                                                    "\"__metadata__\":",
                                                    "\"F32\"",
                                                    "\"BF16\"",
                                                    "\"F64\"",
                                                    "\"U8\"",
                                                    "{",
                                                    "}",
                                                    "[",
                                                    "]",
                                                    ",",
                                                    "0",
                                                    "4294967296",
                                                    "4611686018427387904",
                                                    "9223372036854775807",
                                                    "9223372036854775808",
                                                    "18446744073709551612",
                                                    "18446744073709551616",
                                                    "-1",
                                                    "1.5",
                                                    "[8,10]",
                                                    "[8,8]",
                                                    "[4294967296,4294967296]",
                                                    "\"\\ud800\""};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto input = std::as_bytes(std::span(data, size));
  refuses(
      [&] {
        const safetensors_file file = safetensors_file::parse({input.begin(), input.end()});
        std::uint64_t length = 0;
        for (std::size_t i = length_size; i-- > 0;) length = length << 8U | data[i];
        check(file, size - length_size - length);
      },
      "linattn::safetensors_file::parse: ");
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most,
                                               unsigned int random) {
  constexpr unsigned int leave_length = 8;  // one input in so many keeps the length it has
  if (size <= length_size && seed().size() <= most) {
    std::copy(seed().begin(), seed().end(), data);
    size = seed().size();
  }
  if (random % 3 == 0 && size > length_size) {  // a word somewhere, in the place of some bytes
    const std::string_view word = words[random / 3 % words.size()];
    const std::size_t at = length_size + random / 71 % (size - length_size);
    const std::size_t gone = std::min<std::size_t>(random / 1009 % 12, size - at);
    if (size - gone + word.size() <= most) {
      std::memmove(data + at + word.size(), data + at + gone, size - at - gone);
      std::copy(word.begin(), word.end(), data + at);
      size = size - gone + word.size();
    }
  } else {
    size = LLVMFuzzerMutate(data, size, most);
  }
  if (random % leave_length != 0 && size > length_size) {  // up to the last brace
    std::size_t end = size;
    while (end > length_size && data[end - 1] != '}') --end;
    for (std::size_t i = 0; i < length_size; ++i) data[i] = std::uint8_t((end - length_size) >> 8 * i);
  }
  return size;
}
