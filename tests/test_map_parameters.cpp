// Saved parameters of maps: the layout byte by byte, round trips to the last bit, and refusal of everything else.
#include <gtest/gtest.h>

#include <linattn/linattn.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/map_probe.hpp"

namespace {

using Eigen::Index;
using linattn::random_rows;
using support::normal_matrix;
using support::row_matrix;

constexpr std::size_t header_size = 128;
constexpr std::size_t checksum_size = 4;

template <class Map>
std::string saved(const Map& map) {
  std::ostringstream stream;
  map.save(stream);
  return stream.str();
}

template <class Map>
Map loaded(const std::string& bytes) {
  std::istringstream stream(bytes);
  return Map::load(stream);
}

/// What load says about bytes that it must refuse; empty where it does not.
template <class Map>
std::string refusal(const std::string& bytes) {
  try {
    loaded<Map>(bytes);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

/// The same record with another number of the header or payload, and checksums that agree with it.
template <class T>
std::string forged(std::string bytes, std::size_t at, T value) {
  std::string number;
  linattn::detail::append_number(number, value);
  bytes.replace(at, number.size(), number);
  const auto sign = [&](std::size_t begin, std::size_t end) {
    std::string checksum;
    linattn::detail::append_number(checksum,
                                   linattn::detail::crc32(std::string_view(bytes).substr(begin, end - begin)));
    bytes.replace(end, checksum_size, checksum);
  };
  sign(0, header_size - checksum_size);
  sign(header_size, bytes.size() - checksum_size);
  return bytes;
}

template <class T>
std::string size_forged(const std::string& bytes, std::size_t number, T value) {
  return forged(bytes, 48 + 8 * number, static_cast<std::int64_t>(value));
}

/// A learned map with a head of 2 rows for each of 2 heads of 3 coordinates.
template <class T>
linattn::hedgehog<T> small_map() {
  return {normal_matrix<T>(4, 3, 1), normal_matrix<T>(1, 4, 2), 2, 0.5};
}

// ---- the layout

TEST(MapParameters, ChecksumIsTheCommonOne) { EXPECT_EQ(linattn::detail::crc32("123456789"), 0xCBF43926U); }

TEST(MapParameters, HaveTheDocumentedBytes) {
  row_matrix<float> W(2, 1);
  W << 1.5F, -2;
  row_matrix<float> b(1, 2);
  b << 0.25F, 3;
  std::string expected("linattn\x1A\1\0\0\0\4\0\0\0hedgehog", 24);
  expected.resize(48, '\0');
  for (const char size : std::string("\1\1\2\0\0\0\0\0", 8)) expected += size + std::string(7, '\0');  // H, D, m
  expected += std::string("\x18\0\0\0\0\0\0\0\0\0\0\0", 12);  // a payload of 24 bytes
  expected += "\x45\xbf\x10\x5d";                             // zlib.crc32 of what is before
  expected += std::string("\0\0\0\0\0\0\xe0\x3f", 8);         // temperature 0.5
  expected += std::string("\0\0\xc0\x3f\0\0\0\xc0\0\0\x80\x3e\0\0\x40\x40", 16);
  expected += "\x48\x43\x11\xc9";  // zlib.crc32 of the 24 bytes
  EXPECT_EQ(saved(linattn::hedgehog<float>(W, b, 1, 0.5)), expected);
}

// ---- round trips

template <class T>
struct SavedMaps : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(SavedMaps, scalars);

template <class Map>
void expect_round_trip(const Map& map) {
  const std::string bytes = saved(map);
  const Map copy = loaded<Map>(bytes);
  EXPECT_EQ(saved(copy), bytes) << Map::name;
  EXPECT_EQ(copy.head_dim(), map.head_dim()) << Map::name;
  const auto x = normal_matrix<typename Map::scalar>(5, map.head_dim(), 3);
  for (const Index head : {0, 1}) {
    const auto phi = support::features(map, x, 0, head);
    EXPECT_TRUE(support::same_bits(support::features(copy, x, 0, head), phi)) << Map::name;
    EXPECT_TRUE(support::same_bits(support::gradient(copy, x, phi, 0, head), support::gradient(map, x, phi, 0, head)))
        << Map::name;
  }
  if constexpr (requires { map.redraw(9); }) {
    EXPECT_EQ(saved(copy.redraw(9)), saved(map.redraw(9))) << Map::name << ": options and own parameter, too";
    EXPECT_NE(saved(copy.redraw(9)), bytes) << Map::name;
  }
}

TYPED_TEST(SavedMaps, KeepEveryBit) {
  using T = TypeParam;
  for (const Index d : {1, 5, 16}) {
    for (const Index m : {1, 7, 32}) {
      for (const random_rows kind : {random_rows::independent, random_rows::orthogonal, random_rows::regularized}) {
        for (const double temperature : {0.0, 1.7}) {
          const linattn::random_feature_options options{.rows = kind, .temperature = temperature};
          constexpr std::uint64_t seed = 0xFEDCBA9876543210;
          expect_round_trip(linattn::positive_random<T>(d, m, seed, options));
          expect_round_trip(linattn::hyperbolic<T>(d, 2 * m, seed, options));
          if (kind != random_rows::regularized) expect_round_trip(linattn::gerf<T>(d, m, seed, -0.3, options));
          expect_round_trip(linattn::random_fourier<T>(d, 2 * m, seed, options));
          expect_round_trip(linattn::gaussian_fourier<T>(d, 2 * m, seed, options));
          expect_round_trip(linattn::rfa<T>(d, 2 * m, seed, options));
          expect_round_trip(linattn::generalized_relu<T>(d, m, seed, options, 0.125));
        }
      }
      for (const Index heads : {1, 3}) {
        const auto W = normal_matrix<T>(heads * m, d, 4), b = normal_matrix<T>(1, heads * m, 5);
        expect_round_trip(linattn::hedgehog<T>(W, b, heads, 0.3));
        expect_round_trip(linattn::learned_linear<T>(W, b, heads));
        expect_round_trip(linattn::learned_linear<T, linattn::exponential>(W, b, heads));
        expect_round_trip(linattn::learned_linear<T, linattn::elu_plus_one>(W, b, heads));
      }
    }
  }
}

TEST(MapParameters, FollowEachOtherInAStream) {
  const auto first = small_map<float>();
  const linattn::gerf<double> second(3, 4, 5, -0.1);
  std::stringstream stream;
  first.save(stream);
  second.save(stream);
  stream << "and something else";
  EXPECT_EQ(saved(linattn::hedgehog<float>::load(stream)), saved(first));
  EXPECT_EQ(saved(linattn::gerf<double>::load(stream)), saved(second));
  std::string word;
  stream >> word;
  EXPECT_EQ(word, "and");
}

// ---- damage

template <class Map>
void expect_every_damage_noticed(const Map& map) {
  const std::string bytes = saved(map);
  const std::string prefix = std::string("linattn::") + Map::name + "::load: ";
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const std::string text = refusal<Map>(bytes.substr(0, length));
    EXPECT_TRUE(text.starts_with(prefix + "the record is cut off: its ")) << length << " bytes: " << text;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = bytes;
      flipped[i] = static_cast<char>(flipped[i] ^ 1 << bit);
      EXPECT_TRUE(refusal<Map>(flipped).starts_with(prefix)) << "byte " << i << ", bit " << bit;
    }
  }
}

TEST(MapParameters, AreRefusedAtEveryLengthAndWithEveryBitFlipped) {
  expect_every_damage_noticed(small_map<float>());
  expect_every_damage_noticed(small_map<double>());
  expect_every_damage_noticed(
      linattn::learned_linear<float>(normal_matrix<float>(2, 3, 1), normal_matrix<float>(1, 2, 2)));
  expect_every_damage_noticed(linattn::gerf<float>(3, 2, 5, -0.1));
  expect_every_damage_noticed(linattn::rfa<double>(2, 2, 5));
}

TEST(MapParameters, SayWhatIsWrong) {
  using map = linattn::hedgehog<float>;
  const std::string bytes = saved(small_map<float>());
  EXPECT_EQ(refusal<map>(""), "linattn::hedgehog::load: the record is cut off: its header has 0 of 128 bytes");
  EXPECT_EQ(refusal<map>(bytes.substr(0, 150)),
            "linattn::hedgehog::load: the record is cut off: its payload has 22 of 72 bytes");
  EXPECT_EQ(refusal<map>(bytes.substr(0, 203)),
            "linattn::hedgehog::load: the record is cut off: its checksum has 3 of 4 bytes");
  EXPECT_EQ(refusal<map>(std::string(200, 'x')),
            "linattn::hedgehog::load: this is no record of linattn: it does not begin with its eight bytes");
  EXPECT_EQ(refusal<map>(forged(bytes, 8, std::uint32_t{2})),
            "linattn::hedgehog::load: the record has version 2 of the layout, this library reads 1");
  std::string other_header = bytes;
  other_header[50] = 1;
  EXPECT_EQ(refusal<map>(other_header),
            "linattn::hedgehog::load: the record is damaged: the checksum of its header is wrong");
  std::string other_payload = bytes;
  other_payload[140] = static_cast<char>(other_payload[140] + 1);
  EXPECT_EQ(refusal<map>(other_payload),
            "linattn::hedgehog::load: the record is damaged: the checksum of its payload is wrong");
}

TEST(MapParameters, AreRefusedByAnotherMapOrScalar) {
  EXPECT_EQ(
      refusal<linattn::hedgehog<double>>(saved(small_map<float>())),
      "linattn::hedgehog::load: the record holds hedgehog with scalars of 4 bytes, expected hedgehog with 8 bytes");
  EXPECT_EQ(
      (refusal<linattn::learned_linear<float, linattn::exponential>>(
          saved(linattn::learned_linear<float>(normal_matrix<float>(2, 3, 1), normal_matrix<float>(1, 2, 2))))),
      "linattn::learned_linear<exponential>::load: the record holds learned_linear<relu> with scalars of 4 bytes, "
      "expected learned_linear<exponential> with 4 bytes");
  EXPECT_NE(refusal<linattn::hyperbolic<float>>(saved(linattn::positive_random<float>(4, 6, 1))), "");
  EXPECT_NE(refusal<linattn::gaussian_fourier<float>>(saved(linattn::random_fourier<float>(4, 6, 1))), "");
}

// ---- records whose checksums are right

TEST(MapParameters, AreRefusedWithSizesThatAreNotTheirs) {
  using map = linattn::hedgehog<float>;
  const std::string bytes = saved(small_map<float>());  // sizes 2, 3, 2
  const std::string damaged = "linattn::hedgehog::load: the record is damaged: ";
  for (std::size_t number = 0; number < 3; ++number) {
    EXPECT_EQ(refusal<map>(size_forged(bytes, number, 0)), damaged + "size number " + std::to_string(number) + " is 0");
    EXPECT_EQ(refusal<map>(size_forged(bytes, number, -5)),
              damaged + "size number " + std::to_string(number) + " is -5");
    EXPECT_NE(refusal<map>(size_forged(bytes, number, std::numeric_limits<std::int64_t>::max())), "");
    for (const int power : {16, 31, 32, 40}) {  // whose products leave 64 bits, too
      EXPECT_EQ(refusal<map>(size_forged(size_forged(bytes, number, Index{1} << power), 2, Index{1} << power)),
                damaged + "its payload of 72 bytes is too short for its sizes");
    }
    EXPECT_NE(refusal<map>(size_forged(bytes, number, 4)), "");
  }
  EXPECT_EQ(refusal<map>(size_forged(bytes, 0, 1)), damaged + "its payload has 72 bytes, but its sizes make 40");
}

TEST(MapParameters, AskForNoMemoryThatTheirDataDoNotFill) {
  using map = linattn::hedgehog<float>;
  // A request of these sizes would end in std::bad_alloc or std::length_error instead of a sentence.
  EXPECT_EQ(refusal<map>(forged(saved(small_map<float>()), 112, std::uint64_t{1} << 60U)),
            "linattn::hedgehog::load: the record is cut off: its payload has 76 of 1152921504606846976 bytes");
  EXPECT_NE(refusal<map>(forged(saved(small_map<float>()), 112, ~std::uint64_t{0})), "");
}

TEST(MapParameters, AreRefusedWithValuesThatNoMapHas) {
  const auto expect = [](const std::string& text, const std::string& end) { EXPECT_TRUE(text.ends_with(end)) << text; };
  const std::string learned = saved(small_map<float>());
  expect(refusal<linattn::hedgehog<float>>(forged(learned, header_size, 0.0)), "its temperature is 0");
  expect(refusal<linattn::hedgehog<float>>(forged(learned, header_size, std::numeric_limits<double>::infinity())),
         "its temperature is inf");
  const std::string random = saved(linattn::gerf<float>(3, 2, 5, -0.1));
  expect(refusal<linattn::gerf<float>>(forged(random, header_size, std::uint64_t{3})), "there is no such kind of rows");
  expect(refusal<linattn::gerf<float>>(forged(random, header_size, std::uint64_t{2})),
         "directions of one length are not weighed by A; use independent or orthogonal ones");
  expect(refusal<linattn::gerf<float>>(forged(random, header_size + 8, -1.0)), "its temperature is -1");
  expect(refusal<linattn::gerf<float>>(forged(random, header_size + 16, 0.125)),
         "A is 0.125; it must be below 1/8, where the variance is infinite");
  expect(refusal<linattn::generalized_relu<float>>(
             forged(saved(linattn::generalized_relu<float>(3, 2, 5)), header_size + 16, -1.0)),
         "its epsilon is -1");
}

TEST(MapParameters, AreNotSavedToAStreamThatDoesNotTakeThem) {
  std::ostream broken(nullptr);
  try {
    small_map<float>().save(broken);
    FAIL() << "nothing was refused";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "linattn::hedgehog::save: the stream does not take the 204 bytes of the record");
  }
}

}  // namespace
