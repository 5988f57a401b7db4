// What the ranks exchange: parts of a sequence as MPI sees them, one contiguous element each, and the operation that
// appends one to another.
#pragma once

#include <linattn/detail/checks.hpp>
#include <linattn/detail/engine.hpp>
#include <linattn/detail/layout.hpp>
#include <linattn/segment.hpp>
#include <linattn/state.hpp>

#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <limits>

LINATTN_NAMESPACE_BEGIN
namespace mpi::mpi_detail {

using linattn::detail::engine_access;

/// Throws what MPI reports, where the communicator's error handler returns.
inline void require_success(const char* function, int code) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  linattn::detail::refuse("mpi", function, " says ", std::string(text, std::size_t(length)));
}

// ---- slabs: all that is known here of how states and segments lie in memory ----------------------------------------

template <class Part>
std::size_t bytes_of(const Part& part) {
  return engine_access::slab(part).size() * sizeof(typename Part::scalar);
}

template <rule_traits Rule, class T, Eigen::Index Features, Eigen::Index ValueDim, Eigen::Index Heads>
auto layout_of(const state<Rule, T, Features, ValueDim, Heads>& s) {
  using linattn::detail::extent;
  return linattn::detail::segment_layout<T, Features, ValueDim, Heads, Rule>{
      {extent<Features>(s.features()), extent<ValueDim>(s.value_dim()), extent<Heads>(s.heads())}};
}

/// Everything that a state holds but its tokens, from a state or a segment to the other or its like: a segment begins
/// with X, which lies as a state does.
template <class State, class From, class To>
void copy_contents(const State& sizes, const From& from, To& to) {
  const auto layout = layout_of(sizes).state;
  std::copy_n(engine_access::data(from), layout.size(), engine_access::data(to));
}

template <class State>
void set_tokens(State& s, Eigen::Index tokens) {
  engine_access::add_tokens(s, tokens - s.tokens());
}

/// A of `to` = the transpose of A of `from`; sizes: a state of the operator.
template <class State, class Segment>
void transpose_transition(const State& sizes, const Segment& from, Segment& to) {
  const auto layout = layout_of(sizes);
  for (Eigen::Index h = 0; h < from.heads(); ++h) {
    const auto a = from.transition(h);
    auto* const head = engine_access::data(to) + h * layout.state.head_stride();
    for (Eigen::Index c = 0; c < from.features(); ++c) {
      auto* const column = head + (1 + c / layout.block_width()) * layout.state.size() + c % layout.block_width();
      for (Eigen::Index r = 0; r < from.features(); ++r) column[r * layout.state.row_stride()] = a(c, r);
    }
  }
}

// ---- MPI's side -----------------------------------------------------------------------------------------------------

/// The datatype of one part, and the operation `append` on it. Its callback is told a datatype and two addresses that
/// are MPI's: the sizes come as an attribute of the datatype, in the shape of two parts to merge in.
template <class Part>
class append_operation {
 public:
  explicit append_operation(const Part& like) : m_scratch{like, like} {
    const std::size_t bytes = bytes_of(like);
    if (bytes > std::size_t(std::numeric_limits<int>::max())) {
      linattn::detail::refuse("mpi", "a message of ", Eigen::Index(bytes), " bytes is beyond what MPI counts in int");
    }
    require_success("MPI_Type_contiguous", MPI_Type_contiguous(int(bytes), MPI_BYTE, &m_type));
    require_success("MPI_Type_commit", MPI_Type_commit(&m_type));
    require_success("MPI_Type_set_attr", MPI_Type_set_attr(m_type, key(), &m_scratch));
    require_success("MPI_Op_create", MPI_Op_create(&append, /*commute=*/0, &m_operation));
  }
  ~append_operation() {
    if (m_operation != MPI_OP_NULL) MPI_Op_free(&m_operation);
    if (m_type != MPI_DATATYPE_NULL) MPI_Type_free(&m_type);
  }
  append_operation(const append_operation&) = delete;
  append_operation& operator=(const append_operation&) = delete;

  /// `before` becomes what the lower ranks' parts are, appended in order; untouched on rank 0.
  void exclusive_scan(MPI_Comm comm, const Part& mine, Part& before) const {
    require_success("MPI_Exscan",
                    MPI_Exscan(engine_access::data(mine), engine_access::data(before), 1, m_type, m_operation, comm));
  }
  void all_reduce(MPI_Comm comm, const Part& mine, Part& all) const {
    require_success("MPI_Allreduce",
                    MPI_Allreduce(engine_access::data(mine), engine_access::data(all), 1, m_type, m_operation, comm));
  }

 private:
  struct scratch {
    Part earlier, later;
  };

  /// One for the life of the process.
  static int key() {
    static const int made = [] {
      int k = MPI_KEYVAL_INVALID;
      require_success("MPI_Type_create_keyval",
                      MPI_Type_create_keyval(MPI_TYPE_NULL_COPY_FN, MPI_TYPE_NULL_DELETE_FN, &k, nullptr));
      return k;
    }();
    return made;
  }

  /// later = earlier, then later: MPI hands the lower ranks' side first. Called from C, so nothing may leave it.
  static void append(void* earlier, void* later, int* count, MPI_Datatype* type) noexcept {
    scratch* parts = nullptr;
    int found = 0;
    MPI_Type_get_attr(*type, key(), static_cast<void*>(&parts), &found);
    const std::size_t bytes = bytes_of(parts->earlier);
    for (std::size_t i = 0; i < std::size_t(*count); ++i) {
      const auto at = [&](void* first) { return static_cast<char*>(first) + i * bytes; };
      std::memcpy(engine_access::data(parts->earlier), at(earlier), bytes);
      std::memcpy(engine_access::data(parts->later), at(later), bytes);
      parts->earlier.merge(parts->later);
      std::memcpy(at(later), engine_access::data(parts->earlier), bytes);
    }
  }

  scratch m_scratch;
  MPI_Datatype m_type = MPI_DATATYPE_NULL;
  MPI_Op m_operation = MPI_OP_NULL;
};

}  // namespace mpi::mpi_detail
LINATTN_NAMESPACE_END
