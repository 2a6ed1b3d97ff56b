#ifndef FA_TOOLS_FA_SYSTEM_HPP_
#define FA_TOOLS_FA_SYSTEM_HPP_

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

/// What the command line asks of the system: system_posix.cpp or system_windows.cpp.
namespace fa::cli {

bool stderr_is_terminal();

/// The program of that name in a directory; empty where there is none to be run.
std::filesystem::path program_in(const std::filesystem::path& directory, const std::string& name);

/// What `program option FILE` prints, with a file that has those bytes; throws where it fails.
std::string output_about(const std::filesystem::path& program, const std::string& option,
                         const std::vector<std::byte>& bytes);

/// The result of `body`, run in a process of its own that starts with no driver, no compiler and no kernel loaded, as
/// long as this one has none. What `body` throws is thrown here. Refused on Windows, where processes do not fork.
nlohmann::json run_in_child(const std::function<nlohmann::json()>& body);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_SYSTEM_HPP_
