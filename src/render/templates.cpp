#include "render/templates.hpp"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include <fa/error.hpp>

#include "render/embedded_templates.hpp"

namespace fa::render {
namespace {

std::vector<Header> read_embedded() {
  std::vector<Header> headers;
  for (const EmbeddedTemplate& entry : embedded_templates()) headers.push_back({entry.name, entry.text});
  return headers;
}

[[noreturn]] void throw_io(std::string_view argument, const std::filesystem::path& value, const std::string& message) {
  throw Error(ErrorCode::io, fmt::format("{}{}", argument, message),
              {{"argument", std::string(argument)}, {"value", value.string()}});
}

std::string read_file(const std::filesystem::path& path, std::string_view argument) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || file.bad()) throw_io(argument, path, fmt::format(": {} cannot be read", path.string()));
  return text.str();
}

/// Lines as they are embedded (cmake/embed_templates_script.cmake), so that the same templates have the same digest:
/// without indentation, but for the first, and without comments. No string has two slashes.
std::string embedded_form(std::string_view text) {
  std::string form;
  form.reserve(text.size());
  for (bool first = true; !text.empty(); first = false) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    if (!first) line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    if (const std::size_t comment = line.find("//"); comment != std::string_view::npos) {
      line = line.substr(0, comment);
      line = line.substr(0, line.find_last_not_of(' ') + 1);
    }
    form += line;
    if (end == std::string_view::npos) break;
    form += '\n';
    text.remove_prefix(end + 1);
  }
  return form;
}

std::vector<Header> read_directory(const std::filesystem::path& root, std::string_view argument) {
  std::vector<Header> headers;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->path().extension() != ".cuh" || it->is_directory(ignored)) continue;
    // To open a FIFO would wait for who writes to it.
    if (!it->is_regular_file(ignored)) {
      throw_io(argument, it->path(), fmt::format(": {} is not a regular file", it->path().string()));
    }
    headers.push_back(
        {it->path().lexically_relative(root).generic_string(), embedded_form(read_file(it->path(), argument))});
  }
  if (error || headers.empty()) {
    throw_io(argument, root,
             fmt::format(" = {}: {}; accepted is a readable directory of templates", root.string(),
                         error ? error.message() : "no .cuh file in it"));
  }
  return headers;
}

std::string digest_of(const std::vector<const Header*>& headers) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  const auto add = [&](const std::string& text) {
    const std::uint64_t size = text.size();
    XXH3_128bits_update(state, &size, sizeof(size));
    XXH3_128bits_update(state, text.data(), text.size());
  };
  for (const Header* header : headers) {
    add(header->name);
    add(header->text);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

/// What an #include line asks for, however it is spelled; empty for any other line.
std::string_view asked_for(std::string_view line) {
  const auto skip = [&](std::string_view what) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t\v\f\r"), line.size()));
    const bool found = line.starts_with(what);
    if (found) line.remove_prefix(what.size());
    return found;
  };
  if (line.starts_with("\xef\xbb\xbf")) line.remove_prefix(3);  // a byte order mark
  if (!skip("#") || !skip("include") || !(skip("<") || skip("\""))) return {};
  return line.substr(0, line.find_first_of(">\""));
}

template <class Visit>
void for_each_include(std::string_view text, const Visit& visit) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    if (const std::string_view name = asked_for(text.substr(0, end)); !name.empty()) visit(name);
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
}

TemplateSet read_used_templates() {
  constexpr const char* kVariable = "FA_TEMPLATE_DIR";
  const char* directory = std::getenv(kVariable);
  return directory != nullptr && *directory != '\0' ? read_templates(directory, kVariable)
                                                    : TemplateSet(read_embedded());
}

}  // namespace

TemplateSet::TemplateSet(std::vector<Header> headers) : headers_(std::move(headers)) {
  std::ranges::sort(headers_, {}, &Header::name);
  std::vector<const Header*> all;
  for (const Header& header : headers_) all.push_back(&header);
  digest_ = digest_of(all);
}

const Header* TemplateSet::find(std::string_view name) const noexcept {
  const auto found = std::ranges::lower_bound(headers_, name, {}, &Header::name);
  return found != headers_.end() && found->name == name ? &*found : nullptr;
}

void TemplateSet::add_included(std::string_view text, std::map<std::string_view, const Header*>* found) const {
  for_each_include(text, [&](std::string_view name) {
    const Header* header = find(name);
    if (header != nullptr && found->emplace(header->name, header).second) add_included(header->text, found);
  });
}

const TemplateSet::Included& TemplateSet::included_by(std::string_view unit) const {
  std::string roots;
  for_each_include(unit, [&](std::string_view name) { roots.append(name).push_back('\n'); });
  const std::scoped_lock lock(mutex_);
  if (const auto known = known_.find(roots); known != known_.end()) return known->second;
  std::map<std::string_view, const Header*> found;
  add_included(unit, &found);
  Included included;
  for (const auto& [name, header] : found) included.headers.push_back(header);
  included.digest = digest_of(included.headers);
  return known_.emplace(std::move(roots), std::move(included)).first->second;
}

TemplateSet read_templates(const std::filesystem::path& directory, std::string_view argument) {
  return TemplateSet(read_directory(directory, argument));
}

const TemplateSet& templates() {
  static const TemplateSet set = read_used_templates();
  return set;
}

const std::string& templates_digest() {
  return templates().digest();
}

const std::string& templates_digest(std::string_view unit) {
  return templates().included_by(unit).digest;
}

}  // namespace fa::render
