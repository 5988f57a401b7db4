// Many states in one block of memory, of which a batch names those it works on.
//
//   // once: room for 1,000 states, each begun
//   linattn::state_pool pool{.memory = memory, .bytes_per_slot = attn.state_bytes(), .capacity = 1000};
//   for (std::int32_t slot = 0; slot < 1000; ++slot) attn.make_state(pool[slot]);
//
//   // of each call: which slot each sequence has
//   const std::int32_t slots[] = {17, 3, -1, 999};
//   pool.slots = slots;
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/state_storage.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

LINATTN_NAMESPACE_BEGIN

/// The states of a batch: sequence b has slot number slots[b] of the caller's memory, read and written in place. A
/// negative number: the sequence starts from nothing at position 0, and what it leaves is not written.
///
/// A description, cheap to copy, that owns nothing: memory and slot numbers must outlive the calls it is given to.
/// Each slot that is named must hold a state of the operator, begun by attn.make_state(pool[slot]) or copied as bytes
/// from another slot, also of another pool; with compile-time sizes by new (pool[slot].data())
/// state_type(attn.make_state()). `pool[slot]` is also what attn.attach_state takes, to look into one.
///
/// The calls that take a pool throw std::invalid_argument, before they write a state, where the memory is not aligned,
/// the slots are too small, or a slot number is beyond `capacity`, names no state of the operator, or stands there
/// twice. That takes time proportional to slots.size() and no allocation: each named slot carries a mark for its
/// duration, so that even two calls that only read must not share a slot at one time.
struct state_pool {
  void* memory = nullptr;                    ///< where slot 0 begins: a multiple of state_alignment(), never null
  Eigen::Index bytes_per_slot = 0;           ///< from one slot to the next: state_bytes() or more, a multiple of 64
  std::span<const std::int32_t> slots = {};  ///< of each sequence of a batch
  Eigen::Index capacity = std::numeric_limits<Eigen::Index>::max();  ///< slots that there are; default: not known

  /// Sequences of the batch.
  Eigen::Index size() const noexcept { return Eigen::Index(slots.size()); }
  /// The memory of a slot, which must be there: 0 <= slot < capacity.
  void* address(std::int32_t slot) const noexcept {
    return static_cast<std::byte*>(memory) + Eigen::Index(slot) * bytes_per_slot;
  }
  std::span<std::byte> operator[](std::int32_t slot) const noexcept {
    return {static_cast<std::byte*>(address(slot)), std::size_t(bytes_per_slot)};
  }
};

namespace detail {

/// The slab of sequence b; null where it starts from nothing.
template <class T>
T* slab_of(const state_pool& pool, Eigen::Index b) noexcept {
  const std::int32_t slot = pool.slots[std::size_t(b)];
  return slot < 0 ? nullptr : static_cast<T*>(pool.address(slot));
}

/// The first sequence whose slot an earlier one has, or -1. Slots must be there. A slot's mark says which sequence was
/// seen last to have it, and is believed only where that one does: whatever the marks were before.
template <class T, class Layout>
Eigen::Index first_repeated(const state_pool& pool, const Layout& layout) noexcept {
  Eigen::Index b = 0;
  for (; b < pool.size(); ++b) {
    const std::int32_t slot = pool.slots[std::size_t(b)];
    if (slot < 0) continue;
    T* const slab = slab_of<T>(pool, b);
    const std::int64_t mark = layout.number(slab, trailer::mark);
    if (mark >= 0 && mark < b && pool.slots[std::size_t(mark)] == slot) break;
    layout.set_number(slab, trailer::mark, b);
  }
  for (Eigen::Index seen = 0; seen < b; ++seen) {
    if (pool.slots[std::size_t(seen)] >= 0) layout.set_number(slab_of<T>(pool, seen), trailer::mark, 0);
  }
  return b == pool.size() ? -1 : b;
}

/// Throws unless every slot can be read and written as a state of its own.
template <class T, class Layout>
void require_pool(const char* function, const state_pool& pool, const Layout& layout) {
  if (pool.memory == nullptr) refuse(function, "the pool has no memory");
  if (pool.bytes_per_slot < layout.bytes() || pool.bytes_per_slot % Eigen::Index(slab_alignment) != 0) {
    refuse(function, "the pool has ", pool.bytes_per_slot, " bytes per slot; a state of ", sizes_of(layout), " takes ",
           layout.bytes(), ", and each begins at a multiple of ", Eigen::Index(slab_alignment));
  }
  state_memory<T>(function, layout, pool.memory, pool.bytes_per_slot);
  const std::int64_t tag = layout.tag();
  for (Eigen::Index b = 0; b < pool.size(); ++b) {
    const Eigen::Index slot = pool.slots[std::size_t(b)];
    if (slot < 0) continue;
    if (slot >= pool.capacity) {
      refuse(function, "sequence ", b, " has slot ", slot, " of a pool of ", pool.capacity, " slots");
    }
    if (layout.number(slab_of<T>(pool, b), trailer::tag) != tag) {
      refuse(function, "slot ", slot, ", of sequence ", b, ", holds no state of ", sizes_of(layout),
             " and this operator's rule and scalar; make_state(pool[slot]) begins one there");
    }
  }
  const Eigen::Index repeated = first_repeated<T>(pool, layout);
  if (repeated >= 0) {
    refuse(function, "sequence ", repeated, " has slot ", Eigen::Index(pool.slots[std::size_t(repeated)]),
           ", which an earlier one has, too");
  }
}

}  // namespace detail
LINATTN_NAMESPACE_END
