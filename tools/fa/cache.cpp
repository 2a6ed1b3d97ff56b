#include "cache.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fa/error.hpp>

#include "api/build.hpp"
#include "cache/files.hpp"
#include "cache/pack.hpp"
#include "cache/sha256.hpp"
#include "cache/store.hpp"
#include "choice.hpp"
#include "commands.hpp"
#include "output.hpp"
#include "support/text.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

struct ListOptions {
  std::string directory;
  std::vector<std::string> packs;
  bool json = false;
};

struct GarbageOptions {
  std::string directory;
  std::uint64_t max_bytes = 0;
  std::uint64_t max_entries = 0;
  bool other_versions = false;
};

struct ExportOptions {
  std::string directory;
  std::string file;
  std::vector<std::string> archs;
};

struct ImportOptions {
  std::string directory;
  std::vector<std::string> files;
  std::vector<std::string> sha256;
};

std::string size_text(std::uint64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

std::string time_text(std::chrono::system_clock::time_point time) {
  return time == std::chrono::system_clock::time_point() ? "-" : fmt::format("{:%Y-%m-%d %H:%M}", fmt::gmtime(time));
}

nlohmann::json to_json(const cache::StoredEntry& stored) {
  nlohmann::json json = {{"path", stored.path.string()}, {"file_bytes", stored.file_bytes}};
  if (!stored.problem.empty()) {
    json["problem"] = stored.problem;
    return json;
  }
  const cache::Entry& entry = stored.entry;
  json.update({{"digest", entry.key.digest()},
               {"target", entry.key.target},
               {"kernel", entry.kernel_name},
               {"spec", entry.key.spec},
               {"options", entry.key.options},
               {"templates", entry.key.templates},
               {"unit", entry.key.unit},
               {"compiler", entry.compiler},
               {"min_driver", entry.min_driver},
               {"registers", entry.registers},
               {"local_bytes", entry.local_bytes},
               {"shared_bytes", entry.shared_bytes},
               {"threads", entry.threads},
               {"compile_ms", entry.compile_ms},
               {"cubin_bytes", stored.cubin_bytes},
               {"last_used", time_text(stored.last_used)}});
  return json;
}

/// What is listed: the packs if there are any, else the directory.
struct Listing {
  std::string where;
  std::vector<cache::StoredEntry> entries;

  std::size_t damaged() const {
    return static_cast<std::size_t>(
        std::count_if(entries.begin(), entries.end(), [](const auto& entry) { return !entry.problem.empty(); }));
  }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const cache::StoredEntry& entry : entries) {
      sum += entry.cubin_bytes;
    }
    return sum;
  }
};

Listing list_all(const ListOptions& options) {
  if (options.packs.empty()) {
    const std::filesystem::path directory = existing_cache_directory(options.directory);
    return {directory.string(), cache::list_stored(directory)};
  }
  Listing all;
  for (const std::string& file : options.packs) {
    all.where += (all.where.empty() ? "" : ", ") + file;
    std::vector<cache::StoredEntry> entries = list_pack_or_throw(file);
    std::move(entries.begin(), entries.end(), std::back_inserter(all.entries));
  }
  return all;
}

void list(const ListOptions& options) {
  const Listing listing = list_all(options);
  if (options.json) {
    nlohmann::json array = nlohmann::json::array();
    for (const cache::StoredEntry& entry : listing.entries) {
      array.push_back(to_json(entry));
    }
    print_json({{"directory", listing.where}, {"damaged", listing.damaged()}, {"entries", array}});
    return;
  }
  for (const cache::StoredEntry& stored : listing.entries) {
    const cache::Entry& entry = stored.entry;
    if (!stored.problem.empty()) {
      fmt::print("damaged  {}: {}\n", printable(stored.path.string()), printable(stored.problem));
      continue;
    }
    fmt::print("{:<8} {:>9} {:>4} registers {:>4} local  {:<11} {}\n", printable(entry.key.target),
               size_text(stored.cubin_bytes), entry.registers, entry.local_bytes, printable(entry.compiler),
               printable(entry.key.spec));
  }
  fmt::print("{}: {} kernels, {}, {} damaged\n", listing.where, listing.entries.size() - listing.damaged(),
             size_text(listing.bytes()), listing.damaged());
}

