#include "support/precompiled/precompiled.hpp"

LINATTN_TEST_RULES(template, double)
