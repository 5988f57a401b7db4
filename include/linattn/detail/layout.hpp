// Sizes and places: how a state and a workspace lie in memory.
#pragma once

#include <linattn/detail/simd.hpp>
#include <linattn/options.hpp>
#include <linattn/update_rules/additive.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <type_traits>
#include <vector>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// The one door through the privacy of state and workspace (engine_access.hpp).
struct engine_access;

/// A size that is a compile-time constant where N is not Dynamic, and one Index otherwise.
template <Eigen::Index N>
struct extent {
  constexpr extent() noexcept = default;
  constexpr explicit extent(Eigen::Index) noexcept {}
  constexpr operator Eigen::Index() const noexcept { return N; }  // NOLINT(google-explicit-constructor)
};
template <>
struct extent<Eigen::Dynamic> {
  Eigen::Index value = 0;
  constexpr extent() noexcept = default;
  constexpr explicit extent(Eigen::Index n) noexcept : value(n) {}
  constexpr operator Eigen::Index() const noexcept { return value; }  // NOLINT(google-explicit-constructor)
};

constexpr Eigen::Index round_up(Eigen::Index n, Eigen::Index multiple) noexcept {
  return (n + multiple - 1) / multiple * multiple;
}

/// n elements of T padded to whole packets.
template <class T>
constexpr Eigen::Index padded(Eigen::Index n) noexcept {
  return round_up(n, packet<T>::size);
}

/// Elements of T in a cache line.
template <class T>
inline constexpr Eigen::Index line = Eigen::Index(slab_alignment / sizeof(T));

/// Entries below this, 2^-100, are cleared where a rule decays, or erases as the delta rules do: their sums never
/// matter beside a value of normal size, and left alone they would end as subnormal numbers, which are slow to compute
/// with, for ever.
template <class T>
inline constexpr T silence = T(0x1p-100);

template <class T>
struct slab_allocator {
  using value_type = T;
  slab_allocator() = default;
  template <class U>
  explicit slab_allocator(const slab_allocator<U>&) noexcept {}
  T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(slab_alignment)));
  }
  void deallocate(T* p, std::size_t) noexcept { ::operator delete(p, std::align_val_t(slab_alignment)); }
  friend bool operator==(const slab_allocator&, const slab_allocator&) noexcept { return true; }
};

template <class T, Eigen::Index Size>
struct alignas(slab_alignment) inline_slab {
  std::array<T, std::size_t(Size)> elements{};
  inline_slab() = default;
  explicit inline_slab(Eigen::Index) {}
  T* data() noexcept { return elements.data(); }
  const T* data() const noexcept { return elements.data(); }
  std::size_t size() const noexcept { return elements.size(); }
};

template <class T>
struct heap_slab : std::vector<T, slab_allocator<T>> {
  heap_slab() = default;
  explicit heap_slab(Eigen::Index n) : std::vector<T, slab_allocator<T>>(std::size_t(n), T(0)) {}
};

/// A 64-byte aligned, zeroed array of T: inline for a compile-time size, on the heap for Dynamic. Assignment between
/// equal sizes does not allocate.
template <class T, Eigen::Index Size>
using slab = std::conditional_t<Size == Eigen::Dynamic, heap_slab<T>, inline_slab<T, (Size > 0 ? Size : 1)>>;

/// Which heads of q, k and out belong to which state. Counts that are all the same, as they are where they are known at
/// compile time, cost nothing.
template <Eigen::Index Heads>
struct head_map {
  static constexpr bool can_share = Heads == Eigen::Dynamic;

  extent<Heads> queries;
  extent<Heads> keys;
  extent<Heads> states;
  extent<can_share ? Eigen::Dynamic : 1> readers;  // output heads of a state
  head_sharing how = head_sharing::interleaved;
  bool shares = false;  // whether any counts differ

  constexpr head_map() noexcept = default;
  constexpr head_map(Eigen::Index query_heads, Eigen::Index key_heads, Eigen::Index value_heads,
                     head_sharing sharing) noexcept
      : queries(query_heads),
        keys(key_heads),
        states(value_heads),
        readers(query_heads > value_heads ? query_heads / value_heads : 1),
        how(sharing),
        shares(query_heads != value_heads || key_heads != value_heads) {}

