// check_feature_map passes every shipped map and names the fault of each broken specimen.
#include <gtest/gtest.h>

#include <linattn/check_feature_map.hpp>
#include <linattn/feature_maps/elu_plus_one.hpp>
#include <linattn/feature_maps/exponential.hpp>
#include <linattn/feature_maps/identity.hpp>
#include <linattn/feature_maps/positive_random.hpp>
#include <linattn/feature_maps/random_fourier.hpp>
#include <linattn/feature_maps/relu.hpp>
#include <linattn/feature_maps/squared_relu.hpp>

#include <atomic>
#include <cmath>
#include <memory>
#include <string>

namespace {

using Eigen::Index;
using linattn::check_feature_map;
using linattn::const_tile;
using linattn::feature_map_report;
using linattn::tile;
using linattn::tile_position;

constexpr Index awkward_sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 65};

std::string text(const feature_map_report& report) {
  std::string all;
  for (const std::string& problem : report.problems) all += problem + "\n";
  return all;
}

testing::AssertionResult passes(const feature_map_report& report) {
  if (report.passed && report.problems.empty()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << text(report);
}

/// Fails, and its first problem holds the words.
testing::AssertionResult fails_with(const feature_map_report& report, const std::string& words) {
  if (report.passed || report.problems.empty()) return testing::AssertionFailure() << "no problem was found";
  if (report.problems.front().find(words) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << words << "' is not in: " << text(report);
}

// ---- shipped maps
// ----------------------------------------------------------------------------------------------------

template <class T>
struct ShippedMaps : testing::Test {};
using scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(ShippedMaps, scalars);

TYPED_TEST(ShippedMaps, Pass) {
  using T = TypeParam;
  for (const Index d : awkward_sizes) {
    const linattn::feature_map_check_options few{.rows = 64};
    EXPECT_TRUE(passes(check_feature_map<T>(linattn::elu_plus_one(), d, few)));
    EXPECT_TRUE(passes(check_feature_map<T>(linattn::identity(), d, few)));
    EXPECT_TRUE(passes(check_feature_map<T>(linattn::relu(), d, few)));
    EXPECT_TRUE(passes(check_feature_map<T>(linattn::squared_relu(), d, few)));
    EXPECT_TRUE(passes(check_feature_map<T>(linattn::exponential(), d, few)));
    for (const Index m : {1, 5, 16, 67}) {
      EXPECT_TRUE(passes(check_feature_map<T>(linattn::positive_random<T>(d, m, 1), d, few)));
      EXPECT_TRUE(passes(check_feature_map<T>(linattn::random_fourier<T>(d, 2 * m, 1), d, few)));
    }
  }
}

TEST(CheckFeatureMap, CountsDenominators) {
  const linattn::feature_map_check_options sample{.rows = 1000};
  const auto elu = check_feature_map<float>(linattn::elu_plus_one(), 64, sample);
  EXPECT_EQ(elu.features, 64);
  EXPECT_EQ(elu.denominators, 1000);
  EXPECT_EQ(elu.non_positive, 0);
  EXPECT_EQ(check_feature_map<float>(linattn::positive_random<float>(64, 128, 1), 64, sample).non_positive, 0);
  const auto identity = check_feature_map<float>(linattn::identity(), 64, sample);
  EXPECT_NEAR(identity.non_positive_share(), 0.5, 0.1);  // q.z of a symmetric q
}

TEST(CheckFeatureMap, CountsTheDenominatorsOfTrigonometricFeatures) {
  const linattn::random_fourier<float> map(64, 512, 1);
  const auto unit = check_feature_map<float>(map, 64);
  EXPECT_TRUE(passes(unit)) << "a property of the map, not a fault";
  EXPECT_EQ(unit.features, 512);
  EXPECT_NEAR(unit.non_positive_share(), 0.4, 0.1);  // the documented share at N(0, 1), D = 64
  EXPECT_EQ(check_feature_map<float>(map, 64, {.deviation = 0.5}).non_positive, 0);
}

TEST(CheckFeatureMap, IsAFunctionOfTheSeed) {
  const linattn::random_fourier<float> map(16, 32, 1);
  const auto first = check_feature_map<float>(map, 16);
  EXPECT_EQ(check_feature_map<float>(map, 16).non_positive, first.non_positive);
  EXPECT_NE(check_feature_map<float>(map, 16, {.seed = 2}).non_positive, first.non_positive);
}

TEST(CheckFeatureMap, HandlesNoRows) {
  const auto report = check_feature_map<float>(linattn::relu(), 4, {.rows = 0});
  EXPECT_TRUE(passes(report));
  EXPECT_EQ(report.denominators, 0);
  EXPECT_EQ(report.non_positive_share(), 0.0);
}

// ---- maps of the other kinds that the contract allows
// ------------------------------------------------------------------

/// Derive and override what is broken: phi = |x|, element by element.
struct absolute_value {
  static constexpr Index dimension(Index head_dim) { return head_dim; }
  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi) const {
    phi = x.cwiseAbs();
  }
};

struct asymmetric {
  static constexpr Index dimension(Index head_dim) { return 2 * head_dim; }
  template <class T>
  void forward_queries(const const_tile<T>& x, tile<T>& phi) const {
    phi << x.cwiseAbs(), x.cwiseAbs2();
  }
  template <class T>
  void forward_keys(const const_tile<T>& x, tile<T>& phi) const {
    phi << x.cwiseAbs2(), x.cwiseAbs();
  }
};

struct positional {
  static constexpr Index dimension(Index head_dim) { return head_dim; }
  template <class T>
  void forward(const const_tile<T>& x, tile<T>& phi, tile_position where) const {
    for (Index r = 0; r < x.rows(); ++r) phi.row(r) = x.row(r).cwiseAbs() * T(1 + (where.first_position + r) % 5);
  }
};

struct asymmetric_positional {
  static constexpr Index dimension(Index head_dim) { return head_dim; }
  template <class T>
  void forward_queries(const const_tile<T>& x, tile<T>& phi, tile_position where) const {
    positional().forward(x, phi, where);
  }
  template <class T>
  void forward_keys(const const_tile<T>& x, tile<T>& phi, tile_position where) const {
    positional().forward(x, phi, where);
  }
};

TEST(CheckFeatureMap, PassesEveryKindOfMap) {
  for (const Index d : {1, 3, 16, 33}) {
    EXPECT_TRUE(passes(check_feature_map<float>(absolute_value(), d)));
    EXPECT_TRUE(passes(check_feature_map<float>(asymmetric(), d)));
    EXPECT_TRUE(passes(check_feature_map<float>(positional(), d)));
    EXPECT_TRUE(passes(check_feature_map<float>(asymmetric_positional(), d)));
    EXPECT_TRUE(passes(check_feature_map<double>(asymmetric(), d)));
  }
}

// ---- broken specimens
// ------------------------------------------------------------------------------------------------

constexpr Index head_dim = 11;

template <class Map>
feature_map_report check(const Map& map) {
  return check_feature_map<float>(map, head_dim);
}

struct without_features : absolute_value {
  static constexpr Index dimension(Index) { return 0; }
};

struct made_for_another_size : absolute_value {
  Index head_dim() const { return 4; }
};

struct forgets_the_last_feature : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi.leftCols(phi.cols() - 1) = x.leftCols(phi.cols() - 1).cwiseAbs();
  }
};

