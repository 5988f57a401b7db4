// Records: how parameters are written to a stream and read back, whole or not at all.
//
// Little-endian on every machine. A header of 128 bytes, the payload, and the payload's checksum:
//
//     0   8  "linattn" and the byte 0x1A
//     8   4  version of this layout, 1
//    12   4  bytes of a scalar: 4 float, 8 double
//    16  32  what the record holds, zero-padded: the name of a map
//    48  64  eight sizes, 64-bit integers; unused ones are 0
//   112   8  bytes of the payload, n
//   120   4  0
//   124   4  CRC-32 of bytes 0 ... 123
//   128   n  payload: 64-bit integers, doubles, and scalars as IEEE 754 bit patterns, without padding
//   128+n 4  CRC-32 of the payload
//
// The CRC is that of zlib and PNG; it sees every change of up to 32 neighbouring bits. It guards against accidents, not
// against an author of records: what is read is checked again for sense where it is used. The header has a checksum of
// its own, so that sizes are believed before the payload is read, and no memory is asked for before its data is there.
#pragma once

#include <linattn/detail/checks.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <istream>
#include <limits>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// CRC-32 of some bytes: polynomial 0x04C11DB7, bits reflected. Behind others, whose CRC-32 is `before`.
inline std::uint32_t crc32(std::string_view bytes, std::uint32_t before = 0) {
  static constexpr auto table = [] {
    std::array<std::uint32_t, 256> remainders{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t r = byte;
      for (int bit = 0; bit < 8; ++bit) r = (r & 1U) != 0 ? 0xEDB88320U ^ r >> 1U : r >> 1U;
      remainders[byte] = r;
    }
    return remainders;
  }();
  std::uint32_t crc = ~before;
  for (const char c : bytes) crc = table[(crc ^ static_cast<unsigned char>(c)) & 0xFFU] ^ crc >> 8U;
  return ~crc;
}

/// The unsigned integer with the bits of x.
template <class T>
auto bits_of(T x) {
  using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static_assert(sizeof(T) == sizeof(bits));
  return std::bit_cast<bits>(x);
}

/// The bytes of x, a number of 4 or 8 bytes, lowest first. Returns where they end.
template <class T>
char* put_number(char* to, T x) {
  auto rest = bits_of(x);
  for (std::size_t i = 0; i < sizeof(T); ++i, rest >>= 8U) *to++ = static_cast<char>(rest & 0xFFU);
  return to;
}

template <class T>
void append_number(std::string& bytes, T x) {
  char number[sizeof(T)];
  put_number(number, x);
  bytes.append(number, sizeof(T));
}

template <class T>
T number_at(const char* bytes) {
  decltype(bits_of(T())) bits = 0;
  for (std::size_t i = sizeof(T); i-- > 0;) bits = bits << 8U | static_cast<unsigned char>(bytes[i]);
  return std::bit_cast<T>(bits);
}

/// What the writer and the reader of a record agree on.
struct record_layout {
  static constexpr std::string_view magic{"linattn\x1A", 8};
  static constexpr std::uint32_t version = 1;
  static constexpr std::size_t name_size = 32;
  static constexpr std::size_t sizes = 8;
  static constexpr std::size_t version_at = 8;
  static constexpr std::size_t scalar_at = 12;
  static constexpr std::size_t name_at = 16;
  static constexpr std::size_t sizes_at = 48;
  static constexpr std::size_t payload_size_at = 112;
  static constexpr std::size_t checksum_at = 124;
  static constexpr std::size_t header_size = 128;
};

using record_sizes = std::array<std::int64_t, record_layout::sizes>;

/// All that is before a payload.
inline std::array<char, record_layout::header_size> record_header(std::string_view name, std::size_t scalar_size,
                                                                  const record_sizes& sizes, std::size_t payload_size) {
  std::array<char, record_layout::header_size> header{};
  char* to = std::copy(record_layout::magic.begin(), record_layout::magic.end(), header.data());
  to = put_number(to, record_layout::version);
  put_number(to, static_cast<std::uint32_t>(scalar_size));
  std::copy(name.begin(), name.end(), header.data() + record_layout::name_at);
  to = header.data() + record_layout::sizes_at;
  for (const std::int64_t size : sizes) to = put_number(to, size);
  put_number(to, static_cast<std::uint64_t>(payload_size));
  put_number(header.data() + record_layout::checksum_at,
             crc32(std::string_view(header.data(), record_layout::checksum_at)));
  return header;
}

/// Text in a field of record_layout::name_size bytes.
inline std::string_view text_at(const char* field) {
  const std::string_view text(field, record_layout::name_size);
  return text.substr(0, text.find('\0'));
}