  constexpr Eigen::Index outputs() const noexcept { return states * readers; }
  /// Whether the heads that read a state lie side by side.
  constexpr bool are_neighbours() const noexcept { return how == head_sharing::interleaved || states == 1; }
  constexpr Eigen::Index state_of(Eigen::Index output) const noexcept { return shared(output, states, outputs()); }
  constexpr Eigen::Index query_of(Eigen::Index output) const noexcept { return shared(output, queries, outputs()); }
  constexpr Eigen::Index key_of(Eigen::Index state) const noexcept { return shared(state, keys, states); }
  /// Output head number `reader` of a state.
  constexpr Eigen::Index output_of(Eigen::Index state, Eigen::Index reader) const noexcept {
    return how == head_sharing::tiled ? reader * states + state : state * readers + reader;
  }

  /// Groups of heads that share nothing with others: what a gradient, which adds up what heads share, is cut into.
  constexpr Eigen::Index groups() const noexcept {
    return shares ? std::gcd(Eigen::Index(queries), Eigen::Index(keys)) : Eigen::Index(states);
  }
  /// That of a head, where there are `many` of its kind.
  constexpr Eigen::Index group_of(Eigen::Index head, Eigen::Index many) const noexcept {
    return shared(head, groups(), many);
  }
  /// Whether no lower one of `many` heads uses that one of `few` which `head` does.
  constexpr bool is_first(Eigen::Index head, Eigen::Index few, Eigen::Index many) const noexcept {
    return how == head_sharing::tiled ? head < few : head % (many / few) == 0;
  }

 private:
  constexpr Eigen::Index shared(Eigen::Index head, Eigen::Index few, Eigen::Index many) const noexcept {
    if (few == many) return head;
    return how == head_sharing::tiled ? head % few : head / (many / few);
  }
};

/// The number of readers of a state that no others share.
using one_reader = extent<1>;

/// Heads that share nothing, as a pass sees them: number h of everything belongs together.
struct equal_heads {
  static constexpr one_reader readers{};
  static constexpr Eigen::Index state_of(Eigen::Index output) noexcept { return output; }
  static constexpr Eigen::Index query_of(Eigen::Index output) noexcept { return output; }
  static constexpr Eigen::Index key_of(Eigen::Index state) noexcept { return state; }
  static constexpr Eigen::Index output_of(Eigen::Index state, Eigen::Index) noexcept { return state; }
  static constexpr bool are_neighbours() noexcept { return true; }
};

/// Some of a state's heads, [first, last): all of them where their number is a compile-time constant.
template <class Heads>
struct state_range {
  constexpr explicit state_range(Heads) noexcept {}
  static constexpr Eigen::Index first() noexcept { return 0; }
  static constexpr Eigen::Index size() noexcept { return Heads(); }
};
template <>
struct state_range<extent<Eigen::Dynamic>> {
  Eigen::Index begin = 0;
  Eigen::Index end;
  constexpr explicit state_range(Eigen::Index heads) noexcept : end(heads) {}
  constexpr state_range(Eigen::Index first, Eigen::Index last) noexcept : begin(first), end(last) {}
  constexpr Eigen::Index first() const noexcept { return begin; }
  constexpr Eigen::Index size() const noexcept { return end - begin; }
};

/// Groups of heads that share nothing with others (head_map::groups), [first, last); all, if not said.
struct group_range {
  Eigen::Index first = 0;
  Eigen::Index last = std::numeric_limits<Eigen::Index>::max();
  constexpr bool contains(Eigen::Index group) const noexcept { return first <= group && group < last; }
};

/// Heads that share, of which a pass takes one reader of a state at a time.
template <class Map>
struct one_by_one : Map {
  static constexpr one_reader readers{};
  explicit constexpr one_by_one(const Map& map) noexcept : Map(map) {}
};

/// Behind the heads of a state, in a cache line of their own, 64-bit integers: with them its bytes are all of it.
enum class trailer {
  tag,             // state_layout::tag(), or this is no state of that layout
  tokens,          // keys absorbed
  first_position,  // of the first of them
  mark,            // 0 but while slots are looked through for duplicates (state_pool.hpp)
};

/// [head][C][M] with rows padded to whole packets, each head on a cache line and followed by those of z (C), the total
/// log-decay (C, or one for a decay per head) and the log scale mu (C) that its rule keeps.
template <class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads,
          rule_traits Rule = additive::traits>
struct state_layout {
  static constexpr rule_traits rule = Rule;

  extent<Features> features;   // C
  extent<ValueDim> value_dim;  // M
  extent<Heads> heads;         // H

