#ifndef FA_TOOLS_FA_CACHE_HPP_
#define FA_TOOLS_FA_CACHE_HPP_

#include <filesystem>
#include <string>
#include <vector>

#include "cache/store.hpp"

namespace CLI {
class App;
}

namespace fa::cli {

/// The directory given, else the default one. Throws fa::Error(io) when there is none.
std::filesystem::path cache_directory(const std::string& given);

/// The same, of a directory to look into: throws fa::Error(io) too when it cannot be used, or when one that was given
/// is not there.
std::filesystem::path existing_cache_directory(const std::string& given);

/// Throws fa::Error(io) when the pack as a whole cannot be used.
std::vector<cache::StoredEntry> list_pack_or_throw(const std::string& file);

/// `fa cache why`.
void add_why(CLI::App& cache_command, int* exit_code);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_CACHE_HPP_
