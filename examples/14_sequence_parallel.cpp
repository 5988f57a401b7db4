// 14_sequence_parallel: one sequence over many processes, each holding its own stretch of tokens.
//
//     rank 0            rank 1            rank 2            rank 3
//     absorb            absorb            absorb            absorb            each its own rows, all at once
//        `---- state ----> `---- state ----> `---- state ----> .              an exclusive scan: one state a message
//     forward_causal    forward_causal    forward_causal    forward_causal    each from the state before its rows
//
//     mpirun -n 4 build/release/examples/14_sequence_parallel [tokens a rank]
//
// Checks the outputs against one process that has all tokens, times 1, 2, 4 ... ranks with equally many tokens each,
// and extrapolates to 1,024 by the model of mpi.hpp. More ranks than cores take turns: their times are no speed-ups.
#include <linattn/gates.hpp>
#include <linattn/linattn.hpp>
#include <linattn/mpi.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

namespace {

using matrix = linattn::row_matrix<float>;
using Eigen::Index;

constexpr Index heads = 8, dim = 64;

/// Tokens first ... first + count - 1 of the one sequence that all ranks know.
struct rows {
  matrix q, k, v, log_decay, beta;

  rows(Index first, Index count)
      : q(count, heads * dim),
        k(count, heads * dim),
        v(count, heads * dim),
        log_decay(count, heads),
        beta(count, heads) {
    for (Index i = 0; i < count; ++i) {
      std::minstd_rand bits(unsigned(1 + first + i));
      bits.discard(5);
      std::normal_distribution<float> draw;
      for (matrix* x : {&q, &k, &v, &log_decay, &beta}) {
        for (float& value : x->row(i)) value = draw(bits);
      }
    }
    linattn::l2_normalize(k, heads, k);  // as delta rules need them
    log_decay = -0.01F * log_decay.cwiseAbs();
    linattn::sigmoid_beta(beta, beta);
  }

  template <class Attention>
  typename Attention::inputs inputs() const {
    typename Attention::inputs x;
    if constexpr (requires { x.log_decay; }) x.log_decay = log_decay;
    if constexpr (requires { x.beta; }) x.beta = beta;
    return x;
  }
};

/// The quickest of three, each as slow as its slowest rank.
template <class F>
double seconds(MPI_Comm comm, const F& f) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) {
    MPI_Barrier(comm);
    double taken = -MPI_Wtime();
    f();
    taken += MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, &taken, 1, MPI_DOUBLE, MPI_MAX, comm);
    best = std::min(best, taken);
  }
  return best;
}

/// Whether the outputs of segments of unequal lengths are those of one process.
template <class Attention>
bool agrees(const linattn::mpi::ranks& ranks, const Attention& attention) {
  // Sums of the same terms in another order: a few roundings, relative to the whole. A lost token moves far more.
  constexpr float tolerance = 64 * std::numeric_limits<float>::epsilon();
  const auto begin_of = [](Index rank) { return 100 * rank + 7 * rank * rank; };
  const Index first = begin_of(ranks.rank()), count = begin_of(ranks.rank() + 1) - first;
  const rows all(0, begin_of(ranks.size())), own(first, count);
  const matrix whole = attention.forward_causal(all.q, all.k, all.v, all.template inputs<Attention>());
  matrix out(count, whole.cols());
  auto workspace = attention.make_workspace();
  linattn::mpi::forward_causal(ranks, attention, own.q, own.k, own.v, own.template inputs<Attention>(), out, workspace);
  float error = (out - whole.middleRows(first, count)).norm() / whole.middleRows(first, count).norm();
  if (!(error <= tolerance)) error = 1;  // NaN, too
  MPI_Allreduce(MPI_IN_PLACE, &error, 1, MPI_FLOAT, MPI_MAX, ranks.ascending());
  if (ranks.is_first()) std::printf("  largest relative difference from one process: %.1e\n", double(error));
  return error <= tolerance;
}

