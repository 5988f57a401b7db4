// The sentence with which a call refuses its arguments.
#pragma once

#include <stdexcept>
#include <string>

namespace support {

/// What std::invalid_argument says that `call` throws; empty if it does not.
template <class F>
std::string refusal(const F& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

}  // namespace support
