#include "cache/entry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <limits>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "cache/digest.hpp"
#include "cache/encoding.hpp"
#include "cache/files.hpp"

namespace fa::cache {
namespace {

// Not text, and damaged by any transfer that converts line ends.
constexpr std::string_view kMagic =
    "\x89"
    "FAC\r\n\x1a\n";
constexpr std::size_t kDigestBytes = sizeof(DigestBytes);
constexpr std::size_t kHeaderBytes = 32;
static_assert(std::numeric_limits<double>::is_iec559 && sizeof(double) == sizeof(std::uint64_t));

void write_key(Writer& writer, const Key& key) {
  writer.text(key.templates);
  writer.text(key.spec);
  writer.number(static_cast<std::uint32_t>(key.options.size()));
  for (const std::string& option : key.options) writer.text(option);
  writer.text(key.target);
  writer.text(key.unit);
}

Key read_key(Reader& reader) {
  Key key;
  key.templates = reader.text(kMaxTextBytes);
  key.spec = reader.text(kMaxTextBytes);
  const std::uint32_t options = reader.count(kMaxOptions);
  for (std::uint32_t i = 0; i < options && reader.good(); ++i) key.options.push_back(reader.text(kMaxTextBytes));
  key.target = reader.text(kMaxTextBytes);
  key.unit = reader.text(kMaxTextBytes);
  return key;
}

std::string encode_facts(const Entry& entry) {
  Writer writer;
  write_key(writer, entry.key);
  writer.text(entry.kernel_name);
  writer.text(entry.compiler);
  writer.signed32(entry.registers);
  writer.signed32(entry.local_bytes);
  writer.signed32(entry.shared_bytes);
  writer.signed32(entry.threads);
  writer.signed32(entry.min_driver);
  writer.number(std::bit_cast<std::uint64_t>(entry.compile_ms));
  return writer.take();
}

Entry decode_facts(Reader& reader) {
  Entry entry;
  entry.key = read_key(reader);
  entry.kernel_name = reader.text(kMaxTextBytes);
  entry.compiler = reader.text(kMaxTextBytes);
  entry.registers = reader.signed32();
  entry.local_bytes = reader.signed32();
  entry.shared_bytes = reader.signed32();
  entry.threads = reader.signed32();
  entry.min_driver = reader.signed32();
  entry.compile_ms = std::bit_cast<double>(reader.number<std::uint64_t>());
  return entry;
}

bool within_limits(const Entry& entry) {
  const auto fits = [](const std::string& text) { return text.size() <= kMaxTextBytes; };
  const Key& key = entry.key;
  return !entry.cubin.empty() && entry.cubin.size() <= kMaxCubinBytes && key.options.size() <= kMaxOptions &&
         fits(key.templates) && fits(key.spec) && fits(key.target) && fits(key.unit) && fits(entry.kernel_name) &&
         fits(entry.compiler) && std::ranges::all_of(key.options, fits);
}

/// "13.0".
std::optional<std::pair<int, int>> parse_version(std::string_view text) {
  std::pair<int, int> version;
  const char* const end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, version.first);
  if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.') return std::nullopt;
  const auto minor = std::from_chars(major.ptr + 1, end, version.second);
  if (minor.ec != std::errc() || minor.ptr != end || version.first < 0 || version.second < 0) return std::nullopt;
  return version;
}

std::optional<Entry> refuse(std::string* problem, const char* reason) {
  if (problem != nullptr) *problem = reason;
  return std::nullopt;
}

}  // namespace

std::string Key::digest() const {
  FieldHasher hasher;
  hasher.number(kSchemaVersion).text(templates).text(spec).number(options.size());
  for (const std::string& option : options) hasher.text(option);
  return hasher.text(target).text(unit).hex();
}

std::string encode_key(const Key& key) {
  Writer writer;
  write_key(writer, key);
  return writer.take();
}

std::uint64_t encoded_size(const Entry& entry) {
  return kHeaderBytes + encode_facts(entry).size() + entry.cubin.size() + kDigestBytes;
}

