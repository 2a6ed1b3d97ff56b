#include "cache/entry.hpp"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <limits>
#include <string_view>
#include <utility>

#include "cache/digest.hpp"
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

class Writer {
 public:
  template <std::unsigned_integral Number>
  void number(Number value) {
    for (std::size_t i = 0; i < sizeof value; ++i) out_ += static_cast<char>((value >> (8 * i)) & 0xffU);
  }
  void raw(std::string_view bytes) { out_ += bytes; }
  void text(std::string_view text) {
    number(static_cast<std::uint32_t>(text.size()));
    raw(text);
  }
  void signed32(std::int32_t value) { number(static_cast<std::uint32_t>(value)); }
  void key(const Key& key) {
    text(key.templates);
    text(key.spec);
    number(static_cast<std::uint32_t>(key.options.size()));
    for (const std::string& option : key.options) text(option);
    text(key.target);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Reads what Writer wrote. The first thing that does not fit spoils it, and all that follows reads as zero.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  bool good() const { return good_; }
  bool at_end() const { return left_.empty(); }

  std::span<const std::byte> raw(std::uint64_t size) {
    good_ = good_ && size <= left_.size();
    if (!good_) return {};
    const std::span<const std::byte> bytes = left_.first(size);
    left_ = left_.subspan(size);
    return bytes;
  }
  template <std::unsigned_integral Number>
  Number number() {
    Number value = 0;
    const std::span<const std::byte> bytes = raw(sizeof(Number));
    for (std::size_t i = 0; i < bytes.size(); ++i) value |= std::to_integer<Number>(bytes[i]) << (8 * i);
    return value;
  }
  std::int32_t signed32() { return static_cast<std::int32_t>(number<std::uint32_t>()); }
  std::uint32_t count(std::uint32_t limit) {
    const auto value = number<std::uint32_t>();
    good_ = good_ && value <= limit;
    return good_ ? value : 0;
  }
  std::string text() {
    const std::span<const std::byte> bytes = raw(count(kMaxTextBytes));
    std::string out(bytes.size(), '\0');
    std::ranges::transform(bytes, out.begin(), [](std::byte byte) { return std::to_integer<char>(byte); });
    return out;
  }
  Key key() {
    Key key;
    key.templates = text();
    key.spec = text();
    const std::uint32_t options = count(kMaxOptions);
    for (std::uint32_t i = 0; i < options && good_; ++i) key.options.push_back(text());
    key.target = text();
    return key;
  }

 private:
  std::span<const std::byte> left_;
  bool good_ = true;
};

std::string encode_facts(const Entry& entry) {
  Writer writer;
  writer.key(entry.key);
  writer.text(entry.kernel_name);
  writer.text(entry.compiler);
  writer.signed32(entry.registers);
  writer.signed32(entry.local_bytes);
  writer.signed32(entry.shared_bytes);
  writer.signed32(entry.threads);
  writer.number(std::bit_cast<std::uint64_t>(entry.compile_ms));
  return writer.take();
}

Entry decode_facts(Reader& reader) {
  Entry entry;
  entry.key = reader.key();
  entry.kernel_name = reader.text();
  entry.compiler = reader.text();
  entry.registers = reader.signed32();
  entry.local_bytes = reader.signed32();
  entry.shared_bytes = reader.signed32();
  entry.threads = reader.signed32();
  entry.compile_ms = std::bit_cast<double>(reader.number<std::uint64_t>());
  return entry;
}

bool within_limits(const Entry& entry) {
  const auto fits = [](const std::string& text) { return text.size() <= kMaxTextBytes; };
  const Key& key = entry.key;
  return !entry.cubin.empty() && entry.cubin.size() <= kMaxCubinBytes && key.options.size() <= kMaxOptions &&
         fits(key.templates) && fits(key.spec) && fits(key.target) && fits(entry.kernel_name) && fits(entry.compiler) &&
         std::ranges::all_of(key.options, fits);
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
  return hasher.text(target).hex();
}

std::string encode_key(const Key& key) {
  Writer writer;
  writer.key(key);
  return writer.take();
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

std::optional<Entry> read_entry(const std::filesystem::path& file, std::string* problem) {
  const FileBytes content = read_private_file(AT_FDCWD, file.string(), kMaxEntryBytes);
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
