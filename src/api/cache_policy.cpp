#include <fmt/format.h>

#include <charconv>
#include <mutex>
#include <set>
#include <string_view>
#include <system_error>

#include "api/build.hpp"
#include "cache/sha256.hpp"
#include "support/log.hpp"
#include "support/platform.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

/// "256M": a number of bytes, or of whatever is counted.
std::int64_t parse_amount(const char* variable, std::string_view text) {
  constexpr const char* kAccepted = "a whole number, behind it perhaps K, M or G; negative: no cap";
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : 0;
  const bool known = unit.empty() || shift != 0;
  if (error != std::errc() || !known || value > (INT64_MAX >> shift)) {
    support::throw_invalid(variable, text, kAccepted);
  }
  return value < 0 ? -1 : value << shift;
}

/// What the policy says, else the environment, else the default. No cap is 0.
std::uint64_t cap(std::int64_t wanted, const char* variable, std::uint64_t fallback) {
  if (wanted == 0) {
    const std::string text = support::environment(variable);
    wanted = text.empty() ? 0 : parse_amount(variable, text);
  }
  if (wanted == 0) return fallback;
  return wanted < 0 ? 0 : static_cast<std::uint64_t>(wanted);
}

/// A process opens its stores again and again, each of which tells a cause once; the same reason is worth one line.
void warn_once(const std::string& message) {
  constexpr std::size_t kMost = 256;  // names of files may come without end
  static std::mutex mutex;
  static std::set<std::string> told;
  {
    const std::scoped_lock lock(mutex);
    if (told.size() < kMost && !told.insert(message).second) return;
  }
  support::log(LogLevel::warning, message);
}

void warn_of_directory(const std::string& problem, const std::filesystem::path& directory) {
  if (problem.empty()) return;
  warn_once(directory.empty() ? fmt::format("Compiled kernels stay in memory: {}.", problem)
                              : fmt::format("{}; compiled kernels are kept in {}.", problem, directory.string()));
}

}  // namespace

std::filesystem::path cache_directory(const CachePolicy& policy, std::string* problem) {
  problem->clear();
  if (policy.mode == CachePolicy::Mode::memory) return {};
  if (!policy.directory.empty()) return policy.directory;
  return cache::default_directory(problem);
}

cache::Limits cache_limits(const CachePolicy& policy) {
  return {cap(policy.max_bytes, "FA_CACHE_MAX_BYTES", cache::kDefaultLimits.bytes),
          cap(policy.max_entries, "FA_CACHE_MAX_ENTRIES", cache::kDefaultLimits.entries)};
}

cache::Acceptance cache_acceptance(const CachePolicy& policy) {
  const bool given = !policy.compilers.empty();
  const std::string text = given ? policy.compilers : support::environment("FA_CACHE_COMPILERS");
  if (text == "any") return {};
  const std::optional<cache::Acceptance> accept = cache::parse_acceptance(text);
  if (!accept) {
    support::throw_invalid(given ? "compilers" : "FA_CACHE_COMPILERS", text, "any, or a version as 13.0 or >=12.8");
  }
  return *accept;
}

std::vector<std::filesystem::path> cache_packs(const CachePolicy& policy) {
  std::vector<std::filesystem::path> packs(policy.packs.begin(), policy.packs.end());
  const std::string listed = support::environment("FA_CACHE_PACKS");
  for (std::string_view rest = listed; !rest.empty();) {
    const std::string_view file = rest.substr(0, rest.find(support::platform::list_separator()));
    if (!file.empty()) packs.emplace_back(file);
    rest.remove_prefix(std::min(file.size() + 1, rest.size()));
  }
  return packs;
}

std::vector<std::string> cache_pack_pins(const CachePolicy& policy) {
  if (policy.pack_sha256.size() > policy.packs.size()) {
    support::throw_invalid("pack_sha256", fmt::format("{} of {} packs", policy.pack_sha256.size(), policy.packs.size()),
                           "one for each of `packs`");
  }
  std::vector<std::string> pins;
  for (const std::string& text : policy.pack_sha256) {
    const std::optional<cache::Sha256Bytes> digest = cache::parse_sha256(text);
    if (!digest && !text.empty()) support::throw_invalid("pack_sha256", text, "64 hex digits, or none for any");
    pins.push_back(digest ? cache::to_hex(*digest) : "");
  }
  return pins;
}

std::shared_ptr<cache::Store> open_store(const CachePolicy& policy, int driver) {
  cache::StoreOptions options;
  std::string problem;
  options.directory = cache_directory(policy, &problem);
  options.packs = cache_packs(policy);
  options.pack_sha256 = cache_pack_pins(policy);
  options.limits = cache_limits(policy);
  options.accept = cache_acceptance(policy);
  options.accept.driver = driver;
  options.warn = [](const std::string& message) { warn_once(message); };
  std::shared_ptr<cache::Store> store = cache::Store::shared(options);
  warn_of_directory(problem, options.directory);
  return store;
}

}  // namespace fa::api
