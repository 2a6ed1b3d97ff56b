#include "cache/records.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <system_error>

#include "cache/files.hpp"
#include "cache/store.hpp"

namespace fa::cache {
namespace {

constexpr const char* kFolder = "tuned";
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 20;

Descriptor open_folder(const std::filesystem::path& root, Missing missing, std::string* problem) {
  const Descriptor parent = open_private_root(root, missing, problem);
  return parent.valid() ? open_private_directory(parent.get(), kFolder, missing, problem) : Descriptor();
}

Descriptor open_temporaries(const std::filesystem::path& root, std::string* problem) {
  const Descriptor parent = open_private_root(root, Missing::create, problem);
  if (!parent.valid()) return {};
  const std::string version = fmt::format("v{}", kSchemaVersion);
  const Descriptor folder = open_private_directory(parent.get(), version, Missing::create, problem);
  return folder.valid() ? open_private_directory(folder.get(), "tmp", Missing::create, problem) : Descriptor();
}

}  // namespace

std::optional<std::string> Records::read(const std::string& name, std::string* problem) const {
  problem->clear();
  if (root_.empty()) return std::nullopt;
  std::string absent;
  const Descriptor folder = open_folder(root_, Missing::fail, &absent);
  if (!folder.valid()) return std::nullopt;
  const FileBytes file = read_private_file(folder.get(), name, kMaxBytes, Reading::use);
  if (file.status == FileBytes::Status::refused) *problem = fmt::format("{} {}", name, file.problem);
  if (file.status != FileBytes::Status::read) return std::nullopt;
  return std::string(reinterpret_cast<const char*>(file.bytes.data()), file.bytes.size());
}

std::optional<std::string> Records::publish(const std::string& name, std::string_view text,
                                            std::string* problem) const {
  problem->clear();
  if (root_.empty()) {
    *problem = "there is no directory";
    return std::nullopt;
  }
  const Descriptor folder = open_folder(root_, Missing::create, problem);
  if (!folder.valid()) return std::nullopt;
  const Descriptor temporaries = open_temporaries(root_, problem);
  if (!temporaries.valid()) return std::nullopt;
  const std::string temporary = temporary_name(name);
  if (!write_private_file(temporaries.get(), temporary, std::as_bytes(std::span(text)), problem)) return std::nullopt;
  const bool first = platform::name_exclusively(temporaries.get(), temporary, folder.get(), name);
  const int error = errno;
  platform::remove_file(temporaries.get(), temporary);
  if (first) return std::string(text);
  if (error == EEXIST) {
    if (std::optional<std::string> other = read(name, problem)) return other;
  }
  if (problem->empty()) *problem = error_text(error);
  return std::nullopt;
}

void Records::remove(const std::string& name) const {
  std::string problem;
  const Descriptor folder = open_folder(root_, Missing::fail, &problem);
  if (folder.valid()) platform::remove_file(folder.get(), name);
}

std::vector<std::string> Records::names() const {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& item : std::filesystem::directory_iterator(root_ / kFolder, error)) {
    names.push_back(item.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace fa::cache
