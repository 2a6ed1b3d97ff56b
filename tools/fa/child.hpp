#ifndef FA_TOOLS_FA_CHILD_HPP_
#define FA_TOOLS_FA_CHILD_HPP_

#include <nlohmann/json.hpp>

#include <functional>

namespace fa::cli {

/// The result of `body`, run in a process of its own that starts with no driver, no compiler and no kernel loaded, as
/// long as this one has none. What `body` throws is thrown here.
nlohmann::json run_in_child(const std::function<nlohmann::json()>& body);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_CHILD_HPP_
