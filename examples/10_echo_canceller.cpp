// 10_echo_canceller: a loudspeaker's echo taken out of two microphones at 48 kHz, by the delta rule.
//
// The state S (256, 2) is the estimate of the echo paths: 256 taps from the loudspeaker to each microphone. With x_t
// the last 256 loudspeaker samples, d_t (2) the microphones and L_t = sqrt(|x_t|^2 + floor), the rule
//
//     S += beta k_t (v_t - S^T k_t)^T       k_t = x_t / L_t       v_t = d_t / L_t
//
// says S += beta x_t (d_t - S^T x_t)^T / L_t^2: the normalised LMS algorithm. What the microphones hear
// beside the echo is e_t = d_t - S^T x_t, with S from before the write. The library reads after it, at q_t = k_t:
//
//     out_t = S^T k_t + beta |k_t|^2 (v_t - S^T k_t)    gives    e_t = L_t (v_t - out_t) / (1 - beta |k_t|^2)
//
// ERLE, the echo return loss enhancement, is the power of d over that of e. The filter sees 256 / 48,000 s = 5.3 ms:
// the echo path inside a device and the first reflections beside it, as the generated room has them. A living room's
// echo lasts a hundred times that, and needs as many more taps.
//
// Without arguments: generated speech and room. `10_echo_canceller <folder>`: the same, and far.wav, microphones.wav
// and out.wav are written there. `10_echo_canceller far.wav microphones.wav out.wav`: recordings at 48 kHz, out.wav
// written.

#include <linattn/linattn.hpp>

#include <sndfile.h>
#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace {

using Eigen::Index;
using linattn::row_matrix;
using samples = row_matrix<float>;  // (N, channels)
using canceller = linattn::linear_attention<linattn::identity, linattn::delta, float>;

constexpr int rate = 48000;
constexpr Index taps = 256;
constexpr Index block = 64;
constexpr float step_size = 0.5F;     // beta
constexpr float floor_power = 0.01F;  // of 256 samples: a loudspeaker 44 dB below full scale moves the filter less

// ---- a recording, generated ----------------------------------------------------------------------------------------

/// Uniform in [-1, 1), the same with every standard library.
class noise {
 public:
  float operator()() {
    m_state = m_state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<float>(static_cast<std::int32_t>(m_state >> 32U)) * 0x1p-31F;
  }

 private:
  std::uint64_t m_state = 1;
};

/// A resonance of a voice: y_t = x_t + 2 r cos(w) y_(t-1) - r^2 y_(t-2).
class resonance {
 public:
  float operator()(float x, double hertz, double bandwidth) {
    const double pi = 3.14159265358979;
    const double r = std::exp(-pi * bandwidth / rate);
    const double y = (1 - r) * x + 2 * r * std::cos(2 * pi * hertz / rate) * m_last - r * r * m_before;
    m_before = m_last;
    m_last = y;
    return static_cast<float>(y);
  }

 private:
  double m_last = 0;
  double m_before = 0;
};

/// Syllables of 200 ms: a buzz of about 120 Hz through three resonances, different for each vowel, the first 60 ms of
/// it a hiss; every eighth syllable is silence.
samples speech(Index n) {
  constexpr double vowels[][3] = {{730, 1090, 2440}, {270, 2290, 3010}, {300, 870, 2240}, {530, 1840, 2480}};
  constexpr Index syllable = rate / 5;
  noise random;
  resonance formants[3];
  samples x(n, 1);
  double phase = 0;
  for (Index t = 0; t < n; ++t) {
    const Index number = t / syllable;
    const double into = static_cast<double>(t % syllable) / syllable;
    phase += (110 + 30 * std::sin(2e-5 * static_cast<double>(t))) / rate;
    const float pulse = phase >= 1 ? 6.0F : 0.0F;
    phase -= phase >= 1 ? 1 : 0;
    const bool hiss = into < 0.3;
    float y = hiss ? 0.15F * random() : pulse + 0.05F * random();
    for (int f = 0; f < 3; ++f)
      y = formants[f](y, vowels[number * 7 % 4][f], 60 + 40 * f) + (hiss ? 0.3F * y : 0.1F * y);
    const double envelope = number % 8 == 7 ? 0 : std::sin(3.14159265358979 * into);
    x(t) = static_cast<float>(envelope) * y;
  }
  return x * (0.5F / x.cwiseAbs().maxCoeff());
}

/// (N, 2): each microphone hears the loudspeaker by a path of its own, and noise 70 dB below full scale.
samples room(const samples& far) {
  constexpr Index length = 400;
  samples path = samples::Zero(length, 2);
  noise random;
  for (Index m = 0; m < 2; ++m) {
    path(20 + 7 * m, m) = 0.6F;                    // the direct sound
    for (Index j = 25 + 7 * m; j < length; ++j) {  // reflections, 60 dB down after 256 samples
      path(j, m) = 0.3F * random() * std::pow(10.0F, -3.0F * static_cast<float>(j) / 256.0F);
    }
  }
  samples microphones(far.rows(), 2);
  for (Index t = 0; t < far.rows(); ++t) {
    const Index reach = std::min(t + 1, length);
    microphones.row(t) = far.col(0).segment(t + 1 - reach, reach).reverse().transpose() * path.topRows(reach);
    for (Index m = 0; m < 2; ++m) microphones(t, m) += 3e-4F * random();
  }
  return microphones;
}

// ---- WAV files -----------------------------------------------------------------------------------------------------

