// What does attention cost as the sequence grows, and what its gradients? (The paper's figure 1.)
//
// Non-causal, float, H = 8, D = M = 32, N = 2^9 ... 2^16, `forward` and `forward` + `vjp`:
//
//   linear    linear_attention, elu + 1
//   blocked   softmax without an N x N matrix: cached_softmax, its gradient block by block
//   naive     softmax as eq. 2 is written, P (N, N) of every head kept for the gradient
//
// 2^16 / N samples, one after the other, as often as half a second allows, or as many of them; thread CPU seconds a
// sample, the least of up to four. Bytes are the largest number that was allocated at once for
// one sample, inputs and outputs included, counted in malloc; `beyond` leaves inputs and outputs out. A method stops
// where a sample would need more than 4 GiB, or more than 10 s (naive) or 100 s (blocked), and says so: a length that
// is not reached takes four times the one before.
//
// Checked before anything is timed: `blocked` against the reference in double, its gradients and those of `naive`
// against central differences in double. The figures go to stdout as JSON, with slopes fitted to log-log; exits with 1
// when a check fails, or when linear time or memory grows faster than N^1.1 or softmax's naive memory slower than
// N^1.8.
#include "common.hpp"
#include "softmax_baselines.hpp"

#include <malloc.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>

// ---- bytes allocated at once ----------------------------------------------------------------------------------------

namespace {

std::size_t bytes_now = 0, bytes_most = 0;  // this program has one thread

void* counted(void* memory) {
  if (memory != nullptr) bytes_now += malloc_usable_size(memory);
  if (bytes_now > bytes_most) bytes_most = bytes_now;
  return memory;
}

}  // namespace

// In front of the C library's: operator new and Eigen's allocations come through these.
extern "C" {

void* __libc_malloc(std::size_t) noexcept;
void* __libc_calloc(std::size_t, std::size_t) noexcept;
void* __libc_realloc(void*, std::size_t) noexcept;
void* __libc_memalign(std::size_t, std::size_t) noexcept;
void __libc_free(void*) noexcept;

void* malloc(std::size_t size) noexcept { return counted(__libc_malloc(size)); }
void* calloc(std::size_t count, std::size_t size) noexcept { return counted(__libc_calloc(count, size)); }
void* realloc(void* memory, std::size_t size) noexcept {
  if (memory != nullptr) bytes_now -= malloc_usable_size(memory);
  return counted(__libc_realloc(memory, size));
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return counted(__libc_memalign(alignment, size));
}
void* memalign(std::size_t alignment, std::size_t size) noexcept { return counted(__libc_memalign(alignment, size)); }
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  void* const got = counted(__libc_memalign(alignment, size));
  if (got == nullptr) return ENOMEM;
  *memory = got;
  return 0;
}
void free(void* memory) noexcept {
  if (memory != nullptr) bytes_now -= malloc_usable_size(memory);
  __libc_free(memory);
}

}  // extern "C"

namespace {

using namespace linattn_bench;

constexpr Index heads = 8, dim = 32;
constexpr double most_bytes = 4.0 * (1 << 30);

/// One sample: what goes in, what comes out.
template <class T>
struct sample {
  row_matrix<T> q, k, v, out, dout, dq, dk, dv;  // (N, H D)

  sample(Index n, Index h, Index d, bool differentiates)
      : q(normal_matrix<T>(n, h * d, 1)),
        k(normal_matrix<T>(n, h * d, 2)),
        v(normal_matrix<T>(n, h * d, 3)),
        out(n, h * d),
        dout(differentiates ? normal_matrix<T>(n, h * d, 4) : row_matrix<T>()),
        dq(dout.rows(), dout.cols()),
        dk(dout.rows(), dout.cols()),
        dv(dout.rows(), dout.cols()) {}
};

/// Linear attention with the same two verbs as the baselines.
template <class T>
class linear {
 public:
  linear(Index, Index d, Index h)
      : m_attention({.head_dim = d, .heads = h}), m_workspace(m_attention.make_workspace()) {}

  void forward(const row_matrix<T>& q, const row_matrix<T>& k, const row_matrix<T>& v, row_matrix<T>& out) {
    m_attention.forward(q, k, v, out, m_workspace);
  }
  void vjp(const row_matrix<T>& q, const row_matrix<T>& k, const row_matrix<T>& v, const row_matrix<T>&,
           const row_matrix<T>& dout, row_matrix<T>& dq, row_matrix<T>& dk, row_matrix<T>& dv) {
    m_attention.vjp(q, k, v, dout, dq, dk, dv, m_workspace);
  }

