#include <fmt/format.h>

#include <charconv>
#include <mutex>
#include <string_view>
#include <system_error>

#include "api/build.hpp"
#include "support/log.hpp"
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

/// A process asks for its store again and again; the same reason is worth one line.
void warn_of_directory(const std::string& problem, const std::filesystem::path& directory) {
  static std::mutex mutex;
  static std::string last;
  const std::scoped_lock lock(mutex);
  if (problem.empty() || last == problem) return;
  last = problem;
  if (directory.empty()) {
    support::logf(LogLevel::warning, "Compiled kernels stay in memory: {}.", problem);
  } else {
    support::logf(LogLevel::warning, "{}; compiled kernels are kept in {}.", problem, directory.string());
  }
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
    const std::string_view file = rest.substr(0, rest.find(':'));
    if (!file.empty()) packs.emplace_back(file);
    rest.remove_prefix(std::min(file.size() + 1, rest.size()));
  }
  return packs;
}

std::shared_ptr<cache::Store> open_store(const CachePolicy& policy, int driver) {
  cache::StoreOptions options;
  std::string problem;
  options.directory = cache_directory(policy, &problem);
  options.packs = cache_packs(policy);
  options.limits = cache_limits(policy);
  options.accept = cache_acceptance(policy);
  options.accept.driver = driver;
  options.warn = [](const std::string& message) { support::log(LogLevel::warning, message); };
  std::shared_ptr<cache::Store> store = cache::Store::shared(options);
  warn_of_directory(problem, options.directory);
  return store;
}

}  // namespace fa::api
