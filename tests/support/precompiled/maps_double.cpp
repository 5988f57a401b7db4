#include "support/precompiled/precompiled.hpp"

LINATTN_TEST_MAPS(template, double)