struct forgets_the_last_row : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    const Index rows = phi.rows() > 1 ? phi.rows() - 1 : 1;
    phi.topRows(rows) = x.topRows(rows).cwiseAbs();
  }
};

struct writes_the_padding : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi = x.cwiseAbs();
    phi.data()[phi.cols()] = 0;
  }
};

struct writes_behind_the_last_row : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi = x.cwiseAbs();
    phi.data()[phi.rows() * phi.outerStride()] = 0;
  }
};

struct writes_before_the_first_row : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi = x.cwiseAbs();
    phi.data()[-1] = 0;
  }
};

struct counts_its_calls : absolute_value {
  std::shared_ptr<std::atomic<int>> calls = std::make_shared<std::atomic<int>>(0);
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi = x.cwiseAbs() * float(1 + *calls);
    ++*calls;
  }
};

struct adds_to_what_was_there : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi += x.cwiseAbs(); }
};

struct loses_a_parameter_in_copies : absolute_value {
  float scale = 2;
  loses_a_parameter_in_copies() = default;
  loses_a_parameter_in_copies(const loses_a_parameter_in_copies&) : absolute_value(), scale(1) {}
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi = x.cwiseAbs() * scale; }
};

struct reads_beyond_x : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi = x.cwiseAbs();
    phi(0, 0) += std::abs(x.data()[x.cols()]);
  }
};

