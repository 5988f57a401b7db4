// Saved states: the layout byte by byte, round trips to the last bit, and refusal of everything else, which leaves the
// state as it was.
#include <linattn/feature_maps/cosformer.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/relu.hpp>
#include <linattn/linear_attention.hpp>
#include <linattn/state_io.hpp>

#include "support/allocations.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Eigen::Index;
using linattn::options;
using linattn::row_matrix;
using support::normal_matrix;

constexpr std::size_t header_size = 128;
constexpr std::size_t checksum_size = 4;

template <class Operator>
std::string saved(const Operator& attn, const typename Operator::state_type& s) {
  std::ostringstream stream;
  linattn::save(attn, s, stream);
  return stream.str();
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

/// What load says to bytes that it must refuse, from a span and a stream alike; empty where it does not.
template <class Operator>
std::string refusal(const Operator& attn, typename Operator::state_type& s, const std::string& record) {
  const auto text_of = [&](auto&& from) -> std::string {
    try {
      linattn::load(attn, s, from);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return {};
  };
  const std::string text = text_of(bytes_of(record));
  std::istringstream stream(record);
  EXPECT_EQ(text_of(stream), text);
  return text;
}

/// The same record with another number of the header or payload, and checksums that agree with it.
template <class T>
std::string forged(std::string record, std::size_t at, T value) {
  linattn::detail::put_number(record.data() + at, value);
  const auto sign = [&](std::size_t begin, std::size_t end) {
    linattn::detail::put_number(record.data() + end,
                                linattn::detail::crc32(std::string_view(record).substr(begin, end - begin)));
  };
  sign(0, header_size - checksum_size);
  sign(header_size, record.size() - checksum_size);
  return record;
}

/// Some tokens with whatever the rule takes.
template <class Operator>
struct tokens {
  using T = typename Operator::scalar;
  row_matrix<T> q, k, v, log_decay, beta;

  tokens(const Operator& attn, Index n, std::uint64_t seed)
      : q(normal_matrix<T>(n, attn.heads() * attn.head_dim(), seed)),
        k(normal_matrix<T>(n, attn.heads() * attn.head_dim(), seed + 1)),
        v(normal_matrix<T>(n, attn.heads() * attn.value_dim(), seed + 2)),
        log_decay(-normal_matrix<T>(n, attn.heads() * attn.features(), seed + 3).cwiseAbs()),
        beta(normal_matrix<T>(n, attn.heads(), seed + 4).cwiseAbs().cwiseMin(T(1))) {
    if (Operator::rule.decay == linattn::decay_kind::per_head) log_decay.conservativeResize(n, attn.heads());
  }
  typename Operator::token_inputs inputs(Index i) const {
    typename Operator::token_inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = log_decay.row(i);
    if constexpr (requires { x.beta; }) x.beta = beta.row(i);
    return x;
  }
};

template <class Operator>
row_matrix<typename Operator::scalar> run(const Operator& attn, typename Operator::state_type& s, Index n,
                                          std::uint64_t seed) {
  const tokens<Operator> x(attn, n, seed);
  row_matrix<typename Operator::scalar> y(n, attn.heads() * attn.value_dim());
  auto ws = attn.make_workspace();
  for (Index i = 0; i < n; ++i) attn.step(s, x.q.row(i), x.k.row(i), x.v.row(i), x.inputs(i), y.row(i), ws);
  return y;
}

/// A state that has seen n tokens.
template <class Operator>
auto seen(const Operator& attn, Index n, Index first_position = 0) {
  auto s = attn.make_state(first_position);
  run(attn, s, n, 5);
  return s;
}

constexpr options odd_sizes{.head_dim = 5, .value_dim = 3, .heads = 2};

using elu = linattn::linear_attention<linattn::elu_plus_one>;
using retention = linattn::linear_attention<linattn::identity, linattn::decay>;
using per_feature = linattn::gated<linattn::decay_kind::per_feature>;

// ---- the layout -----------------------------------------------------------------------------------------------------

TEST(SavedState, HasTheDocumentedBytes) {
  const elu attn({.head_dim = 2, .value_dim = 1});
  auto s = attn.make_state(-2);
  run(attn, s, 3, 1);
  s.kv(0) << 1.5F, -2;
  s.k_sum(0) << 0.25F, 3;
  const auto number = [](int n) { return std::string(1, char(n)) + std::string(7, n < 0 ? '\xff' : '\0'); };
  std::string expected("linattn\x1A\1\0\0\0\4\0\0\0state", 21);
  expected.resize(48, '\0');
  // D, C, M, H, a rule that keeps z and reads after it writes, no parameters of the map and rule.
  for (const int n : {2, 2, 1, 1, 32 + 64, 0, 0, 0, 64, 0}) expected += number(n);
  expected.resize(124);
  expected += std::string("\x5c\xb4\xcd\xb7", 4);  // zlib.crc32 of what is before
  expected += "elu_plus_one";
  expected.resize(160, '\0');
  expected += number(3) + number(-2);
  expected += std::string("\0\0\xc0\x3f\0\0\0\xc0\0\0\x80\x3e\0\0\x40\x40", 16);
  expected += std::string("\x94\x14\x8d\x67", 4);  // zlib.crc32 of the 64 bytes
  EXPECT_EQ(saved(attn, s), expected);
  EXPECT_EQ(linattn::saved_bytes(attn), Index(expected.size()));
}

// ---- round trips ----------------------------------------------------------------------------------------------------

/// Into a state on the heap, from a stream and from a span; it goes on as the saved one does, to the last bit.
template <class Operator>
void expect_round_trip(const Operator& attn, Index n) {
  auto s = seen(attn, n, 7);
  const std::string record = saved(attn, s);
  EXPECT_EQ(Index(record.size()), linattn::saved_bytes(attn));
  std::vector<std::byte> bytes(record.size() + 3, std::byte(0x5A));
  linattn::save(attn, s, bytes);
  EXPECT_EQ(std::memcmp(bytes.data(), record.data(), record.size()), 0);
  EXPECT_EQ(bytes[record.size()], std::byte(0x5A));

  auto copy = seen(attn, 3);  // what it holds goes
  linattn::load(attn, copy, bytes);
  EXPECT_EQ(saved(attn, copy), record);
  EXPECT_EQ(copy.tokens(), n);
  EXPECT_EQ(copy.first_position(), 7);
  auto from_stream = attn.make_state();
  std::istringstream stream(record + "more");
  linattn::load(attn, from_stream, stream);
  EXPECT_EQ(stream.tellg(), std::streampos(std::streamoff(record.size())));
  EXPECT_EQ(saved(attn, from_stream), record);

  const auto y = run(attn, s, 4, 9);
  EXPECT_TRUE(support::same_bits(run(attn, copy, 4, 9), y));
  EXPECT_TRUE(support::same_bits(run(attn, from_stream, 4, 9), y));
  EXPECT_EQ(saved(attn, copy), saved(attn, s));
}

TEST(SavedState, KeepsEveryBit) {
  for (const Index n : {0, 1, 21}) {
    for (const options& o : {odd_sizes, options{.head_dim = 1}, options{.head_dim = 16, .heads = 3}}) {
      expect_round_trip(elu(o), n);
      expect_round_trip(linattn::linear_attention<linattn::exponential, linattn::additive, double>(o), n);
      expect_round_trip(linattn::linear_attention<linattn::identity, per_feature>(o), n);
      expect_round_trip(linattn::linear_attention<linattn::identity, linattn::delta>(o), n);
      const std::vector<double> g(std::size_t(std::max<Index>(o.heads, 1)), -0.25);
      expect_round_trip(retention(o, {}, linattn::decay(g)), n);
    }
  }
}

// Any state, NaN payloads, infinities and negative zeros included.
TEST(SavedState, KeepsBitsThatAreNoNumbers) {
  const elu attn(odd_sizes);
  auto s = seen(attn, 4);
  s.kv(0)(4, 2) = std::bit_cast<float>(0x7FC12345U);
  s.kv(1)(0, 0) = std::bit_cast<float>(0xFF812345U);  // signalling
  s.kv(1)(0, 1) = -0.0F;
  s.k_sum(1)[4] = -std::numeric_limits<float>::infinity();
  s.k_sum(0)[0] = std::numeric_limits<float>::denorm_min();
  const std::string record = saved(attn, s);
  auto copy = attn.make_state();
  linattn::load(attn, copy, bytes_of(record));
  EXPECT_EQ(std::bit_cast<std::uint32_t>(copy.kv(0)(4, 2)), 0x7FC12345U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(copy.kv(1)(0, 0)), 0xFF812345U);
  EXPECT_EQ(saved(attn, copy), record);
}

// Compile-time and run-time sizes, heap, inline and attached: one record.
TEST(SavedState, IsTheSameWhereverItLives) {
  const elu attn(odd_sizes);
  const linattn::linear_attention<linattn::elu_plus_one, linattn::additive, float, 5, 3, 2> fixed;
  const std::string record = saved(attn, seen(attn, 6));
  auto inside = fixed.make_state();
  linattn::load(fixed, inside, bytes_of(record));
  EXPECT_EQ(saved(fixed, inside), record);

  struct alignas(64) line {
    std::array<std::byte, 64> bytes;
  };
  std::vector<line> memory(std::size_t(attn.state_bytes() / 64));
  auto attached = attn.make_state(std::as_writable_bytes(std::span(memory)));
  linattn::load(attn, attached, bytes_of(record));
  EXPECT_EQ(saved(attn, attn.attach_state(std::as_writable_bytes(std::span(memory)))), record);
}

TEST(SavedState, FollowsOthersInAStream) {
  const elu attn(odd_sizes);
  const retention other({.head_dim = 3}, {}, linattn::decay({-0.5}));
  std::stringstream stream;
  const auto a = seen(attn, 4);
  const auto b = seen(other, 5);
  linattn::save(attn, a, stream);
  linattn::save(other, b, stream);
  stream << "and something else";
  auto a_again = attn.make_state();
  auto b_again = other.make_state();
  linattn::load(attn, a_again, stream);
  linattn::load(other, b_again, stream);
  EXPECT_EQ(saved(attn, a_again), saved(attn, a));
  EXPECT_EQ(saved(other, b_again), saved(other, b));
  std::string word;
  stream >> word;
  EXPECT_EQ(word, "and");
}

// What an operator may choose anew does not matter.
TEST(SavedState, IsOfEveryOperatorWithTheSameStates) {
  const elu attn({.head_dim = 5, .value_dim = 3, .heads = 2});
  const elu other({.head_dim = 5,
                   .value_dim = 3,
                   .heads = 4,
                   .key_heads = 2,
                   .query_scale = 0.5,
                   .denominator = linattn::denominator_policy::add(1e-6)});
  const std::string record = saved(attn, seen(attn, 6));
  auto s = other.make_state();
  EXPECT_EQ(refusal(other, s, record), "");
  EXPECT_EQ(saved(other, s), record);
}

// ---- damage ---------------------------------------------------------------------------------------------------------

/// Every truncation and every flipped bit is noticed and changes nothing.
template <class Operator>
void expect_every_damage_noticed(const Operator& attn) {
  const std::string record = saved(attn, seen(attn, 6, 1));
  auto s = seen(attn, 4);
  const std::string before = saved(attn, s);
  for (std::size_t length = 0; length < record.size(); ++length) {
    const std::string text = refusal(attn, s, record.substr(0, length));
    EXPECT_TRUE(text.starts_with("linattn::load: the record is cut off: its ")) << length << " bytes: " << text;
  }
  for (std::size_t i = 0; i < record.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = record;
      flipped[i] = static_cast<char>(flipped[i] ^ 1 << bit);
      EXPECT_TRUE(refusal(attn, s, flipped).starts_with("linattn::load: ")) << "byte " << i << ", bit " << bit;
    }
  }
  EXPECT_EQ(saved(attn, s), before);
  EXPECT_EQ(refusal(attn, s, record), "");
  EXPECT_EQ(saved(attn, s), record);
}

TEST(SavedState, IsRefusedAtEveryLengthAndWithEveryBitFlipped) {
  expect_every_damage_noticed(elu({.head_dim = 2, .value_dim = 3, .heads = 2}));
  expect_every_damage_noticed(
      linattn::linear_attention<linattn::exponential, linattn::additive, double>({.head_dim = 2, .heads = 2}));
  expect_every_damage_noticed(linattn::linear_attention<linattn::identity, per_feature>({.head_dim = 3}));
  expect_every_damage_noticed(retention({.head_dim = 3}, {}, linattn::decay({-0.5})));
}

TEST(SavedState, SaysWhatIsWrong) {
  const elu attn({.head_dim = 2, .value_dim = 3, .heads = 2});  // 48 + 64 bytes of payload
  const std::string record = saved(attn, seen(attn, 6));
  auto s = attn.make_state();
  const std::string prefix = "linattn::load: ";
  EXPECT_EQ(refusal(attn, s, ""), prefix + "the record is cut off: its header has 0 of 128 bytes");
  EXPECT_EQ(refusal(attn, s, record.substr(0, 150)), prefix + "the record is cut off: its rest has 22 of 116 bytes");
  EXPECT_EQ(refusal(attn, s, std::string(300, 'x')),
            prefix + "this is no record of linattn: it does not begin with its eight bytes");
  EXPECT_EQ(refusal(attn, s, forged(record, 8, std::uint32_t{2})),
            prefix + "the record has version 2 of the layout, this library reads 1");
  std::string other = record;
  other[50] = 1;
  EXPECT_EQ(refusal(attn, s, other), prefix + "the record is damaged: the checksum of its header is wrong");
  other = record;
  other[200] = static_cast<char>(other[200] + 1);
  EXPECT_EQ(refusal(attn, s, other), prefix + "the record is damaged: the checksum of its payload is wrong");
}

// ---- records of something else --------------------------------------------------------------------------------------

TEST(SavedState, IsRefusedByAnotherOperator) {
  const elu attn(odd_sizes);
  const std::string record = saved(attn, seen(attn, 6));
  const auto text = [&](const auto& other) {
    auto s = other.make_state();
    return refusal(other, s, record);
  };
  const std::string is = "linattn::load: the record's state is ";
  EXPECT_EQ(text(elu({.head_dim = 5, .value_dim = 4, .heads = 2})),
            is +
                "(2 heads, 5 features, 3 values) for head_dim 5, expected (2 heads, 5 features, 4 values) for head_dim "
                "5");
  EXPECT_EQ(text(elu({.head_dim = 5, .value_dim = 3, .heads = 3})),
            is +
                "(2 heads, 5 features, 3 values) for head_dim 5, expected (3 heads, 5 features, 3 values) for head_dim "
                "5");
  EXPECT_EQ(text(linattn::linear_attention<linattn::elu_plus_one, linattn::additive, double>(odd_sizes)),
            "linattn::load: the record holds state with scalars of 4 bytes, expected state with 8 bytes");
  EXPECT_EQ(text(linattn::linear_attention<linattn::relu>(odd_sizes)), is + "of the map elu_plus_one, expected relu");
  EXPECT_EQ(text(linattn::linear_attention<linattn::exponential>(odd_sizes)),
            is + "of a rule with no decay, a sum of keys, expected no decay, a sum of keys, log scales");
  EXPECT_EQ(text(linattn::linear_attention<linattn::elu_plus_one, per_feature>(odd_sizes)),
            is + "of a rule with no decay, a sum of keys, expected a decay per feature, no sum of keys");
  EXPECT_EQ(text(linattn::linear_attention<linattn::elu_plus_one, linattn::delta>(odd_sizes)),
            is + "of a rule with no decay, a sum of keys, expected no decay, a delta correction, no sum of keys");
}

TEST(SavedState, IsRefusedByAMapWithOtherParameters) {
  using random = linattn::linear_attention<linattn::positive_random<float>>;
  const random attn(odd_sizes, linattn::positive_random<float>(5, 4, 1));
  const std::string record = saved(attn, attn.make_state());
  const random same(odd_sizes, linattn::positive_random<float>(5, 4, 1));
  auto s = same.make_state();
  EXPECT_EQ(refusal(same, s, record), "");
  const random other_seed(odd_sizes, linattn::positive_random<float>(5, 4, 2));
  EXPECT_TRUE(refusal(other_seed, s, record)
                  .starts_with("linattn::load: the record's state is of the same map, but with other parameters: "));
  const random other_temperature(odd_sizes, linattn::positive_random<float>(5, 4, 1, {.temperature = 2}));
  EXPECT_NE(refusal(other_temperature, s, record), "");

  using positional = linattn::linear_attention<linattn::cosformer>;
  const positional near(odd_sizes, linattn::cosformer(16)), far(odd_sizes, linattn::cosformer(17));
  auto p = far.make_state();
  EXPECT_EQ(refusal(far, p, saved(near, near.make_state())),
            "linattn::load: the record's state is of the same map, but with other parameters: their fingerprint is 16, "
            "expected 17");
}

TEST(SavedState, IsRefusedByARuleWithOtherDecays) {
  const retention attn({.head_dim = 3, .heads = 2}, {}, linattn::decay({-0.5, -0.25}));
  const retention other({.head_dim = 3, .heads = 2}, {}, linattn::decay({-0.5, -0.125}));
  auto s = other.make_state();
  EXPECT_TRUE(refusal(other, s, saved(attn, seen(attn, 6)))
                  .starts_with("linattn::load: the record's state is of the same rule, but with other decays: "));
}

// ---- records whose checksums are right ------------------------------------------------------------------------------

// No size is believed that is not the operator's: nothing is asked for or written by another one.
TEST(SavedState, IsRefusedWithForgedSizes) {
  const elu attn(odd_sizes);
  const std::string record = saved(attn, seen(attn, 6));
  auto s = seen(attn, 4);
  const std::string before = saved(attn, s);
  for (std::size_t number = 0; number < 4; ++number) {
    for (const std::int64_t n :
         {std::int64_t{0}, std::int64_t{-5}, std::int64_t{4}, std::int64_t{1} << 32, std::int64_t{1} << 62,
          std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
      const std::string text = refusal(attn, s, forged(record, 48 + 8 * number, n));
      EXPECT_TRUE(text.starts_with("linattn::load: the record's state is (")) << text;
    }
  }
  for (const std::int64_t rule : {-1, 3, 96 + 256, 0x18}) {
    const std::string text = refusal(attn, s, forged(record, 80, rule));
    EXPECT_TRUE(text.starts_with("linattn::load: the record's state is of a rule with ")) << text;
  }
  EXPECT_EQ(refusal(attn, s, forged(record, 112, ~std::uint64_t{0})),
            "linattn::load: the record is damaged: its payload has 9223372036854775807 bytes, but its sizes make 208");
  EXPECT_NE(refusal(attn, s, forged(record, 112, std::uint64_t{207})), "");
  EXPECT_EQ(refusal(attn, s, forged(record, 160, std::int64_t{-1})),
            "linattn::load: the record is damaged: its state has -1 tokens");
  for (const std::size_t unused : {24U, 104U, 120U, 150U}) {
    EXPECT_EQ(refusal(attn, s, forged(record, unused, std::uint32_t{1})),
              "linattn::load: the record is damaged: some of its unused bytes are not 0");
  }
  EXPECT_EQ(saved(attn, s), before);
}

TEST(SavedState, AsksForNoMemoryButAStreamsForItsRecord) {
  LINATTN_NEEDS_ALLOCATION_COUNT();
  const elu attn(odd_sizes);
  auto s = seen(attn, 6);
  std::vector<std::byte> bytes(std::size_t(linattn::saved_bytes(attn)));
  const support::allocation_count count;
  linattn::save(attn, s, bytes);
  linattn::load(attn, s, bytes);
  EXPECT_EQ(count.total(), 0);

  std::istringstream stream(saved(attn, s));
  const support::allocation_count of_stream;
  linattn::load(attn, s, stream);
  const long allocations = of_stream.allocations();
  EXPECT_EQ(allocations, 1);
}

// ---- what save and load refuse --------------------------------------------------------------------------------------

TEST(SavedState, NeedsAStateAndRoomForIt) {
  const auto text_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return {};
  };
  const elu attn(odd_sizes);
  const auto s = seen(attn, 6);
  elu::state_type empty;
  auto other = elu({.head_dim = 5, .value_dim = 3, .heads = 3}).make_state();
  std::vector<std::byte> bytes(std::size_t(linattn::saved_bytes(attn)), std::byte(0x5A));
  const auto untouched = bytes;
  EXPECT_EQ(text_of([&] { linattn::save(attn, empty, bytes); }),
            "linattn::save: the state is empty (default-made or moved from), expected (2 heads, 5 features, 3 values)");
  EXPECT_EQ(text_of([&] { linattn::load(attn, other, bytes); }),
            "linattn::load: the state is (3 heads, 5 features, 3 values), expected (2 heads, 5 features, 3 values)");
  EXPECT_EQ(text_of([&] { linattn::save(attn, s, std::span(bytes).first(100)); }),
            "linattn::save: there are 100 bytes, the record takes 340");
  EXPECT_EQ(bytes, untouched);
  std::ostream broken(nullptr);
  EXPECT_EQ(text_of([&] { linattn::save(attn, s, broken); }),
            "linattn::save: the stream does not take the 340 bytes of the record");
}

}  // namespace
