// demo_text_predictor: an online next-byte predictor made of nothing but causal linear attention.
//
//     demo_text_predictor [file]          any file, text or not; without one, the text in examples/data
//
// Three heads read along, one per context order n = 1, 2, 3. At byte t, head n is given
//
//     k_t = the n bytes before byte t            as the one-hot vector of the bucket they hash to   phi: C = 1024
//     v_t = byte t                               as a one-hot vector                                M = 256
//     q_t = the n bytes up to and with byte t    as k, hence the context of byte t + 1
//
// `step` absorbs (k_t, v_t) and reads q_t. The similarity phi(q).phi(k) is 1 where two contexts share a bucket and 0
// elsewhere, so that the output of head n,
//
//     phi(q_t) S / phi(q_t) z = average of v_j over all j <= t whose context is that of byte t + 1,
//
// is the distribution of the byte that followed this context so far, and its normaliser q.z the number of observations
// behind it. S and z are all the model remembers of the text: their size is fixed before the first byte.
//
// Three distributions become one by logistic mixing (as in context-mixing compressors; Mahoney 2005). The next byte is
// spelt bit by bit, highest first. At each bit, head n has n1 observations for a one and n0 for a zero, both being
// parts of its distribution times q.z, and
//
//     p(one) = sigmoid(sum_n w_n s_n),   s_n = log((n1 + prior) / (n0 + prior)),   w_n += rate (bit - p) s_n.
//
// The prior is uniform: a head without observations says 0, even odds. w_n is one of 48 numbers: it depends on the
// bit's place in the byte, and on whether the observations are unanimous. Adding the heads with equal weights instead,
// as one long feature vector would, lets the head with the most common context drown the others: 4.4 bits per byte on
// English text, where the mixture needs 2.6.
//
// Exit code: 0; 1 if the outputs differ from the quadratic form of the same attention; 2 if there is nothing to read.

#include <linattn/linattn.hpp>
#include <linattn/reference.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>

namespace {

using Eigen::Index;

constexpr Index heads = 3;       // H, head h sees h + 1 bytes
constexpr Index buckets = 1024;  // C
constexpr Index values = 256;    // M

/// phi(x) = one-hot of the bucket number x: D = 1, C = buckets. What is no bucket number is NaN throughout.
struct one_hot {
  static constexpr Index dimension(Index) noexcept { return buckets; }

  template <class T>
  void forward(const linattn::const_tile<T>& x, linattn::tile<T>& phi) const noexcept {
    for (Index r = 0; r < x.rows(); ++r) {
      const bool valid = x(r, 0) >= T(0) && x(r, 0) < T(buckets);
      phi.row(r).setConstant(valid ? T(0) : std::numeric_limits<T>::quiet_NaN());
      if (valid) phi(r, static_cast<Index>(x(r, 0))) = T(1);
    }
  }
};

using attention = linattn::linear_attention<one_hot>;
using row = linattn::row_vector<float>;
using coordinates = Eigen::Matrix<float, 1, heads>;  // one bucket number a head

/// The last bytes read, newest lowest; zeros before the first.
struct context {
  std::uint32_t bytes = 0;

  void push(int byte) { bytes = bytes << 8 | static_cast<std::uint32_t>(byte); }

  /// An integer mixer spreads the contexts over the buckets; those of one byte never collide.
  coordinates hashed() const {
    coordinates x;
    for (Index h = 0; h < heads; ++h) {
      const auto order = static_cast<unsigned>(h + 1);
      std::uint32_t hash = bytes & (0xffffffffU >> (32 - 8 * order));
      if (order > 1) {
        hash = (hash + (order << 24)) * 0x9e3779b1U;
        hash = (hash ^ hash >> 15) * 0x85ebca77U;
        hash = (hash ^ hash >> 13) * 0xc2b2ae3dU;
        hash ^= hash >> 16;
      }
      x[h] = static_cast<float>(hash % static_cast<std::uint32_t>(buckets));
    }
    return x;
  }
};

/// Observations of one head summed over the byte's binary tree: node 1 is the root, node i has the children 2 i (next
/// bit zero) and 2 i + 1 (one), leaf 256 + b is byte b.
struct bit_tree {
  std::array<float, 2 * values> observed = {};

