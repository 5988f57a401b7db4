// linattn: exact linear attention on CPUs. The umbrella header: the operator, the maps, the rule, the references.
// Included by name: `check_feature_map.hpp`, for tests of a map of your own; `state_io.hpp`, which saves states;
// `state_pool.hpp`, which describes many in one block of memory; `dlpack.hpp`, views of other frameworks' tensors.
#pragma once

#include <linattn/feature_maps/cosformer.hpp>           // IWYU pragma: export
#include <linattn/feature_maps/dpfp.hpp>                // IWYU pragma: export
#include <linattn/feature_maps/elu_plus_one.hpp>        // IWYU pragma: export
#include <linattn/feature_maps/exponential.hpp>         // IWYU pragma: export
#include <linattn/feature_maps/gaussian_fourier.hpp>    // IWYU pragma: export
#include <linattn/feature_maps/generalized_relu.hpp>    // IWYU pragma: export
#include <linattn/feature_maps/gerf.hpp>                // IWYU pragma: export
#include <linattn/feature_maps/hedgehog.hpp>            // IWYU pragma: export
#include <linattn/feature_maps/hyperbolic.hpp>          // IWYU pragma: export
#include <linattn/feature_maps/identity.hpp>            // IWYU pragma: export
#include <linattn/feature_maps/learned_linear.hpp>      // IWYU pragma: export
#include <linattn/feature_maps/positive_random.hpp>     // IWYU pragma: export
#include <linattn/feature_maps/random_fourier.hpp>      // IWYU pragma: export
#include <linattn/feature_maps/relu.hpp>                // IWYU pragma: export
#include <linattn/feature_maps/rfa.hpp>                 // IWYU pragma: export
#include <linattn/feature_maps/softmax_normalized.hpp>  // IWYU pragma: export
#include <linattn/feature_maps/squared_relu.hpp>        // IWYU pragma: export
#include <linattn/feature_maps/taylor.hpp>              // IWYU pragma: export
#include <linattn/linear_attention.hpp>                 // IWYU pragma: export
#include <linattn/reference.hpp>                        // IWYU pragma: export
#include <linattn/version.hpp>                          // IWYU pragma: export
