// What random feature maps have in common: how their directions are drawn, and the temperature of their kernel.
//
// A map draws W (m, D) in its constructor: the same for a seed on every compiler and machine, and more features keep
// the directions of fewer. (Under -ffast-math draws may differ, and NaN may be lost.) `redraw(seed)` is the map of the
// same sizes and options with new directions; a state absorbed with one map is read with that map. `save` writes W
// itself, so that `load` gives the same bits whatever a later version draws.
//
// Scale: a map applies temperature^(-1/2) to queries and keys itself, for softmax D^(-1/4): leave query_scale at 1.
// Estimates of a kernel are unbiased; a normalised output, a quotient of two of them, is not, but errors fall as
// 1 / sqrt(m).
//
// No allocation after the constructor. Copies share W; a map is immutable and may be used by any number of threads.
#pragma once

#include <linattn/version.hpp>

LINATTN_NAMESPACE_BEGIN

/// How the directions w_c, the rows of W (m, D), are drawn. In each case a pure function of the seed, of which the
/// first rows do not depend on m, and w_c for itself is uniform in direction.
enum class random_rows {
  independent,  ///< N(0, I)
  orthogonal,   ///< the same each, but every D of them at right angles: less variance. Drawing costs 4 D^2 m flops.
  regularized,  ///< orthogonal, and of length sqrt(D): less variance yet, for a kernel that is only close to softmax's
};

/// Options of every random map: `positive_random<float>(64, 256, seed, {.rows = random_rows::orthogonal})`.
struct random_feature_options {
  random_rows rows = random_rows::independent;
  double temperature = 0;  ///< what q.k is divided by in the kernel; 0 stands for the map's own, mostly sqrt(D)
};

LINATTN_NAMESPACE_END