struct depends_on_the_tile : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi = x.cwiseAbs() / x.cwiseAbs().maxCoeff(); }
};

struct depends_on_the_place_in_the_tile : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    for (Index r = 0; r < x.rows(); ++r) phi.row(r) = x.row(r).cwiseAbs() * float(1 + r);
  }
};

struct ignores_its_position : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi, tile_position) const {
    depends_on_the_place_in_the_tile().forward(x, phi);
  }
};

struct divides_by_zero : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    for (Index r = 0; r < x.rows(); ++r) phi.row(r) = x.row(r).cwiseAbs() / x.row(r).norm();  // 0/0 in a row of zeros
  }
};

struct overflows : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi = (x.array() * 100).exp(); }
};

struct is_negative_without_saying_so : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi = x; }
};

struct is_rarely_negative : absolute_value {  // only the long sample shows it
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi = x.array() + 3.0F; }
};

struct says_that_it_is_negative : is_negative_without_saying_so {
  static constexpr bool signed_features = true;
};

struct swallows_nan : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const {
    phi = x.unaryExpr([](float value) { return value > 0 ? value : 0.0F; });
  }
};

struct spreads_nan : absolute_value {
  void forward(const const_tile<float>& x, tile<float>& phi) const { phi = x.cwiseAbs().array() + 0 * x.sum(); }
};

struct packet_of_something_else : absolute_value {
  template <class Packet>
  Packet packet(const Packet& x) const {
    return max(x, Packet(0));
  }
};

struct packet_with_other_features : packet_of_something_else {
  static constexpr Index dimension(Index d) { return 2 * d; }
};

/// Derive and override what is broken: phi = |x|, dx = sign(x) dphi.
struct with_vjp : absolute_value {
  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>&, const const_tile<T>& dphi, tile<T>& dx) const {
    dx = x.cwiseSign().cwiseProduct(dphi);
  }
};

struct vjp_of_another_map : with_vjp {
  template <class T>
  void vjp(const const_tile<T>&, const const_tile<T>&, const const_tile<T>& dphi, tile<T>& dx) const {
    dx = dphi;
  }
};

struct vjp_off_by_two_percent : with_vjp {
  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const {
    with_vjp::vjp(x, phi, dphi, dx);
    dx *= T(1.02);
  }
};

struct vjp_that_adds : with_vjp {
  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>&, const const_tile<T>& dphi, tile<T>& dx) const {
    dx += x.cwiseSign().cwiseProduct(dphi);
  }
};

struct vjp_into_the_padding : with_vjp {
  template <class T>
  void vjp(const const_tile<T>& x, const const_tile<T>& phi, const const_tile<T>& dphi, tile<T>& dx) const {
    with_vjp::vjp(x, phi, dphi, dx);
    dx.data()[dx.cols()] = 0;
  }
};

struct vjp_packet_of_another_map : linattn::squared_relu {
  template <class Packet>
  Packet vjp_packet(const Packet& x, const Packet&, const Packet& dphi) const {
    return max(x, Packet(0)) * dphi;
  }
};

struct broken_keys : asymmetric {
  void forward_keys(const const_tile<float>& x, tile<float>& phi) const { phi.leftCols(x.cols()) = x.cwiseAbs(); }
};

TEST(CheckFeatureMap, NamesWrongSizes) {
  EXPECT_TRUE(fails_with(check(without_features()), "dimension(11) is 0; a map has at least one feature"));
  EXPECT_TRUE(fails_with(check(made_for_another_size()), "made for head_dim 4, but is checked with 11"));
  EXPECT_TRUE(fails_with(check_feature_map<float>(absolute_value(), 0), "head_dim is 0"));
  EXPECT_TRUE(fails_with(check(packet_with_other_features()), "has packet(x) and so one feature a coordinate"));
  const linattn::positive_random<float> map(16, 8, 1);
  EXPECT_TRUE(fails_with(check_feature_map<float>(map, 17), "made for head_dim 16, but is checked with 17"));
}