void stat(const ListOptions& options) {
  const Listing listing = list_all(options);
  struct Sum {
    std::size_t entries = 0;
    std::uint64_t bytes = 0;
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;
  std::uint64_t file_bytes = 0;
  for (const cache::StoredEntry& stored : listing.entries) {
    file_bytes += stored.file_bytes;
    if (stored.problem.empty()) {
      Sum& sum = sums[{stored.entry.key.target, stored.entry.compiler}];
      ++sum.entries;
      sum.bytes += stored.cubin_bytes;
    }
  }
  const cache::Limits limits = api::cache_limits({});
  if (options.json) {
    nlohmann::json groups = nlohmann::json::array();
    for (const auto& [group, sum] : sums) {
      groups.push_back(
          {{"target", group.first}, {"compiler", group.second}, {"entries", sum.entries}, {"bytes", sum.bytes}});
    }
    print_json({{"directory", listing.where},
                {"entries", listing.entries.size()},
                {"file_bytes", file_bytes},
                {"damaged", listing.damaged()},
                {"max_bytes", limits.bytes},
                {"max_entries", limits.entries},
                {"groups", groups}});
    return;
  }
  for (const auto& [group, sum] : sums) {
    fmt::print("{:<8} {:<11} {:>5} kernels {:>10}\n", printable(group.first), printable(group.second), sum.entries,
               size_text(sum.bytes));
  }
  const auto cap = [](std::uint64_t value, const std::string& text) { return value == 0 ? "no cap" : text; };
  fmt::print("{}: {} of {} entries, {} of {}, {} damaged\n", listing.where, listing.entries.size(),
             cap(limits.entries, std::to_string(limits.entries)), size_text(file_bytes),
             cap(limits.bytes, size_text(limits.bytes)), listing.damaged());
}

int verify(const ListOptions& options) {
  const Listing listing = list_all(options);
  for (const cache::StoredEntry& stored : listing.entries) {
    if (!stored.problem.empty()) {
      fmt::print("{}: {}\n", printable(stored.path.string()), printable(stored.problem));
    }
  }
  fmt::print("{}: {} entries are sound, {} are not\n", listing.where, listing.entries.size() - listing.damaged(),
             listing.damaged());
  return listing.damaged() == 0 ? kSuccess : kFailure;
}

void collect(const GarbageOptions& options) {
  cache::Garbage garbage;
  garbage.limits = api::cache_limits({});
  if (options.max_bytes != 0) {
    garbage.limits.bytes = options.max_bytes;
  }
  if (options.max_entries != 0) {
    garbage.limits.entries = options.max_entries;
  }
  garbage.damaged = true;
  garbage.other_versions = options.other_versions;
  const std::filesystem::path directory = existing_cache_directory(options.directory);
  const cache::Collected collected = cache::collect_garbage(directory, garbage);
  fmt::print("{}: removed {} entries ({}), {} are left ({})\n", directory.string(), collected.removed.entries,
             size_text(collected.removed.bytes), collected.left.entries, size_text(collected.left.bytes));
}

void export_pack(const ExportOptions& options) {
  check_output(options.file, {}, false);
  std::vector<cache::Entry> entries = cache::list_entries(existing_cache_directory(options.directory));
  std::erase_if(entries, [&options](const cache::Entry& entry) {
    return !options.archs.empty() &&
           std::find(options.archs.begin(), options.archs.end(), entry.key.target) == options.archs.end();
  });
  std::string problem;
  const std::optional<cache::WrittenPack> pack = cache::write_pack(options.file, entries, &problem);
  if (!pack) {
    throw Error(ErrorCode::io, fmt::format("{} cannot be written: {}", options.file, problem));
  }
  fmt::print("{}: {} kernels, SHA-256 {}\n", options.file, pack->entries, cache::to_hex(pack->sha256));
}

/// Puts every sound entry of the pack that the directory does not have into it.
int import_pack(const std::string& file, const std::optional<cache::Sha256Bytes>& pin, cache::Store& store) {
  std::string problem;
  const std::optional<cache::Pack> pack = cache::Pack::open(file, &problem, pin);
  if (!pack) {
    throw Error(ErrorCode::io, problem);
  }
  std::size_t taken = 0;
  std::size_t damaged = 0;
  for (std::size_t i = 0; i < pack->size(); ++i) {
    cache::Pack::Found found = pack->read(i);
    if (!found.entry) {
      print_failure(found.damage);
      ++damaged;
      continue;
    }
    const cache::Key key = found.entry->key;
    const cache::Lookup lookup = store.get(key, [&found] { return std::move(*found.entry); });
    taken += lookup.origin == cache::Origin::built ? 1 : 0;
  }
  fmt::print("{}: {} kernels taken, {} were there, {} damaged\n", file, taken, pack->size() - taken - damaged, damaged);
  return damaged == 0 ? kSuccess : kFailure;
}

/// One for each file, or none at all.
std::vector<std::optional<cache::Sha256Bytes>> pins_of(const ImportOptions& options) {
  if (!options.sha256.empty() && options.sha256.size() != options.files.size()) {
    support::throw_invalid("--sha256", options.sha256.size(),
                           fmt::format("as many as files, {}", options.files.size()));
  }
  std::vector<std::optional<cache::Sha256Bytes>> pins(options.files.size());
  for (std::size_t i = 0; i < options.sha256.size(); ++i) {
    pins[i] = cache::parse_sha256(options.sha256[i]);
    if (!pins[i]) support::throw_invalid("--sha256", options.sha256[i], "64 hex digits");
  }
  return pins;
}

int import_packs(const ImportOptions& options) {
  const std::vector<std::optional<cache::Sha256Bytes>> pins = pins_of(options);
  cache::StoreOptions store_options;
  store_options.directory = cache_directory(options.directory);
  store_options.limits = api::cache_limits({});
  store_options.warn = [](const std::string& message) { print_failure(message); };
  cache::Store store(store_options);
  int exit_code = kSuccess;
  for (std::size_t i = 0; i < options.files.size(); ++i) {
    exit_code = std::max(exit_code, import_pack(options.files[i], pins[i], store));
  }
  if (store.directory().empty()) return kFailure;  // the warning says why
  return store.counters().publish_failures == 0 ? exit_code : kFailure;
}

void add_directory_option(CLI::App& command, std::string* directory) {
  command.add_option("--directory", *directory, "Instead of the default cache directory");
}

/// A subcommand that goes through the directory, or through packs.
template <typename Run>
void add_listing(CLI::App& parent, const char* name, const char* description, int* exit_code, bool json, Run run) {
  CLI::App* command = parent.add_subcommand(name, description);
  const auto options = std::make_shared<ListOptions>();
  add_directory_option(*command, &options->directory);
  command->add_option("--pack", options->packs, "Packs to look at instead")->delimiter(',');
  if (json) {
    command->add_flag("--json", options->json, "Print JSON");
  }
  command->callback([options, exit_code, run] { *exit_code = run(*options); });
}

void add_gc(CLI::App& parent, int* exit_code) {
  CLI::App* command =
      parent.add_subcommand("gc", "Remove what is damaged and, beyond the caps, what was used least recently");
  const auto options = std::make_shared<GarbageOptions>();
  add_directory_option(*command, &options->directory);
  command->add_option("--max-bytes", options->max_bytes, "Cap, as 64MiB (default: FA_CACHE_MAX_BYTES, else 256 MiB)")
      ->check(CLI::Validator(
          [](const std::string& text) { return text.starts_with('-') ? "'" + text + "': accepted is a size" : ""; },
          ""))
      ->transform(CLI::AsSizeValue(false));
  command->add_option("--max-entries", options->max_entries, "Cap (default: FA_CACHE_MAX_ENTRIES, else 4096)")
      ->check(whole_number());
  command->add_flag("--other-versions", options->other_versions, "Also what other versions of fa keep there");
  command->callback([options, exit_code] {
    collect(*options);
    *exit_code = kSuccess;
  });
}

void add_export_and_import(CLI::App& parent, int* exit_code) {
  CLI::App* export_command = parent.add_subcommand("export", "Write stored kernels into a pack");
  const auto export_options = std::make_shared<ExportOptions>();
  export_command->add_option("file", export_options->file, "The pack, as kernels.fapack")->required();
  export_command->add_option("--arch", export_options->archs, "Only of these targets, as sm_90a,sm_80")->delimiter(',');
  add_directory_option(*export_command, &export_options->directory);
  export_command->callback([export_options, exit_code] {
    export_pack(*export_options);
    *exit_code = kSuccess;
  });
  CLI::App* import_command = parent.add_subcommand(
      "import", "Copy the kernels of packs into the directory. Packs are code: what they hold runs on the GPU as you");
  const auto import_options = std::make_shared<ImportOptions>();
  import_command->add_option("files", import_options->files, "Packs")->required();
  import_command->add_option("--sha256", import_options->sha256, "What the packs must be, 64 hex digits for each file")
      ->delimiter(',');
  add_directory_option(*import_command, &import_options->directory);
  import_command->callback([import_options, exit_code] { *exit_code = import_packs(*import_options); });
}

}  // namespace