/// Throws unless a part of a record is all there.
inline void require_bytes(const char* function, const char* part, std::uint64_t there, std::uint64_t expected) {
  if (there >= expected) return;
  constexpr std::uint64_t most = std::numeric_limits<Eigen::Index>::max();
  refuse(function, "the record is cut off: its ", part, " has ", static_cast<Eigen::Index>(there), " of ",
         static_cast<Eigen::Index>(std::min(expected, most)), " bytes");
}

/// Throws unless this is the whole header of a record of `name` with such scalars.
inline void require_header(const char* function, std::string_view header, std::string_view name,
                           std::size_t scalar_size) {
  using layout = record_layout;
  if (!header.starts_with(layout::magic)) {
    refuse(function, "this is no record of linattn: it does not begin with its eight bytes");
  }
  const auto version = number_at<std::uint32_t>(header.data() + layout::version_at);
  if (version != layout::version) {
    refuse(function, "the record has version ", Eigen::Index{version}, " of the layout, this library reads ",
           Eigen::Index{layout::version});
  }
  if (crc32(header.substr(0, layout::checksum_at)) != number_at<std::uint32_t>(header.data() + layout::checksum_at)) {
    refuse(function, "the record is damaged: the checksum of its header is wrong");
  }
  const std::string_view held = text_at(header.data() + layout::name_at);
  const auto held_scalar = number_at<std::uint32_t>(header.data() + layout::scalar_at);
  if (held != name || held_scalar != scalar_size) {
    refuse(function, "the record holds ", std::string(held), " with scalars of ", Eigen::Index{held_scalar},
           " bytes, expected ", std::string(name), " with ", static_cast<Eigen::Index>(scalar_size), " bytes");
  }
}

/// Collects a record and writes it. Memory: the payload once.
class record_writer {
 public:
  /// What T's record holds, in at most 32 bytes, and up to eight sizes.
  template <class T>
  static record_writer of(std::string_view name, std::initializer_list<Eigen::Index> sizes) {
    return {name, sizeof(T), sizes};
  }

  /// One 64-bit integer, double or scalar.
  template <class T>
  void number(T x) {
    append_number(m_payload, x);
  }

  /// The elements of a dense Eigen object row by row.
  template <class X>
  void matrix(const X& x) {
    m_payload.reserve(m_payload.size() + static_cast<std::size_t>(x.size()) * sizeof(typename X::Scalar));
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      for (Eigen::Index c = 0; c < x.cols(); ++c) number(x(r, c));
    }
  }

  /// Throws std::invalid_argument in the name of <name>::save where the stream does not take it.
  void write(std::ostream& stream) {
    const auto header = record_header(m_name, m_scalar_size, m_sizes, m_payload.size());
    const std::uint32_t checksum = crc32(m_payload);
    append_number(m_payload, checksum);
    stream.write(header.data(), static_cast<std::streamsize>(header.size()));
    stream.write(m_payload.data(), static_cast<std::streamsize>(m_payload.size()));
    if (!stream.flush()) {
      refuse((m_name + "::save").c_str(), "the stream does not take the ",
             static_cast<Eigen::Index>(header.size() + m_payload.size()), " bytes of the record");
    }
  }

  /// A number that other records do not have, but for one pair in 2^32: the checksums of header and payload.
  std::uint64_t fingerprint() const {
    const auto header = record_header(m_name, m_scalar_size, m_sizes, m_payload.size());
    return std::uint64_t{number_at<std::uint32_t>(header.data() + record_layout::checksum_at)} << 32U |
           crc32(m_payload);
  }

 private:
  record_writer(std::string_view name, std::size_t scalar_size, std::initializer_list<Eigen::Index> sizes)
      : m_name(name), m_scalar_size(scalar_size) {
    std::copy(sizes.begin(), sizes.end(), m_sizes.begin());
  }

  std::string m_name;
  std::size_t m_scalar_size;
  record_sizes m_sizes{};
  std::string m_payload;
};

/// Reads one record and hands out what it holds in the order of writing. Whatever is amiss, the constructor or the
/// function that notices throws std::invalid_argument in the name of <name>::load; the stream is then somewhere inside
/// the record. After `finish` it stands behind it.
class record_reader {
 public:
  /// Reads and checks all of a record that should hold `name` in T. Memory: the payload once, and at most twice what
  /// the stream holds.
  template <class T>
  static record_reader of(std::string_view name, std::istream& stream) {
    return {name, sizeof(T), stream};
  }

  /// Size number i, which must be at least 1 and sensible for some object: at most 2^40.
  Eigen::Index size(std::size_t i) const {
    const auto n = number_at<std::int64_t>(m_header.data() + record_layout::sizes_at + i * sizeof(std::int64_t));
    constexpr std::int64_t most = std::int64_t{1} << 40U;
    if (n < 1 || n > most) fail("size number ", static_cast<Eigen::Index>(i), " is ", static_cast<Eigen::Index>(n));
    return static_cast<Eigen::Index>(n);
  }

