// Every update rule in double: see support/rule_laws.hpp.
using scalar = double;
#include "support/rule_laws.hpp"
