#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fa/error.hpp>

#include "cache/store.hpp"
#include "commands.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

struct ListOptions {
  std::string directory;
  bool json = false;
};

std::filesystem::path directory_of(const ListOptions& options) {
  const std::filesystem::path directory =
      options.directory.empty() ? cache::default_directory() : std::filesystem::path(options.directory);
  if (directory.empty()) {
    throw Error(ErrorCode::io, "there is no cache directory: set FA_CACHE_DIR to an absolute path");
  }
  return directory;
}

nlohmann::json to_json(const cache::Entry& entry) {
  return {{"digest", entry.key.digest()},     {"target", entry.key.target},
          {"kernel", entry.kernel_name},      {"spec", entry.key.spec},
          {"options", entry.key.options},     {"templates", entry.key.templates},
          {"compiler", entry.compiler},       {"registers", entry.registers},
          {"local_bytes", entry.local_bytes}, {"shared_bytes", entry.shared_bytes},
          {"threads", entry.threads},         {"compile_ms", entry.compile_ms},
          {"cubin_bytes", entry.cubin.size()}};
}

void print_entries(const std::filesystem::path& directory, const std::vector<cache::Entry>& entries, int damaged) {
  std::size_t bytes = 0;
  for (const cache::Entry& entry : entries) {
    bytes += entry.cubin.size();
    fmt::print("{:<8} {:>9} {:>4} registers {:>4} local  {:<11} {}\n", entry.key.target,
               format_bytes(static_cast<double>(entry.cubin.size())), entry.registers, entry.local_bytes,
               entry.compiler, entry.key.spec);
  }
  fmt::print("{}: {} kernels, {}, {} damaged\n", directory.string(), entries.size(),
             format_bytes(static_cast<double>(bytes)), damaged);
}

void list(const ListOptions& options) {
  const std::filesystem::path directory = directory_of(options);
  int damaged = 0;
  const std::vector<cache::Entry> entries = cache::list_entries(directory, &damaged);
  if (!options.json) {
    print_entries(directory, entries, damaged);
    return;
  }
  nlohmann::json array = nlohmann::json::array();
  for (const cache::Entry& entry : entries) {
    array.push_back(to_json(entry));
  }
  print_json({{"directory", directory.string()}, {"damaged", damaged}, {"entries", array}});
}

}  // namespace

void add_cache(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("cache", "The store of compiled kernels");
  command->require_subcommand(1);
  CLI::App* list_command = command->add_subcommand("list", "Every kernel that is stored");
  const auto options = std::make_shared<ListOptions>();
  list_command->add_option("--directory", options->directory, "Instead of the default cache directory");
  list_command->add_flag("--json", options->json, "Print JSON");
  list_command->callback([options, exit_code] {
    list(*options);
    *exit_code = kSuccess;
  });
}

}  // namespace fa::cli