TEST(CheckFeatureMap, NamesWrongGradients) {
  EXPECT_TRUE(passes(check(with_vjp())));
  EXPECT_TRUE(passes(check_feature_map<double>(with_vjp(), head_dim)));
  EXPECT_TRUE(check(with_vjp()).gradient_checked);
  EXPECT_FALSE(check(absolute_value()).gradient_checked);  // a misspelt vjp is none
  EXPECT_TRUE(fails_with(check(vjp_of_another_map()), "forward: its vjp gives "));
  EXPECT_TRUE(fails_with(check_feature_map<double>(vjp_off_by_two_percent(), head_dim), "forward: its vjp gives "));
  EXPECT_TRUE(fails_with(check(vjp_that_adds()), "forward: its vjp leaves something of dx unwritten"));
  EXPECT_TRUE(fails_with(check(vjp_into_the_padding()), "forward: its vjp writes outside dx"));
  EXPECT_TRUE(fails_with(check(vjp_packet_of_another_map()), "packet: its vjp gives "));
}

TEST(CheckFeatureMap, NamesUnwrittenFeatures) {
  EXPECT_TRUE(fails_with(check(forgets_the_last_feature()), "forward: feature 10 of row 0 is never written"));
  EXPECT_TRUE(fails_with(check(forgets_the_last_row()), "forward: feature 0 of row 6 is never written"));
  EXPECT_TRUE(fails_with(check(broken_keys()), "forward_keys: feature 11 of row 0 is never written"));
}

TEST(CheckFeatureMap, NamesWritesOutsideTheTile) {
  EXPECT_TRUE(fails_with(check(writes_the_padding()), "forward: writes outside phi"));
  EXPECT_TRUE(fails_with(check(writes_behind_the_last_row()), "forward: writes outside phi"));
  EXPECT_TRUE(fails_with(check(writes_before_the_first_row()), "forward: writes outside phi"));
}

TEST(CheckFeatureMap, NamesFeaturesThatAreNoFunctionOfTheRow) {
  EXPECT_TRUE(fails_with(check(counts_its_calls()), "changes from call to call"));
  EXPECT_TRUE(fails_with(check(adds_to_what_was_there()), "depends on what phi held before"));
  EXPECT_TRUE(fails_with(check(loses_a_parameter_in_copies()), "is another one in a copy of the map"));
  EXPECT_TRUE(fails_with(check(reads_beyond_x()), "depends on memory outside x"));
  EXPECT_TRUE(fails_with(check(depends_on_the_tile()), "has other features in another tile"));
  EXPECT_TRUE(fails_with(check(depends_on_the_place_in_the_tile()), "has other features in another tile"));
  EXPECT_TRUE(fails_with(check(ignores_its_position()), "has other features in another tile"));
}

TEST(CheckFeatureMap, NamesValuesThatCannotBe) {
#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
  EXPECT_TRUE(fails_with(check(divides_by_zero()), "feature 0 of row 3 is not finite"));
  EXPECT_TRUE(fails_with(check(overflows()), "is not finite on an input from N(0, 1"));
#endif
  EXPECT_TRUE(fails_with(check(is_negative_without_saying_so()), "signed_features = true"));
  EXPECT_TRUE(fails_with(check(is_rarely_negative()), "signed_features = true"));
  EXPECT_TRUE(passes(check(says_that_it_is_negative())));
}

TEST(CheckFeatureMap, NamesLostAndSpreadNaN) {
#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
  EXPECT_TRUE(fails_with(check(swallows_nan()), "forward: swallows a NaN in coordinate 10"));
  EXPECT_NE(text(check(spreads_nan())).find("a NaN in row 2 changes row 0"), std::string::npos);
#else
  GTEST_SKIP() << "-ffast-math promises nothing about NaN";
#endif
}

TEST(CheckFeatureMap, NamesAPacketThatDiffersFromForward) {
  EXPECT_TRUE(fails_with(check(packet_of_something_else()), "packet: feature"));
  EXPECT_NE(text(check(packet_of_something_else())).find("write forward as elementwise_forward"), std::string::npos);
}

TEST(CheckFeatureMap, SaysOneThingOnce) {
  EXPECT_EQ(check(forgets_the_last_feature()).problems.size(), 1U);
  EXPECT_EQ(check(counts_its_calls()).problems.size(), 1U);
  EXPECT_EQ(check(is_negative_without_saying_so()).problems.size(), 1U);
}

}  // namespace
