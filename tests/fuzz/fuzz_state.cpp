// Whatever bytes `load` is given, it refuses them with a sentence and leaves the state as it was, or takes a record
// that `save` writes in the same bytes.
//
// The first byte of an input chooses the operator, the rest is its record. Checksums would keep libFuzzer out of all
// that is behind them, so what it has changed is signed again, most of the time; and what is too short to be a record
// is replaced by a whole one: the corpus may be empty.
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/state_io.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using namespace linattn;

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace {

constexpr std::size_t header_size = detail::record_layout::header_size;
constexpr std::size_t checksum_size = 4;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

template <class Operator>
class subject {
 public:
  explicit subject(const Operator& attn) : m_attn(attn), m_state(attn.make_state()) { reset(); }

  std::vector<std::byte> record() const {
    std::vector<std::byte> bytes(std::size_t(saved_bytes(m_attn)));
    save(m_attn, m_state, bytes);
    return bytes;
  }

  void try_load(std::span<const std::byte> input) {
    const bool from_span = loads(input, input);
    std::istringstream stream(std::string(reinterpret_cast<const char*>(input.data()), input.size()));
    require(loads(stream, input) == from_span, "a span and a stream of the same bytes differ");
  }

 private:
  /// Entries that no input is likely to have.
  void reset() {
    m_state.reset();
    for (Eigen::Index h = 0; h < m_state.heads(); ++h) m_state.kv(h).setConstant(typename Operator::scalar(0.625));
  }

  template <class From>
  bool loads(From& from, std::span<const std::byte> input) {
    const std::vector<std::byte> before = record();
    try {
      load(m_attn, m_state, from);
    } catch (const std::invalid_argument& refusal) {
      require(std::string_view(refusal.what()).starts_with("linattn::load: the record ") ||
                  std::string_view(refusal.what()).starts_with("linattn::load: the record's ") ||
                  std::string_view(refusal.what()).starts_with("linattn::load: this is no record "),
              refusal.what());
      require(record() == before, "a refused record changed the state");
      return false;
    }
    const std::vector<std::byte> after = record();
    require(input.size() >= after.size() && std::equal(after.begin(), after.end(), input.begin()),
            "a record that was taken is not the one that would be saved");
    reset();
    return true;
  }

  Operator m_attn;
  typename Operator::state_type m_state;
};

/// f(the operator that a first byte chooses).
template <class F>
void with_subject(std::uint8_t choice, const F& f) {
  static subject additive_float(linear_attention<elu_plus_one>({.head_dim = 3, .value_dim = 2, .heads = 2}));
  static subject log_scaled(linear_attention<exponential, additive, double>({.head_dim = 3, .value_dim = 2}));
  static subject per_feature(linear_attention<identity, gated<decay_kind::per_feature>>({.head_dim = 3}));
  static subject retention(linear_attention<identity, decay>({.head_dim = 2}, {}, decay({-0.5})));
  static subject fixed(linear_attention<elu_plus_one, additive, float, 3, 2, 2>{});
  switch (choice % 5) {
    case 0:
      return f(additive_float);
    case 1:
      return f(log_scaled);
    case 2:
      return f(per_feature);
    case 3:
      return f(retention);
    default:
      return f(fixed);
  }
}

/// Checksums that agree with what they are of, where there is room for a header, and a payload.
void sign(std::span<char> record) {
  const auto put = [&](std::size_t begin, std::size_t end) {
    detail::put_number(record.data() + end, detail::crc32(std::string_view(record.data() + begin, end - begin)));
  };
  if (record.size() >= header_size) put(0, header_size - checksum_size);
  if (record.size() >= header_size + checksum_size) put(header_size, record.size() - checksum_size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  with_subject(data[0], [&](auto& s) { s.try_load(std::as_bytes(std::span(data + 1, size - 1))); });
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most,
                                               unsigned int seed) {
  constexpr unsigned int leave_checksums = 8;  // one input in so many is tried with those it has
  if (size <= header_size) {
    const auto choice = std::uint8_t(seed);
    with_subject(choice, [&](auto& s) {
      const std::vector<std::byte> record = s.record();
      if (1 + record.size() > most) return;
      data[0] = choice;
      std::memcpy(data + 1, record.data(), record.size());
      size = 1 + record.size();
    });
  }
  size = LLVMFuzzerMutate(data, size, most);
  if (seed % leave_checksums != 0 && size > 1) sign(std::span(reinterpret_cast<char*>(data + 1), size - 1));
  return size;
}