std::vector<std::byte> encode_entry(const Entry& entry) {
  if (!within_limits(entry)) return {};
  const std::string facts = encode_facts(entry);
  if (facts.size() > kMaxFactsBytes) return {};
  Writer header;
  header.raw(kMagic);
  header.number(static_cast<std::uint32_t>(kSchemaVersion));
  header.number(std::uint32_t{0});
  header.number(std::uint64_t{facts.size()});
  header.number(std::uint64_t{entry.cubin.size()});
  const std::string prefix = header.take();

  std::vector<std::byte> bytes;
  bytes.reserve(kHeaderBytes + facts.size() + entry.cubin.size() + kDigestBytes);
  const auto append = [&bytes](std::span<const std::byte> part) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  };
  append(std::as_bytes(std::span(prefix)));
  append(std::as_bytes(std::span(facts)));
  append(entry.cubin);
  append(digest_bytes(bytes));
  return bytes;
}

std::optional<Entry> decode_entry(std::span<const std::byte> bytes, std::string* problem) {
  if (bytes.size() < kHeaderBytes + kDigestBytes) return refuse(problem, "shorter than any entry");
  const std::span<const std::byte> body = bytes.first(bytes.size() - kDigestBytes);
  Reader header(body.first(kHeaderBytes));
  if (!std::ranges::equal(header.raw(kMagic.size()), std::as_bytes(std::span(kMagic)))) {
    return refuse(problem, "not a kernel entry");
  }
  if (header.number<std::uint32_t>() != kSchemaVersion || header.number<std::uint32_t>() != 0) {
    return refuse(problem, "written under another schema");
  }
  const auto facts_size = header.number<std::uint64_t>();
  const auto cubin_size = header.number<std::uint64_t>();
  if (facts_size > kMaxFactsBytes || cubin_size > kMaxCubinBytes || cubin_size == 0 ||
      kHeaderBytes + facts_size + cubin_size != body.size()) {
    return refuse(problem, "sizes do not match the file");
  }
  if (!std::ranges::equal(digest_bytes(body), bytes.last(kDigestBytes))) {
    return refuse(problem, "digest does not match the bytes");
  }
  Reader facts(body.subspan(kHeaderBytes, facts_size));
  Entry entry = decode_facts(facts);
  if (!facts.good() || !facts.at_end()) return refuse(problem, "malformed facts");
  const std::span<const std::byte> cubin = body.last(cubin_size);
  entry.cubin.assign(cubin.begin(), cubin.end());
  return entry;
}

bool Acceptance::accepts(int compiler_major, int compiler_minor) const noexcept {
  const auto wanted = std::pair(major, minor);
  const auto given = std::pair(compiler_major, compiler_minor);
  return rule == Rule::any || (rule == Rule::exactly ? given == wanted : given >= wanted);
}

std::string Acceptance::refusal(const Entry& entry) const {
  if (driver != 0 && entry.min_driver > driver) {
    return fmt::format("it needs a driver for CUDA {}.{}, and this one is for {}.{}", entry.min_driver / 1000,
                       entry.min_driver % 1000 / 10, driver / 1000, driver % 1000 / 10);
  }
  if (rule == Rule::any) return {};
  const std::string_view compiler = entry.compiler;
  const std::size_t space = compiler.rfind(' ');
  const auto version = parse_version(space == std::string_view::npos ? compiler : compiler.substr(space + 1));
  if (version && accepts(version->first, version->second)) return {};
  return fmt::format("it was compiled by {}, and accepted is {}{}.{}", entry.compiler,
                     rule == Rule::at_least ? ">=" : "", major, minor);
}

std::optional<Acceptance> parse_acceptance(std::string_view text) {
  Acceptance accept;
  if (text.empty()) return accept;
  accept.rule = text.starts_with(">=") ? Acceptance::Rule::at_least : Acceptance::Rule::exactly;
  if (accept.rule == Acceptance::Rule::at_least) text.remove_prefix(2);
  const auto version = parse_version(text);
  if (!version) return std::nullopt;
  std::tie(accept.major, accept.minor) = *version;
  return accept;
}

std::optional<Entry> read_entry(const std::filesystem::path& file, std::string* problem) {
  const FileBytes content = read_private_file(platform::kHere, file, kMaxEntryBytes);
  switch (content.status) {
    case FileBytes::Status::absent:
      return refuse(problem, "cannot be opened");
    case FileBytes::Status::refused:
      return refuse(problem, content.problem.c_str());
    case FileBytes::Status::read:
      break;
  }
  return decode_entry(content.bytes, problem);
}

}  // namespace fa::cache