 private:
  using attention = linattn::linear_attention<linattn::elu_plus_one, linattn::additive, T>;
  attention m_attention;
  typename attention::workspace_type m_workspace;
};

template <class Method, class T>
void call(Method& method, sample<T>& x, bool differentiates) {
  method.forward(x.q, x.k, x.v, x.out);
  if (differentiates) method.vjp(x.q, x.k, x.v, x.out, x.dout, x.dq, x.dk, x.dv);
}

// ---- checks ---------------------------------------------------------------------------------------------------------

/// Central differences of <dout, out> in double are this close, relatively: a third of the digits goes to rounding, and
/// as many to the third derivative.
constexpr double difference_tolerance = 1e-7;

/// Blocks of the gradient are 256 tokens long; a few entries of every gradient, at the ends of blocks among them.
template <class Method>
bool check(const char* name, Method method, Index n, Index h, Index d) {
  sample<double> x(n, h, d, true);
  call(method, x, true);
  const row_matrix<double> want = linattn::softmax_attention(x.q, x.k, x.v, {.heads = h});
  const double error = (x.out - want).norm() / want.norm();
  double worst = 0;
  constexpr double step = 1e-5;
  const std::pair<row_matrix<double>*, const row_matrix<double>*> gradients[] = {
      {&x.q, &x.dq}, {&x.k, &x.dk}, {&x.v, &x.dv}};
  for (const auto& [input, gradient] : gradients) {
    for (const Index row : {Index(0), n / 2, std::min(Index(255), n - 1), std::min(Index(256), n - 1), n - 1}) {
      double& element = (*input)(row, row % (h * d));
      const double before = element;
      double objective[2];
      for (int side = 0; side < 2; ++side) {
        element = before + (side == 0 ? -step : step);
        objective[side] = x.dout.cwiseProduct(linattn::softmax_attention(x.q, x.k, x.v, {.heads = h})).sum();
      }
      element = before;
      const double difference = (objective[1] - objective[0]) / (2 * step);
      const double size = std::sqrt(gradient->squaredNorm() / double(gradient->size()));
      const double off = std::abs(difference - (*gradient)(row, row % (h * d))) / size;
      if (!(off <= worst)) worst = off;  // a NaN stays
    }
  }
  const bool passed = error <= row_tolerance<double> && worst <= difference_tolerance;
  std::fprintf(stderr, "%-8s N = %3td: output off by %.1e, gradients by %.1e%s\n", name, n, error, worst,
               passed ? "" : " FAILED");
  return passed;
}

bool check_all() {
  bool passed = true;
  for (const Index n : {Index(3), Index(300)}) {
    passed = check("naive", naive_softmax<double>(n, 4, 2, true), n, 2, 4) && passed;
    passed = check("blocked", blocked_softmax<double>(n, 4, 2), n, 2, 4) && passed;
  }
  return passed;
}

// ---- measuring ------------------------------------------------------------------------------------------------------

struct figure {
  Index n;
  Index samples;
  double seconds, bytes, beyond;
};

struct series {
  std::string method, stopped;
  bool differentiates;
  std::vector<figure> figures;