  /// The next 64-bit integer, double or scalar.
  template <class T>
  T number() {
    expect(1, 1, sizeof(T));
    m_read += sizeof(T);
    return number_at<T>(m_payload.data() + (m_read - sizeof(T)));
  }

  /// count, but refuses so many matrices (rows, cols) of T that the rest of the payload cannot hold: to be asked before
  /// memory for them is.
  template <class T>
  Eigen::Index matrices(Eigen::Index count, Eigen::Index rows, Eigen::Index cols) const {
    expect(rows, cols, sizeof(T));
    expect(count, rows * cols, sizeof(T));
    return count;
  }

  /// Fills a dense Eigen object row by row.
  template <class X>
  void matrix(X&& x) {
    using element = typename std::remove_cvref_t<X>::Scalar;
    expect(x.rows(), x.cols(), sizeof(element));
    for (Eigen::Index r = 0; r < x.rows(); ++r) {
      for (Eigen::Index c = 0; c < x.cols(); ++c) x(r, c) = number<element>();
    }
  }

  /// Refuses a payload of which something is left.
  void finish() const {
    if (m_read != m_payload.size()) {
      fail("its payload has ", bytes(m_payload.size()), " bytes, but its sizes make ", bytes(m_read));
    }
  }

  /// Refuses the record with a sentence that begins "the record is damaged: ".
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    refuse(m_function.c_str(), "the record is damaged: ", parts...);
  }

 private:
  record_reader(std::string_view name, std::size_t scalar_size, std::istream& stream)
      : m_function(std::string(name) + "::load") {
    using layout = record_layout;
    m_header = take(stream, layout::header_size, "header");
    require_header(m_function.c_str(), m_header, name, scalar_size);
    m_payload = take(stream, number_at<std::uint64_t>(m_header.data() + layout::payload_size_at), "payload");
    if (crc32(m_payload) != number_at<std::uint32_t>(take(stream, sizeof(std::uint32_t), "checksum").data())) {
      fail("the checksum of its payload is wrong");
    }
  }

  /// n bytes of the stream, in pieces: memory for those that are there, not for those that a header speaks of.
  std::string take(std::istream& stream, std::uint64_t n, const char* part) const {
    constexpr std::uint64_t piece = 1U << 16U;
    std::string taken;
    while (taken.size() < n) {
      const std::size_t before = taken.size();
      const auto more = static_cast<std::size_t>(std::min(piece, n - before));
      taken.resize(before + more);
      stream.read(taken.data() + before, static_cast<std::streamsize>(more));
      const auto got = static_cast<std::size_t>(stream.gcount());
      if (got < more) require_bytes(m_function.c_str(), part, before + got, n);
    }
    return taken;
  }

  void expect(Eigen::Index rows, Eigen::Index cols, std::size_t size) const {
    const auto left = static_cast<Eigen::Index>((m_payload.size() - m_read) / size);
    if (rows < 0 || cols < 0 || (cols > 0 && rows > left / cols)) {
      fail("its payload of ", bytes(m_payload.size()), " bytes is too short for its sizes");
    }
  }

  static Eigen::Index bytes(std::uint64_t n) { return static_cast<Eigen::Index>(n); }

  std::string m_function;
  std::string m_header;
  std::string m_payload;
  std::size_t m_read = 0;
};

/// save and load of a map's parameters: the base of maps that have some. A map has `name` and `scalar`, makes this
/// class its friend, and gives it `record(name)`, which returns a full record_writer, and a constructor from a
/// record_reader, which takes everything out of it.
template <class Map>
class storable {
 public:
  /// Writes the map to a binary stream: all that its features depend on. What `load` makes of it equals it to the last
  /// bit on every machine and with later versions, and so do its features where the instructions are the same. Bytes:
  /// 132 and those of the parameters, in the layout of linattn/detail/serialization.hpp. Throws std::invalid_argument
  /// where the stream does not take them.
  void save(std::ostream& stream) const {
    const auto& map = static_cast<const Map&>(*this);
    map.record(Map::name).write(stream);
  }

  /// Of what `save` writes; maps of other parameters have another one, but for one pair in 2^32. Allocates.
  std::uint64_t fingerprint() const { return static_cast<const Map&>(*this).record(Map::name).fingerprint(); }

  /// The map that was saved; the stream then stands behind it. Throws std::invalid_argument for a record that is cut
  /// off, damaged, of a version that is not known, or of another map or scalar. An operator checks head_dim() when it
  /// is made. Memory: the map's and once more its parameters', none for parameters that are not there.
  static Map load(std::istream& stream) {
    auto in = record_reader::of<typename Map::scalar>(Map::name, stream);
    Map map(in);
    in.finish();
    return map;
  }

 private:
  friend Map;
  storable() = default;
};

}  // namespace detail
LINATTN_NAMESPACE_END