  void assign(const float* distribution, float normaliser) {
    for (std::size_t b = 0; b < values; ++b) observed[values + b] = distribution[b] * normaliser;
    for (std::size_t i = values - 1; i >= 1; --i) observed[i] = observed[2 * i] + observed[2 * i + 1];
  }
};
using forest = std::array<bit_tree, heads>;

/// What the heads say about one bit, and with which weights they were heard.
struct opinion {
  double log_odds = 0;  ///< log(p(one) / p(zero)) of the mixture
  std::size_t place = 0;
  std::array<double, heads> vote = {};            ///< s_n
  std::array<std::size_t, heads> unanimous = {};  ///< 1 where all observations agree
};

/// Logistic mixing of the heads; the weights follow the gradient of the log-loss.
class mixer {
 public:
  mixer() {
    for (auto& place : m_weights) place.fill({initial_weight, initial_weight});
  }

  /// On the bit below `node`, the one after `place` bits of the byte.
  opinion ask(const forest& trees, std::size_t node, std::size_t place) const {
    opinion o{0, place, {}, {}};
    for (std::size_t h = 0; h < heads; ++h) {
      const double zeros = static_cast<double>(trees[h].observed[2 * node]);
      const double ones = static_cast<double>(trees[h].observed[2 * node + 1]);
      o.vote[h] = std::log((ones + prior) / (zeros + prior));
      o.unanimous[h] = zeros == 0 || ones == 0 ? 1 : 0;
      o.log_odds += m_weights[place][h][o.unanimous[h]] * o.vote[h];
    }
    o.log_odds = std::clamp(o.log_odds, -largest_log_odds, largest_log_odds);
    return o;
  }

  /// `error` is the bit minus the probability it was given.
  void learn(const opinion& o, double error) {
    for (std::size_t h = 0; h < heads; ++h) m_weights[o.place][h][o.unanimous[h]] += rate * error * o.vote[h];
  }

 private:
  static constexpr double prior = 0.3;  // observations of either bit before there are any
  static constexpr double rate = 0.01;
  static constexpr double initial_weight = 0.4;    // three heads that agree are a little more than one
  static constexpr double largest_log_odds = 9.7;  // no bit is cheaper than 1e-4 or dearer than 14 bits

  std::array<std::array<std::array<double, 2>, heads>, 8> m_weights;  // [place in the byte][head][unanimous]
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// The predictor: one state, three heads, 48 weights.
class predictor {
 public:
  predictor() : m_attention({.head_dim = 1, .value_dim = values, .heads = heads}) { m_value.setZero(); }

  /// Charges the byte, -log2 of the probability it was given, and learns from it.
  double code_length_then_absorb(int byte) {
    double bits = 0;
    std::size_t node = 1;
    for (std::size_t place = 0; place < 8; ++place) {
      const int bit = byte >> (7 - place) & 1;
      const opinion o = m_mixer.ask(m_trees, node, place);
      const double p_one = sigmoid(o.log_odds);
      bits -= std::log2(bit == 1 ? p_one : 1 - p_one);
      m_mixer.learn(o, bit - p_one);
      node = 2 * node + static_cast<std::size_t>(bit);
    }

    const coordinates k = m_context.hashed();  // (1, H)
    m_context.push(byte);
    const coordinates q = m_context.hashed();                          // (1, H)
    for (Index h = 0; h < heads; ++h) m_value[h * values + byte] = 1;  // (1, H*M)
    m_attention.step(m_state, q, k, m_value, m_output, m_workspace);
    for (Index h = 0; h < heads; ++h) m_value[h * values + byte] = 0;

    for (Index h = 0; h < heads; ++h) {  // the q.z of a one-hot query is one entry of z
      m_trees[std::size_t(h)].assign(m_output.data() + h * values, m_state.k_sum(h)[static_cast<Index>(q[h])]);
    }
    return bits;
  }