std::filesystem::path cache_directory(const std::string& given) {
  std::string problem;
  std::filesystem::path directory = given.empty() ? cache::default_directory(&problem) : std::filesystem::path(given);
  if (directory.empty()) {
    throw Error(ErrorCode::io, fmt::format("there is no cache directory: {}", problem));
  }
  return std::filesystem::absolute(directory);
}

std::filesystem::path existing_cache_directory(const std::string& given) {
  std::filesystem::path directory = cache_directory(given);
  std::error_code ignored;
  const bool missing = !std::filesystem::exists(std::filesystem::symlink_status(directory, ignored));
  if (missing && given.empty()) return directory;  // nothing has been stored yet
  std::string problem;
  if (!cache::open_private_root(directory, cache::Missing::fail, &problem).valid()) {
    throw Error(ErrorCode::io, fmt::format("the cache directory cannot be used: {}", problem),
                {{"argument", "directory"}, {"value", directory.string()}});
  }
  return directory;
}

std::vector<cache::StoredEntry> list_pack_or_throw(const std::string& file) {
  std::string problem;
  std::vector<cache::StoredEntry> entries = cache::list_pack(file, &problem);
  if (!problem.empty()) {
    throw Error(ErrorCode::io, problem);
  }
  return entries;
}

void add_cache(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("cache", "The store of compiled kernels");
  command->require_subcommand(1);
  const auto succeed = [](auto run) {
    return [run](const ListOptions& options) -> int {
      run(options);
      return kSuccess;
    };
  };
  add_listing(*command, "list", "Every kernel that is stored", exit_code, true, succeed(&list));
  add_listing(*command, "stat", "How much is stored, of which compilers, and the caps", exit_code, true,
              succeed(&stat));
  add_listing(*command, "verify", "Check every entry to its last byte", exit_code, false, &verify);
  add_gc(*command, exit_code);
  add_export_and_import(*command, exit_code);
  add_why(*command, exit_code);
}

}  // namespace fa::cli