/// Times of `count` tokens a rank on 1, 2, 4 ... ranks. Efficiency is that of one rank, which scans nothing, to theirs.
template <class Attention>
void weak_scaling(const Attention& attention, Index count) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const rows own(rank * count, count);
  const auto x = own.template inputs<Attention>();
  matrix out(count, heads * dim);
  auto workspace = attention.make_workspace();
  if (rank == 0) std::printf("  ranks     tokens   milliseconds   efficiency   rounds, of one message\n");
  double one = 0;
  for (int p = 1;; p = std::min(2 * p, size)) {
    MPI_Comm some = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank < p ? 0 : MPI_UNDEFINED, rank, &some);
    if (some != MPI_COMM_NULL) {
      const linattn::mpi::ranks ranks(some);
      const double t = seconds(
          some, [&] { linattn::mpi::forward_causal(ranks, attention, own.q, own.k, own.v, x, out, workspace); });
      if (p == 1) one = t;
      if (rank == 0) {
        std::printf("  %5d %10ld %14.2f %12.2f %8.0f, of %ld bytes\n", p, long(p * count), t * 1e3, one / t,
                    std::ceil(std::log2(p)), long(linattn::mpi::message_bytes(attention)));
      }
    }
    if (some != MPI_COMM_NULL) MPI_Comm_free(&some);
    MPI_Barrier(MPI_COMM_WORLD);  // those left out wait, and take no core from the others
    if (p == size) break;
  }
}

/// What a message costs on its way, measured there and back between ranks 0 and 1.
double way_of(std::size_t bytes) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<char> message(bytes);
  const auto send = [&](int to) { MPI_Send(message.data(), int(bytes), MPI_CHAR, to, 0, MPI_COMM_WORLD); };
  const auto receive = [&](int from) {
    MPI_Recv(message.data(), int(bytes), MPI_CHAR, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  };
  constexpr int ways = 20;
  return seconds(MPI_COMM_WORLD,
                 [&] {
                   for (int i = 0; rank < 2 && i < ways / 2; ++i) {
                     if (rank == 0) send(1);
                     receive(1 - rank);
                     if (rank == 1) send(0);
                   }
                 }) /
         ways;
}

/// t(P) of mpi.hpp, beside what this machine says about its terms.
template <class Attention>
void model(const Attention& attention, Index count) {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const rows own(0, count);
  const auto x = own.template inputs<Attention>();
  matrix out(count, heads * dim);
  auto workspace = attention.make_workspace();
  const auto part = [&] {
    if constexpr (Attention::rule.corrects == linattn::correction::none) {
      return attention.make_state();
    } else {
      return attention.make_segment();
    }
  };
  auto earlier = part(), later = part();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  // One rank works, the others wait: what a rank with a core of its own needs.
  const auto alone = [&](const auto& f) {
    return seconds(MPI_COMM_WORLD, [&] {
      if (rank == 0) f();
    });
  };
  const double absorb = alone([&] { attention.absorb(later, own.k, own.v, x, workspace); });
  const double causal = alone([&] { attention.forward_causal(own.q, own.k, own.v, x, out, workspace); });
  const double merge = alone([&] { earlier.merge(later); });
  const auto bytes = linattn::mpi::message_bytes(attention);
  const double here = size > 1 ? way_of(std::size_t(bytes)) : 0;

  // A network of 100 Gbit/s and 2 microseconds, which is an assumption and not measured.
  constexpr double latency = 2e-6, bandwidth = 12.5e9;
  if (rank != 0) return;
  std::printf("  model: absorb %.2f ms, causal %.2f ms, merge %.0f us", absorb * 1e3, causal * 1e3, merge * 1e6);
  if (size > 1) std::printf("; a message takes %.0f us here", here * 1e6);
  std::printf("\n  at an assumed %.0f us and %.1f GB/s:\n", latency * 1e6, bandwidth * 1e-9);
  std::printf("  ranks     tokens   milliseconds   times one rank with all tokens\n");
  for (int p = 1; p <= 1024; p *= 4) {
    const double rounds = std::ceil(std::log2(p));
    const double t = p == 1 ? causal : absorb + causal + rounds * (3 * latency + double(bytes) / bandwidth + 2 * merge);
    std::printf("  %5d %10ld %14.2f %10.1f\n", p, long(p * count), t * 1e3, p * causal / t);
  }
}

template <class Attention>
bool show(const char* name, const Attention& attention, Index count) {
  const linattn::mpi::ranks ranks(MPI_COMM_WORLD);
  if (ranks.is_first()) std::printf("%s, %ld heads of %ld, float\n", name, long(heads), long(dim));
  const bool good = agrees(ranks, attention);
  weak_scaling(attention, count);
  model(attention, count);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const Index count = argc > 1 ? std::atol(argv[1]) : 8192;
  const linattn::options sizes{.head_dim = dim, .heads = heads, .query_scale = 1 / std::sqrt(double(dim))};
  const linattn::linear_attention<linattn::elu_plus_one> additive(sizes);
  const linattn::linear_attention<linattn::identity, linattn::gated_delta<>> gated_delta(sizes);
  const bool good = count > 0 && show("additive, elu + 1", additive, count) && show("gated delta", gated_delta, count);
  MPI_Finalize();
  return good ? 0 : 1;
}
