#include "cache/explain.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

namespace fa::cache {
namespace {

/// "sm80_forward arch=sm_90a d_qk=128" by field; the first word, which names the kernel, under "kernel".
std::map<std::string, std::string> spec_fields(std::string_view spec) {
  std::map<std::string, std::string> fields;
  while (!spec.empty()) {
    const std::string_view word = spec.substr(0, spec.find(' '));
    spec.remove_prefix(std::min(word.size() + 1, spec.size()));
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos) {
      fields["kernel"] += word;
    } else {
      fields[std::string(word.substr(0, equals))] = word.substr(equals + 1);
    }
  }
  return fields;
}

void add_spec(const Key& wanted, const Key& stored, std::vector<Difference>* all) {
  const std::map<std::string, std::string> a = spec_fields(wanted.spec);
  const std::map<std::string, std::string> b = spec_fields(stored.spec);
  const std::size_t before = all->size();
  for (const auto& [name, value] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second != value) {
      all->push_back({name, value, other == b.end() ? "" : other->second});
    }
  }
  for (const auto& [name, value] : b) {
    if (!a.contains(name)) all->push_back({name, "", value});
  }
  if (all->size() == before && wanted.spec != stored.spec) all->push_back({"spec", wanted.spec, stored.spec});
}

/// What makes an entry far: the wrong kernel above all, then each of its facts, and least what a rebuild would change.
int weight(const Difference& difference) {
  if (difference.field == "kernel" || difference.field == "target") return 100;
  if (difference.field == "templates" || difference.field == "unit" || difference.field == "options") return 1;
  const bool shape = difference.field == "dtype" || difference.field == "d_qk" || difference.field == "d_v";
  return shape ? 40 : 10;
}

int distance(const std::vector<Difference>& all) {
  int sum = 0;
  for (const Difference& difference : all) sum += weight(difference);
  return sum;
}

}  // namespace

std::vector<Difference> differences(const Key& wanted, const Key& stored) {
  std::vector<Difference> all;
  if (wanted.target != stored.target) all.push_back({"target", wanted.target, stored.target});
  add_spec(wanted, stored, &all);
  if (wanted.options != stored.options) {
    all.push_back({"options", fmt::format("{}", fmt::join(wanted.options, " ")),
                   fmt::format("{}", fmt::join(stored.options, " "))});
  }
  if (wanted.templates != stored.templates) all.push_back({"templates", wanted.templates, stored.templates});
  const bool follows = wanted.spec != stored.spec || wanted.templates != stored.templates;
  if (wanted.unit != stored.unit && !follows) all.push_back({"unit", wanted.unit, stored.unit});
  return all;
}

std::vector<Neighbour> nearest(const Key& wanted, const std::vector<StoredEntry>& stored, std::size_t count) {
  std::vector<Neighbour> all;
  for (const StoredEntry& item : stored) {
    if (item.problem.empty()) all.push_back({&item, differences(wanted, item.entry.key)});
  }
  std::ranges::stable_sort(all, {}, [](const Neighbour& neighbour) { return distance(neighbour.differences); });
  if (all.size() > count) all.resize(count);
  return all;
}

}  // namespace fa::cache
