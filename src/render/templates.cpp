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

#include <fa/error.hpp>

#include "render/embedded_templates.hpp"

namespace fa::render {
namespace {

std::vector<Header> read_embedded() {
  std::vector<Header> headers;
  for (const EmbeddedTemplate& entry : embedded_templates()) headers.push_back({entry.name, entry.text});
  return headers;
}

[[noreturn]] void throw_unreadable(const std::filesystem::path& path, std::string_view problem) {
  throw Error(ErrorCode::io, fmt::format("FA_TEMPLATE_DIR: {} {}", path.string(), problem),
              {{"argument", "FA_TEMPLATE_DIR"}, {"value", path.string()}});
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || file.bad()) throw_unreadable(path, "cannot be read");
  return text.str();
}

std::vector<Header> read_directory(const std::filesystem::path& root) {
  std::vector<Header> headers;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->path().extension() != ".cuh" || it->is_directory(ignored)) continue;
    // To open a FIFO would wait for who writes to it.
    if (!it->is_regular_file(ignored)) throw_unreadable(it->path(), "is not a regular file");
    headers.push_back({it->path().lexically_relative(root).generic_string(), read_file(it->path())});
  }
  if (error || headers.empty()) {
    throw Error(ErrorCode::io,
                fmt::format("FA_TEMPLATE_DIR = {}: {}; accepted is a readable directory of templates", root.string(),
                            error ? error.message() : "no .cuh file in it"),
                {{"argument", "FA_TEMPLATE_DIR"}, {"value", root.string()}});
  }
  std::sort(headers.begin(), headers.end(), [](const Header& a, const Header& b) { return a.name < b.name; });
  return headers;
}

std::vector<Header> read_templates() {
  const char* directory = std::getenv("FA_TEMPLATE_DIR");
  return directory != nullptr && *directory != '\0' ? read_directory(directory) : read_embedded();
}

std::string digest(const std::vector<Header>& headers) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  const auto add = [&](const std::string& text) {
    const std::uint64_t size = text.size();
    XXH3_128bits_update(state, &size, sizeof(size));
    XXH3_128bits_update(state, text.data(), text.size());
  };
  for (const Header& header : headers) {
    add(header.name);
    add(header.text);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

const std::vector<Header>& templates() {
  static const std::vector<Header> headers = read_templates();
  return headers;
}

const std::string& templates_digest() {
  static const std::string value = digest(templates());
  return value;
}

}  // namespace fa::render
