// States to files and back, between machines and builds.
//
//   std::ofstream file("prefix.state", std::ios::binary);
//   linattn::save(attn, s, file);
//   ...
//   auto s = attn.make_state();
//   std::ifstream file("prefix.state", std::ios::binary);
//   linattn::load(attn, s, file);                  // throws, and leaves s as it is, unless all of it is right
//
// Within one process, and between processes of one build, a copy of the state's bytes does (state.hpp).
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/state_record.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <istream>
#include <ostream>
#include <span>
#include <string>

LINATTN_NAMESPACE_BEGIN

// The record of a state. Little-endian on every machine; integers of 64 bits where not said otherwise; T is float or
// double, as IEEE 754 bit patterns, NaN payloads included; rows have no padding, so that neither packet width nor
// alignment of the build that wrote it matters.
//
//   byte     bytes   what
//   0        8       "linattn" and the byte 0x1A
//   8        4       version of the layout, 1
//   12       4       bytes of T: 4 or 8
//   16       32      "state", zero-padded
//   48       32      D, C, M, H: head_dim, features, value_dim, value_heads of the operator
//   80       8       traits of the update rule, from the lowest bit: decay (2 bits: none, per head, per feature), decay
//                    of the operator, correction (2 bits: none, delta, rank one), keeps z, reads after it writes, keeps
//                    log scales
//   88       8       fingerprint of the feature map's parameters, 0 where it has none
//   96       8       CRC-32 of the operator's own log-decays as doubles, 0 where it has none
//   104      8       0; a reader takes no other value here or in the padding of names
//   112      8       n, bytes of the payload
//   120      4       0
//   124      4       CRC-32 of bytes 0 ... 123
//   128      32      name of the feature map, zero-padded                                        payload
//   160      8       tokens
//   168      8       first_position
//   176      n - 48  of each head in turn: S (C, M) row by row; z (C) where the rule keeps it; the total log-decay, (C)
//                    or (1), where it decays; log scales (C) where it keeps them: T each
//   128 + n  4       CRC-32 of the payload
//
// The checksums see every change of up to 32 neighbouring bits, and guard against accidents, not against an author of
// records: one may give a state any entries, but no call of this header reads or writes beyond what it was given, nor
// allocates more than the operator's own state takes, whatever the bytes.
//
// A record belongs to one operator: scalar, sizes, rule, and the map with its parameters. query_scale, normalize, the
// denominator's policy and the numbers of query and key heads are none of the state's, and may differ.

/// Bytes of a saved state: 180, and those of its entries without padding. The same for every state of an operator.
template <class Operator>
requires requires { typename Operator::state_type; }
Eigen::Index saved_bytes(const Operator& attn) {
  return static_cast<Eigen::Index>(detail::state_record<Operator>(attn).size());
}

/// Writes a state of the operator to the first saved_bytes(attn) bytes of `to`, or to a binary stream. What load makes
/// of them equals it to the last bit. Throws std::invalid_argument, before anything is written, where the state is not
/// the operator's or the span is too short; and where the stream does not take the bytes.
/// Cost: one pass over the state and a checksum, byte by byte. The span's form allocates nothing, but for the
/// fingerprint of a map with parameters, which takes their bytes once; the stream's allocates the record, too.
template <class Operator>
requires requires { typename Operator::state_type; }
void save(const Operator& attn, const typename Operator::state_type& s, std::span<std::byte> to) {
  const detail::state_record<Operator> record(attn);
  record.require("save", s);
  if (to.size() < record.size()) {
    detail::refuse("save", "there are ", static_cast<Eigen::Index>(to.size()), " bytes, the record takes ",
                   saved_bytes(attn));
  }
  record.write(s, reinterpret_cast<char*>(to.data()));
}
/// The same, to a stream.
template <class Operator>
requires requires { typename Operator::state_type; }
void save(const Operator& attn, const typename Operator::state_type& s, std::ostream& to) {
  const detail::state_record<Operator> record(attn);
  record.require("save", s);
  std::string bytes(record.size(), '\0');
  record.write(s, bytes.data());
  to.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!to.flush()) {
    detail::refuse("save", "the stream does not take the ", saved_bytes(attn), " bytes of the record");
  }
}

/// The state that was saved, into one of this operator (make_state), on the heap, attached or inline: entries, tokens()
/// and first_position(). From the first saved_bytes(attn) bytes of `from`, or from a binary stream, which then stands
/// behind them. Throws std::invalid_argument for a record that is cut off, damaged, of a version that is not known, of
/// another scalar, sizes, rule or map, with a sentence that names both; the state is then as it was, and the stream
/// somewhere inside the record. Cost and memory: as save; a header is checked before memory for the rest is asked for.
template <class Operator>
requires requires { typename Operator::state_type; }
void load(const Operator& attn, typename Operator::state_type& s, std::span<const std::byte> from) {
  const detail::state_record<Operator> record(attn);
  record.require("load", s);
  const char* const header = reinterpret_cast<const char*>(from.data());
  detail::require_bytes("load", "header", from.size(), record.header_size);
  record.require_header(header);
  detail::require_bytes("load", "rest", from.size() - record.header_size, record.rest_size());
  const char* const payload = header + record.header_size;
  record.require_rest(header, payload);
  record.read(payload, s);
}
/// The same, from a stream.
template <class Operator>
requires requires { typename Operator::state_type; }
void load(const Operator& attn, typename Operator::state_type& s, std::istream& from) {
  const detail::state_record<Operator> record(attn);
  record.require("load", s);
  char header[detail::state_record<Operator>::header_size];
  const auto read = [&](const char* part, char* to, std::size_t n) {
    from.read(to, static_cast<std::streamsize>(n));
    detail::require_bytes("load", part, static_cast<std::size_t>(from.gcount()), n);
  };
  read("header", header, sizeof header);
  record.require_header(header);
  std::string rest(record.rest_size(), '\0');
  read("rest", rest.data(), rest.size());
  record.require_rest(header, rest.data());
  record.read(rest.data(), s);
}

LINATTN_NAMESPACE_END
