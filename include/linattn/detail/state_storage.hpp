// What a state lives in: itself, the heap, or memory of the caller's.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/layout.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

LINATTN_NAMESPACE_BEGIN
namespace detail {

/// What a state must agree on, for messages.
struct state_sizes {
  Eigen::Index heads;
  Eigen::Index features;
  Eigen::Index value_dim;
};
inline void append(std::string& text, const state_sizes& part) {
  text += sentence("(", part.heads, " heads, ", part.features, " features, ", part.value_dim, " values)");
}
template <class Layout>
state_sizes sizes_of(const Layout& layout) noexcept {
  return {layout.heads, layout.features, layout.value_dim};
}

/// Memory as the slab of a state. Throws unless it has room for one, on a boundary of a cache line.
template <class T, class Layout>
T* state_memory(const char* function, const Layout& layout, void* memory, Eigen::Index bytes) {
  if (bytes < layout.bytes()) {
    refuse(function, "the memory has ", bytes, " bytes, a state of ", sizes_of(layout), " takes ", layout.bytes());
  }
  const auto offset = Eigen::Index(reinterpret_cast<std::uintptr_t>(memory) % slab_alignment);
  if (offset != 0) {
    refuse(function, "the memory begins ", offset, " bytes behind a boundary of ", Eigen::Index(slab_alignment),
           " bytes, where a state must begin");
  }
  return static_cast<T*>(memory);
}

/// n elements, not zeroed, on the heap or attached to memory that is another's. A copy is on the heap.
template <class T>
class state_slab {
 public:
  state_slab() = default;
  explicit state_slab(Eigen::Index n)
      : m_own(slab_allocator<T>().allocate(std::size_t(n))), m_data(m_own.get()), m_size(std::size_t(n)) {}
  state_slab(T* memory, Eigen::Index n) noexcept : m_data(memory), m_size(std::size_t(n)) {}
  state_slab(const state_slab& other) : state_slab(other.m_size == 0 ? state_slab() : state_slab(other.count())) {
    copy(other);
  }
  state_slab(state_slab&& other) noexcept { swap(other); }
  state_slab& operator=(state_slab other) noexcept {
    swap(other);
    return *this;
  }
  ~state_slab() = default;

  T* data() noexcept { return m_data; }
  const T* data() const noexcept { return m_data; }
  std::size_t size() const noexcept { return m_size; }
  bool is_attached() const noexcept { return m_size != 0 && m_own == nullptr; }

  /// The elements of a slab of the same size.
  void copy(const state_slab& other) noexcept {
    if (m_size != 0) std::memmove(m_data, other.m_data, m_size * sizeof(T));
  }

 private:
  struct deleter {
    void operator()(T* p) const noexcept { slab_allocator<T>().deallocate(p, 0); }
  };

  Eigen::Index count() const noexcept { return Eigen::Index(m_size); }
  void swap(state_slab& other) noexcept {
    std::swap(m_own, other.m_own);
    std::swap(m_data, other.m_data);
    std::swap(m_size, other.m_size);
  }

  std::unique_ptr<T[], deleter> m_own;
  T* m_data = nullptr;
  std::size_t m_size = 0;
};

/// Layout and slab of a state. One that is attached keeps its memory when it is assigned to, whose owner knows what
/// lies there: of the same sizes, or nothing is.
template <class T, class Layout, bool IsFixed = Layout::is_fixed>
struct state_storage {
  Layout m_layout;
  state_slab<T> m_slab;

  state_storage() = default;
  explicit state_storage(const Layout& layout) : m_layout(layout), m_slab(layout.slab_size()) {}
  state_storage(const Layout& layout, T* memory) noexcept : m_layout(layout), m_slab(memory, layout.slab_size()) {}
  state_storage(const state_storage&) = default;
  state_storage(state_storage&&) noexcept = default;
  state_storage& operator=(const state_storage& other) {
    if (keeps_memory(other)) {
      m_slab.copy(other.m_slab);
    } else {
      m_slab = other.m_slab;
    }
    m_layout = other.m_layout;
    return *this;
  }
  state_storage& operator=(state_storage&& other) {  // NOLINT(performance-noexcept-move-constructor): it may refuse
    if (this == &other) return *this;
    if (m_slab.is_attached() && keeps_memory(other)) {
      m_slab.copy(other.m_slab);
      other.m_slab = {};
    } else {
      m_slab = std::move(other.m_slab);
    }
    m_layout = other.m_layout;
    return *this;
  }
  ~state_storage() = default;

 private:
  /// Whether the elements of the other's fit where those of this one are. Throws where they must and do not.
  bool keeps_memory(const state_storage& other) const {
    if (!m_slab.is_attached()) return m_slab.size() == other.m_slab.size();
    if (m_slab.size() != other.m_slab.size() || m_layout.tag() != other.m_layout.tag()) {
      refuse("state::operator=", "this state is attached to memory for ", sizes_of(m_layout), ", the other one is ",
             other.m_slab.size() == 0 ? std::string("empty (default-made or moved from)")
                                      : sentence(sizes_of(other.m_layout)));
    }
    return true;
  }
};

/// With compile-time sizes the slab alone: the object is the bytes of the state.
template <class T, class Layout>
struct state_storage<T, Layout, true> {
  static constexpr Layout m_layout{};
  inline_slab<T, Layout().slab_size()> m_slab;

  state_storage() = default;
  explicit state_storage(const Layout&) noexcept {}
};

}  // namespace detail
LINATTN_NAMESPACE_END