  double slope(double figure::*what) const {
    double sx = 0, sy = 0, sxx = 0, sxy = 0;
    for (const figure& f : figures) {
      const double x = std::log2(double(f.n)), y = std::log2(f.*what);
      sx += x, sy += y, sxx += x * x, sxy += x * y;
    }
    const auto count = double(figures.size());
    return (count * sxy - sx * sy) / (count * sxx - sx * sx);
  }
};

/// make(N) gives a method, bytes_of(N) what it is going to allocate.
template <class Make>
series measure(const char* name, bool differentiates, double most_seconds,
               const std::function<double(double)>& bytes_of, const Make& make) {
  series found{name, "", differentiates, {}};
  for (Index n = 1 << 9; n <= 1 << 16; n *= 2) {
    if (bytes_of(double(n)) > most_bytes) {
      found.stopped = "N = " + std::to_string(n) + " needs more than 4 GiB a sample";
      break;
    }
    if (!found.figures.empty() && 4 * found.figures.back().seconds > most_seconds) {
      found.stopped = "N = " + std::to_string(n) + " takes more than " + std::to_string(int(most_seconds)) +
                      " s a sample, four times N = " + std::to_string(n / 2);
      break;
    }
    const std::size_t before = bytes_now;
    bytes_most = bytes_now;
    figure f{n, 0, 0, 0, 0};
    {
      sample<float> x(n, heads, dim, differentiates);
      const std::size_t inputs_and_outputs = bytes_now - before;
      auto method = make(n);
      constexpr double enough = 0.5;
      const double start = seconds();
      call(*method, x, differentiates);
      f.seconds = seconds() - start;
      f.samples = 1;
      f.bytes = double(bytes_most - before);
      f.beyond = f.bytes - double(inputs_and_outputs);
      for (int repetition = 0; repetition < 3 && seconds() - start < enough; ++repetition) {
        const double begun = seconds();
        Index samples = 0;
        do {
          call(*method, x, differentiates);
          benchmark::ClobberMemory();
          ++samples;
        } while (samples < (1 << 16) / n && seconds() - start < enough);
        const double each = (seconds() - begun) / double(samples);
        if (each < f.seconds) f.seconds = each, f.samples = samples;
      }
    }
    std::fprintf(stderr, "%-8s %-14s N = %5td: %10.3f ms, %9.2f MiB, %9.2f beyond inputs and outputs\n", name,
                 differentiates ? "forward + vjp" : "forward", n, 1e3 * f.seconds, f.bytes / (1 << 20),
                 f.beyond / (1 << 20));
    found.figures.push_back(f);
  }
  if (!found.stopped.empty()) std::fprintf(stderr, "%-8s stops: %s\n", name, found.stopped.c_str());
  std::fprintf(stderr, "%-8s time grows as N^%.2f, bytes as N^%.2f\n", name, found.slope(&figure::seconds),
               found.slope(&figure::bytes));
  return found;
}

void print(const std::vector<series>& all) {
  std::printf("{\n  \"H\": %td,\n  \"D\": %td,\n  \"packet_bytes\": %zu,\n  \"peak_gflops\": %.1f,\n", heads, dim,
              std::size_t(linattn::detail::packet<float>::size) * sizeof(float), 1e-9 * fma_peak<float>());
#if defined(__clang__)
  std::printf("  \"compiler\": \"clang %s\",\n", __clang_version__);
#else
  std::printf("  \"compiler\": \"GCC %s\",\n", __VERSION__);
#endif
  std::printf("  \"series\": [\n");
  for (const series& s : all) {
    std::printf(
        "    {\"method\": \"%s\", \"what\": \"%s\", \"stopped\": \"%s\", \"time_slope\": %.3f, "
        "\"bytes_slope\": %.3f, \"figures\": [\n",
        s.method.c_str(), s.differentiates ? "forward + vjp" : "forward", s.stopped.c_str(), s.slope(&figure::seconds),
        s.slope(&figure::bytes));
    for (const figure& f : s.figures) {
      std::printf("      {\"N\": %td, \"samples\": %td, \"seconds\": %.4g, \"bytes\": %.0f, \"beyond\": %.0f}%s\n", f.n,
                  f.samples, f.seconds, f.bytes, f.beyond, &f == &s.figures.back() ? "" : ",");
    }
    std::printf("    ]}%s\n", &s == &all.back() ? "" : ",");
  }
  std::printf("  ]\n}\n");
}

/// The claim itself.
bool grows_as_promised(const std::vector<series>& all) {
  bool passed = true;
  for (const series& s : all) {
    const double time = s.slope(&figure::seconds), bytes = s.slope(&figure::bytes);
    if (s.method == "linear" && !(time <= 1.1 && bytes <= 1.1)) passed = false;
    if (s.method == "naive" && !(bytes >= 1.8)) passed = false;
  }
  if (!passed) std::fprintf(stderr, "FAILED: a slope is not what it has to be\n");
  return passed;
}

}  // namespace

int main() {
  if (!check_all()) return 1;
  std::vector<series> all;
  for (const bool differentiates : {false, true}) {
    const double in_and_out = 4.0 * heads * dim * (differentiates ? 8 : 4);
    const auto linear_bytes = [&](double n) { return in_and_out * n; };
    const auto naive_bytes = [&](double n) {
      return in_and_out * n + 4 * n * n * (differentiates ? double(heads) + 1 : 1);
    };
    all.push_back(measure("linear", differentiates, 100, linear_bytes,
                          [](Index n) { return std::make_unique<linear<float>>(n, dim, heads); }));
    all.push_back(measure("blocked", differentiates, 100, linear_bytes,
                          [](Index n) { return std::make_unique<blocked_softmax<float>>(n, dim, heads); }));
    all.push_back(measure("naive", differentiates, 10, naive_bytes, [&](Index n) {
      return std::make_unique<naive_softmax<float>>(n, dim, heads, differentiates);
    }));
  }
  print(all);
  return grows_as_promised(all) ? 0 : 1;
}
