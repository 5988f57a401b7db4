// The record of a state: what of it is written, in which order, and what a reader checks. The bytes: state_io.hpp.
#pragma once

#include <linattn/detail/engine.hpp>
#include <linattn/detail/serialization.hpp>
#include <linattn/state.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// A rule's traits as a number.
constexpr std::int64_t rule_code(const rule_traits& rule) {
  return std::int64_t(rule.decay) | std::int64_t(rule.fixed_decay) << 2 | std::int64_t(rule.corrects) << 3 |
         std::int64_t(rule.normalizes) << 5 | std::int64_t(rule.reads_after_write) << 6 |
         std::int64_t(rule.log_scaled) << 7;
}

/// That number in words; of one that no rule has, what can be read from it.
inline std::string rule_words(std::int64_t code) {
  static constexpr const char* decays[] = {"no decay", "a decay per head", "a decay per feature", "an unknown decay"};
  static constexpr const char* corrections[] = {"", ", a delta correction", ", a rank-one correction",
                                                ", an unknown correction"};
  std::string words = decays[code & 3];
  if ((code & 4) != 0) words += " of its own";
  words += corrections[code >> 3 & 3];
  words += (code & 32) != 0 ? ", a sum of keys" : ", no sum of keys";
  if ((code & 64) == 0) words += ", reading before it writes";
  if ((code & 128) != 0) words += ", log scales";
  if (code < 0 || code > 255) words += sentence(" (number ", Eigen::Index(code), ")");
  return words;
}

template <class Map>
std::uint64_t map_fingerprint(const Map& map) {
  if constexpr (requires { map.fingerprint(); }) {
    return map.fingerprint();
  } else {
    static_assert(std::is_empty_v<Map>,
                  "linattn: the feature map has members, on which its features may depend: to save and load states it "
                  "needs `std::uint64_t fingerprint() const`, a number that other parameters do not have");
    return 0;
  }
}

/// What an operator adds to each token beside the tokens' own inputs.
template <class Rule>
std::uint64_t rule_fingerprint(const Rule& rule) {
  std::uint32_t crc = 0;
  if constexpr (Rule::traits.fixed_decay) {
    for (const double g : rule.log_decay) {
      char bytes[sizeof g];
      put_number(bytes, g);
      crc = crc32(std::string_view(bytes, sizeof bytes), crc);
    }
  }
  return crc;
}

template <class Operator>
class state_record {
  using state_type = typename Operator::state_type;
  using T = typename Operator::accumulator_type;
  using map_type = typename Operator::feature_map_type;
  using layout = record_layout;
  static_assert(
      requires { std::string_view(map_type::name); },
      "linattn: a saved state says which feature map made it: to save and load states the map needs a `static "
      "constexpr "
      "const char* name`, at most 32 characters that no other map has");
  static constexpr std::string_view name = map_type::name;
  static_assert(name.size() <= layout::name_size, "linattn: the name of a feature map has at most 32 characters");
  static constexpr std::string_view held = "state";
  static constexpr std::int64_t rule = rule_code(Operator::rule);
  // In the payload, before the heads.
  static constexpr std::size_t tokens_at = layout::name_size;
  static constexpr std::size_t heads_at = tokens_at + 2 * sizeof(std::int64_t);

 public:
  static constexpr std::size_t header_size = layout::header_size;

  explicit state_record(const Operator& attn) : m_attn(attn) {}

  std::size_t payload_size() const {
    constexpr rule_traits r = Operator::rule;
    const Eigen::Index C = m_attn.features(), M = m_attn.value_dim();
    const Eigen::Index decays = r.decay == decay_kind::per_feature ? C : r.decay == decay_kind::per_head ? 1 : 0;
    const Eigen::Index head = C * M + (r.normalizes ? C : 0) + decays + (r.log_scaled ? C : 0);
    return heads_at + std::size_t(m_attn.value_heads() * head) * sizeof(T);
  }
  /// Behind the header: the payload and its checksum.
  std::size_t rest_size() const { return payload_size() + sizeof(std::uint32_t); }
  std::size_t size() const { return header_size + rest_size(); }

  /// Throws unless the state is the operator's.
  void require(const char* function, const state_type& s) const {
    if (engine_access::is_empty(s) || s.heads() != m_attn.value_heads() || s.features() != m_attn.features() ||
        s.value_dim() != m_attn.value_dim()) {
      refuse(function, "the state is ", s, ", expected ", sizes());
    }
  }

  /// Writes size() bytes.
  void write(const state_type& s, char* to) const {
    const auto header = this->header();
    char* const payload = std::copy(header.begin(), header.end(), to);
    std::fill_n(payload, layout::name_size, '\0');
    std::copy(name.begin(), name.end(), payload);
    char* end = put_number(payload + tokens_at, std::int64_t{s.tokens()});
    end = put_number(end, std::int64_t{s.first_position()});
    for_each_run(engine_access::layout(s), engine_access::data(s), [&](const T* run, Eigen::Index n) {
      for (Eigen::Index i = 0; i < n; ++i) end = put_number(end, run[i]);
    });
    put_number(end, crc32(std::string_view(payload, payload_size())));
  }

