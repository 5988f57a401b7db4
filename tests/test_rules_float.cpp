// Every update rule in float: see support/rule_laws.hpp.
using scalar = float;
#include "support/rule_laws.hpp"