  /// `length` bytes of what it expects next, drawn with a seed. The state is only read: nothing made up is learnt.
  std::string continuation(std::size_t length, std::uint64_t seed) const {
    constexpr double sharpness = 2.5;  // multiplies the log odds: 1 draws from the model, infinity takes the likeliest
    context ahead = m_context;
    forest trees = m_trees;
    linattn::row_matrix<float> output(1, heads * values), denominators(1, heads);
    auto scratch = m_attention.make_workspace();
    std::string text;
    while (text.size() < length) {
      std::size_t node = 1;
      for (std::size_t place = 0; place < 8; ++place) {
        seed = seed * 6364136223846793005U + 1442695040888963407U;
        const double uniform = static_cast<double>(seed >> 11) * 0x1p-53;
        node = 2 * node + (uniform < sigmoid(sharpness * m_mixer.ask(trees, node, place).log_odds) ? 1U : 0U);
      }
      const int byte = static_cast<int>(node) - static_cast<int>(values);
      text += static_cast<char>(byte);
      ahead.push(byte);
      m_attention.read(m_state, ahead.hashed(), output, scratch, denominators);
      for (Index h = 0; h < heads; ++h) {
        trees[std::size_t(h)].assign(output.data() + h * values, denominators(0, h));
      }
    }
    return text;
  }

  const row& output() const { return m_output; }
  Index state_floats() const { return heads * (m_state.kv(0).size() + m_state.k_sum(0).size()); }

 private:
  attention m_attention;
  attention::state_type m_state = m_attention.make_state();
  attention::workspace_type m_workspace = m_attention.make_workspace();
  context m_context;
  row m_value = row(heads * values);
  row m_output = row(heads * values);
  forest m_trees = {};
  mixer m_mixer;
};

/// The first rows of what `step` returned, against eq. 3 evaluated over all pairs in double.
class prefix_check {
 public:
  static constexpr Index longest = 512;
  // Outputs are quotients of integers below 2^24: one rounding in the reciprocal, one in the product.
  static constexpr double tolerance = 2 * std::numeric_limits<float>::epsilon();

  void add(int byte, const row& output) {
    if (m_rows == longest) return;
    const coordinates k = m_context.hashed();
    m_context.push(byte);
    const coordinates q = m_context.hashed();
    for (Index h = 0; h < heads; ++h) {
      m_k(m_rows, h) = k[h];
      m_q(m_rows, h) = q[h];
      m_v(m_rows, h * values + byte) = 1;
    }
    m_output.row(m_rows++) = output;
  }
  Index rows() const { return m_rows; }
  double largest_difference() const {
    const auto same_bucket = [](const auto& q, const auto& k) { return q[0] == k[0] ? 1.0 : 0.0; };
    const linattn::row_matrix<double> expected = linattn::kernel_attention<double>(
        same_bucket, m_q.topRows(m_rows), m_k.topRows(m_rows), m_v.topRows(m_rows), {.heads = heads, .causal = true});
    return (expected - m_output.topRows(m_rows).cast<double>()).cwiseAbs().template maxCoeff<Eigen::PropagateNaN>();
  }