  /// Throws unless the header_size bytes are the header of this operator's record.
  void require_header(const char* header) const {
    detail::require_header("load", std::string_view(header, header_size), held, sizeof(T));
    if (size_at(header, 0) != m_attn.head_dim() || size_at(header, 1) != m_attn.features() ||
        size_at(header, 2) != m_attn.value_dim() || size_at(header, 3) != m_attn.value_heads()) {
      refuse("load", "the record's state is ",
             state_sizes{Eigen::Index(size_at(header, 3)), Eigen::Index(size_at(header, 1)),
                         Eigen::Index(size_at(header, 2))},
             " for head_dim ", Eigen::Index(size_at(header, 0)), ", expected ", sizes(), " for head_dim ",
             m_attn.head_dim());
    }
    if (size_at(header, 4) != rule) {
      refuse("load", "the record's state is of a rule with ", rule_words(size_at(header, 4)), ", expected ",
             rule_words(rule));
    }
    const auto bytes = number_at<std::uint64_t>(header + layout::payload_size_at);
    if (bytes != payload_size()) {
      constexpr std::uint64_t most = std::numeric_limits<Eigen::Index>::max();
      refuse("load", "the record is damaged: its payload has ", Eigen::Index(std::min(bytes, most)),
             " bytes, but its sizes make ", Eigen::Index(payload_size()));
    }
  }

  /// Throws unless the rest_size() bytes behind that header are whole, and of this operator's map and rule.
  void require_rest(const char* header, const char* payload) const {
    if (crc32(std::string_view(payload, payload_size())) != number_at<std::uint32_t>(payload + payload_size())) {
      refuse("load", "the record is damaged: the checksum of its payload is wrong");
    }
    if (text_at(payload) != name) {
      refuse("load", "the record's state is of the map ", std::string(text_at(payload)), ", expected ",
             std::string(name));
    }
    const auto expected = this->header();
    require_same("map, but with other parameters", size_at(header, 5), size_at(expected.data(), 5));
    require_same("rule, but with other decays", size_at(header, 6), size_at(expected.data(), 6));
    const auto is_zero = [](char c) { return c == '\0'; };
    if (!std::equal(expected.begin(), expected.end(), header) ||
        !std::all_of(payload + name.size(), payload + tokens_at, is_zero)) {
      refuse("load", "the record is damaged: some of its unused bytes are not 0");
    }
    const auto tokens = number_at<std::int64_t>(payload + tokens_at);
    if (tokens < 0) refuse("load", "the record is damaged: its state has ", Eigen::Index(tokens), " tokens");
  }

  /// What a payload says that has been checked, into a state that has been.
  void read(const char* payload, state_type& s) const {
    const auto& where = engine_access::layout(s);
    T* const slab = engine_access::data(s);
    where.begin(slab, Eigen::Index(number_at<std::int64_t>(payload + tokens_at + sizeof(std::int64_t))));
    where.add_tokens(slab, Eigen::Index(number_at<std::int64_t>(payload + tokens_at)));
    const char* from = payload + heads_at;
    for_each_run(where, slab, [&](T* run, Eigen::Index n) {
      for (Eigen::Index i = 0; i < n; ++i, from += sizeof(T)) run[i] = number_at<T>(from);
    });
  }

 private:
  /// f(first element, their number) of what a record holds of the heads, in its order.
  template <class Layout, class U, class F>
  static void for_each_run(const Layout& l, U* slab, const F& f) {
    for (Eigen::Index h = 0; h < l.heads; ++h) {
      U* const head = slab + h * l.head_stride();
      for (Eigen::Index c = 0; c < l.features; ++c) f(head + c * l.row_stride(), Eigen::Index(l.value_dim));
      if constexpr (Operator::rule.normalizes) f(head + l.z_offset(), Eigen::Index(l.features));
      f(head + l.log_decay_offset(), l.decays());
      if constexpr (Operator::rule.log_scaled) f(head + l.log_scale_offset(), Eigen::Index(l.features));
    }
  }

  auto header() const {
    return record_header(
        held, sizeof(T),
        {m_attn.head_dim(), m_attn.features(), m_attn.value_dim(), m_attn.value_heads(), rule,
         std::int64_t(map_fingerprint(m_attn.feature_map())), std::int64_t(rule_fingerprint(m_attn.update_rule())), 0},
        payload_size());
  }
  static std::int64_t size_at(const char* header, std::size_t i) {
    return number_at<std::int64_t>(header + layout::sizes_at + i * sizeof(std::int64_t));
  }
  static void require_same(const char* what, std::int64_t found, std::int64_t expected) {
    if (found != expected) {
      refuse("load", "the record's state is of the same ", what, ": their fingerprint is ", Eigen::Index(found),
             ", expected ", Eigen::Index(expected));
    }
  }
  state_sizes sizes() const { return {m_attn.value_heads(), m_attn.features(), m_attn.value_dim()}; }

  const Operator& m_attn;
};

}  // namespace detail
LINATTN_NAMESPACE_END