  constexpr Eigen::Index row_stride() const noexcept { return padded<T>(value_dim); }
  constexpr Eigen::Index feature_stride() const noexcept { return padded<T>(features); }
  constexpr Eigen::Index z_offset() const noexcept { return round_up(features * row_stride(), line<T>); }
  constexpr Eigen::Index log_decay_offset() const noexcept {
    return z_offset() + (Rule.normalizes ? round_up(feature_stride(), line<T>) : 0);
  }
  /// Log-decays of a head, for one token or in total.
  constexpr Eigen::Index decays() const noexcept {
    return Rule.decay == decay_kind::per_feature ? Eigen::Index(features) : Rule.decay == decay_kind::per_head ? 1 : 0;
  }
  constexpr Eigen::Index log_scale_offset() const noexcept { return log_decay_offset() + round_up(decays(), line<T>); }
  constexpr Eigen::Index head_stride() const noexcept {
    return log_scale_offset() + (Rule.log_scaled ? round_up(feature_stride(), line<T>) : 0);
  }
  /// Elements of all heads: what a pass works on.
  constexpr Eigen::Index size() const noexcept { return heads * head_stride(); }
  /// Elements of a state, bytes of them: the heads and the trailer.
  constexpr Eigen::Index slab_size() const noexcept { return size() + line<T>; }
  constexpr Eigen::Index bytes() const noexcept { return slab_size() * Eigen::Index(sizeof(T)); }

  /// One at a time: a wider access would wait for narrower ones of the step before.
  std::int64_t number(const T* slab, trailer which) const noexcept {
    std::int64_t n;
    std::memcpy(&n, slab + size() + std::ptrdiff_t(which) * numbers_apart, sizeof n);
    return n;
  }
  void set_number(T* slab, trailer which, std::int64_t n) const noexcept {
    std::memcpy(slab + size() + std::ptrdiff_t(which) * numbers_apart, &n, sizeof n);
  }
  void add_tokens(T* slab, Eigen::Index n) const noexcept {
    set_number(slab, trailer::tokens, number(slab, trailer::tokens) + n);
  }
  /// Whether memory of bytes() bytes holds a state of this layout.
  bool holds_state(const T* slab) const noexcept { return number(slab, trailer::tag) == tag(); }

  /// A number that other sizes, rules, scalars and packets do not have: FNV-1a of them, a number a time.
  constexpr std::int64_t tag() const noexcept {
    std::uint64_t hash = 0xCBF29CE484222325U;
    for (const Eigen::Index number :
         {Eigen::Index(features), Eigen::Index(value_dim), Eigen::Index(heads), row_stride(), Eigen::Index(sizeof(T)),
          decays(), Eigen::Index(Rule.corrects), Eigen::Index(Rule.normalizes), Eigen::Index(Rule.log_scaled)}) {
      hash = (hash ^ std::uint64_t(number)) * 0x100000001B3U;
    }
    return std::int64_t(hash);
  }

  /// All of a state that has seen nothing.
  void begin(T* slab, Eigen::Index first_position) const noexcept {
    clear(slab);
    std::fill_n(slab + size(), line<T>, T(0));
    set_number(slab, trailer::tag, tag());
    set_number(slab, trailer::first_position, first_position);
  }

  /// The heads to what a sequence begins with: zeros, and the scales of no key.
  void clear(T* slab) const noexcept { clear(slab, 0, heads); }
  /// Some of them, [first, last).
  void clear(T* slab, Eigen::Index first, Eigen::Index last) const noexcept {
    std::fill(slab + first * head_stride(), slab + last * head_stride(), T(0));
    for (Eigen::Index h = first; Rule.log_scaled && h < last; ++h) {
      T* const scales = slab + h * head_stride() + log_scale_offset();
      std::fill(scales, scales + feature_stride(), std::numeric_limits<T>::lowest());
    }
  }

  static constexpr bool is_fixed = Features != Eigen::Dynamic && ValueDim != Eigen::Dynamic && Heads != Eigen::Dynamic;

 private:
  static constexpr std::ptrdiff_t numbers_apart = std::ptrdiff_t(sizeof(std::int64_t) / sizeof(T));
};

/// The layout of one head, its sizes not part of its type.
template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads, rule_traits Any>
constexpr auto at_run_time(const state_layout<T, Features, ValueDim, Heads, Any>& layout) noexcept {
  using size = extent<Eigen::Dynamic>;
  return state_layout<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::Dynamic, Rule>{size(layout.features),
                                                                               size(layout.value_dim), size(1)};
}

}  // namespace detail
LINATTN_NAMESPACE_END