bool read_wav(const std::string& name, samples& x) {
  SF_INFO info = {};
  SNDFILE* const file = sf_open(name.c_str(), SFM_READ, &info);
  if (file == nullptr) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), sf_strerror(nullptr));
    return false;
  }
  x.resize(info.frames, info.channels);
  const sf_count_t got = sf_readf_float(file, x.data(), info.frames);
  sf_close(file);
  if (got == info.frames && info.samplerate == rate) return true;
  std::fprintf(stderr, "%s: %s\n", name.c_str(), got == info.frames ? "not at 48 kHz" : "ends early");
  return false;
}

bool write_wav(const std::string& name, const samples& x) {
  SF_INFO info = {};
  info.samplerate = rate;
  info.channels = static_cast<int>(x.cols());
  info.format = SF_FORMAT_WAV | SF_FORMAT_FLOAT;
  SNDFILE* const file = sf_open(name.c_str(), SFM_WRITE, &info);
  const bool written = file != nullptr && sf_writef_float(file, x.data(), x.rows()) == x.rows();
  if (!written) std::fprintf(stderr, "%s: %s\n", name.c_str(), sf_strerror(file));
  if (file != nullptr) sf_close(file);
  return written;
}

// ---- the canceller -------------------------------------------------------------------------------------------------

/// What is left of the microphones (N, M), block by block as it would come from a sound card, and how long each took.
samples cancel(const samples& far, const samples& microphones, std::vector<double>& seconds) {
  const Index n = microphones.rows(), channels = microphones.cols();
  const canceller attention({.head_dim = taps, .value_dim = channels});
  auto state = attention.make_state();
  auto workspace = attention.make_workspace();

  samples past = samples::Zero(1, taps - 1 + n);  // silence before the first sample
  past.rightCols(n) = far.transpose();
  samples keys(block, taps), values(block, channels), out(block, channels), left(n, channels);
  samples beta = samples::Constant(block, 1, step_size);
  Eigen::ArrayXf power(block), length(block), unread(block);
  seconds.reserve(static_cast<std::size_t>((n + block - 1) / block));
  for (Index t = 0; t < n; t += block) {
    const auto start = std::chrono::steady_clock::now();
    const Index rows = std::min(block, n - t);
    // Row i holds samples t + i - 255 ... t + i: windows one sample apart are rows with a stride of one.
    const Eigen::Map<const samples, 0, Eigen::OuterStride<>> windows(past.data() + t, rows, taps,
                                                                     Eigen::OuterStride<>(1));
    power.head(rows) = windows.rowwise().squaredNorm();                  // |x|^2
    length.head(rows) = (power.head(rows) + floor_power).sqrt();         // L
    keys.topRows(rows) = windows.array().colwise() / length.head(rows);  // k
    values.topRows(rows) = microphones.middleRows(t, rows).array().colwise() / length.head(rows);
    attention.forward_causal(state, keys.topRows(rows), keys.topRows(rows), values.topRows(rows),
                             {.beta = beta.topRows(rows)}, out.topRows(rows), workspace);
    unread.head(rows) = 1 - step_size * power.head(rows) / length.head(rows).square();
    left.middleRows(t, rows) = (values - out).topRows(rows).array().colwise() * (length.head(rows) / unread.head(rows));
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return left;
}

/// Of each second; the worst after the second one.
double print_erle(const samples& microphones, const samples& left) {
  double worst = 1e9;
  for (Index t = 0; t < left.rows(); t += rate) {
    const Index n = std::min<Index>(rate, left.rows() - t);
    const double before = microphones.middleRows(t, n).cast<double>().squaredNorm();
    const double after = left.middleRows(t, n).cast<double>().squaredNorm();
    const double erle = 10 * std::log10((before + 1e-20) / (after + 1e-20));
    std::printf("second %2d   ERLE %5.1f dB\n", static_cast<int>(t / rate) + 1, erle);
    if (t >= 2 * rate && !(erle >= worst)) worst = erle;  // a NaN, too
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  samples far, microphones;
  if (arguments.size() == 3) {
    if (!read_wav(arguments[0], far) || !read_wav(arguments[1], microphones)) return 2;
    if (far.cols() != 1 || far.rows() != microphones.rows()) {
      std::fprintf(stderr, "far.wav must have one channel, and as many samples as the microphones\n");
      return 2;
    }
  } else if (arguments.size() <= 1) {
    far = speech(5 * rate);
    microphones = room(far);
  } else {
    std::fprintf(stderr, "usage: 10_echo_canceller [folder | far.wav microphones.wav out.wav]\n");
    return 2;
  }

  std::vector<double> seconds;
  const samples left = cancel(far, microphones, seconds);
  const double worst = print_erle(microphones, left);
  std::sort(seconds.begin(), seconds.end());
  const double slow = seconds.empty() ? 0 : seconds[(seconds.size() - 1) * 999 / 1000];
  std::printf("a block of %d samples, %d taps, %d microphones: median %.1f, p99.9 %.1f microseconds of %.0f\n",
              static_cast<int>(block), static_cast<int>(taps), static_cast<int>(microphones.cols()),
              seconds.empty() ? 0 : 1e6 * seconds[seconds.size() / 2], 1e6 * slow, 1e6 * block / rate);

  if (arguments.size() == 3) return write_wav(arguments[2], left) ? 0 : 1;
  if (arguments.size() == 1) {
    const std::string folder = arguments[0] + "/";
    if (!write_wav(folder + "far.wav", far) || !write_wav(folder + "microphones.wav", microphones) ||
        !write_wav(folder + "out.wav", left)) {
      return 1;
    }
  }
  constexpr double bar = 30;  // dB, from the third second on
  return worst >= bar ? 0 : 1;
}