 private:
  using matrix = linattn::row_matrix<float>;
  static constexpr Index m_width = heads * values;
  context m_context;
  Index m_rows = 0;
  matrix m_q = matrix::Zero(longest, heads), m_k = matrix::Zero(longest, heads);  // (N, H)
  matrix m_v = matrix::Zero(longest, m_width), m_output = m_v;                    // (N, H*M)
};

/// Bits per byte of a code that knows how often each byte occurs and nothing else: a yardstick, no part of the model.
struct order_0 {
  std::array<double, values> counts = {};
  double entropy() const {
    double total = 0, bits = 0;
    for (const double n : counts) total += n;
    for (const double n : counts) bits -= n > 0 ? n / total * std::log2(n / total) : 0;
    return bits;
  }
};

/// Size of `gzip -9` of a regular file; 0 where that cannot be had.
double gzip_bytes(const std::string& path) {
  double size = 0;
#if defined(__unix__) || defined(__APPLE__)
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return 0;
  std::string quoted = "'";
  for (const char c : path) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  std::FILE* pipe = ::popen(("gzip -9 2>/dev/null < " + quoted + "' | wc -c").c_str(), "r");
  if (pipe == nullptr) return 0;
  if (std::fscanf(pipe, "%lf", &size) != 1) size = 0;
  ::pclose(pipe);
#endif
  return size;
}

void print_indented(const std::string& text) {
  std::printf("    ");
  for (const char c : text) {
    if (c == '\n') {
      std::printf("\n    ");
    } else {
      std::putchar(c >= ' ' && c <= '~' ? c : '.');
    }
  }
  std::printf("\n");
}

int nothing_to_read(const std::string& path, const char* why) {
  std::fprintf(stderr, "demo_text_predictor: cannot read '%s': %s\n", path.c_str(), why);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fprintf(stderr, "usage: demo_text_predictor [file]\n");
    return 2;
  }
  const std::string path = argc == 2 ? argv[1] : LINATTN_EXAMPLES_DIR "/data/linear_attention.txt";
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return nothing_to_read(path, std::strerror(errno));

  predictor model;
  prefix_check check;
  order_0 letters;
  double bits = 0, bits_at_last_row = 0;
  Index bytes = 0, bytes_at_last_row = 0, next_row = 1024;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const auto print_row = [&] {
    std::printf("%12td %12.3f %12.3f %12.0f\n", bytes, bits / double(bytes),
                (bits - bits_at_last_row) / double(bytes - bytes_at_last_row), double(bytes) / seconds());
    std::fflush(stdout);
    bits_at_last_row = bits;
    bytes_at_last_row = bytes;
  };

  errno = 0;
  for (int byte = std::getc(file); byte != EOF; byte = std::getc(file)) {
    if (bytes == 0) {
      std::printf("%s\n\n%12s %12s %12s %12s\n", path.c_str(), "bytes", "bits/byte", "since above", "bytes/s");
    }
    bits += model.code_length_then_absorb(byte);
    check.add(byte, model.output());
    letters.counts[std::size_t(byte)] += 1;
    if (++bytes == next_row) {
      print_row();
      next_row += std::min<Index>(next_row, 32768);
    }
  }
  const bool broken = std::ferror(file) != 0;
  const int error = errno;
  std::fclose(file);
  if (broken) return nothing_to_read(path, std::strerror(error));
  if (bytes == 0) return nothing_to_read(path, "the file is empty");
  if (bytes != bytes_at_last_row) print_row();

  const double elapsed = seconds();
  std::printf("\nbits per byte  %7.3f  this model: %.0f bytes if its predictions drove an arithmetic coder\n",
              bits / double(bytes), std::ceil(bits / 8));
  std::printf("               %7.3f  order-0 entropy: knowing the letters' frequencies beforehand\n",
              letters.entropy());
  const double zipped = gzip_bytes(path);
  if (zipped > 0) std::printf("               %7.3f  gzip -9: %.0f bytes\n", 8 * zipped / double(bytes), zipped);
  std::printf("speed          %7.0f  bytes per second: %td bytes in %.2f s, one thread\n", double(bytes) / elapsed,
              bytes, elapsed);
  std::printf(
      "state          %7.2f  MiB: %td heads x (%td x %td + %td) floats, the same at every byte; and 48 weights\n",
      double(model.state_floats()) * sizeof(float) / 1048576.0, heads, buckets, values, buckets);

  const double difference = check.largest_difference();
  const bool correct = difference <= prefix_check::tolerance;
  std::printf("check          %7.0e  largest difference of the first %td outputs from the O(N^2) form: %s\n",
              difference, check.rows(), correct ? "ok" : "WRONG");

  std::printf("\nwhat it would write next:\n\n");
  print_indented(model.continuation(200, 2020));
  return correct ? 0 : 1;
}
